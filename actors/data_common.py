"""What the map-style and the in-order source share: names of batches, seeding, and batches kept for another go.

Used by `actors.data_plan`, `actors.data_map` and `actors.data_iterable` alone. Knows no dataset.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch

try:
    import numpy
except ImportError:  # torch runs without it
    numpy = None  # type: ignore[assignment]

Key: TypeAlias = tuple[int, int]
"""(step, logical shard): the name of a batch."""


def seed_generators(seed: int) -> None:
    """Seed the global CPU generators of torch, `random` and numpy (not `torch.manual_seed`, which costs 250 µs)."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    if numpy is not None:
        numpy.random.seed(seed & 0xFFFFFFFF)


class KeptBatch:
    """A batch that was handed out, kept in case its step is discarded and has to be computed again."""

    __slots__ = ("_tensors", "batch")

    def __init__(self, batch: Any) -> None:
        self.batch = batch
        self._tensors = [(tensor, _version(tensor)) for tensor in _tensors(batch)]

    def unchanged(self) -> bool:
        """False if the user's loop wrote into the batch: an in-place operation on a tensor, or another one put there.

        Sees tensors in (nested) lists, tuples and mappings, not what numpy writes into memory it shares with them.
        """
        now = list(_tensors(self.batch))
        return len(now) == len(self._tensors) and all(
            tensor is kept and _version(tensor) == version
            for tensor, (kept, version) in zip(now, self._tensors, strict=True)
        )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _version(tensor: torch.Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
