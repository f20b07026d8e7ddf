"""The state outlives the cluster: written beside the training, read back by any number of replicas, bit for bit."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray

import everstep
from everstep.actors.places import checkpoints_url
from everstep.checkpoint.catalog import committed_steps
from everstep.checkpoint.store import open_store
from everstep.checkpoint.verify import verify
from everstep.errors import RunStopped
from everstep.orchestrator import connect
from tests.cluster.harness import Run, config
from tests.cluster.loops import STEPS, Loop, samples_by_step

LOOP: dict[str, Any] = {"steps": STEPS, "compute_s": 0.1}


def stored(run: Run) -> list[int]:
    """Committed steps, newest first."""
    return committed_steps(open_store(checkpoints_url(run.config)))


def test_when_all_are_lost_the_newest_checkpoint_is_where_it_goes_on(
    name: str, folder: Path, undisturbed: tuple[everstep.Result, Any]
) -> None:
    settings = config(name, folder, max_replicas=3, every_steps=10, keep_last=2)
    with Run(Loop(folder=str(folder), **LOOP), settings) as run:
        run.wait_for(lambda e: e.type == "checkpoint_committed")
        newest = run.wait_for(lambda e: e.type == "checkpoint_committed")
        for replica in run.replicas():
            os.kill(replica["pid"], signal.SIGKILL)
        lost = run.wait_for(lambda e: e.type == "state_lost")
        assert lost.step >= newest.step >= 20  # type: ignore[attr-defined]
        result = run.finish()
    assert (result.steps, result.digest) == (STEPS, undisturbed[0].digest)
    assert samples_by_step(folder) == undisturbed[1]
    assert len(stored(run)) == 2 and stored(run)[0] == STEPS, "the end is kept too"


def test_a_stopped_run_is_taken_up_by_another_number_of_replicas(
    name: str, folder: Path, undisturbed: tuple[everstep.Result, Any]
) -> None:
    loop = Loop(folder=str(folder), **LOOP)
    with Run(loop, config(name, folder, max_replicas=3, every_steps=10)) as run:
        run.wait_for(lambda e: e.type == "checkpoint_committed")
        run.ask("stop", "the test", True)
        with pytest.raises(RunStopped):
            run.finish()
    newest = stored(run)[0]
    (folder / "go").unlink()
    with Run(loop, config(name, folder, max_replicas=2, every_steps=10)) as again:
        first = again.wait_for(lambda e: e.type == "step_committed")
        assert first.step == newest  # type: ignore[attr-defined]
        result = again.finish()
    assert (result.steps, result.digest) == (STEPS, undisturbed[0].digest)


def keepers(name: str) -> list[Any]:
    named = ray.util.list_named_actors(all_namespaces=True)
    found = [a["name"] for a in named if a["name"].startswith(f"everstep:{name}:keeper-")]
    return [ray.get_actor(one, namespace=connect.NAMESPACE) for one in found]


@pytest.mark.soak  # writers killed at every operation: tests/unit/test_ck_commit.py
def test_killing_who_writes_a_checkpoint_changes_nothing_cases_17_and_23(
    name: str, folder: Path, undisturbed: tuple[everstep.Result, Any]
) -> None:
    """Storage takes seconds for each; a replica dies while its part is written, then a keeper. What is there is whole."""
    settings = config(name, folder, max_replicas=3, every_steps=2, bytes_per_s=2_000.0)
    with Run(Loop(folder=str(folder), **LOOP), settings) as run:
        run.wait_for(lambda e: e.type == "checkpoint_thinned")  # one is being written, training does not wait
        run.kill(run.replicas()[1])
        run.wait_world(2)
        run.wait_for(lambda e: e.type == "checkpoint_committed")
        run.wait_for(lambda e: e.type == "checkpoint_thinned")
        os.kill(ray.get(keepers(name)[0].pid.remote(), timeout=30.0), signal.SIGKILL)
        run.wait_for(lambda e: e.type == "checkpoint_committed")
        result = run.finish()
    assert (result.steps, result.digest) == (STEPS, undisturbed[0].digest)
    store = open_store(checkpoints_url(run.config))
    steps = committed_steps(store)
    assert steps[0] == STEPS
    assert all(verify(store, step).whole for step in steps)
