"""How long the controller's mind needs when half of a large run dies at once.

    python -m benchmarks.control_plane [--json]

A generation of N replicas trains; N/2 of them die in one moment. Measured is the CPU time of all calls of `Core.handle`
from the first sign of it to the order for the next generation: a lost line and Ray's word for each of the dead, and
each survivor's report of what it holds. That is all the controller itself adds to such a recovery, beside its network.
No Ray, no torch, no sockets; the garbage collector is set as in the controller. The last line is one JSON object; with
--json it is the only one.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time

from everstep.actors import wire
from everstep.orchestrator.core import Core, Phase, Settings
from everstep.orchestrator.core import model as m
from everstep.orchestrator.settings import GC_THRESHOLDS
from everstep.policies.budget import BudgetLimits, FailureClass

SIZES = (1_250, 2_500, 5_000, 10_000)
REPEATS = 5
GOAL_S = 0.1
"""At the largest size."""


def running(num_replicas: int) -> Core:
    """A core in the middle of a run of so many replicas, in the first generation, at step 1."""
    core = Core(
        Settings(
            min_replicas=1,
            max_replicas=num_replicas,
            replicas=num_replicas,
            logical_shards=2 * num_replicas,
            budget=BudgetLimits(process_crash=None),
        )
    )
    core.store = ("10.0.0.1", 4000)
    core.handle(m.Start(incarnation=1), 0.0)
    for i in range(num_replicas):
        core.handle(
            wire.Hello(
                run="run",
                token="t",
                replica=i,
                pid=i,
                node=f"node-{i // 8}",
                host=f"host-{i // 8}",
                transfer=(f"10.0.{i // 250}.{i % 250}", 5000),
                ready=True,
                signature=("weights",),
                digest="d",
                total=100,
            ),
            1.0,
        )
    for i in range(num_replicas):
        core.handle(wire.Formed(replica=i, generation=1, connect_s=0.1), 2.0)
    for i in range(num_replicas):
        beat = wire.Beat(
            replica=i, seq=1, generation=1, applied=0, phase="compute", progress=1, compute_s=1 + i % 7 / 100
        )
        core.handle(beat, 2.5)
    record = wire.Record(history=0, generation=1, step=0, metrics={"loss": 1.0}, samples=64, step_s=1.0)
    core.handle(wire.Committed(replica=0, generation=1, record=record), 3.0)
    assert core.phase is Phase.RUNNING
    return core


def signs(num_replicas: int) -> list[m.CoreEvent]:
    """What the controller hears: every second replica dies, the others report the shard they have computed."""
    dead = range(1, num_replicas, 2)
    events: list[m.CoreEvent] = [m.LinkLost(replica=i, refused=True) for i in dead]
    events += [
        m.ReplicaDied(replica=i, cause="its process was killed", failure=FailureClass.PROCESS_CRASH)
        for i in dead
    ]
    for i in range(0, num_replicas, 2):
        status = wire.Status(
            generation=1, applied=1, fresh=False, kept=(2 * i,), current=2 * i + 1, vote="AAAA"
        )
        events.append(wire.Parked(replica=i, generation=1, boundary=False, status=status))
    return events


def mass_failure_s(num_replicas: int) -> float:
    """CPU seconds from the first sign to the order."""
    core, events = running(num_replicas), signs(num_replicas)
    handle = core.handle
    commands: list[m.Command] = []
    started = time.process_time()
    for event in events:
        commands = handle(event, 4.0)
    seconds = time.process_time() - started
    forms = [c for c in commands if isinstance(c, m.Send) and isinstance(c.message, wire.Form)]
    assert len(forms) == 1 and len(forms[0].replicas) == len(range(0, num_replicas, 2))
    return seconds


def main() -> None:
    quiet = "--json" in sys.argv[1:]
    gc.set_threshold(*GC_THRESHOLDS)
    medians: dict[int, float] = {}
    if not quiet:
        print(
            "half of N replicas die at once: CPU time of the controller's core until the next generation is ordered"
        )
        print(f"{'replicas':>9}  {'median ms':>9}  {'fastest ms':>10}  {'µs per replica':>14}")
    for size in SIZES:
        times = [mass_failure_s(size) for _ in range(REPEATS)]
        medians[size] = statistics.median(times)
        if not quiet:
            each_us = medians[size] / size * 1e6
            print(f"{size:>9,}  {medians[size] * 1e3:>9.1f}  {min(times) * 1e3:>10.1f}  {each_us:>14.2f}")
    largest = SIZES[-1]
    result = {
        "replicas": largest,
        "mass_failure_s": round(medians[largest], 4),
        "goal_s": GOAL_S,
        "by_replicas": {str(size): round(seconds, 4) for size, seconds in medians.items()},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
