"""Where chunks lie: every element in exactly one, however tensors are shaped, sliced and divided."""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.checkpoint.chunks import (
    Index,
    boxes_of_range,
    cut,
    cut_tensor,
    divide,
    exact_cover,
    memory_shape,
    overlap,
)
from everstep.checkpoint.state import Layout
from tests.unit.ck_helpers import odd_state, snapshot_of

shapes = st.lists(st.integers(0, 7), max_size=5).map(tuple)
FAST = settings(max_examples=50, deadline=None)


def painted(shape: Index, boxes: list[tuple[Index, Index]]) -> np.ndarray:
    """How often each element is covered."""
    count = np.zeros(shape, int)
    for start, size in boxes:
        count[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))] += 1
    return count


@FAST
@given(shapes, st.sampled_from([1, 2, 4, 8, 16]), st.integers(16, 200))
def test_a_tensor_is_cut_into_chunks_that_cover_it_once_and_fit(
    shape: Index, itemsize: int, chunk_bytes: int
) -> None:
    chunks = cut_tensor(0, shape, itemsize, chunk_bytes)
    boxes = [(chunk.start, chunk.shape) for chunk in chunks]
    assert (painted(shape, boxes) == 1).all()
    assert exact_cover(shape, boxes) is None
    assert all(chunk.nbytes == prod(chunk.shape) * itemsize <= chunk_bytes for chunk in chunks)
    assert boxes == sorted(boxes)


@FAST
@given(st.data(), shapes, st.integers(1, 60))
def test_chunks_of_slices_cover_the_slices_and_are_the_chunks_of_the_whole_where_they_can(
    data: st.DataObject, shape: Index, chunk_bytes: int
) -> None:
    origin = tuple(data.draw(st.integers(0, n)) for n in shape)
    extent = tuple(data.draw(st.integers(0, n - a)) for a, n in zip(origin, shape, strict=True))
    chunks = cut_tensor(3, shape, 1, chunk_bytes, origin=origin, extent=extent)
    inside = np.zeros(shape, int)
    inside[tuple(slice(a, a + n) for a, n in zip(origin, extent, strict=True))] = 1
    assert (painted(shape, [(chunk.start, chunk.shape) for chunk in chunks]) == inside).all()
    if extent[1:] == shape[1:]:  # a slice of whole rows, as sharded state has
        whole = {(chunk.start, chunk.shape) for chunk in cut_tensor(3, shape, 1, chunk_bytes)}
        first, end = (origin[0], origin[0] + extent[0]) if shape else (0, 1)
        within = [box for box in whole if not shape or (box[0][0] >= first and box[0][0] + box[1][0] <= end)]
        assert {(chunk.start, chunk.shape) for chunk in chunks} >= set(within if prod(extent) else [])


@FAST
@given(st.lists(shapes, min_size=1, max_size=6), st.integers(1, 7), st.integers(4, 60))
def test_every_chunk_is_given_to_one_part_and_parts_are_even_up_to_a_chunk(
    all_shapes: list[Index], num_parts: int, chunk_bytes: int
) -> None:
    layout = Layout.of(None, [torch.zeros(shape, dtype=torch.int32) for shape in all_shapes])
    chunks = cut(layout, chunk_bytes)
    parts = divide(chunks, num_parts)
    assert [chunk for part in parts for chunk in part] == chunks
    even = sum(chunk.nbytes for chunk in chunks) / num_parts
    largest = max((chunk.nbytes for chunk in chunks), default=0)
    assert all(abs(sum(chunk.nbytes for chunk in part) - even) <= largest for part in parts)


def test_where_the_cuts_are_does_not_depend_on_the_number_of_replicas() -> None:
    chunks = cut(snapshot_of(odd_state()).plan(), 64)
    for num_parts in range(1, 6):
        assert [chunk for part in divide(chunks, num_parts) for chunk in part] == chunks


def test_shapes_are_taken_in_memory_order() -> None:
    layout = snapshot_of({"a": {"t": torch.zeros(5, 12).t()}}).plan()
    assert layout.tensors[0].shape == (12, 5) and memory_shape(layout.tensors[0]) == (5, 12)


def test_no_parts_and_chunks_below_one_element_are_refused() -> None:
    with pytest.raises(ValueError, match="num_parts is 0"):
        divide([], 0)
    with pytest.raises(ValueError, match="one element takes 8"):
        cut_tensor(0, (3,), 8, 4)
    with pytest.raises(ValueError, match="does not lie in"):
        cut_tensor(0, (3,), 1, 4, origin=(2,), extent=(2,))


