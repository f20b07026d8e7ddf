"""Random histories of kills, joins, scales and drains, real processes: the end is always that of the undisturbed run."""

from __future__ import annotations

import os
import random
import signal
from pathlib import Path
from typing import Any

import pytest

import everstep
from tests.cluster.conftest import Nodes
from tests.cluster.harness import Run, config
from tests.cluster.loops import STEPS, Loop, samples_by_step

ACTIONS = (
    "kill",
    "kill",
    "kill two",
    "scale",
    "scale",
    "drain",
    "terminate",
    "freeze",
    "lose node",
    "add node",
)


def act(action: str, run: Run, nodes: Nodes, chance: random.Random) -> None:
    members = run.replicas()
    if not members:
        return
    one = chance.choice(members)
    others = (
        len(members) > 1
    )  # the last holder of the state is not killed: without checkpoints that loses steps
    if action == "kill" and others:
        os.kill(one["pid"], signal.SIGKILL)
    elif action == "kill two" and len(members) > 2:
        for replica in chance.sample(members, 2):
            os.kill(replica["pid"], signal.SIGKILL)
    elif action == "freeze" and others:
        os.kill(one["pid"], signal.SIGSTOP)
    elif action == "terminate" and others:
        os.kill(one["pid"], signal.SIGTERM)
    elif action == "scale":
        run.ask("scale", chance.randint(1, 4), "history")
    elif action == "drain" and others:
        run.ask("drain", one["node"], "history")
    elif action == "lose node" and others and len(nodes.workers) > 2:
        nodes.kill(nodes.of(one["node"]))
    elif action == "add node" and len(nodes.workers) < 5:
        nodes.add()


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.soak) for s in range(1, 10))])
def test_any_history_ends_like_the_undisturbed_run(
    seed: int, nodes: Nodes, name: str, folder: Path, undisturbed: tuple[everstep.Result, Any]
) -> None:
    chance = random.Random(seed)
    settings = config(
        name, folder, replicas=3, heartbeat_timeout_s=3.0, process_crashes=None, network=None, unknown=None
    )
    done = []
    with Run(Loop(folder=str(folder), steps=STEPS, compute_s=0.05), settings) as run:
        run.wait_world(3)
        step = 2
        while step < STEPS - 20:
            run.wait_step(step)
            action = chance.choice(ACTIONS)
            act(action, run, nodes, chance)
            done.append(f"{action} at {step}")
            step += chance.randint(3, 20)
        run.ask("scale", 3, "history")
        result = run.finish()
    assert result.digest == undisturbed[0].digest, done
    assert samples_by_step(folder) == undisturbed[1], done
    assert sum(r.steps_lost for r in result.recoveries) == 0, done
    committed = [e.step for e in run.seen if e.type == "step_committed"]  # type: ignore[attr-defined]
    assert committed == sorted(set(committed)), done
