"""Growing, shrinking, draining and waiting: changes by wish lose nothing, and happen without waits."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import ray

import everstep
from everstep.errors import ConfigError
from everstep.orchestrator.eventlog import read_history
from everstep.orchestrator.events import RunEnded
from tests.cluster.conftest import Nodes
from tests.cluster.harness import Run, config
from tests.cluster.loops import STEPS, Loop, samples_by_step

LOOP: dict[str, Any] = {"steps": STEPS, "compute_s": 0.1}


def test_every_sample_once_through_4_3_4_2_case_10(
    nodes: Nodes, name: str, folder: Path, undisturbed: tuple[everstep.Result, Any]
) -> None:
    """Rescales in one epoch, one of them by a kill: the same ids in the same steps as the undisturbed run."""
    with Run(Loop(folder=str(folder), **LOOP), config(name, folder)) as run:
        run.wait_world(4)
        run.kill(run.replicas()[2])
        run.wait_world(3)
        run.wait_world(4)
        run.ask("scale", 2, "test")
        run.wait_world(2)
        result = run.finish()
    assert samples_by_step(folder) == undisturbed[1]
    assert result.digest == undisturbed[0].digest


def test_scale_down_and_up_is_one_reform_each_case_14(
    name: str, folder: Path, undisturbed: tuple[everstep.Result, Any]
) -> None:
    settings = config(name, folder, replicas=3, settle_s=6.0)
    with Run(Loop(folder=str(folder), **LOOP), settings) as run:
        run.wait_world(3)
        run.ask("scale", 2, "test")
        run.wait_world(2)
        run.ask("scale", 4, "test")
        run.wait_world(4)
        with pytest.raises(ConfigError, match="5"):
            run.ask("scale", 5, "test")
        result = run.finish()
    changed = [r for r in result.recoveries if r.world_size_before != r.world_size_after]
    assert [(r.world_size_before, r.world_size_after) for r in changed] == [(3, 2), (2, 4)]
    assert all(r.steps_lost == 0 for r in result.recoveries)
    assert changed[1].bytes_transferred > 0
    assert result.digest == undisturbed[0].digest


def test_grows_onto_nodes_that_come_later_cases_4_and_12(
    nodes: Nodes, name: str, folder: Path, undisturbed: tuple[everstep.Result, Any]
) -> None:
    """Two nodes, four wished: it starts with two, an autoscaler sees the pending two, growth needs no restart."""
    for node in nodes.workers[2:]:
        nodes.kill(node)
    with Run(Loop(folder=str(folder), **LOOP), config(name, folder, min_replicas=2, settle_s=0.5)) as run:
        run.wait_world(2)
        pids = {r["pid"] for r in run.replicas()}
        run.wait_until(pending_demand)  # Ray gathers it from its nodes once a second
        nodes.add()
        run.wait_world(3)
        assert pids < {r["pid"] for r in run.replicas()}
        result = run.finish()
    assert result.digest == undisturbed[0].digest


def pending_demand() -> bool:
    from ray.autoscaler.v2.sdk import get_cluster_status

    address = ray.get_runtime_context().gcs_address
    demands = get_cluster_status(address).resource_demands
    return bool(demands.ray_task_actor_demand)


def test_drain_moves_replicas_off_a_node(
    nodes: Nodes, name: str, folder: Path, undisturbed: tuple[everstep.Result, Any]
) -> None:
    with Run(Loop(folder=str(folder), **LOOP), config(name, folder, max_replicas=3)) as run:
        run.wait_world(3)
        node = run.replicas()[0]["node"]
        run.ask("drain", node[:12], "test")
        run.wait_for(lambda e: e.type == "generation_formed" and len(e.replicas) == 2)  # type: ignore[attr-defined]
        run.wait_world(3)
        assert node not in [r["node"] for r in run.replicas()]
        with pytest.raises(ConfigError, match="no-such-node"):
            run.ask("drain", "no-such-node", "test")
        result = run.finish()
    assert result.digest == undisturbed[0].digest


def test_a_drain_notice_of_ray_is_a_planned_departure_case_8(
    nodes: Nodes, name: str, folder: Path, undisturbed: tuple[everstep.Result, Any]
) -> None:
    """What a preemption notice, or SIGTERM of `ray start --block`, tells Ray; without a preemption eating a budget."""
    from ray._raylet import GcsClient

    with Run(
        Loop(folder=str(folder), **LOOP), config(name, folder, max_replicas=3, process_crashes=0)
    ) as run:
        run.wait_world(3)
        node = run.replicas()[1]["node"]
        reason_preemption = 2
        GcsClient(address=nodes.cluster.address).drain_node(node, reason_preemption, "spot notice", 0)
        run.wait_for(lambda e: e.type == "node_draining")
        run.wait_for(lambda e: e.type == "generation_formed" and node not in e.nodes)  # type: ignore[attr-defined]
        nodes.kill(nodes.of(node))
        result = run.finish()
    assert all(r.steps_lost == 0 for r in result.recoveries)
    assert result.digest == undisturbed[0].digest


def test_sigterm_of_a_replica_is_a_planned_departure(
    name: str, folder: Path, undisturbed: tuple[everstep.Result, Any]
) -> None:
    with Run(
        Loop(folder=str(folder), **LOOP), config(name, folder, max_replicas=3, process_crashes=0)
    ) as run:
        run.wait_world(3)
        os.kill(run.replicas()[1]["pid"], signal.SIGTERM)
        run.wait_for(lambda e: e.type == "generation_formed" and len(e.replicas) == 2)  # type: ignore[attr-defined]
        result = run.finish()
    assert result.digest == undisturbed[0].digest


@pytest.mark.soak  # on the core alone in tests/unit/test_core_endings.py
def test_a_loop_that_is_left_by_break_ends_the_run_also_while_others_join(name: str, folder: Path) -> None:
    loop = Loop(folder=str(folder), steps=1000, leave_at=60, compute_s=0.05)
    with Run(loop, config(name, folder, max_replicas=3, replicas=1)) as run:
        run.wait_step(1)
        run.ask("scale", 3, "the test")
        result = run.finish()
    assert (result.steps, result.value) == (60, None)
    ended = read_history(run.config.storage, name).events[-1]
    assert isinstance(ended, RunEnded) and "not JSON-safe" in ended.reason


def test_a_spare_replaces_the_dead_at_once_case_18(
    name: str, folder: Path, undisturbed: tuple[everstep.Result, Any]
) -> None:
    settings = config(name, folder, max_replicas=3, spares=1, backoff_s=60.0)
    with Run(Loop(folder=str(folder), steps=STEPS, compute_s=0.1), settings) as run:
        run.wait_world(3)
        run.wait_until(lambda: run.status()["spares_ready"] == 1)
        run.kill(run.replicas()[0])
        run.wait_for(lambda e: e.type == "generation_formed" and len(e.replicas) == 2)  # type: ignore[attr-defined]
        run.wait_world(3)
        result = run.finish()
    assert result.digest == undisturbed[0].digest


def test_below_the_minimum_it_waits_and_goes_on(
    nodes: Nodes, name: str, folder: Path, undisturbed: tuple[everstep.Result, Any]
) -> None:
    with Run(Loop(folder=str(folder), **LOOP), config(name, folder, min_replicas=2, max_replicas=2)) as run:
        run.wait_step(5)
        survivor, victim = run.replicas()
        run.kill(victim)
        run.wait_for(lambda e: e.type == "waiting")
        run.wait_for(lambda e: e.type == "resumed")
        run.wait_world(2)
        assert survivor["pid"] in [r["pid"] for r in run.replicas()], "its state was kept where it was"
        result = run.finish()
    assert all(r.steps_lost == 0 for r in result.recoveries)
    assert result.digest == undisturbed[0].digest


@pytest.mark.soak  # with checkpoints in test_checkpoints.py
def test_losing_everybody_is_said_and_begun_again(
    name: str, folder: Path, undisturbed: tuple[everstep.Result, Any]
) -> None:
    with Run(Loop(folder=str(folder), **LOOP), config(name, folder, max_replicas=2)) as run:
        run.wait_step(20)
        for replica in run.replicas():
            os.kill(replica["pid"], signal.SIGKILL)
        run.wait_for(lambda e: e.type == "state_lost")
        result = run.finish()
    assert result.steps == STEPS
    assert result.digest == undisturbed[0].digest
