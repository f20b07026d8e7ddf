"""One step of the user's loop: its batches, their gradients, its commit. And the means that a commit reports.

Made by `actors.session`, which does what a commit needs; this file keeps the loop's rules and what belongs to one step.
Everything runs in the training thread.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from everstep.actors.data_common import seed_generators
from everstep.errors import LoopError
from everstep.policies.seeds import shard_seed

if TYPE_CHECKING:
    from everstep.actors.session import Session


class Step:
    """One step of the loop, from its batches to its commit."""

    def __init__(self, session: Session, number: int) -> None:
        self.number = number
        """Counts from 0, without gaps or repeats in history."""
        self.committed = False
        """True after the `commit` that made this step history. False after a commit that found a peer dead: the loop
        yields the step again then, and code after `commit` that must run once per step belongs under this flag."""
        self.metrics: dict[str, float] = {}
        """After the commit: its metrics, the same on all replicas. Good for decisions such as early stopping."""
        self._session = session
        self._losses: dict[int, float] = {}
        self._scales: dict[int, float] = {}
        self._recorded: dict[str, dict[int, float]] = {}
        self._shard: int | None = None
        self._open = False
        self._called = False
        self._started_at = 0.0

    @property
    def shard(self) -> int:
        """The logical shard of the batch at hand."""
        if self._shard is None:
            raise LoopError(f"step {self.number}: there is a shard only inside `for batch in step.batches()`")
        return self._shard

    @property
    def mean_loss(self) -> ShardMean:
        """The mean loss: over all shards when given to `commit`, over this replica's shards so far as a float."""
        return ShardMean("loss", self._losses)

    def batches(self) -> Iterator[Any]:
        """The batches of the logical shards that this replica has to compute, one per shard, as collated.

        There may be none: the others may compute a joiner's first step while it receives the state. So do not rely,
        after the loop, on names that are set inside it.

        Before each of them the random generators (torch, its devices, `random`, numpy) are seeded by (run seed, step,
        shard), so that dropout does not depend on who computes it.
        """
        session = self._session
        reducer, source = session._reducer, session._source
        assert reducer is not None and source is not None
        while (shard := session._next_shard(self)) is not None:
            scale = source.scale(self.number, shard)
            batch = source.get(self.number, shard)
            self._shard, self._open = shard, True
            self._scales[shard] = scale
            seed = shard_seed(session.seed, self.number, shard)
            seed_generators(seed)
            if session.device.type == "cuda":
                torch.cuda.manual_seed(seed)
            reducer.begin_shard(shard, last=not session._todo, scale=scale)
            self._started_at = time.monotonic()
            if batch is None:  # no sample of this step falls into the shard
                self._close_shard()
                continue
            yield batch
            if self._open:
                raise LoopError(
                    f"step {self.number}: the batch of shard {shard} was left without step.backward(loss)"
                )
        self._shard = None

    def backward(self, loss: Tensor, *, final: bool = True) -> None:
        """Compute the gradient of this batch's mean loss.

        Args:
            loss: scalar tensor, the mean over the samples of the batch.
            final: False for all but the last of several calls for one batch (accumulation inside a shard); their
                gradients add up, so divide the losses accordingly.

        Raises LoopError outside of `batches()` or for a second final call on one batch.
        """
        session, shard = self._session, self._shard
        if shard is None or not self._open:
            raise LoopError(
                f"step {self.number}: backward() needs a batch of step.batches() that is still open"
            )
        reducer = session._reducer
        assert reducer is not None
        value = float(loss.detach())
        self._losses[shard] = self._losses.get(shard, 0.0) + value
        scaled = session._registry.scale_loss(loss)
        scale = self._scales[shard]
        if final:
            reducer.backward_final()
        torch.autograd.backward(scaled if scale == 1.0 else scaled * scale)
        if final:
            self._close_shard()

    def _close_shard(self) -> None:
        reducer, shard = self._session._reducer, self._shard
        assert reducer is not None and shard is not None
        reducer.end_shard()
        self._open = False
        self._session._computed(shard, time.monotonic() - self._started_at)

    def record(self, **values: float | Tensor) -> None:
        """Metrics of the batch at hand; `commit` reports their mean over the global batch."""
        shard = self.shard
        for name, value in values.items():
            self._recorded.setdefault(name, {})[shard] = _number(name, value)

    def commit(
        self,
        metrics: Mapping[str, Any] | None = None,
        *,
        clip_grad_norm: float | None = None,
        clip_grad_value: float | None = None,
    ) -> bool:
        """Make the step history: reduce, vote, update. The optimizers, schedulers and scaler registered are stepped.

        Args:
            metrics: name → `step.mean_loss`, or a number (its mean over the shards is reported).
            clip_grad_norm: total norm that the gradients of all registered modules are clipped to.
            clip_grad_value: bound on each element of the gradients.

        Returns: `self.committed`. After False the loop yields this step again with the shards that are missing.
        """
        if self._called and self.committed:
            raise LoopError(f"step {self.number} is committed already")
        left = self._session._shards_left(self)
        if self._open or left:
            raise LoopError(
                f"step {self.number}: commit() came before all batches of step.batches() were computed "
                f"(shards {left or [self._shard]} are left)"
            )
        self._called = True
        self.committed = self._session._commit(self, metrics or {}, (clip_grad_norm, clip_grad_value))
        return self.committed

    def _must_be_over(self) -> None:
        if not self._called:
            raise LoopError(
                f"the loop went on without step.commit() for step {self.number}; call it once per step, after the "
                "last batch"
            )
        self._called = False

    def _non_finite(self) -> bool:
        return not all(map(math.isfinite, self._losses.values()))

    def _shard_metrics(self, metrics: Mapping[Any, Any]) -> dict[str, dict[int, tuple[float, float]]]:
        """name → shard → (weight, value), for the shards this replica holds."""
        held = self._session._member.kept
        names: dict[str, Mapping[int, float]] = {"loss": self._losses, **self._recorded}
        for name, value in metrics.items():
            if not isinstance(name, str) or not name or "\0" in name:
                raise LoopError(
                    f"metric {name!r}: the name must be a text of at least one character, and no NUL"
                )
            if isinstance(value, ShardMean):
                names[name] = value.by_shard
            else:
                names[name] = dict.fromkeys(self._losses, _number(name, value))
        return {
            name: {
                s: (self._scales[s], v) for s, v in by_shard.items() if s in held and self._scales[s] > 0.0
            }
            for name, by_shard in names.items()
        }


def _number(name: str, value: Any) -> float:
    try:
        return float(value.detach() if isinstance(value, Tensor) else value)
    except (TypeError, ValueError, RuntimeError) as error:
        raise LoopError(
            f"metric {name!r}: {value!r:.80} is no number ({error}); give a number, a tensor of one element, or step.mean_loss"
        ) from error


class ShardMean:
    """A value per logical shard; as a float the mean over the shards this replica has computed."""

    def __init__(self, name: str, by_shard: Mapping[int, float]) -> None:
        self.name = name
        self.by_shard = by_shard

    def __float__(self) -> float:
        values = list(self.by_shard.values())
        return math.fsum(values) / len(values) if values else math.nan

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __repr__(self) -> str:
        return f"{self.name}={float(self):.6g}"
