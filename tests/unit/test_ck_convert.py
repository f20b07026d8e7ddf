"""Verified to the last byte, exported to other formats and imported from them: the same bits, and bounded memory."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file

from everstep.checkpoint import convert, convert_dcp
from everstep.checkpoint.catalog import newest_whole, open_checkpoint
from everstep.checkpoint.convert import export_safetensors, import_safetensors
from everstep.checkpoint.convert_dcp import export_dcp, import_dcp
from everstep.checkpoint.errors import CheckpointDamaged, Superseded
from everstep.checkpoint.hashing import byte_view
from everstep.checkpoint.manifest import Manifest
from everstep.checkpoint.reader import read_tensors
from everstep.checkpoint.store import Store, open_store
from everstep.checkpoint.tree import DTYPES, flatten, unflatten
from everstep.checkpoint.verify import verify
from everstep.errors import ConfigError, StateError
from tests.unit.ck_helpers import (
    NO_WAIT,
    commit_parts,
    new_store,
    odd_state,
    save,
    snapshot_of,
    trained,
    write_parts,
)

ALONE = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
ANY_DTYPE = pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")


def loaded(store: Store, manifest: Manifest) -> Any:
    buffers = [spec.empty() for spec in manifest.layout().tensors]
    read_tensors(store, manifest, buffers)
    return unflatten(manifest.skeleton, buffers)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.dtype, one.shape) == (other.dtype, other.shape) and byte_view(one.contiguous()) == byte_view(
        other.contiguous()
    )


def same_trees(one: Any, other: Any) -> bool:
    first, second = flatten(one), flatten(other)
    return first[0] == second[0] and all(map(same_bits, first[1], second[1]))


def every_dtype() -> dict[str, torch.Tensor]:
    raw = torch.arange(192, dtype=torch.int64).to(torch.uint8)
    return {name: (raw % 2 if name == "bool" else raw).view(dtype) for name, dtype in DTYPES.items()}


def fresh(tmp_path: Path, name: str) -> Store:
    return open_store(str(tmp_path / name), retry=NO_WAIT)


def exported(tmp_path: Path, tree: Any, **options: Any) -> tuple[Store, Manifest]:
    store = new_store(tmp_path)
    snapshot = snapshot_of(tree)
    parts = write_parts(store, snapshot, 7, world_size=2, **options)
    return store, commit_parts(store, snapshot, 7, parts, user={"epoch": 3})


# --- verify


def test_a_whole_checkpoint_is_verified_to_the_last_byte(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    first = save(store, odd_state(), 1)
    save(store, odd_state(), 2, attempt="i0-1", previous=first)
    for step in (1, 2):
        verified = verify(store, step)
        manifest = store.size(f"steps/{step}/i0-{step - 1}/manifest.json")
        assert verified.whole and verified.num_objects == len(first.objects)
        assert verified.num_bytes == manifest + sum(held.size for held in first.objects)


def test_all_damage_is_reported_by_name_at_once(tmp_path: Path) -> None:
    store = new_store(tmp_path)
    manifest = save(store, {"m": {str(number): torch.randn(50) for number in range(6)}}, 1, world_size=3)
    flipped, cut_short, gone = (held.key for held in manifest.objects)
    chunk = next(chunk for chunk in manifest.chunks if chunk.object == flipped)
    whole = bytearray(store.get(flipped, 1 << 20))
    whole[chunk.offset] ^= 1
    whole[20] ^= 1
    store.put(flipped, bytes(whole))
    store.put(cut_short, store.get(cut_short, 1 << 20)[:-1])
    store.delete([gone])
    verified = verify(store, 1)
    assert not verified.whole and len(verified.problems) == 5
    text = "\n".join(verified.problems)
    assert f"{gone} is missing" in text and f"{cut_short} has" in text and f"{flipped}: its header" in text
    assert f"{flipped}, tensor {manifest.tensors[chunk.tensor].name!r} from" in text


def test_every_flipped_byte_is_a_problem() -> None:
    store = open_store("memory://verify", retry=NO_WAIT)
    store.delete([info.key for info in store.listing("")])
    save(store, {"a": {"w": torch.arange(6, dtype=torch.int16)}}, 5, world_size=1, chunk_bytes=8)
    for key in [info.key for info in store.listing("") if info.key != "LATEST"]:
        whole = store.get(key, 1 << 20)
        for place in range(len(whole)):
            store.put(key, whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :])
            assert verify(store, 5, num_threads=1).problems, (key, place)
        store.put(key, whole)
    assert verify(store, 5).whole and not verify(store, 6).whole


# --- safetensors


@ANY_DTYPE
@pytest.mark.parametrize("slice_bytes", [16, 100, 1 << 20])
def test_an_export_is_loaded_by_the_library_of_the_format(tmp_path: Path, slice_bytes: int) -> None:
    tree = {**odd_state(), "every": every_dtype()}
    store, manifest = exported(tmp_path, tree)
    [path] = export_safetensors(store, manifest, tmp_path / "out", slice_bytes=slice_bytes)
    got = load_file(path)
    assert set(got) == {entry.name for entry in manifest.tensors}
    for name, tensor in tree["every"].items():
        if name in ("complex32", "complex128"):  # unknown to the format: as bytes
            assert byte_view(got[f"every.{name}"]) == byte_view(tensor)
        else:
            assert same_bits(got[f"every.{name}"], tensor), name
    assert torch.equal(got["b.transposed"], tree["b"]["transposed"]) and got["a.empty"].shape == (0, 3)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        "checkpoint.safetensors",
        "everstep.json",
    ]


@ANY_DTYPE
def test_an_export_in_many_files_comes_back_whole(tmp_path: Path) -> None:
    tree = {**odd_state(), "every": every_dtype()}
    store, manifest = exported(tmp_path, tree)
    paths = export_safetensors(store, manifest, tmp_path / "out", file_bytes=300)
    assert len(paths) > 3 and paths[0].name == f"checkpoint-00001-of-{len(paths):05d}.safetensors"
    other = fresh(tmp_path, "other")
    import_safetensors(paths, other, step=9, run="again", chunk_bytes=100)
    again = open_checkpoint(other, 9)
    assert same_trees(loaded(other, again), tree) and again.user == {"epoch": 3} and verify(other, 9).whole
    with pytest.raises(CheckpointDamaged, match="is in none of the files"):
        import_safetensors(paths[1:], fresh(tmp_path, "third"), step=9, run="again")


def test_an_export_holds_one_slice_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store, manifest = exported(
        tmp_path, {"m": {"w": torch.randn(64, 50).t(), "v": torch.randn(3000)}}, chunk_bytes=1024
    )
    sizes: list[int] = []
    read_slice = convert.read_slice

    def watched(*arguments: Any) -> bytes:
        sizes.append(len(data := read_slice(*arguments)))
        return data

    monkeypatch.setattr(convert, "read_slice", watched)
    monkeypatch.setattr(convert_dcp, "read_slice", watched)
    export_safetensors(store, manifest, tmp_path / "one", slice_bytes=500)
    export_dcp(store, manifest, tmp_path / "two", slice_bytes=500)
    assert max(sizes) <= 500 and sum(sizes) == 2 * manifest.total_bytes


def test_files_of_others_become_the_state_of_a_model(tmp_path: Path) -> None:
    model, _, _ = trained()
    save_file(
        {key: tensor.contiguous() for key, tensor in model.state_dict().items()},
        tmp_path / "model.safetensors",
    )
    store = fresh(tmp_path, "run")
    import_safetensors([tmp_path / "model.safetensors"], store, step=0, run="trial", name="model")
    choice = newest_whole(store)
    assert choice.manifest is not None
    other, _, _ = trained(seed=5)
    other.load_state_dict(loaded(store, choice.manifest)["model"])
    assert all(map(same_bits, other.state_dict().values(), model.state_dict().values()))
    with pytest.raises(Superseded):
        import_safetensors([tmp_path / "model.safetensors"], store, step=1, run="trial", name="model")
    with pytest.raises(StateError, match="name='model'"):
        save_file({"w": torch.ones(1)}, tmp_path / "plain.safetensors")
        import_safetensors([tmp_path / "plain.safetensors"], fresh(tmp_path, "x"), step=0, run="trial")


def test_damaged_files_and_full_folders_are_refused(tmp_path: Path) -> None:
    store, manifest = exported(tmp_path, odd_state())
    [path] = export_safetensors(store, manifest, tmp_path / "out")
    for act in (export_safetensors, export_dcp):
        with pytest.raises(ConfigError, match="not empty"):
            act(store, manifest, tmp_path / "out")
    whole = path.read_bytes()
    for number, damaged in enumerate(
        (
            b"",
            whole[:7],
            whole[:-1],
            whole + b"x",
            whole[:9] + b"\xff" + whole[10:],
            b"\xff" * 8 + whole[8:],
        )
    ):
        path.write_bytes(damaged)
        with pytest.raises(CheckpointDamaged, match=r"checkpoint\.safetensors"):
            import_safetensors([path], fresh(tmp_path, str(number)), step=0, run="r")
    path.write_bytes(whole)
    side = json.loads((path.parent / "everstep.json").read_bytes())
    for change in ({"version": 2}, {"skeleton": {"tensor": 0}}, {"tensors": 3}, {"user": []}, {"more": 1}):
        (path.parent / "everstep.json").write_text(json.dumps({**side, **change}))
        with pytest.raises(CheckpointDamaged, match=r"everstep\.json"):
            import_safetensors([path], fresh(tmp_path, "side"), step=0, run="r")
    side["tensors"][0]["shape"] = [9]
    side["tensors"][0]["order"] = [0]
    (path.parent / "everstep.json").write_text(json.dumps(side))
    with pytest.raises(CheckpointDamaged, match="says"):
        import_safetensors([path], fresh(tmp_path, "shape"), step=0, run="r")


def test_an_export_of_a_damaged_checkpoint_leaves_no_file(tmp_path: Path) -> None:
    store, manifest = exported(tmp_path, odd_state())
    key = manifest.objects[-1].key
    whole = store.get(key, 1 << 20)
    store.put(key, whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointDamaged):
        export_safetensors(store, manifest, tmp_path / "out")
    assert not list((tmp_path / "out").glob("checkpoint*"))
    with pytest.raises(CheckpointDamaged):
        export_dcp(store, manifest, tmp_path / "dcp")
    assert not (tmp_path / "dcp" / ".metadata").exists()


# --- DCP


@ANY_DTYPE
@ALONE
@pytest.mark.parametrize("slice_bytes", [16, 100, 1 << 20])
def test_an_export_is_loaded_by_torch_into_plain_tensors(tmp_path: Path, slice_bytes: int) -> None:
    tree = {**odd_state(), "every": every_dtype()}
    store, manifest = exported(tmp_path, tree)
    export_dcp(store, manifest, tmp_path / "out", slice_bytes=slice_bytes)
    wanted = {f"every.{name}": torch.zeros_like(tensor) for name, tensor in tree["every"].items()}
    wanted |= {"b.transposed": torch.zeros(12, 5), "a.tied": torch.zeros(7, dtype=torch.int16)}
    wanted |= {"b.tied": torch.zeros(7, dtype=torch.int16), "a.scalar": torch.zeros((), dtype=torch.float64)}
    wanted |= {"a.empty": torch.empty(0, 3)}
    dcp.load(wanted, checkpoint_id=tmp_path / "out", no_dist=True)
    assert all(same_bits(wanted[f"every.{name}"], tensor) for name, tensor in tree["every"].items())
    assert torch.equal(wanted["b.transposed"], tree["b"]["transposed"]) and wanted["a.scalar"] == 2.5
    assert torch.equal(wanted["a.tied"], tree["a"]["tied"]) and torch.equal(
        wanted["b.tied"], tree["a"]["tied"]
    )


@ANY_DTYPE
def test_a_dcp_export_comes_back_whole(tmp_path: Path) -> None:
    tree = {**odd_state(), "every": every_dtype()}
    store, manifest = exported(tmp_path, tree)
    export_dcp(store, manifest, tmp_path / "out", slice_bytes=64)
    other = fresh(tmp_path, "other")
    imported = import_dcp(tmp_path / "out", other, step=9, run="again", trust_pickle=True, chunk_bytes=100)
    assert imported.skipped == () and verify(other, 9).whole
    assert same_trees(loaded(other, open_checkpoint(other, 9)), tree)


@ALONE
def test_a_checkpoint_of_torch_becomes_one_of_ours(tmp_path: Path) -> None:
    model, _, _ = trained()
    dcp.save(
        {"model": model.state_dict(), "extra": {"epoch": 3}}, checkpoint_id=tmp_path / "dcp", no_dist=True
    )
    store = fresh(tmp_path, "run")
    imported = import_dcp(tmp_path / "dcp", store, step=4, run="trial", trust_pickle=True)
    assert imported.skipped == ("extra.epoch",)
    again = loaded(store, open_checkpoint(store, 4))["model"]
    assert all(same_bits(again[key], tensor) for key, tensor in model.state_dict().items())


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("owned",)


def test_no_pickle_is_read_unless_its_writer_is_trusted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "dcp"
    folder.mkdir()
    (folder / ".metadata").write_bytes(pickle.dumps(Evil()))
    for trust in (False, 1, "yes"):
        with pytest.raises(ConfigError, match="trust_pickle"):
            import_dcp(folder, fresh(tmp_path, "run"), step=0, run="r", trust_pickle=trust)  # type: ignore[arg-type]
    assert not (tmp_path / "owned").exists()
    for raw in (b"", b"garbage", pickle.dumps({"not": "metadata"})):
        (folder / ".metadata").write_bytes(raw)
        with pytest.raises(CheckpointDamaged, match="dcp"):
            import_dcp(folder, fresh(tmp_path, "run"), step=0, run="r", trust_pickle=True)


@ALONE
def test_a_dcp_folder_without_its_data_is_named(tmp_path: Path) -> None:
    store, manifest = exported(tmp_path, odd_state())
    export_dcp(store, manifest, tmp_path / "out")
    data = tmp_path / "out" / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:100])
    other = fresh(tmp_path, "other")
    with pytest.raises(CheckpointDamaged, match="tensor"):
        import_dcp(tmp_path / "out", other, step=0, run="r", trust_pickle=True)
    assert newest_whole(other).manifest is None and not other.listing("steps/")
