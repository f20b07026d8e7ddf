"""The controller's core under everything at once: seeded simulations and senseless events.

`make test` plays some ten thousand events; `make soak` a million, or as many as EVERSTEP_SOAK_EVENTS says.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from typing import Any
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from everstep.actors import wire
from everstep.errors import IllegalEvent
from everstep.orchestrator import events as ev
from everstep.orchestrator.core import (
    Core,
    Phase,
    ReplicaState,
    Settings,
    ending,
    failing,
    forming,
    machine,
    state,
)
from everstep.orchestrator.core import model as m
from everstep.policies.budget import BudgetLimits, FailureClass
from tests.simulated_checks import Violation, check_books
from tests.simulated_rules import Rules
from tests.simulated_scenario import Scenario
from tests.simulation import World

# ---- simulations

CHUNKS = 6
SEEDS_PER_CHUNK = 9


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_whatever_happens_the_promises_hold(chunk: int) -> None:
    seen: Counter[str] = Counter()
    num_events = 0
    for seed in range(chunk * SEEDS_PER_CHUNK, (chunk + 1) * SEEDS_PER_CHUNK):
        world = World(seed).run()
        seen += world.seen
        num_events += world.num_events
    assert num_events > 2_500
    # A simulation in which nothing happens proves nothing.
    for what in ("fetched", "unplanned", "shards_kept", "controller_restarted", "waiting", "parking-forming"):
        assert seen[what] > 0, seen


@pytest.mark.parametrize("seed", [3, 29])
def test_a_seed_replays_exactly(seed: int) -> None:
    first, second = World(seed).run(), World(seed).run()
    assert list(map(repr, first.story)) == list(map(repr, second.story))
    assert (first.now, first.num_events, first.seen) == (second.now, second.num_events, second.seen)


def let_all_go(run: state.RunState, plan: Any) -> None:
    run.kept_sources = set()
    for i in plan.dropped:
        forming.ending.release(run, run.replicas[i], run.replicas[i].leaving or "scaled down")


_park = failing.park


def wait_for_one(run: state.RunState, cause: str, blamed: m.Replica | None, *, planned: bool) -> None:
    _park(run, cause, blamed, planned=planned)
    run.awaited = set(list(run.awaited)[:1])


def deaf(run: state.RunState, event: Any) -> None:
    pass


DEFECTS: dict[str, tuple[Any, dict[str, Any]]] = {
    # name: (what is broken, the scenario that brings it to light)
    "not everybody is waited for": (
        lambda: mock.patch.object(failing, "park", wait_for_one),
        {"faults": {"split_vote": 1}},
    ),
    "a half-fetched state is taken for whole": (
        lambda: mock.patch.object(forming, "without_void", lambda run, survivors: survivors),
        {"faults": {"crash": 1, "crash_source": 2, "ambush": 4}, "moments": ("fetching",),
         "effects": ("crash_source",), "replicas": 2},
    ),
    "the last source is let go": (
        lambda: mock.patch.object(forming, "let_go", let_all_go),
        {"faults": {"sigterm_all": 3, "scale": 1}},
    ),
    "records are forgotten before they are stored": (
        lambda: mock.patch.object(state.RunState, "known_step", lambda run: run.step),
        {"faults": {"controller": 1}, "tell_stored": False},
    ),
    "a controller that came back does not listen": (
        lambda: mock.patch.dict(machine._WHILE_ADOPTING, {wire.Finished: deaf, wire.Ready: deaf}),
        {"faults": {"ambush": 3, "controller": 0.2}, "moments": ("finished", "done"), "effects": ("controller",),
         "total": 8},
    ),
    "a joiner waits for those who left the loop": (
        lambda: mock.patch.object(ending, "release_uninformed", lambda run: None),
        {"faults": {"scale": 3}, "leave_at": 20, "total": 40},
    ),
    "a controller that came back does not wait for leases": (
        mock.MagicMock,
        {"faults": {"controller": 1, "cut": 3}, "settings": {"adopt_timeout_s": 3.0}},
    ),
    "a replica rolls forward in spite of its promise": (
        mock.MagicMock,
        {"faults": {"split_vote": 3, "ambush": 3}, "moments": ("roll_forward",), "replicas": 4,
         "effects": ("crash", "glitch", "break_lines"), "rules": Rules(promise_covers_roll_forward=False)},
    ),
    "a replica commits in spite of its promise": (
        mock.MagicMock,
        {"faults": {"split_vote": 3, "ambush": 3}, "moments": ("vote", "reduced"), "replicas": 4,
         "effects": ("crash", "glitch"), "rules": Rules(promise_covers_commit=False)},
    ),
}  # fmt: skip


@pytest.mark.parametrize("defect", DEFECTS)
def test_the_simulation_notices_when(defect: str) -> None:
    broken, scenario = DEFECTS[defect]
    played = {"num_nodes": 4, "total": 120, "fault_every_s": 1.0, "faults_s": 40.0, **scenario}
    with broken(), pytest.raises(Violation):
        for seed in range(80):
            World(seed, Scenario(**played)).run()


@pytest.mark.soak
def test_a_million_events() -> None:
    wanted = int(os.environ.get("EVERSTEP_SOAK_EVENTS", "1000000"))
    seen: Counter[str] = Counter()
    seed, num_events, started = 10_000, 0, time.process_time()
    while num_events < wanted:
        world = World(seed).run()
        seen += world.seen
        num_events += world.num_events
        seed += 1
    seconds = time.process_time() - started
    print(f"\n{num_events} events in {seed - 10_000} runs, {seconds:.0f} CPU-s; {dict(sorted(seen.items()))}")
    assert seen["rolled_forward"] > 0
    assert seen["woken_fenced"] > 0


# ---- senseless events

V = 6
IDS = st.integers(0, 9)
STEPS = st.integers(0, 8)
STATUSES = st.builds(
    wire.Status, generation=st.integers(0, 6), applied=STEPS, fresh=st.booleans(), reduced=st.booleans(),
    kept=st.lists(st.integers(-1, V), max_size=4).map(tuple), current=st.integers(-1, V), done=st.booleans(),
    vote=st.sampled_from(("", "v")),
)  # fmt: skip
RECORDS = st.builds(
    wire.Record, history=st.integers(0, 1), generation=st.integers(0, 6), step=STEPS,
    metrics=st.just({"loss": 1.0}), samples=st.just(1), step_s=st.just(0.1), skipped=st.booleans(),
)  # fmt: skip
TEXTS = st.sampled_from(("", "e", "f"))
NUMBERS = st.floats(allow_nan=True, allow_infinity=True)


class Senseless(RuleBasedStateMachine):
    """Events of legal types in any order, from anybody, about anything."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 50.0
        self.core = Core(
            Settings(
                min_replicas=2,
                max_replicas=5,
                replicas=3,
                spares=1,
                logical_shards=V,
                settle_s=1.0,
                budget=BudgetLimits(process_crash=4, unknown=None, network=None, back_off_s=0.1),
            )
        )
        self.core.store = ("store", 1)
        self.due = 0
        self.ended = False

    def feed(self, event: m.CoreEvent) -> None:
        number = self.core.number
        for command in self.core.handle(event, self.now):
            if not isinstance(command, m.Emit):
                continue
            assert not self.ended, f"{command.event.type} after RunEnded"
            if isinstance(command.event, ev.StepCommitted):
                assert command.event.step == self.due
                self.due += 1
            self.due = 0 if isinstance(command.event, ev.StateLost) else self.due
            self.ended = isinstance(command.event, ev.RunEnded)
        assert self.core.number in (number, number + 1)

    def near(self, offset: int) -> int:
        return max(self.core.number + offset, 0)

    @initialize(
        kind=st.sampled_from(("fresh", "adopt", "formed", "formed", "formed", "trained", "trained")),
        step=st.none() | STEPS,
        history=st.integers(0, 1),
        ids=st.frozensets(IDS, max_size=4),
    )
    def begin(self, kind: str, step: int | None, history: int, ids: frozenset[int]) -> None:
        with pytest.raises(IllegalEvent):
            self.core.handle(m.Tick(), self.now)
        if kind == "adopt":
            self.due = step or 0
            self.feed(m.Adopt(incarnation=2, replicas=tuple(ids), step=self.due, history=history, next_id=3))
            return
        self.feed(m.Start(incarnation=1))
        if kind == "fresh":
            return
        for i in range(4):
            self.hello(i, wire.Status(), True, False, None, [], "", 6)
        self.all_formed()
        assert self.core.phase is Phase.RUNNING
        if kind == "trained":
            record = wire.Record(
                history=0, generation=1, step=0, metrics={"loss": 1.0}, samples=1, step_s=0.1
            )
            self.committed(0, 0, record)

    @rule(seconds=st.sampled_from((0.0, 0.001, 0.5, 3.0, 40.0)))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.feed(m.Tick())

    @rule(i=IDS, status=STATUSES, ready=st.booleans(), faulted=st.booleans(), offset=st.none() | st.integers(-1, 1),
          records=st.lists(RECORDS, max_size=3), digest=TEXTS, total=st.sampled_from((0, 6, 6, 6, 6)))  # fmt: skip
    def hello(self, i: int, status: wire.Status, ready: bool, faulted: bool, offset: int | None,
              records: list[wire.Record], digest: str, total: int) -> None:  # fmt: skip
        generation = None
        if offset is not None:
            members = tuple(range(i % 3, i % 3 + 3))
            nothing: tuple[tuple[int, ...], ...] = tuple(() for _ in members)
            generation = wire.Generation(
                number=self.near(offset), incarnation=1, history=0, step=status.applied, members=members,
                ranges=((0, 2), (2, 4), (4, 6)), held=nothing, todo=nothing, store=("s", 1), fetch=members[:1],
            )  # fmt: skip
        self.feed(
            wire.Hello(
                run="run",
                token="t",
                replica=i,
                pid=i,
                node=f"n{i % 3}",
                host="h",
                transfer=(f"h{i}", i),
                status=status,
                generation=generation,
                ready=ready,
                faulted=faulted,
                records=tuple(records),
                signature=("w",),
                digest=digest,
                total=total,
            )
        )

    @rule(
        i=IDS,
        digest=TEXTS,
        total=st.sampled_from((6, 6, 6, 7)),
        signature=st.sampled_from(("w", "w", "w", "x")),
    )
    def ready(self, i: int, digest: str, total: int, signature: str) -> None:
        self.feed(wire.Ready(replica=i, signature=(signature,), digest=digest, total=total))

    @rule(i=IDS, phase=st.sampled_from(("reduce", "wait", "compute", "done", "?")), progress=st.integers(0, 3),
          compute_s=NUMBERS)  # fmt: skip
    def beat(self, i: int, phase: str, progress: int, compute_s: float) -> None:
        beat = wire.Beat(
            replica=i, seq=1, generation=0, applied=0, phase=phase, progress=progress, compute_s=compute_s
        )
        self.feed(beat)

    @rule(i=IDS, offset=st.integers(-2, 1))
    def formed(self, i: int, offset: int) -> None:
        self.feed(wire.Formed(replica=i, generation=self.near(offset), connect_s=0.1))

    @rule()
    def all_formed(self) -> None:
        for i in self.core.generation.members if self.core.generation else ():
            self.formed(i, 0)

    @rule(status=STATUSES)
    def all_parked(self, status: wire.Status) -> None:
        for i in sorted(self.core.awaited):
            self.parked(i, 0, status, [])

    @rule(i=IDS, offset=st.integers(-2, 1), status=STATUSES, records=st.lists(RECORDS, max_size=3))
    def parked(self, i: int, offset: int, status: wire.Status, records: list[wire.Record]) -> None:
        self.feed(
            wire.Parked(
                replica=i, generation=self.near(offset), boundary=False, status=status, records=tuple(records)
            )
        )

    @rule(i=IDS, offset=st.integers(-1, 1), record=RECORDS)
    def committed(self, i: int, offset: int, record: wire.Record) -> None:
        self.feed(wire.Committed(replica=i, generation=self.near(offset), record=record))

    @rule(i=IDS, offset=st.integers(-1, 1), error=TEXTS)
    def fault(self, i: int, offset: int, error: str) -> None:
        self.feed(wire.Fault(replica=i, generation=self.near(offset), error=error))

    @rule(i=IDS, offset=st.integers(-1, 1))
    def fetched(self, i: int, offset: int) -> None:
        self.feed(wire.Fetched(replica=i, generation=self.near(offset), num_bytes=1, seconds=0.1))

    @rule(i=IDS, step=STEPS, error=st.integers(), fatal=st.integers(0, 9))
    def user_failed(self, i: int, step: int, error: int, fatal: int) -> None:
        if fatal > 4:
            return
        failed = wire.UserFailed(replica=i, step=step, error=str(error), traceback="T", fatal=fatal == 0)
        self.feed(failed)

    @rule(i=IDS, applied=STEPS, digest=st.sampled_from(("e",) * 9 + ("f",)))
    def finished(self, i: int, applied: int, digest: str) -> None:
        self.feed(wire.Finished(replica=i, applied=applied, digest=digest, value=None))

    @rule(i=IDS, reason=TEXTS)
    def leaving(self, i: int, reason: str) -> None:
        self.feed(wire.Leaving(replica=i, reason=reason))

    @rule(i=IDS, refused=st.booleans())
    def link_lost(self, i: int, refused: bool) -> None:
        self.feed(m.LinkLost(replica=i, refused=refused))

    @rule(i=IDS, failure=st.sampled_from(FailureClass))
    def died(self, i: int, failure: FailureClass) -> None:
        if failure is not FailureClass.USER_EXCEPTION:
            self.feed(m.ReplicaDied(replica=i, cause="c", failure=failure))

    @rule(n=st.integers(0, 3), gone=st.booleans())
    def node(self, n: int, gone: bool) -> None:
        self.feed(m.NodeGone(node=f"n{n}") if gone else m.Drain(node=f"n{n}", by="b"))

    @rule(wish=st.integers(0, 7))
    def scale(self, wish: int) -> None:
        if 2 <= wish <= 5:
            self.feed(m.Scale(replicas=wish, by="b"))
            return
        target = self.core.target
        with pytest.raises(IllegalEvent):
            self.feed(m.Scale(replicas=wish, by="b"))
        assert self.core.target == target

    @rule(now=st.integers(0, 19))
    def stop(self, now: int) -> None:
        if now == 0:
            self.feed(m.Stop(by="b", now=True))
        elif now == 1:
            self.feed(m.Stop(by="b"))

    @rule()
    def nonsense(self) -> None:
        for event in (
            m.Start(incarnation=5),
            m.Adopt(incarnation=5, replicas=()),
            object(),
            wire.Keep(memo={}),
        ):
            with pytest.raises(IllegalEvent):
                self.core.handle(event, self.now)  # type: ignore[arg-type]

    @invariant()
    def books_are_right(self) -> None:
        check_books(self.core, pytest.fail)

    @invariant()
    def the_present_generation_makes_sense(self) -> None:
        generation = self.core.generation
        if self.core.phase is Phase.FORMING and generation is not None:
            assert len(set(generation.members)) == len(generation.members) <= 5
            assert set(generation.fetch) <= set(generation.members)
            assert not set(generation.fetch) & set(generation.roll_forward)
            if not generation.final:  # after the last step who has finished may be lost, and is not missed
                assert all(i in self.core.index[ReplicaState.MEMBER] for i in generation.members)
                shards = sorted(s for part in (*generation.held, *generation.todo) for s in part)
                assert shards == list(range(V))
        waits = self.core.phase in (Phase.PARKING, Phase.FORMING, Phase.ADOPTING, Phase.ENDING)
        assert not waits or self.core.deadline is not None

    @invariant()
    def time_adds_up(self) -> None:
        core = self.core
        if core.began_s is not None:
            booked_s = sum(core.clock.seconds.values()) + self.now - core.clock.since_s
            assert booked_s == pytest.approx(self.now - core.began_s, abs=1e-6)


Senseless.TestCase.settings = settings(
    max_examples=60, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSenselessEvents = Senseless.TestCase
