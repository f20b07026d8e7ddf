"""Replicas die in every way; the others go on with the state they hold. Numbers refer to the reported cases."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

import everstep
from tests.cluster.conftest import Nodes
from tests.cluster.harness import Run, config
from tests.cluster.loops import STEPS, Loop, samples_by_step


def unplanned(result: everstep.Result) -> list[Any]:
    return [r for r in result.recoveries if r.world_size_after < r.world_size_before]


def test_a_killed_replica_costs_no_step_no_sample_and_no_bit(
    name: str, folder: Path, undisturbed: tuple[everstep.Result, Any]
) -> None:
    loop = Loop(folder=str(folder), steps=STEPS, compute_s=0.1)
    with Run(loop, config(name, folder, max_replicas=3)) as run:
        run.wait_step(5)
        before = {r["pid"] for r in run.replicas()}
        killed = run.replicas()[1]
        run.kill(killed)
        run.wait_world(2)
        after = {r["pid"] for r in run.replicas()}
        result = run.finish()
    assert after == before - {killed["pid"]}, "the survivors are the same processes"
    assert result.digest == undisturbed[0].digest
    assert samples_by_step(folder) == undisturbed[1]
    recovery = unplanned(result)[0]
    assert recovery.steps_lost == 0 and recovery.blamed_replica == killed["replica"]
    assert recovery.shards_recomputed < 8, "what the survivors had computed was kept"
    assert sum(recovery.phases.values()) == pytest.approx(recovery.total_s, abs=1e-3)


def test_rank_0_is_not_special_case_2(
    name: str, folder: Path, undisturbed: tuple[everstep.Result, Any]
) -> None:
    """Kill the replica that holds rank 0, three times in a row."""
    with Run(
        Loop(folder=str(folder), steps=STEPS, compute_s=0.1), config(name, folder, backoff_s=30.0)
    ) as run:
        for size in (3, 2, 1):
            run.wait_step(3 if size == 3 else 0)
            run.kill(run.replicas()[0])
            run.wait_world(size)
        result = run.finish()
    assert result.digest == undisturbed[0].digest
    assert len(unplanned(result)) == 3


def test_half_of_the_replicas_at_once_is_one_recovery_case_15(
    name: str, folder: Path, undisturbed: tuple[everstep.Result, Any]
) -> None:
    with Run(
        Loop(folder=str(folder), steps=STEPS, compute_s=0.1), config(name, folder, backoff_s=30.0)
    ) as run:
        run.wait_step(5)
        for replica in run.replicas()[1:3]:
            os.kill(replica["pid"], signal.SIGKILL)
        run.wait_world(2)
        result = run.finish()
    assert [(r.world_size_before, r.world_size_after) for r in unplanned(result)] == [(4, 2)]
    assert result.digest == undisturbed[0].digest


def test_nobody_waits_for_the_next_collective_to_find_out_case_1(name: str, folder: Path) -> None:
    """Shards that take long: the group re-forms while the survivors are in the middle of their computation."""
    loop = Loop(folder=str(folder), steps=3, compute_s=4.0)
    with Run(loop, config(name, folder, logical_shards=4, max_replicas=4, backoff_s=30.0)) as run:
        run.wait_step(0)
        victim = run.replicas()[2]
        time.sleep(0.5)  # into the computation of step 1
        killed_at = run.kill(victim)
        formed = run.wait_for(lambda e: e.type == "generation_formed" and len(e.replicas) == 3)  # type: ignore[attr-defined]
        result = run.finish()
    assert formed.time - killed_at < 2 * run.config.detection.heartbeat_s
    assert result.steps == 3


def test_survivors_never_import_again_and_the_node_is_used_again_cases_9_and_13(
    name: str, folder: Path, undisturbed: tuple[everstep.Result, Any]
) -> None:
    loop = Loop(folder=str(folder), steps=STEPS, compute_s=0.1, import_s=2.0)
    with Run(loop, config(name, folder)) as run:
        run.wait_step(3)
        victim = run.replicas()[1]
        run.kill(victim)
        run.wait_world(3)
        run.wait_world(4)
        assert victim["node"] in [r["node"] for r in run.replicas()], "one crash does not ban a node"
        result = run.finish()
    imports = (folder / "imports.txt").read_text().split()
    assert len(imports) == len(set(imports)) == 5, "each replica imported once; one was replaced"
    assert unplanned(result)[0].total_s < 1.0
    assert result.digest == undisturbed[0].digest


def test_a_frozen_replica_is_ejected_and_wakes_to_find_itself_dead_case_25(
    name: str, folder: Path, undisturbed: tuple[everstep.Result, Any]
) -> None:
    settings = config(name, folder, max_replicas=3, heartbeat_timeout_s=2.0, backoff_s=30.0)
    with Run(Loop(folder=str(folder), steps=STEPS, compute_s=0.1), settings) as run:
        run.wait_step(5)
        frozen = run.replicas()[1]
        process = psutil.Process(frozen["pid"])
        run.kill(frozen, signal.SIGSTOP)
        run.wait_world(2)
        if process.is_running():
            process.resume()
        result = run.finish()
        psutil.wait_procs([process], timeout=10.0)
        assert not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    assert result.digest == undisturbed[0].digest
    assert samples_by_step(folder) == undisturbed[1]


def test_a_replica_that_holds_the_gil_in_c_is_replaced_case_27(
    name: str, folder: Path, undisturbed: tuple[everstep.Result, Any]
) -> None:
    loop = Loop(folder=str(folder), steps=STEPS, stuck_at=4, stuck_replica=2, compute_s=0.1)
    with Run(loop, config(name, folder, max_replicas=3, heartbeat_timeout_s=2.0)) as run:
        run.wait_world(3)
        run.wait_world(2)
        result = run.finish()
    assert result.digest == undisturbed[0].digest


def test_a_lost_node_costs_no_step(
    nodes: Nodes, name: str, folder: Path, undisturbed: tuple[everstep.Result, Any]
) -> None:
    loop = Loop(folder=str(folder), steps=STEPS, compute_s=0.1)
    with Run(loop, config(name, folder, max_replicas=3)) as run:
        run.wait_step(5)
        nodes.kill(nodes.of(run.replicas()[0]["node"]))
        run.wait_world(2)
        result = run.finish()
    assert result.digest == undisturbed[0].digest
    assert samples_by_step(folder) == undisturbed[1]


def test_data_workers_and_augmented_order_survive_a_kill(
    name: str, folder: Path, undisturbed: tuple[everstep.Result, Any]
) -> None:
    loop = Loop(folder=str(folder), steps=STEPS, compute_s=0.1, num_workers=1)
    with Run(loop, config(name, folder, max_replicas=3, backoff_s=30.0)) as run:
        run.wait_step(5)
        victim = psutil.Process(run.replicas()[1]["pid"])
        workers = victim.children(recursive=True)
        assert workers, "it has data workers"
        victim.kill()
        run.wait_world(2)
        _, alive = psutil.wait_procs(workers, timeout=10.0)
        assert not alive, "a killed replica's data workers end with it"
        result = run.finish()
    assert result.digest == undisturbed[0].digest
