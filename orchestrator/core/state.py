"""All that the core knows of a run, and the few things every part of it does: send, emit, change phase.

The parts of the protocol (`gathering`, `forming`, `training`, `failing`, `changing`, `watching`, `ending`,
`adopting`) are functions over this one object; `machine` calls them. Nothing else touches it.
"""

from __future__ import annotations

from typing import Any

from everstep.actors import wire
from everstep.errors import IllegalEvent
from everstep.orchestrator import events
from everstep.orchestrator.core import model as m
from everstep.orchestrator.core.accounts import Clock, Reform
from everstep.orchestrator.core.model import Phase, ReplicaState
from everstep.policies.budget import RestartBudget
from everstep.policies.hang import StepDurations
from everstep.policies.straggler import Rebalance, RebalanceState


class RunState:
    """One run, as its controller knows it."""

    def __init__(self, settings: m.Settings) -> None:
        self.settings = settings
        self.phase = Phase.GATHERING
        self.replicas: dict[int, m.Replica] = {}
        self.index: dict[ReplicaState, dict[int, m.Replica]] = {state: {} for state in ReplicaState}
        self.num_leaving = 0
        self.generation: wire.Generation | None = None
        self.number = 0
        self.incarnation = 0
        self.history = 0
        self.step = 0
        self.total = 0
        self.target = settings.replicas
        self.next_id = 0
        self.outcome = ""
        self.reason = ""
        self.value: Any = None
        self.digest = ""
        self.metrics: dict[str, float] = {}
        self.budget = RestartBudget(limits=settings.budget)
        self.excluded: set[str] = set()
        self.clock = Clock()
        self.store: tuple[str, int] = ("", 0)
        self.counts = {"generations": 0, "recoveries": 0, "duplicates": 0}
        self.last_recovery: events.Recovery | None = None
        self.step_s = 0.0
        self.now = 0.0
        self.out: list[m.Command] = []
        self.awaited: set[int] = set()
        self.deadline: float | None = None
        self.last_tick: float | None = None
        self.reform: Reform | None = None
        self.reference: tuple[str, ...] | None = None
        self.durations = StepDurations()
        self.rebalance = Rebalance()
        self.rebalance_state = RebalanceState()
        self.committed_s = 0.0
        self.last_commit_s = 0.0
        self.relaunch_s = 0.0
        self.gather_s: float | None = None
        self.waiting_since: float | None = None
        self.join_since: float | None = None
        self.fetching: set[int] = set()
        self.kept_sources: set[int] = set()
        self.unexplained: dict[int, tuple[float, str]] = {}
        self.user_errors: set[tuple[int, str]] = set()
        self.stop_wanted = ""
        self.wish = ""
        self.memo_version = 0
        self.adopting: dict[int, wire.Hello] = {}
        self.expected: set[int] = set()
        self.records: dict[int, wire.Record] = {}
        self.started = False
        self.stuck = 0

    def memo(self) -> dict[str, Any]:
        """What must survive the controller: carried by every replica, handed back in its `Hello`."""
        self.memo_version += 1
        return {
            "incarnation": self.incarnation, "version": self.memo_version, "target": self.target,
            "next_id": self.next_id, "history": self.history, "number": self.number,
            "budget": self.budget.to_json(), "excluded": sorted(self.excluded),
            "seconds": dict(self.clock.seconds), "counts": dict(self.counts),
        }  # fmt: skip

    # Replicas are counted by state, so that no event costs more than the replicas it is about.

    def add(self, replica: m.Replica) -> None:
        """A replica of which the core did not know."""
        self.replicas[replica.replica] = replica
        self.index[replica.state][replica.replica] = replica

    def remove(self, replica: m.Replica) -> None:
        """It is out for good."""
        del self.replicas[replica.replica]
        del self.index[replica.state][replica.replica]
        self.num_leaving -= bool(replica.leaving) and replica.state in m.IN_POOL

    def move(self, replica: m.Replica, state: ReplicaState) -> None:
        """Change its state."""
        if replica.leaving:
            self.num_leaving += (state in m.IN_POOL) - (replica.state in m.IN_POOL)
        del self.index[replica.state][replica.replica]
        replica.state = state
        self.index[state][replica.replica] = replica

    def mark_leaving(self, replica: m.Replica, why: str) -> None:
        """It should go at the next boundary."""
        if not replica.leaving and why:
            self.num_leaving += replica.state in m.IN_POOL
        replica.leaving = replica.leaving or why

    def by_state(self, state: ReplicaState) -> list[m.Replica]:
        """All replicas in a state, in the order in which they came to it."""
        return list(self.index[state].values())

    def pool_size(self) -> int:
        """Replicas that count towards the wished number."""
        return sum(len(self.index[s]) for s in m.IN_POOL) - self.num_leaving

    def send(self, replicas: tuple[int, ...], message: wire.Message) -> None:
        self.out.append(m.Send(replicas=replicas, message=message))

    def emit(self, event: events.Event) -> None:
        self.out.append(m.Emit(event=event))

    def enter(self, phase: Phase) -> None:
        if phase is not self.phase and phase not in m.TRANSITIONS[self.phase]:
            raise IllegalEvent(f"run {self.settings.run!r}: {self.phase} cannot become {phase}")
        self.phase = phase
        self.clock.switch(self.bucket(), self.now)

    def bucket(self) -> str:
        if self.phase is Phase.RUNNING:
            if self.reform is not None:
                return "transfer" if self.fetching else "lost_work"
            size = len(self.generation.members) if self.generation else 0
            return "productive" if size >= self.target else "degraded"
        if self.phase in (Phase.PARKING, Phase.FORMING):
            return "reform"
        return "productive" if self.phase is Phase.PAUSING else "idle"

    def all_done(self) -> bool:
        return bool(self.total) and self.step >= self.total

    def all_finished(self) -> bool:
        members, parked = self.index[ReplicaState.MEMBER], self.index[ReplicaState.PARKED]
        there = bool(members or parked)
        return there and all(r.finished for r in members.values()) and all(r.finished for r in parked.values())

    def spread_memo(self) -> None:
        alive = tuple(r.replica for r in self.replicas.values() if r.state is not ReplicaState.LAUNCHED)
        if alive:
            self.send(alive, wire.Keep(memo=self.memo()))
