"""What feeds a replica's logical shards: the interface that the training session calls, and what makes one.

A `ShardSource` is told what the replica owns (`deal`), asked for one batch after the other (`get`) and told what is
history (`committed`). What a batch holds is a function of (seed, step, shard) alone; who reads it, in which process,
and how often the deal changes make no difference. No Ray here, no collectives, and nothing is decided: the deal comes
from outside.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

from torch.utils.data import IterableDataset

from everstep.actors.data_iterable import IterableSource, ShardedIterable, StatefulIterator
from everstep.actors.data_map import MapSource
from everstep.errors import ConfigError
from everstep.policies.ledger import DataLedger

__all__ = ["IterableSource", "MapSource", "ShardSource", "ShardedIterable", "StatefulIterator", "make_source"]


class ShardSource(Protocol):
    """What `Session.steps` pulls batches from. All calls come from the training thread."""

    steps_per_epoch: int | None
    """None where the dataset has no known length."""

    def deal(self, step: int, now: Sequence[int], later: Sequence[int], until: int) -> None:
        """What this replica owns: `now` are the shards it has still to compute at `step`, `later` those it owns at
        every step after it; nothing is read ahead from step `until` on. Steps before `step` are history."""
        ...

    def get(self, step: int, shard: int) -> Any | None:
        """The collated batch of a shard that was dealt, None if it has no sample in this step."""
        ...

    def committed(self, step: int) -> None:
        """`step` is history: forget its batches. Until then `get` gives them out again without reading."""
        ...

    def scale(self, step: int, shard: int) -> float:
        """Weight of the shard's mean loss, so that sum_v(scale_v * mean_v) / V is the mean over all samples."""
        ...

    def samples(self, step: int) -> int:
        """Samples of the step, over all shards."""
        ...

    def states(self) -> dict[int, Any]:
        """JSON-safe position per shard computed here in the last committed step; {} where none is needed."""
        ...

    def load_states(self, states: Mapping[int, Any]) -> None:
        """Positions that `states` gave, on this replica or another."""
        ...

    def close(self) -> None:
        """Stop what runs in the background. No call may follow."""
        ...


def make_source(
    dataset: Any,
    *,
    global_batch_size: int,
    logical_shards: int,
    seed: int,
    shuffle: bool = True,
    last_batch: Literal["drop", "partial"] = "drop",
    num_workers: int = 0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    pin_memory: bool = False,
    prefetch_factor: int = 2,
    seed_samples: bool = True,
    worker_init_fn: Callable[[int], None] | None = None,
    timeout_s: float = 600.0,
) -> ShardSource:
    """The source for what the user passed as dataset: map-style where it can be, else a `ShardedIterable`.

    Raises ConfigError when it is neither, or when the numbers cannot work.
    """
    name = f"{type(dataset).__module__}.{type(dataset).__qualname__}"
    missing = [method for method in ("__len__", "__getitem__") if not hasattr(dataset, method)]
    if not missing and not isinstance(dataset, IterableDataset):
        try:
            ledger = DataLedger(
                dataset_size=len(dataset),
                global_batch_size=global_batch_size,
                logical_shards=logical_shards,
                seed=seed,
                shuffle=shuffle,
                last_batch=last_batch,
            )
        except ValueError as error:
            raise ConfigError(f"dataset {name}: {error}") from error
        return MapSource(
            dataset,
            ledger,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory,
            prefetch_factor=prefetch_factor,
            seed_samples=seed_samples,
            worker_init_fn=worker_init_fn,
            timeout_s=timeout_s,
        )
    if isinstance(dataset, ShardedIterable):
        if num_workers:
            raise ConfigError(
                f"dataset {name} is read in order, in the training process: num_workers={num_workers} must be 0"
            )
        return IterableSource(dataset, global_batch_size, logical_shards, collate_fn, seed=seed)
    lack = (
        "is an IterableDataset"
        if isinstance(dataset, IterableDataset)
        else f"has no {' and no '.join(missing)}"
    )
    raise ConfigError(
        f"dataset {name} {lack} and no shard(index, num_shards): a run whose replicas come and go must be able to find "
        f"every sample again. Give it __len__ and __getitem__, or a shard() that returns an iterator with state_dict() "
        f"and load_state_dict() (see ShardedIterable)"
    )
