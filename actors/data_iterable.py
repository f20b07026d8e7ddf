"""Batches from datasets that can only be read in order.

Made by `actors.data.make_source`, called by the training session. A dataset gives one stateful iterator per logical
shard; every step takes the same number of samples from each, so the position of a shard is a function of the step
alone. Positions are saved to save time: where one is missing or old, the samples since then are read again and thrown
away, and the batch is the same. No Ray, no threads, no processes of its own.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import default_collate

from everstep.actors.data_common import KeptBatch, Key, seed_generators
from everstep.errors import ConfigError, InternalError, StateError
from everstep.policies.seeds import batch_seed


@runtime_checkable
class StatefulIterator(Protocol):
    """One logical shard of a dataset, read in order."""

    def __next__(self) -> Any:
        """The next sample; StopIteration at the end of the epoch."""
        ...

    def state_dict(self) -> Any:
        """The position (and random state, if any) after the last sample, JSON-safe."""
        ...

    def load_state_dict(self, state: Any) -> None:
        """Go to a position that `state_dict` gave, of an iterator of the same shard and epoch."""
        ...


@runtime_checkable
class ShardedIterable(Protocol):
    """A dataset that is read in order, cut into logical shards. Bring your own, or a Hugging Face IterableDataset.

    An optional `set_epoch(epoch)` is called before each `shard(...)`; the iterator keeps to that epoch, for other
    shards may be in another one at that time. The shards together must hold every sample once.
    """

    def shard(self, index: int, num_shards: int) -> StatefulIterator:
        """Shard `index` of `num_shards`, from its beginning."""
        ...


@dataclass(slots=True, kw_only=True)
class _OpenShard:
    """One shard's iterator and where it stands."""

    holder: Any
    """What has the state."""
    values: Iterator[Any]
    """What gives samples; mostly the same object."""
    epoch: int
    next_step: int
    untouched: bool
    """It was opened at the beginning of its epoch and has given nothing yet."""


