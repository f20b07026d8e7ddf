"""The controller dies, is slow, or loses its driver: training goes on, and nothing is left at the end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
import ray

import everstep
from everstep.errors import RunNameTaken
from everstep.orchestrator import connect
from tests.cluster.conftest import Nodes
from tests.cluster.harness import Run, config
from tests.cluster.loops import Loop, let_go, samples_by_step
from tests.waiting import wait_until


def controller_pid(run: Run) -> int:
    return int(run.status()["pid"])


def test_training_goes_on_without_its_controller_cases_3_and_26(name: str, folder: Path) -> None:
    """SIGKILL it; it returns with its state; a kill right afterwards is survived; so is its second death."""
    loop = Loop(folder=str(folder), steps=100, compute_s=0.1)
    with Run(loop, config(name, folder, max_replicas=3, backoff_s=0.1)) as run:
        run.wait_step(10)
        before = run.status()
        os.kill(controller_pid(run), signal.SIGKILL)
        run._after = run._position = 0
        run.seen.clear()
        run.wait_for(lambda e: e.type == "controller_restarted")
        after = run.status()
        assert after["incarnation"] > before["incarnation"]
        assert after["generation"] == before["generation"], "nobody was disturbed"
        assert after["step"] > before["step"], "training went on meanwhile"
        assert {r["pid"] for r in after["replicas"]} == {r["pid"] for r in before["replicas"]}
        run.kill(run.replicas()[0])
        run.wait_world(2)
        result = run.finish()
    assert result.steps == 100
    steps = {step for step, _ in samples_by_step(folder)}
    assert steps == set(range(100))


def test_a_name_in_use_is_refused_and_two_runs_do_not_know_of_each_other(name: str, folder: Path) -> None:
    one, two = folder / "one", folder / "two"
    one.mkdir()
    two.mkdir()
    first = Run(Loop(folder=str(one), steps=60, compute_s=0.1), config(f"{name}-1", one, max_replicas=2))
    second = Run(Loop(folder=str(two), steps=60, compute_s=0.1), config(f"{name}-2", two, max_replicas=2))
    with first, second:
        first.wait_step(2)
        second.wait_step(2)
        with pytest.raises(RunNameTaken, match=f"{name}-1"):
            everstep.run(Loop(folder=str(one)), config(f"{name}-1", one))
        first.kill(first.replicas()[0])
        first.wait_world(1)
        assert first.finish().digest == second.finish().digest
    # Shards may be dealt anew by measured speed at any time; nobody was lost, nothing was computed twice.
    lost = [r for r in second.result.recoveries if r.blamed_replica is not None or r.shards_recomputed]
    assert not lost, "the other run was not disturbed"
    assert {r.world_size_after for r in second.result.recoveries} <= {2}


DRIVER = """
import sys
sys.path.insert(0, {root!r})
import ray
ray.init(address={address!r}, namespace="everstep", log_to_driver=False)
import everstep
from tests.cluster.harness import config
from tests.cluster.loops import Loop
from pathlib import Path
result = everstep.run(
    Loop(folder={folder!r}, steps={steps}, compute_s=0.02),
    config({name!r}, Path({folder!r}), max_replicas=2, driver_grace_s={grace}),
)
"""


def start_driver(
    nodes: Nodes, name: str, folder: Path, grace: float, steps: int = 100_000
) -> subprocess.Popen[bytes]:
    root = str(Path(__file__).resolve().parents[2])
    code = DRIVER.format(
        root=root, address=nodes.cluster.address, folder=str(folder), name=name, grace=grace, steps=steps
    )
    return subprocess.Popen([sys.executable, "-c", code], cwd=root)


def test_nothing_is_left_after_the_driver_was_killed(nodes: Nodes, name: str, folder: Path) -> None:
    driver = start_driver(nodes, name, folder, grace=3.0)
    try:
        wait_until(lambda: name in connect.live_runs(), 60.0)
        run = connect.find_controller(name)
        wait_until(lambda: connect.ask(run, "status")["step"] > 3, 60.0)
        pids = [r["pid"] for r in connect.ask(run, "status")["replicas"]]
        driver.kill()
        driver.wait(10.0)
        _, alive = psutil.wait_procs([psutil.Process(p) for p in pids if psutil.pid_exists(p)], timeout=40.0)
        assert not alive
        wait_until(lambda: name not in connect.live_runs(), 60.0)
    finally:
        driver.kill()
        driver.wait(10.0)


def test_who_submits_again_gets_the_result_that_a_lost_driver_left(
    nodes: Nodes, name: str, folder: Path
) -> None:
    driver = start_driver(nodes, name, folder, grace=600.0, steps=40)
    try:
        wait_until(lambda: name in connect.live_runs(), 60.0)
        run = connect.find_controller(name)
        wait_until(lambda: connect.ask(run, "status")["step"] > 3, 60.0)
        driver.kill()
        driver.wait(10.0)
        let_go(folder)
        wait_until(lambda: connect.ask(run, "status")["phase"] == "ended", 60.0)
        imports = (folder / "imports.txt").read_text()
        with Run(Loop(folder=str(folder), steps=40), config(name, folder)) as again:
            result = again.finish()
        assert result.steps == 40 and result.digest
        assert (folder / "imports.txt").read_text() == imports
    finally:
        driver.kill()
        driver.wait(10.0)


def test_sigterm_of_the_driver_ends_the_run(nodes: Nodes, name: str, folder: Path) -> None:
    driver = start_driver(nodes, name, folder, grace=60.0)
    try:
        wait_until(lambda: name in connect.live_runs(), 60.0)
        run = connect.find_controller(name)
        wait_until(lambda: connect.ask(run, "status")["step"] > 3, 60.0)
        driver.terminate()
        assert driver.wait(20.0) != 0
        wait_until(lambda: name not in connect.live_runs(), 60.0)
    finally:
        driver.kill()
        driver.wait(10.0)


def test_replicas_end_by_themselves_when_no_controller_comes_back(name: str, folder: Path) -> None:
    """The lease: even if the controller is gone for good."""
    settings = config(name, folder, max_replicas=2, heartbeat_timeout_s=2.0, lease_s=6.0)
    run = Run(Loop(folder=str(folder), steps=100000, compute_s=0.02), settings)
    run._thread.start()
    run.wait_step(3)
    processes = [psutil.Process(pid) for pid in run.pids()]
    ray.kill(run.controller(), no_restart=True)
    _, alive = psutil.wait_procs(processes, timeout=30.0)
    assert not alive
    run._thread.join(60.0)
    assert run.error is not None
    run.assert_nothing_left()
