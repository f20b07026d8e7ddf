"""Tensors as plain bytes, and the hashes of those bytes.

Called by `checkpoint.state` (layout, digest) and by the state transfer (`actors.transfer`, `actors.transfer_client`),
which sends and receives these very bytes. Nothing here copies a tensor that is dense in CPU memory, and nothing here
decides what is state.

A tensor is *dense* if its elements fill one block of memory without gaps or overlaps, in whatever order of
dimensions (`channels_last` and transposed weights are dense). Dense tensors travel in memory order, and the order
travels with them, so that a kernel on the other side walks through memory in the same order: otherwise two replicas
with equal values could round differently in their next update.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, cast

import torch
import xxhash

if TYPE_CHECKING:
    from typing_extensions import Buffer

ALIGN_BYTES: Final = 64
"""Every tensor starts at a multiple of this in the byte space, so that its bytes can be read as any dtype in place."""

PAGE_BYTES: Final = 4096


def memory_order(tensor: torch.Tensor) -> tuple[int, ...] | None:
    """Dimensions of a dense tensor from slowest to fastest in memory; None if the tensor is not dense."""
    shape, stride = tensor.shape, tensor.stride()
    order = tuple(range(tensor.dim()))
    if tensor.is_contiguous():
        return order
    # Dimensions of size 1 have meaningless strides: where they stand changes nothing.
    order = tuple(sorted(order, key=lambda dim: (-stride[dim] if shape[dim] > 1 else 0, dim)))
    expected = 1
    for dim in reversed(order):
        if shape[dim] == 1:
            continue
        if stride[dim] != expected:
            return None
        expected *= shape[dim]
    return order


def strides_of(shape: Sequence[int], order: Sequence[int]) -> tuple[int, ...]:
    """Strides, in elements, of a dense tensor of `shape` whose memory order is `order`."""
    strides = [1] * len(shape)
    step = 1
    for dim in reversed(order):
        strides[dim] = step
        step *= max(shape[dim], 1)
    return tuple(strides)


def dense(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` itself, detached, if it is dense and holds its values literally; else a contiguous copy."""
    plain = tensor.detach().resolve_conj().resolve_neg()
    return plain if memory_order(plain) is not None else plain.contiguous()


def byte_view(tensor: torch.Tensor) -> memoryview:
    """The live memory of a dense CPU tensor as writable bytes in memory order (no copy; keeps the memory alive)."""
    if tensor.numel() == 0:
        return memoryview(bytearray())
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))
    return memoryview(cast("Buffer", flat.view(torch.uint8).numpy()))


def prefault(tensor: torch.Tensor) -> None:
    """Touch every page of a dense CPU tensor whose content is not yet needed: its bytes become undefined."""
    if tensor.numel() == 0:
        return
    flat = tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)
    flat[::PAGE_BYTES].zero_()
    flat[-1:].zero_()


def hash64(views: Sequence[memoryview]) -> int:
    """xxh3_64 of the views one after another. The GIL is free meanwhile."""
    if len(views) == 1:
        return xxhash.xxh3_64_intdigest(views[0])
    hasher = xxhash.xxh3_64()
    for view in views:
        hasher.update(view)
    return hasher.intdigest()


def hash128(head: bytes, tensors: Iterable[torch.Tensor]) -> str:
    """xxh3_128 as 32 hex digits over `head` and the values of dense CPU tensors in row-major order.

    Values, not memory: two tensors with equal values hash equal whatever their memory order is.
    """
    hasher = xxhash.xxh3_128()
    hasher.update(head)
    for tensor in tensors:
        hasher.update(byte_view(tensor.contiguous()))
    return hasher.hexdigest()


class ByteSpace:
    """Dense CPU tensors laid side by side in one space of byte offsets, each starting at its given offset.

    Gaps between tensors (alignment) belong to the space but hold no bytes: they are never sent.
    """

    def __init__(self, tensors: Sequence[torch.Tensor], offsets: Sequence[int]) -> None:
        held = [(offset, byte_view(tensor)) for tensor, offset in zip(tensors, offsets, strict=True)]
        self._spans = [(offset, view) for offset, view in held if len(view)]
        self._starts = [offset for offset, _ in self._spans]

    def views(self, offset: int, length: int) -> Iterator[memoryview]:
        """The bytes of [offset, offset + length), tensor by tensor, without the gaps."""
        end = offset + length
        first = max(bisect_right(self._starts, offset) - 1, 0)
        for start, view in self._spans[first:]:
            if start >= end:
                return
            piece = view[max(offset - start, 0) : end - start]
            if len(piece):
                yield piece

    def chunks(self, offset: int, length: int, max_bytes: int, max_views: int) -> Iterator[list[memoryview]]:
        """The same bytes, grouped into lists of at most `max_bytes` bytes and `max_views` views."""
        chunk: list[memoryview] = []
        room = max_bytes
        for view in self.views(offset, length):
            while len(view):
                chunk.append(view[:room])
                view = view[len(chunk[-1]) :]
                room -= len(chunk[-1])
                if not room or len(chunk) == max_views:
                    yield chunk
                    chunk, room = [], max_bytes
        if chunk:
            yield chunk