class IterableSource:
    """Feeds logical shards from a `ShardedIterable`; the `ShardSource` of `actors.data`, read in this process.

    Each shard takes global_batch_size / logical_shards samples per step from its own iterator, and goes on with the
    next epoch when that ends, in the middle of a batch if need be. The global generators are seeded before each batch
    by (seed, step, shard). Raises ConfigError when the numbers cannot work or a shard is empty, StateError when a
    position is not JSON-safe or not one of ours.
    """

    def __init__(
        self,
        dataset: Any,
        global_batch_size: int,
        logical_shards: int,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        *,
        seed: int = 0,
    ) -> None:
        if logical_shards < 1 or global_batch_size < 1 or global_batch_size % logical_shards:
            raise ConfigError(
                f"global_batch_size={global_batch_size} must be a positive multiple of logical_shards={logical_shards}"
            )
        self.steps_per_epoch: int | None = None
        self._dataset = dataset
        self._name = type(dataset).__name__
        self._samples = global_batch_size
        self._num_shards = logical_shards
        self._collate: Callable[[list[Any]], Any] = default_collate if collate_fn is None else collate_fn
        self._seed = seed
        self._step, self._until = 0, 0
        self._now: frozenset[int] = frozenset()
        self._later: frozenset[int] = frozenset()
        self._open: dict[int, _OpenShard] = {}
        self._kept: dict[Key, KeptBatch] = {}
        self._after: dict[Key, dict[str, Any]] = {}
        """Positions after batches of steps that are not history yet."""
        self._committed: dict[int, dict[str, Any]] = {}
        self._loaded: dict[int, dict[str, Any]] = {}
        self._last_committed: int | None = None

    def deal(self, step: int, now: Sequence[int], later: Sequence[int], until: int) -> None:
        """See `ShardSource.deal`. Iterators of shards that are no longer owned are let go."""
        self._step, self._until = step, until
        self._now, self._later = frozenset(now), frozenset(later)
        owned = self._now | self._later
        self._open = {shard: opened for shard, opened in self._open.items() if shard in owned}
        self._settle(step - 1)
        for key in [key for key in self._after if key[0] > step]:
            del self._after[key], self._kept[key]

    def get(self, step: int, shard: int) -> Any:
        """The batch of a shard that was dealt to this replica; the same one each time until the step is history."""
        key = (step, shard)
        kept = self._kept.get(key)
        if kept is not None and kept.unchanged():
            return kept.batch
        dealt = shard in self._now if step == self._step else shard in self._later
        if kept is None and not (dealt and self._step <= step < self._until):
            raise InternalError(f"shard {shard} of step {step} was not dealt to this replica")
        opened = self._opened_at(step, shard)
        # An exception in the user's code would leave the iterator somewhere in the batch: then it is opened anew.
        del self._open[shard]
        batch = self._take(opened, shard)
        self._open[shard] = opened
        self._after[key] = self._position(opened, shard)
        self._kept[key] = KeptBatch(batch)
        return batch

    def committed(self, step: int) -> None:
        """`step` is history: its batches are forgotten, its positions are what `states` gives."""
        self._settle(step)
        self._last_committed = step

    def scale(self, step: int, shard: int) -> float:
        """1.0: all shards are of one size in every step."""
        return 1.0

    def samples(self, step: int) -> int:
        """The global batch size."""
        return self._samples

    def states(self) -> dict[int, Any]:
        """Positions after the last committed step, of the shards that this replica computed in it. JSON-safe."""
        return {
            shard: position
            for shard, position in self._committed.items()
            if position["step"] == self._last_committed
        }

    def load_states(self, states: Mapping[int, Any]) -> None:
        """Positions that `states` gave, here or elsewhere, of this step or an earlier one (then it takes longer)."""
        for shard, position in states.items():
            if not (isinstance(position, Mapping) and {"step", "epoch", "state"} <= position.keys()):
                raise StateError(f"not a position of shard {shard} of {self._name}: {position!r}")
            self._loaded[int(shard)] = dict(position)

    def close(self) -> None:
        """Let go of all iterators and batches."""
        self._open.clear()
        self._kept.clear()
        self._after.clear()

    def _settle(self, step: int) -> None:
        """Steps up to `step` are history."""
        for key in sorted(key for key in self._after if key[0] <= step):
            self._committed[key[1]] = self._after.pop(key)
            del self._kept[key]

    def _opened_at(self, step: int, shard: int) -> _OpenShard:
        """The iterator of `shard` where `step` begins: as it stands, or from the newest position known before it."""
        opened = self._open.get(shard)
        if opened is None or opened.next_step != step:
            start: dict[str, Any] = {"step": -1, "epoch": 0, "state": None}
            known = (self._after.get((step - 1, shard)), self._committed.get(shard), self._loaded.get(shard))
            usable = [position for position in known if position is not None and position["step"] < step]
            newest = max(usable, key=lambda position: position["step"], default=start)
            opened = self._open_shard(shard, newest)
            while opened.next_step < step:
                self._take(opened, shard)
            self._open[shard] = opened
        return opened

    def _open_shard(self, shard: int, position: Mapping[str, Any]) -> _OpenShard:
        epoch, state = int(position["epoch"]), position["state"]
        if hasattr(self._dataset, "set_epoch"):
            self._dataset.set_epoch(epoch)
        holder = self._dataset.shard(index=shard, num_shards=self._num_shards)
        if state is not None:
            holder.load_state_dict(state)
        values = holder if hasattr(holder, "__next__") else iter(holder)
        return _OpenShard(
            holder=holder,
            values=values,
            epoch=epoch,
            next_step=int(position["step"]) + 1,
            untouched=state is None,
        )

    def _take(self, opened: _OpenShard, shard: int) -> Any:
        """The batch at `opened.next_step`, which moves on. `opened` goes through as many epochs as it takes."""
        seed_generators(batch_seed(self._seed, opened.next_step, shard))
        samples: list[Any] = []
        while len(samples) < self._samples // self._num_shards:
            try:
                samples.append(next(opened.values))
                opened.untouched = False
            except StopIteration:
                if opened.untouched:
                    raise ConfigError(
                        f"shard {shard} of {self._num_shards} of {self._name} is empty in epoch {opened.epoch}: every "
                        f"shard needs samples. Use fewer logical_shards, or a dataset with more pieces"
                    ) from None
                start = {"step": opened.next_step - 1, "epoch": opened.epoch + 1, "state": None}
                fresh = self._open_shard(shard, start)
                opened.holder, opened.values = fresh.holder, fresh.values
                opened.epoch, opened.untouched = fresh.epoch, True
        opened.next_step += 1
        return self._collate(samples)

    def _position(self, opened: _OpenShard, shard: int) -> dict[str, Any]:
        """After the last `_take`. Through JSON at once: a copy, and the same thing that a restarted run would see."""
        state = opened.holder.state_dict()
        try:
            state = json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise StateError(
                f"state_dict() of shard {shard} of {self._name} gave what JSON cannot carry: {error}"
            ) from error
        if state is None:
            raise StateError(
                f"state_dict() of shard {shard} of {self._name} gave None instead of its position"
            )
        return {"step": opened.next_step - 1, "epoch": opened.epoch, "state": state}
