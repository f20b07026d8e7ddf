"""Cuts tensors into chunks, and says where chunks lie. Pure integers: no tensors, no bytes, no store.

Called by the writer (what to write, and which replica writes it), the manifest (whether chunks cover a tensor exactly
once) and the reader (what a chunk and a wanted slice have in common).

All shapes and indices are in *memory order*: the dimensions of a tensor from slowest to fastest, as
`TensorSpec.order` lists them. A chunk fixes a prefix of the indices, takes a range of one dimension and all of the
rest, so its bytes are contiguous. Where the cuts are depends on shape, item size and `chunk_bytes` alone, never on the
number of replicas: a chunk that did not change is recognized whoever writes it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Final, TypeAlias

from everstep.checkpoint.state import Layout, TensorSpec

CHUNK_BYTES: Final = 4 << 20
"""Default size of a chunk: large enough for few requests, small enough that sparse updates leave chunks unchanged."""

MAX_CORNERS: Final = 1 << 28
"""Corners of boxes that `exact_cover` looks at for one tensor; bounds its work."""

Index: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True, order=True)
class Chunk:
    """A box of one tensor, in the tensor's memory order."""

    tensor: int
    """Number of the tensor in the layout."""
    start: Index
    shape: Index
    nbytes: int


def memory_shape(spec: TensorSpec) -> Index:
    """The shape of `spec` with its dimensions in memory order."""
    return tuple(spec.shape[dim] for dim in spec.order)


def cut(layout: Layout, chunk_bytes: int = CHUNK_BYTES) -> list[Chunk]:
    """All chunks of all tensors, in order of tensor and memory. Tensors without elements have none."""
    return [
        chunk
        for number, spec in enumerate(layout.tensors)
        for chunk in cut_tensor(number, memory_shape(spec), spec.dtype.itemsize, chunk_bytes)
    ]


