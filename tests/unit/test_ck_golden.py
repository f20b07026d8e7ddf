"""A checkpoint of format version 1 that lies in the repository: today's code reads it, and writes the same bytes."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import xxhash

from everstep.checkpoint.catalog import newest_whole, open_checkpoint
from everstep.checkpoint.reader import read_tensors
from everstep.checkpoint.store import Store, open_store
from everstep.checkpoint.tree import unflatten
from tests.unit.ck_helpers import commit_parts, snapshot_of, write_parts

GOLDEN = Path(__file__).parent / "golden" / "checkpoint_v1"
"""Never written again: a change of it is a new version of the format. Made by `write(open_store(...))`."""


def states() -> list[dict[str, Any]]:
    """The same numbers on every machine."""
    tied = torch.arange(7, dtype=torch.int16)
    frozen = torch.arange(48, dtype=torch.float32).reshape(4, 12)
    found = []
    for step in (3, 4):
        moving = (torch.arange(20) * step).to(torch.bfloat16).reshape(5, 4)
        model = {"frozen": frozen, "moving": moving.t(), "tied": tied, "empty": torch.empty(0, 3)}
        other = {
            "tied": tied,
            0: (torch.tensor(step * 0.5, dtype=torch.float64), None, "text", 1.5),
            "nan": float("nan"),
        }
        wide = torch.tensor([1 + 2j, 3 - 4j], dtype=torch.complex128)
        found.append(
            {"model": model, "other": {**other, "wide": wide, "flags": torch.tensor([True, False, True])}}
        )
    return found


def write(store: Store) -> None:
    previous = None
    for step, tree in zip((3, 4), states(), strict=True):
        snapshot, attempt = snapshot_of(tree), f"i0-{step}"
        parts = write_parts(
            store, snapshot, step, world_size=2, attempt=attempt, chunk_bytes=64, previous=previous
        )
        user = {"ledger": {"epoch": 1, "position": step * 8}, "metrics": [0.5, None]}
        previous = commit_parts(store, snapshot, step, parts, attempt=attempt, user=user)


def objects(root: Path) -> dict[str, bytes]:
    return {
        path.relative_to(root).as_posix(): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def test_todays_code_reads_the_golden_checkpoint() -> None:
    store = open_store(str(GOLDEN))
    for step, tree in zip((3, 4), states(), strict=True):
        manifest = open_checkpoint(store, step)
        buffers = [spec.empty() for spec in manifest.layout().tensors]
        read_tensors(store, manifest, buffers)
        again = unflatten(manifest.skeleton, buffers)
        assert torch.equal(again["model"]["moving"], tree["model"]["moving"])
        assert torch.equal(again["model"]["frozen"], tree["model"]["frozen"])
        assert again["model"]["moving"].stride() == (1, 4) and again["model"]["empty"].shape == (0, 3)
        assert again["model"]["tied"] is again["other"]["tied"]
        assert again["other"][0][0].item() == step * 0.5 and again["other"][0][1:] == (None, "text", 1.5)
        assert (
            torch.equal(again["other"]["wide"], tree["other"]["wide"])
            and again["other"]["nan"] != again["other"]["nan"]
        )
        assert manifest.user == {"ledger": {"epoch": 1, "position": step * 8}, "metrics": [0.5, None]}
    choice = newest_whole(store)
    assert choice.manifest is not None and choice.manifest.step == 4 and choice.refused == ()


def test_todays_code_writes_the_golden_bytes(tmp_path: Path) -> None:
    write(open_store(str(tmp_path / "again")))
    assert objects(tmp_path / "again") == objects(GOLDEN)


def test_a_program_that_knows_only_the_format_page_reads_it() -> None:
    """FORMAT.md followed word for word, with nothing of ours."""
    commit = json.loads((GOLDEN / "commits/4.json").read_bytes())
    check = commit.pop("check")
    body = json.dumps(commit, sort_keys=True, separators=(",", ":")).encode("ascii")
    assert xxhash.xxh3_64_hexdigest(body) == check and commit["version"] == 1
    raw = (GOLDEN / commit["manifest"]).read_bytes()
    assert (
        len(raw) == commit["manifest_bytes"] and hashlib.sha256(raw).hexdigest() == commit["manifest_sha256"]
    )
    manifest = json.loads(raw)
    assert manifest["format"] == "everstep-checkpoint" and manifest["version"] == 1
    number, entry = next(
        (n, entry) for n, entry in enumerate(manifest["tensors"]) if entry["name"] == "model.frozen"
    )
    assert entry["dtype"] == "float32"
    memory = np.full([entry["shape"][dim] for dim in entry["order"]], np.nan, "<f4")
    for tensor, start, shape, held, offset, digest, blocks in manifest["chunks"]:
        if tensor != number:
            continue
        whole = (GOLDEN / manifest["objects"][held]["key"]).read_bytes()
        assert len(whole) == manifest["objects"][held]["size"]
        data = whole[offset : offset + 4 * int(np.prod(shape))]
        assert xxhash.xxh3_128_hexdigest(data) == digest and xxhash.xxh3_64_hexdigest(data) == blocks
        box = tuple(slice(a, a + n) for a, n in zip(start, shape, strict=True))
        memory[box] = np.frombuffer(data, "<f4").reshape(shape)
    assert np.array_equal(
        memory.transpose(np.argsort(entry["order"])), np.arange(48, dtype="f4").reshape(4, 12)
    )
    for held in manifest["objects"]:
        head = (GOLDEN / held["key"]).read_bytes()[: held["header_bytes"]]
        assert xxhash.xxh3_64_hexdigest(head) == held["header_hash"]


def test_its_parts_are_files_that_the_library_of_the_container_reads() -> None:
    from safetensors.torch import load_file

    loaded = load_file(GOLDEN / "steps/3/i0-3/r0000.safetensors")
    assert any(name.startswith("model.frozen@0,0") for name in loaded)
