"""`everstep checkpoints` on storage alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file

from everstep.checkpoint.catalog import committed_steps
from everstep.checkpoint.commit import begin
from everstep.checkpoint.store import open_store
from everstep.orchestrator.cli import cli
from tests.unit.ck_helpers import save, trained


@pytest.fixture
def storage(tmp_path: Path) -> Path:
    """A run with checkpoints of steps 1 to 3."""
    store = open_store(str(tmp_path / "runs" / "gpt" / "checkpoints"))
    begin(store, 0, "first")
    for step in (1, 2, 3):
        save(store, trained(seed=step)[2], step, attempt=f"i0-{step}")
    return tmp_path / "runs"


def call(storage: Path, *args: str) -> Result:
    return CliRunner().invoke(cli, ["checkpoints", *args, "--storage", str(storage)])


def test_they_are_listed_newest_first(storage: Path) -> None:
    found = json.loads(call(storage, "ls", "gpt", "--json").stdout)
    assert [one["step"] for one in found] == [3, 2, 1]
    lines = call(storage, "ls", "gpt").stdout.splitlines()
    assert lines[0].split()[0] == "STEP" and lines[1].split()[0] == "3"
    assert "no checkpoint" in call(storage, "ls", "other").stdout


def test_one_is_inspected(storage: Path) -> None:
    found = json.loads(call(storage, "inspect", "gpt", "--step", "2", "--json").stdout)
    assert (found["step"], found["replicas"]) == (2, 3)
    assert {"name": "model.2.weight", "dtype": "float32", "shape": [6, 12], "bytes": 288} in found["tensors"]
    assert "model.2.weight" in call(storage, "inspect", "gpt").stdout


def test_damage_is_named_and_fails(storage: Path) -> None:
    assert "is whole" in call(storage, "verify", "gpt").stdout
    [file] = (storage / "gpt" / "checkpoints" / "steps" / "3").rglob("r0000.safetensors")
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    result = call(storage, "verify", "gpt")
    assert result.exit_code == 1 and "r0000.safetensors" in result.stderr
    assert call(storage, "verify", "gpt", "--step", "2").exit_code == 0


@pytest.mark.parametrize("kind", ["safetensors", "dcp"])
def test_what_is_exported_can_be_imported_by_another_run(storage: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    result = call(storage, "export", "gpt", str(out), "--to", kind)
    assert result.exit_code == 0, result.output
    if kind == "safetensors":
        tensors = load_file(out / "checkpoint.safetensors")
        assert torch.equal(tensors["model.2.weight"], trained(seed=3)[0][2].weight)  # type: ignore[index]
    assert call(storage, "export", "gpt", str(out)).exit_code == 2, "nothing is overwritten"
    trust = ("--trust-pickle",) if kind == "dcp" else ()
    if trust:
        assert call(storage, "import", "new", str(out), "--step", "7").exit_code != 0
    result = call(storage, "import", "new", str(out), "--step", "7", *trust)
    assert result.exit_code == 0, result.output
    assert json.loads(call(storage, "ls", "new", "--json").stdout)[0]["step"] == 7
    assert call(storage, "verify", "new").exit_code == 0


def test_older_ones_are_deleted_by_wish(storage: Path) -> None:
    result = call(storage, "prune", "gpt", "--keep-last", "1")
    assert result.exit_code == 0 and "2 checkpoints" in result.stdout
    assert committed_steps(open_store(str(storage / "gpt" / "checkpoints"))) == [3]
    assert call(storage, "verify", "gpt").exit_code == 0


def test_a_run_without_checkpoints_is_told_so(storage: Path) -> None:
    result = call(storage, "inspect", "none")
    assert result.exit_code == 2 and "has no checkpoint" in result.output