def cut_tensor(
    number: int,
    shape: Index,
    itemsize: int,
    chunk_bytes: int = CHUNK_BYTES,
    *,
    origin: Index | None = None,
    extent: Index | None = None,
) -> list[Chunk]:
    """Chunks of the slice [origin, origin + extent) of a tensor of `shape` (all of it by default), in memory order.

    Each is contiguous in the memory of a dense tensor that holds just the slice. Cuts lie on multiples of the row
    count in global indices, so that the same rows make the same chunks in whichever slice they are.
    """
    if chunk_bytes < itemsize:
        raise ValueError(f"chunk_bytes is {chunk_bytes}, one element takes {itemsize}")
    start = origin if origin is not None else (0,) * len(shape)
    size = (
        extent
        if extent is not None
        else tuple(whole - first for whole, first in zip(shape, start, strict=True))
    )
    if len(start) != len(shape) or len(size) != len(shape):
        raise ValueError(f"slice {start} + {size} of a tensor of {len(shape)} dimensions")
    if any(
        first < 0 or n < 0 or first + n > whole for first, n, whole in zip(start, size, shape, strict=True)
    ):
        raise ValueError(f"slice {start} + {size} does not lie in a tensor of shape {shape}")
    if prod(size) == 0:
        return []
    if prod(size) * itemsize <= chunk_bytes and _aligned(start, size, shape, itemsize, chunk_bytes):
        return [Chunk(number, start, size, prod(size) * itemsize)]
    dim = _cut_dim(size, itemsize, chunk_bytes)
    row_bytes = prod(size[dim + 1 :]) * itemsize
    rows = max(1, chunk_bytes // row_bytes)
    chunks = []
    for prefix in product(
        *(range(first, first + n) for first, n in zip(start[:dim], size[:dim], strict=True))
    ):
        first, end = start[dim], start[dim] + size[dim]
        while first < end:
            stop = min(first - first % rows + rows, end)
            chunks.append(
                Chunk(
                    number,
                    (*prefix, first, *start[dim + 1 :]),
                    (*(1,) * dim, stop - first, *size[dim + 1 :]),
                    (stop - first) * row_bytes,
                )
            )
            first = stop
    return chunks


def _cut_dim(size: Index, itemsize: int, chunk_bytes: int) -> int:
    """The first dimension of which one row fits into a chunk."""
    return next(
        (dim for dim in range(len(size)) if prod(size[dim + 1 :]) * itemsize <= chunk_bytes), len(size) - 1
    )


def _aligned(start: Index, size: Index, shape: Index, itemsize: int, chunk_bytes: int) -> bool:
    """Whether a slice that fits into one chunk crosses no cut of the whole tensor."""
    if not size or (start == (0,) * len(start) and size == shape):
        return True
    dim = _cut_dim(size, itemsize, chunk_bytes)
    rows = max(1, chunk_bytes // (prod(size[dim + 1 :]) * itemsize))
    return start[dim] // rows == (start[dim] + size[dim] - 1) // rows


def divide(chunks: Sequence[Chunk], num_parts: int) -> list[list[Chunk]]:
    """Contiguous runs of `chunks`, one per part, every chunk in exactly one.

    A chunk belongs to the part in which its middle byte falls if the bytes are divided evenly; so no part deviates
    from the even share by more than the largest chunk.
    """
    if num_parts < 1:
        raise ValueError(f"num_parts is {num_parts}, must be at least 1")
    total = sum(chunk.nbytes for chunk in chunks)
    parts: list[list[Chunk]] = [[] for _ in range(num_parts)]
    before = 0
    for chunk in chunks:
        twice_middle = 2 * before + chunk.nbytes
        parts[twice_middle * num_parts // (2 * total)].append(chunk)
        before += chunk.nbytes
    return parts


def offset_in(start: Index, origin: Index, shape: Index, itemsize: int) -> int:
    """Byte offset of the element at global index `start` in a dense slice of `shape` that begins at `origin`."""
    position = 0
    for index, first, size in zip(start, origin, shape, strict=True):
        position = position * size + index - first
    return position * itemsize


def overlap(start: Index, shape: Index, other_start: Index, other_shape: Index) -> tuple[Index, Index] | None:
    """Start and shape of what two boxes have in common; None if nothing."""
    first = tuple(map(max, start, other_start))
    end = [min(a + n, b + m) for a, n, b, m in zip(start, shape, other_start, other_shape, strict=True)]
    size = tuple(stop - begin for begin, stop in zip(first, end, strict=True))
    return (first, size) if all(n > 0 for n in size) else None


def boxes_of_range(shape: Index, first: int, end: int) -> Iterator[tuple[Index, Index]]:
    """The elements [first, end) of a tensor, counted in memory order, as few boxes (start, shape), in order."""
    if not 0 <= first <= end <= prod(shape):
        raise ValueError(f"elements {first} to {end} of a tensor of shape {shape}")
    while first < end:
        # The largest box that begins at `first`: whole rows of the slowest dimension for which that is possible.
        inner, dim = 1, len(shape)
        while dim > 0 and first % (inner * shape[dim - 1]) == 0 and first + inner * shape[dim - 1] <= end:
            dim -= 1
            inner *= shape[dim]
        if dim == 0:
            yield (0,) * len(shape), shape
            return
        here = first // inner % shape[dim - 1]
        rows = min((end - first) // inner, shape[dim - 1] - here)
        start = [0] * len(shape)
        rest = first // inner
        for position in range(dim - 1, -1, -1):
            rest, start[position] = divmod(rest, shape[position])
        yield tuple(start), (*(1,) * (dim - 1), rows, *shape[dim:])
        first += rows * inner


def exact_cover(shape: Index, boxes: Iterable[tuple[Index, Index]]) -> str | None:
    """None if the boxes (start, shape) cover a tensor of `shape` exactly once, else what is wrong."""
    held = list(boxes)
    for start, size in held:
        if len(start) != len(shape) or len(size) != len(shape):
            return f"slice {list(start)} + {list(size)} has not {len(shape)} dimensions"
        if any(n < 1 or a < 0 or a + n > whole for a, n, whole in zip(start, size, shape, strict=True)):
            return f"slice {list(start)} + {list(size)} does not lie in shape {list(shape)}"
    if prod(shape) == 0:
        return None
    stated, there = sum(prod(size) for _, size in held), prod(shape)
    if stated != there:
        return f"slices are {'missing' if stated < there else 'overlapping'}: {stated} elements of {there}"
    if all(_is_contiguous(size, shape) for _, size in held):
        return _cover_by_ranges(shape, held)
    return _cover_by_corners(shape, held)


def _is_contiguous(size: Index, shape: Index) -> bool:
    """Whether a box is one range of the tensor's memory: rows of one dimension, all of the faster ones."""
    dim = next((dim for dim, n in enumerate(size) if n > 1), len(size))
    return size[dim + 1 :] == shape[dim + 1 :]


def _cover_by_ranges(shape: Index, boxes: list[tuple[Index, Index]]) -> str | None:
    """Ranges of memory that together are as long as the tensor cover it if and only if none meets another."""
    end = 0
    origin = (0,) * len(shape)
    for first, size in sorted((offset_in(start, origin, shape, 1), prod(size)) for start, size in boxes):
        if first != end:
            return f"slices are overlapping and missing, first seen at element {min(first, end)}"
        end = first + size
    return None


def _cover_by_corners(shape: Index, boxes: list[tuple[Index, Index]]) -> str | None:
    """The corners of a box, with alternating signs, are the difference of its indicator function, and taking
    differences is injective: boxes tile the tensor if and only if their corners sum to the tensor's own. So n boxes
    take O(n 2^d) steps, where d counts the dimensions in which the tensor is cut, usually one or two.
    """
    dims = [dim for dim in range(len(shape)) if any(size[dim] != shape[dim] for _, size in boxes)]
    if len(boxes) << len(dims) > MAX_CORNERS:
        return f"{len(boxes)} slices, cut in {len(dims)} dimensions at once, are too many to check"
    corners: Counter[Index] = Counter()
    for sign, (start, size) in [(1, box) for box in boxes] + [(-1, ((0,) * len(shape), shape))]:
        for choice in product((0, 1), repeat=len(dims)):
            corner = tuple(start[dim] + size[dim] * far for dim, far in zip(dims, choice, strict=True))
            corners[corner] += -sign if sum(choice) % 2 else sign
    wrong = next((corner for corner, count in corners.items() if count), None)
    if wrong is None:
        return None
    return f"slices are overlapping and missing, first seen at index {list(wrong)} of dimensions {dims}"
