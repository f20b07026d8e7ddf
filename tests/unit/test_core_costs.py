"""What an event costs the controller's core: the same in a run of any size. Counted in lines run, so it is exact."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

from everstep.actors import wire
from everstep.orchestrator.core import Core, Phase, Settings
from everstep.orchestrator.core import model as m
from everstep.policies.budget import BudgetLimits, FailureClass


def lines_run(work: Callable[[], object]) -> int:
    """Lines of Python that are executed, in every frame below."""
    count = 0

    def trace(frame: FrameType, kind: str, argument: object) -> Any:
        nonlocal count
        count += kind == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def costs(num_replicas: int) -> dict[str, int]:
    """Lines run by one event of each kind, in a run of so many replicas."""
    core = Core(
        Settings(max_replicas=2 * num_replicas, replicas=num_replicas, logical_shards=2 * num_replicas,
                 budget=BudgetLimits(back_off_s=1000.0, back_off_cap_s=1000.0))
    )  # fmt: skip
    core.store = ("store", 1)
    core.handle(m.Start(incarnation=1), 10.0)
    measured: dict[str, int] = {}

    def feed(event: m.CoreEvent, name: str = "") -> None:
        lines = lines_run(lambda: core.handle(event, 11.0))
        if name:
            measured[name] = lines

    def hello(i: int) -> wire.Hello:
        return wire.Hello(run="run", token="t", replica=i, pid=i, node=f"n{i}", host="h", transfer=("h", i))

    for i in range(num_replicas):
        last = i == num_replicas - 1
        feed(hello(i), "hello while gathering" if last else "")
        if not last:
            feed(
                wire.Ready(replica=i, signature=("w",), digest="d", total=9),
                "ready" if i == num_replicas - 2 else "",
            )
    feed(wire.Ready(replica=num_replicas - 1, signature=("w",), digest="d", total=9))
    assert core.phase is Phase.FORMING
    for i in range(num_replicas):
        feed(wire.Formed(replica=i, generation=1, connect_s=0.1), "formed" if i == 1 else "")
    assert core.phase is Phase.RUNNING
    feed(wire.Beat(replica=1, seq=1, generation=1, applied=0, phase="compute", progress=1), "beat")
    feed(wire.Fault(replica=1, generation=0, error="late"), "a late fault")
    feed(m.LinkLost(replica=1, refused=False), "link lost")
    feed(hello(1), "hello of a member")
    feed(wire.Fetched(replica=1, generation=1, num_bytes=1, seconds=0.1), "fetched")
    feed(m.ReplicaDied(replica=2, cause="killed", failure=FailureClass.NODE_LOSS))
    assert core.phase is Phase.PARKING
    feed(m.ReplicaDied(replica=3, cause="killed", failure=FailureClass.NODE_LOSS), "another death")
    parked = wire.Parked(
        replica=4, generation=1, boundary=False, status=wire.Status(generation=1, fresh=False)
    )
    feed(parked, "parked")
    return measured


def test_an_event_costs_the_same_at_any_number_of_replicas() -> None:
    few, many = costs(20), costs(400)
    assert few.keys() == many.keys()
    for name, lines in few.items():
        assert many[name] <= lines + 20, name
