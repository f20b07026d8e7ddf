"""Packaging: four folders are one package, in a checkout, in a wheel and for the linters; and importing it is light."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("actors", "checkpoint", "orchestrator", "policies")


def run(arguments: Sequence[str], cwd: Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": "", "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        arguments,
        cwd=cwd,
        env=environment,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tree as a clone has it, without what was built in it."""
    copy = tmp_path_factory.mktemp("checkout")
    for folder in (*FOLDERS, "everstep"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(ROOT / folder, copy / folder, symlinks=True, ignore=ignore)
    shutil.copy(ROOT / "pyproject.toml", copy)
    return copy


@pytest.mark.parametrize("folder", FOLDERS)
def test_everstep_holds_a_link_to_each_folder(folder: str) -> None:
    link = ROOT / "everstep" / folder
    assert link.is_symlink()
    assert link.readlink() == Path("..") / folder


def test_the_import_folder_holds_nothing_but_the_public_face() -> None:
    own = {path.name for path in (ROOT / "everstep").iterdir() if not path.is_symlink()} - {"__pycache__"}
    assert own == {"__init__.py", "__main__.py", "errors.py", "py.typed"}


def test_a_wheel_holds_every_module_once_and_nothing_else(checkout: Path, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--no-index",
        "--quiet",
    ]
    built = run([*command, "--wheel-dir", str(tmp_path), "."], cwd=checkout)
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("everstep-*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        entry_points = archive.read(
            next(name for name in names if name.endswith("entry_points.txt"))
        ).decode()
    modules = {f"everstep/{path.name}" for path in (ROOT / "everstep").glob("*.py")}
    for folder in FOLDERS:
        modules |= {f"everstep/{path.relative_to(ROOT)}" for path in (ROOT / folder).rglob("*.py")}
    assert sorted(name for name in names if ".dist-info/" not in name) == sorted(
        {*modules, "everstep/py.typed"}
    )
    assert "everstep = everstep.orchestrator.cli:main" in entry_points


def test_a_checkout_runs_without_an_install(checkout: Path) -> None:
    where = run(
        [sys.executable, "-c", "import everstep.orchestrator.cli as m; print(m.__file__)"], cwd=checkout
    )
    assert Path(where.stdout.strip()) == checkout / "everstep" / "orchestrator" / "cli.py"
    version = run([sys.executable, "-m", "everstep", "--version"], cwd=checkout)
    assert version.stdout.startswith("everstep, version 0.")


@pytest.mark.parametrize(
    "program",
    [
        "import everstep; dir(everstep)",
        "import everstep; everstep.RunConfig, everstep.FailureConfig",
        "import everstep.orchestrator.live, everstep.orchestrator.eventlog",
        "from everstep.orchestrator.cli import cli; cli(['--help'], standalone_mode=False)",
        "from everstep.orchestrator.cli import cli; cli(['submit', '--help'], standalone_mode=False)",
    ],
)
def test_help_and_configs_load_neither_ray_nor_torch(program: str) -> None:
    heavy = "sorted({'ray', 'torch', 'numpy', 'rich', 'fsspec', 'yaml'} & set(sys.modules))"
    result = run([sys.executable, "-c", f"import sys; {program}; print('loaded', {heavy})"], cwd=ROOT)
    assert result.stdout.splitlines()[-1] == "loaded []", result.stderr


def test_only_one_file_reads_the_environment() -> None:
    readers = []
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            names = [
                node.attr for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Attribute)
            ]
            if {"environ", "getenv"} & set(names):
                readers.append(str(path.relative_to(ROOT)))
    # nccl.py sets what torch reads when a group is made; it reads nothing.
    assert sorted(set(readers) - {"actors/groups/nccl.py"}) == ["orchestrator/environment.py"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_ruff_refuses_the_import_that_would_make_a_second_copy(folder: str) -> None:
    command = [
        sys.executable,
        "-m",
        "ruff",
        "check",
        "--no-cache",
        "--stdin-filename",
        "orchestrator/x.py",
        "-",
    ]
    result = run(command, cwd=ROOT, stdin=f'"""X."""\n\nimport {folder}\n\nprint({folder})\n')
    assert "TID251" in result.stdout


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("orchestrator/core/__init__.py", "import time"),
        ("policies/__init__.py", "import everstep.errors"),
        ("checkpoint/__init__.py", "import ray"),
        ("actors/__init__.py", "import everstep.orchestrator.config"),
        ("orchestrator/events.py", "import torch"),
    ],
)
def test_the_linter_refuses_imports_against_the_direction(checkout: Path, module: str, line: str) -> None:
    command = [
        sys.executable,
        "-c",
        "from importlinter.cli import lint_imports_command as c; c()",
        "--no-cache",
    ]
    file = checkout / module
    text = file.read_text()
    file.write_text(f"{text}\n{line}\n")
    try:
        result = run(command, cwd=checkout)
    finally:
        file.write_text(text)
    assert result.returncode == 1 and "BROKEN" in result.stdout, result.stdout + result.stderr
