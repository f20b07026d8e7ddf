"""Written by any number of replicas, read by any other, whole or in slices: the same bits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from everstep.checkpoint import chunks, part, reader, records
from everstep.checkpoint.catalog import committed_steps, newest_whole, open_checkpoint
from everstep.checkpoint.errors import CheckpointIncomplete, ObjectExists, WriteCancelled
from everstep.checkpoint.hashing import byte_view
from everstep.checkpoint.manifest import Manifest
from everstep.checkpoint.part import PartIndex, PartSpec
from everstep.checkpoint.reader import Wanted, read, read_tensors, want_range
from everstep.checkpoint.state import RegisteredState
from everstep.checkpoint.store import Store, open_store
from everstep.checkpoint.tree import DTYPES, flatten, unflatten
from everstep.errors import StateError
from tests.unit.ck_helpers import (
    NO_WAIT,
    commit_parts,
    new_store,
    odd_state,
    save,
    snapshot_of,
    table,
    trained,
    write_parts,
)


def same_bits(one: Any, other: Any) -> bool:
    first, second = flatten(one), flatten(other)
    return first[0] == second[0] and all(
        a.dtype == b.dtype and a.shape == b.shape and byte_view(a.contiguous()) == byte_view(b.contiguous())
        for a, b in zip(first[1], second[1], strict=True)
    )


def loaded(store: Store, manifest: Manifest) -> Any:
    buffers = [spec.empty() for spec in manifest.layout().tensors]
    read_tensors(store, manifest, buffers)
    return unflatten(manifest.skeleton, buffers)


@pytest.mark.parametrize("world_size", range(1, 6))
def test_what_any_number_of_replicas_writes_comes_back_bit_for_bit(tmp_path: Any, world_size: int) -> None:
    store = new_store(tmp_path)
    save(store, odd_state(), 7, world_size=world_size)
    manifest = open_checkpoint(store, 7)
    again = loaded(store, manifest)
    assert same_bits(again, odd_state())
    assert again["a"]["tied"] is again["b"]["tied"]
    assert again["b"]["transposed"].stride() == odd_state()["b"]["transposed"].stride()


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_of_state_comes_back(tmp_path: Any, dtype: str) -> None:
    store = new_store(tmp_path)
    raw = torch.arange(256, dtype=torch.int64).to(torch.uint8).repeat(2)
    raw = raw % 2 if dtype == "bool" else raw
    tensor = raw.view(DTYPES[dtype])
    save(store, {"a": {"t": tensor}}, 0, chunk_bytes=48)
    again = loaded(store, open_checkpoint(store, 0))["a"]["t"]
    assert again.dtype == tensor.dtype and byte_view(again) == byte_view(tensor)


def test_a_model_and_its_optimizer_come_back_into_other_objects(tmp_path: Any) -> None:
    store = new_store(tmp_path)
    _, _, state = trained(seed=1)
    save(store, state, 3, world_size=2)
    _, _, other = trained(seed=2)
    manifest = open_checkpoint(store, 3)
    assert not same_bits(snapshot_tree(other), snapshot_tree(state))
    buffers = other.receive_buffers(manifest.layout())
    read_tensors(store, manifest, buffers)
    other.load(manifest.skeleton, buffers)
    assert same_bits(snapshot_tree(other), snapshot_tree(state))


def snapshot_tree(state: RegisteredState) -> Any:
    snapshot = state.capture()
    return unflatten(snapshot.skeleton, list(snapshot.tensors))


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_slice_reads_just_its_own_elements(tmp_path: Any, data: st.DataObject) -> None:
    store = open_store("memory://slices", retry=NO_WAIT)
    tensor = torch.arange(7 * 5 * 6, dtype=torch.int32).reshape(7, 5, 6)
    if not committed_steps(store):
        save(store, {"a": {"t": tensor}}, 1, world_size=2, chunk_bytes=100)
    manifest = open_checkpoint(store, 1)
    start = tuple(data.draw(st.integers(0, n)) for n in tensor.shape)
    shape = tuple(data.draw(st.integers(0, n - a)) for a, n in zip(start, tensor.shape, strict=True))
    into = bytearray(b"\xff" * 4 * torch.Size(shape).numel())
    report = read(
        store, manifest, [Wanted(0, start, shape, memoryview(into))], get_bytes=data.draw(st.integers(1, 900))
    )
    wanted = tensor[tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))].contiguous()
    assert bytes(into) == wanted.numpy().tobytes()
    assert report.num_bytes >= len(into)


def test_slices_across_blocks_of_large_chunks(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (records, part, reader):
        monkeypatch.setattr(module, "BLOCK_BYTES", 64)  # the same code with small blocks
    store = new_store(tmp_path)
    tensor = torch.arange(40 * 33, dtype=torch.float64).reshape(40, 33)
    save(store, {"a": {"t": tensor}}, 1, chunk_bytes=4000)
    manifest = open_checkpoint(store, 1)
    for first, rows, left, columns in [
        (0, 40, 0, 33),
        (3, 30, 7, 2),
        (39, 1, 32, 1),
        (0, 40, 0, 1),
        (11, 1, 0, 33),
    ]:
        into = torch.full((rows, columns), -1.0, dtype=torch.float64)
        report = read(store, manifest, [Wanted(0, (first, left), (rows, columns), byte_view(into))])
        assert torch.equal(into, tensor[first : first + rows, left : left + columns])
        assert report.num_bytes <= tensor.nbytes
    narrow = torch.empty(1, 1, dtype=torch.float64)
    assert read(store, manifest, [Wanted(0, (20, 5), (1, 1), byte_view(narrow))]).num_bytes == 64


@pytest.mark.parametrize(("writers", "readers"), [(1, 3), (3, 2), (4, 5), (5, 1)])
def test_resharded_reads_put_together_are_the_whole(tmp_path: Any, writers: int, readers: int) -> None:
    store = new_store(tmp_path)
    save(store, odd_state(), 1, world_size=writers)
    manifest = open_checkpoint(store, 1)
    buffers = [spec.empty() for spec in manifest.layout().tensors]
    fetched = 0
    for rank in range(readers):
        wanted = []
        for number, (entry, tensor) in enumerate(zip(manifest.tensors, buffers, strict=True)):
            elements = tensor.numel()
            first, end = elements * rank // readers, elements * (rank + 1) // readers
            view = byte_view(tensor)[first * entry.itemsize : end * entry.itemsize]
            wanted += want_range(manifest, number, first * entry.itemsize, view)
        fetched += read(store, manifest, wanted).num_bytes
    assert same_bits(unflatten(manifest.skeleton, buffers), odd_state())
    assert fetched >= manifest.total_bytes


@pytest.mark.parametrize(
    ("start", "shape", "size"),
    [
        ((0,), (3,), 12),
        ((6, 0), (2, 5), 40),
        ((-1, 0), (1, 5), 20),
        ((0, 0), (2, 5), 39),
        ((0, 0), (1, 6), 24),
    ],
)
def test_a_slice_that_could_not_be_filled_is_refused(
    tmp_path: Any, start: tuple[int, ...], shape: tuple[int, ...], size: int
) -> None:
    store = new_store(tmp_path)
    manifest = save(store, {"a": {"t": torch.zeros(7, 5)}}, 1)
    with pytest.raises(ValueError, match="slice"):
        read(store, manifest, [Wanted(0, start, shape, memoryview(bytearray(size)))])
    with pytest.raises(ValueError, match="slice"):
        read(store, manifest, [Wanted(0, (0, 0), (1, 5), memoryview(bytes(20)))])


def test_unchanged_chunks_are_referred_to_and_not_written_again(tmp_path: Any) -> None:
    store = new_store(tmp_path)
    frozen, trained_one = torch.randn(100), torch.randn(100)
    first = save(store, {"a": {"frozen": frozen, "moving": trained_one}}, 1, world_size=2)
    trained_one += 1
    snapshot = snapshot_of({"a": {"frozen": frozen, "moving": trained_one}})
    # Another world size, and another part that writes: chunks are recognized all the same.
    parts = write_parts(store, snapshot, 2, attempt="i0-1", world_size=3, previous=first)
    second = commit_parts(store, snapshot, 2, parts, attempt="i0-1")
    assert sum(one.referenced_bytes for one in parts) == frozen.nbytes
    new = sum(info.size for info in store.listing("steps/2/") if info.key.endswith(".safetensors"))
    assert new == sum(one.written_bytes for one in parts) < trained_one.nbytes + 2500
    assert {c.object for c in second.chunks if second.tensors[c.tensor].name == "a.frozen"} <= {
        held.key for held in first.objects
    }
    assert same_bits(
        loaded(store, open_checkpoint(store, 2)), {"a": {"frozen": frozen, "moving": trained_one}}
    )


def test_a_state_that_did_not_change_writes_no_object(tmp_path: Any) -> None:
    store = new_store(tmp_path)
    first = save(store, odd_state(), 1)
    second = save(store, odd_state(), 2, attempt="i0-1", previous=first)
    third = save(store, odd_state(), 3, attempt="i0-2", previous=second)
    assert [info.key for info in store.listing("steps/") if "steps/1/" not in info.key] == [
        "steps/2/i0-1/manifest.json",
        "steps/3/i0-2/manifest.json",
    ]
    assert third.objects == first.objects
    assert same_bits(loaded(store, open_checkpoint(store, 3)), odd_state())


def test_another_shape_dtype_or_order_is_never_taken_for_unchanged(tmp_path: Any) -> None:
    store = new_store(tmp_path)
    base = save(store, {"a": {"t": torch.zeros(4, 4)}}, 1)
    for attempt, tensor in enumerate(
        [torch.zeros(2, 8), torch.zeros(4, 4, dtype=torch.int32), torch.zeros(4, 4).t()]
    ):
        snapshot = snapshot_of({"a": {"t": tensor}})
        parts = write_parts(store, snapshot, 2, attempt=f"i0-{attempt + 1}", previous=base)
        assert not any(one.referenced_bytes for one in parts)


def test_a_part_index_survives_the_way_between_processes(tmp_path: Any) -> None:
    store = new_store(tmp_path)
    snapshot = snapshot_of(odd_state())
    for one in write_parts(store, snapshot, 1):
        assert PartIndex.from_json(one.as_json(), table(snapshot)) == one
    raw: dict[str, Any] = write_parts(store, snapshot, 2)[0].as_json()
    for name, value in [("version", 2), ("attempt", "../x"), ("objects", []), ("chunks", 3), ("rank", -1)]:
        with pytest.raises(CheckpointIncomplete, match="part index"):
            PartIndex.from_json({**raw, name: value}, table(snapshot))


def test_a_part_is_written_once_and_a_cancelled_one_is_not_seen(tmp_path: Any) -> None:
    store = new_store(tmp_path)
    snapshot = snapshot_of(odd_state())
    write_parts(store, snapshot, 1)
    with pytest.raises(ObjectExists):
        write_parts(store, snapshot, 1)
    layout, cancel = snapshot.plan(), __import__("threading").Event()
    seen: list[tuple[int, int]] = []

    def progress(done: int, total: int) -> None:
        seen.append((done, total))
        if len(seen) == 3:
            cancel.set()

    spec = PartSpec(step=2, generation=1, attempt="i0-9", rank=0, tensors=table(snapshot))
    with pytest.raises(WriteCancelled, match="nothing is visible"):
        part.write_part(
            store,
            spec,
            chunks.cut(layout, 128),
            part.views_of(layout, snapshot.tensors),
            progress=progress,
            cancel=cancel,
        )
    assert len(seen) == 3 and not store.listing("steps/2/") and not store.unfinished()


def test_the_bytes_of_packed_chunks_are_the_bytes_of_the_tensors(tmp_path: Any) -> None:
    snapshot = snapshot_of(odd_state())
    layout = snapshot.plan()
    one, mine = part.views_of(layout, snapshot.tensors), chunks.divide(chunks.cut(layout, 32), 3)[1]
    other = part.views_packed(mine, memoryview(b"".join(bytes(one(chunk)) for chunk in mine)))
    assert len(mine) > 3 and all(one(chunk) == other(chunk) for chunk in reversed(mine))


def bad_names() -> list[Any]:
    return [{"a" * 5000: torch.ones(1)}, {"\ud800": torch.ones(1)}]


@pytest.mark.parametrize("tree", bad_names(), ids=["long", "surrogate"])
def test_a_name_that_could_not_be_read_is_refused_before_anything_is_written(
    tmp_path: Any, tree: Any
) -> None:
    store = new_store(tmp_path)
    with pytest.raises(StateError):
        save(store, {"a": tree}, 1)
    assert not store.listing("steps/")


@pytest.mark.parametrize("user", [{"x": float("nan")}, {"x": (1, 2)}, {1: 2}, {"x": object()}])
def test_user_data_that_json_would_change_is_refused(tmp_path: Any, user: Any) -> None:
    store = new_store(tmp_path)
    snapshot = snapshot_of(odd_state())
    parts = write_parts(store, snapshot, 1)
    with pytest.raises(StateError, match="user data"):
        commit_parts(store, snapshot, 1, parts, user=user)
    assert newest_whole(store).manifest is None


def test_user_data_nested_so_deep_that_nobody_could_read_it_is_not_committed(tmp_path: Any) -> None:
    store = new_store(tmp_path)
    snapshot = snapshot_of(odd_state())
    deep: Any = 1
    for _ in range(256):
        deep = [deep]
    with pytest.raises(CheckpointIncomplete, match="deep"):
        commit_parts(store, snapshot, 1, write_parts(store, snapshot, 1), user={"x": deep})
    assert committed_steps(store) == []
