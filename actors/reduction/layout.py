"""How gradients are laid out: buckets, and where in them each parameter lies.

Used by the reducer. A bucket is one flat tensor of one dtype and device; buckets are filled in reverse order of
registration, which is about the order in which backward produces gradients, and reduced in that order by everybody.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor, nn

FIRST_BUCKET_BYTES = 1 << 20
"""The first bucket is small, so that the network is busy early."""


@dataclass(frozen=True, slots=True)
class Slot:
    """The place of one parameter's gradient."""

    parameter: int
    """Index of the parameter among the trainable ones."""
    bucket: int
    offset: int
    """In elements."""
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def view(self, flat: Tensor) -> Tensor:
        """The part of the bucket's `flat` that is this gradient, in the parameter's shape and memory format."""
        return flat.as_strided(self.shape, self.strides, flat.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are reduced together."""

    number: int
    dtype: torch.dtype
    device: torch.device
    slots: tuple[Slot, ...]
    numel: int

    def empty(self, numel: int) -> Tensor:
        """A new flat tensor of `numel` elements."""
        return torch.empty(numel, dtype=self.dtype, device=self.device)


class Gradients:
    """One flat tensor per bucket, and each parameter's part of it, by the parameter's index."""

    __slots__ = ("flats", "views")

    def __init__(self, buckets: Sequence[Bucket], numel: Callable[[int], int] = lambda numel: numel) -> None:
        """`numel`: elements to allocate for a bucket of so many, at least as many."""
        self.flats = [bucket.empty(numel(bucket.numel)) for bucket in buckets]
        self.views = {
            slot.parameter: slot.view(self.flats[bucket.number])
            for bucket in buckets
            for slot in bucket.slots
        }


def trainable(named: Sequence[tuple[str, nn.Parameter]]) -> list[tuple[str, nn.Parameter]]:
    """Those that require a gradient, tied ones once, under their first name."""
    found: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in named:
        if parameter.requires_grad:
            found.setdefault(id(parameter), (name, parameter))
    return list(found.values())


def lay_out(parameters: Sequence[nn.Parameter], bucket_bytes: int) -> list[Bucket]:
    """Buckets of at least `bucket_bytes` each, but for the first and the last of a dtype and device."""
    open_buckets: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    closed: list[list[int]] = []
    for index in reversed(range(len(parameters))):
        parameter = parameters[index]
        key = (parameter.dtype, parameter.device)
        members = open_buckets.setdefault(key, [])
        members.append(index)
        limit = bucket_bytes if closed else min(bucket_bytes, FIRST_BUCKET_BYTES)
        if sum(parameters[i].numel() for i in members) * parameter.element_size() >= limit:
            closed.append(open_buckets.pop(key))
    closed += open_buckets.values()
    return [_bucket(number, members, parameters) for number, members in enumerate(closed)]


def describe(named: Sequence[tuple[str, nn.Parameter]], buckets: Sequence[Bucket]) -> str:
    """Hash (hex) of everything in which two replicas' layouts could differ."""
    digest = hashlib.sha256()
    for bucket in buckets:
        for slot in bucket.slots:
            place = (
                named[slot.parameter][0],
                bucket.number,
                slot.offset,
                slot.shape,
                slot.strides,
                str(bucket.dtype),
            )
            digest.update(repr(place).encode())
    return digest.hexdigest()


def _bucket(number: int, members: Sequence[int], parameters: Sequence[nn.Parameter]) -> Bucket:
    slots, offset = [], 0
    for index in members:
        parameter = parameters[index]
        slots.append(Slot(index, number, offset, tuple(parameter.shape), _strides(parameter)))
        offset += parameter.numel()
    first = parameters[members[0]]
    return Bucket(number, first.dtype, first.device, tuple(slots), offset)


def _strides(parameter: Tensor) -> tuple[int, ...]:
    """The parameter's own strides if it fills its memory without gaps (optimizers are fast when gradients share its
    format), else those of a contiguous tensor."""
    expected = 1
    for stride, size in sorted(zip(parameter.stride(), parameter.shape, strict=True)):
        if size > 1 and stride != expected:
            return tuple(prod(parameter.shape[i + 1 :]) for i in range(parameter.dim()))
        expected *= size
    return parameter.stride()
