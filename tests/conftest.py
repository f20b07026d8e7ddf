"""What every test gets: the environment of local Ray clusters, a storage folder of its own, markers by folder."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def ray_environment() -> dict[str, str]:
    """The variables of ray.env, which the Makefile exports too."""
    lines = (ROOT / "ray.env").read_text(encoding="utf-8").splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


# At import, before any test module can import ray or torch: both read these then.
os.environ.update(ray_environment())


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "cluster" in item.path.relative_to(ROOT).parts:
            item.add_marker("cluster")


@pytest.fixture(autouse=True)
def own_storage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test writes to the home directory, or takes part in a run that was submitted around it."""
    storage = tmp_path / "storage"
    monkeypatch.setenv("EVERSTEP_STORAGE", str(storage))
    monkeypatch.delenv("EVERSTEP_RUN_NAME", raising=False)
    return storage


@pytest.fixture(autouse=True, scope="module")
def what_was_left_open_is_found_here() -> Iterator[None]:
    """A socket, file or process that a module forgot is told as that module's error, not as some later test's."""
    yield
    gc.collect()