@FAST
@given(st.data(), st.lists(st.integers(1, 5), max_size=4).map(tuple))
def test_a_range_of_memory_is_few_boxes_in_order(data: st.DataObject, shape: Index) -> None:
    total = prod(shape)
    first = data.draw(st.integers(0, total))
    end = data.draw(st.integers(first, total))
    numbers = np.arange(total).reshape(shape)
    got: list[int] = []
    boxes = list(boxes_of_range(shape, first, end))
    for start, size in boxes:
        got += numbers[tuple(slice(a, a + n) for a, n in zip(start, size, strict=True))].ravel().tolist()
    assert got == list(range(first, end))
    assert len(boxes) <= max(2 * len(shape), 1)


@st.composite
def tilings(draw: st.DrawFn, shape: Index | None = None) -> tuple[Index, list[tuple[Index, Index]]]:
    """A box, cut again and again at random places: not only along memory."""
    whole: Index = shape or draw(st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple))
    boxes = [((0,) * len(whole), whole)]
    for _ in range(draw(st.integers(0, 6))):
        start, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(whole) - 1))
        at = draw(st.integers(0, size[dim]))
        near = (start, (*size[:dim], at, *size[dim + 1 :]))
        far = (
            (*start[:dim], start[dim] + at, *start[dim + 1 :]),
            (*size[:dim], size[dim] - at, *size[dim + 1 :]),
        )
        boxes += [box for box in (near, far) if prod(box[1])]
    return whole, draw(st.permutations(boxes))


@FAST
@given(tilings())
def test_any_tiling_covers_exactly(tiling: tuple[Index, list[tuple[Index, Index]]]) -> None:
    assert exact_cover(*tiling) is None


@settings(max_examples=120, deadline=None)
@given(st.data(), tilings())
def test_cover_is_exact_just_if_every_element_is_painted_once(
    data: st.DataObject, tiling: tuple[Index, list[tuple[Index, Index]]]
) -> None:
    shape, boxes = tiling
    number = data.draw(st.integers(0, len(boxes) - 1))
    start, size = boxes[number]
    moved = tuple(a + data.draw(st.integers(-1, 1)) for a in start)
    resized = tuple(n + data.draw(st.integers(-1, 1)) for n in size)
    boxes = [*boxes[:number], (moved, resized), *boxes[number + 1 :]]
    if any(a < 0 or n < 1 or a + n > whole for a, n, whole in zip(moved, resized, shape, strict=True)):
        assert exact_cover(shape, boxes) is not None
    else:
        assert (exact_cover(shape, boxes) is None) == bool((painted(shape, boxes) == 1).all())


def test_a_tensor_of_many_dimensions_that_is_cut_in_all_of_them_is_covered() -> None:
    shape = (2,) * 12
    boxes = [(chunk.start, chunk.shape) for chunk in cut_tensor(0, shape, 4, 4)]
    assert len(boxes) == 4096 and exact_cover(shape, boxes) is None
    assert exact_cover(shape, [boxes[0], *boxes[:-1]]) is not None


def test_what_would_take_too_long_to_check_is_refused() -> None:
    shape = (3,) * 30
    crossing = ((0,) * 30, (2,) * 30)  # cut in every dimension: 2**30 corners
    rest, here = 3**30 - 2**30, 0
    rows = []
    while here < rest:  # as many elements as are missing, in ranges of memory
        [(start, size)] = list(boxes_of_range(shape, here, min(here + 3**29, rest)))[:1]
        rows.append((start, size))
        here += prod(size)
    assert sum(prod(size) for _, size in [crossing, *rows]) == 3**30
    assert "too many to check" in (exact_cover(shape, [crossing, *rows]) or "")


@FAST
@given(st.data(), st.lists(st.integers(1, 6), max_size=3).map(tuple))
def test_what_two_boxes_have_in_common(data: st.DataObject, shape: Index) -> None:
    boxes = []
    for _ in range(2):
        start = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
        boxes.append(
            (start, tuple(data.draw(st.integers(1, n - a)) for a, n in zip(start, shape, strict=True)))
        )
    both = painted(shape, boxes) == 2
    common = overlap(*boxes[0], *boxes[1])
    assert (painted(shape, [common] if common else []) == both).all()
