"""All that the core knows of a run, and the few things every part of it does: send, emit, change phase.

The parts of the protocol (`gathering`, `forming`, `training`, `failing`, `changing`, `watching`, `ending`,
`adopting`) are functions over this one object; `machine` calls them. Nothing else touches it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from everstep.actors import wire
from everstep.errors import IllegalEvent
from everstep.orchestrator import events
from everstep.orchestrator.core import model as m
from everstep.orchestrator.core.accounts import Clock, Reform
from everstep.orchestrator.core.model import Phase, ReplicaState
from everstep.policies.budget import FailureClass, RestartBudget
from everstep.policies.hang import StepDurations
from everstep.policies.straggler import Rebalance, RebalanceState

if TYPE_CHECKING:
    from everstep.orchestrator.core.checkpointing import Attempt


class RunState:
    """One run, as its controller knows it."""

    def __init__(self, settings: m.Settings) -> None:
        self.settings = settings
        self.phase = Phase.GATHERING
        self.replicas: dict[int, m.Replica] = {}
        self.index: dict[ReplicaState, dict[int, m.Replica]] = {state: {} for state in ReplicaState}
        self.num_leaving = 0
        """Replicas that should leave and are not released yet."""
        self.num_finished = 0
        """Members and parked replicas whose train function has returned."""
        self.generation: wire.Generation | None = None
        self.number = 0
        self.incarnation = 0
        self.history = 0
        self.step = 0
        """Steps of this history that were told: `StepCommitted` was emitted for all below."""
        self.reached = 0
        """Steps applied to the state the present generation holds, as far as known. More than `step` while a record
        is on its way; less when a step is done again whose only witness died after it had told of it."""
        self.durable_step: int | None = 0 if settings.await_storage else None
        """Steps whose `StepCommitted` is in storage; None: to emit is to store."""
        self.first_step = 0
        """Steps in the checkpoint with which the run began."""
        self.first_number = 0
        """First generation of this history."""
        self.total = 0
        """Steps of the run: as many as the loop announced, or fewer where it was left before (`break`)."""
        self.announced = 0
        """Steps of the loop, as the first replica announced them."""
        self.target = settings.replicas
        self.next_id = 0
        self.outcome = ""
        self.reason = ""
        self.value: Any = None
        self.value_problem = ""
        self.digest = ""
        self.metrics: dict[str, float] = {}
        self.budget = RestartBudget(limits=settings.budget)
        self.charged: dict[tuple[int, FailureClass], None] = {}
        """(generation, failure class) that were charged: however many members one generation loses, it is once."""
        self.excluded: set[str] = set()
        self.clock = Clock()
        self.began_s: float | None = None
        """When the run began, or the oldest moment that a controller which came back knows of."""
        self.store: tuple[str, int] = ("", 0)
        """Where the rendezvous store listens; port 0: it does not stand yet, so no generation is sent out."""
        self.counts = {"generations": 0, "recoveries": 0}
        self.last_recovery: events.Recovery | None = None
        self.step_s = 0.0
        self.transfer_s = 0.0
        """What the last transfer of the state took; 0 while there was none."""
        self.now = 0.0
        self.out: list[m.Command] = []
        self.awaited: set[int] = set()
        """Whose report the present phase waits for."""
        self.deadline: float | None = None
        self.last_tick: float | None = None
        self.reform: Reform | None = None
        self.explained = True
        """Why the last generation was stopped is known and counted: it was wished, or somebody was lost."""
        self.hold_until = 0.0
        """The next generation is not sent out before: re-forms that nobody's loss explains become slower."""
        self.fenced_at = 0.0
        """When the leases of all who were lost without proof of their death must have ended."""
        self.reference: tuple[str, ...] | None = None
        self.durations = StepDurations()
        self.rebalance = Rebalance()
        self.rebalance_state = RebalanceState()
        self.last_commit_s = 0.0
        self.relaunch_s = 0.0
        self.gather_s: float | None = None
        self.waiting_since: float | None = None
        self.join_since: float | None = None
        self.gap_since: float | None = None
        """Since when a committed step's record is missing."""
        self.fetching: set[int] = set()
        self.kept_sources: set[int] = set()
        """Replicas that are no members any more, but alone hold the state that the members fetch."""
        self.unexplained: dict[int, m.Replica] = {}
        """Those whose process is gone, while nobody has said yet what became of it."""
        self.untold: list[tuple[m.Replica, str, FailureClass]] = []
        """Losses that are not written down yet, with their causes: in a mass failure the orders come first."""
        self.user_errors: set[tuple[int, str]] = set()
        self.stop_wanted = ""
        self.wish = ""
        self.pausing_for = ""
        """Why the members were last asked to pause."""
        self.memo_version = 0
        self.adopting: dict[int, wire.Hello] = {}
        self.expected: set[int] = set()
        self.adopt: m.Adopt | None = None
        self.postponed: list[m.CoreEvent] = []
        """What came while adopting and is looked at afterwards."""
        self.records: dict[int, wire.Record] = {}
        self.checkpoint_step = 0
        """Steps in the newest whole checkpoint; 0 while there is none."""
        self.attempts: dict[tuple[int, str], Attempt] = {}
        """Checkpoints that are being written, by step and name."""
        self.saved_in = 0
        """Generation in which a checkpoint was asked for because all of its members are leaving."""
        self.dropped_attempts: dict[tuple[int, str], None] = {}
        self.searching = False
        """Which checkpoint is the newest whole one is not known yet; until then nobody begins without a state."""
        self.refused = False
        """The one that was known turned out damaged."""
        self.started = False

    def memo(self) -> dict[str, Any]:
        """What must survive the controller: carried by every replica, handed back in its `Hello`."""
        self.memo_version += 1
        self.clock.switch(self.clock.bucket, self.now)
        return {
            "incarnation": self.incarnation, "version": self.memo_version, "target": self.target,
            "next_id": self.next_id, "history": self.history, "number": self.number, "first": self.first_number,
            "budget": self.budget.to_json(), "excluded": sorted(self.excluded), "began_s": self.began_s,
            "at_s": self.now, "seconds": dict(self.clock.seconds), "counts": dict(self.counts),
            "user_errors": sorted(self.user_errors), "stop": self.stop_wanted,
            "outcome": self.outcome, "reason": self.reason,
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
        if replica.leaving and replica.state is not ReplicaState.RELEASED:
            self.num_leaving -= 1
        if replica.finished and replica.state in _SEATED:
            self.num_finished -= 1

    def move(self, replica: m.Replica, state: ReplicaState) -> None:
        """Change its state."""
        before = replica.state
        if before is state:
            return
        if replica.leaving:
            self.num_leaving += (state is not ReplicaState.RELEASED) - (before is not ReplicaState.RELEASED)
        if replica.finished:
            self.num_finished += (state in _SEATED) - (before in _SEATED)
        del self.index[before][replica.replica]
        replica.state = state
        self.index[state][replica.replica] = replica

    def mark_leaving(self, replica: m.Replica, why: str) -> None:
        """It should go at the next boundary."""
        if not replica.leaving and why:
            replica.leaving = why
            self.num_leaving += replica.state is not ReplicaState.RELEASED

    def mark_finished(self, replica: m.Replica, finished: bool) -> None:
        """Its train function has returned, or has not after all."""
        if replica.state in _SEATED:
            self.num_finished += finished - replica.finished
        replica.finished = finished

    def by_state(self, state: ReplicaState) -> list[m.Replica]:
        """All replicas in a state, in the order in which they came to it."""
        return list(self.index[state].values())

    def seated(self) -> int:
        """Replicas that are, or were until just now, in the generation."""
        return len(self.index[ReplicaState.MEMBER]) + len(self.index[ReplicaState.PARKED])

    def pool_size(self) -> int:
        """Replicas that count towards the wished number."""
        return len(self.replicas) - len(self.index[ReplicaState.RELEASED]) - self.num_leaving

    def begin_at(self, step: int) -> None:
        """The run stands at another step than the one it was led to: that of a checkpoint, or of what is left of the state."""
        self.step = step
        if self.durable_step is not None:
            self.durable_step = step

    def known_step(self) -> int:
        """The replicas may forget the records of all steps below."""
        return self.step if self.durable_step is None else min(self.step, self.durable_step)

    def send(self, replicas: tuple[int, ...], message: wire.Message) -> None:
        self.out.append(m.Send(replicas=replicas, message=message))

    def emit(self, event: events.Event) -> None:
        self.out.append(m.Emit(event=event))

    def tell_losses(self) -> None:
        """Write down who was lost, and why."""
        untold, self.untold = self.untold, []
        for replica, cause, failure in untold:
            self.emit(
                events.ReplicaLost(
                    replica=replica.replica, node=replica.node, cause=cause, failure_class=failure.value
                )
            )

    def enter(self, phase: Phase) -> None:
        if phase is not self.phase and phase not in m.TRANSITIONS[self.phase]:
            raise IllegalEvent(f"run {self.settings.run!r}: {self.phase} cannot become {phase}")
        self.phase = phase
        self.account()

    def account(self) -> None:
        """From now on the time goes to the bucket that is right now."""
        self.clock.switch(self.bucket(), self.now)

    def bucket(self) -> str:
        if self.phase in (Phase.RUNNING, Phase.PAUSING):
            if self.fetching:
                return "transfer"
            if self.reform is not None and not self.reform.planned:
                return "lost_work"
            size = len(self.generation.members) if self.generation else 0
            return "productive" if size >= self.target else "degraded"
        return "reform" if self.phase in (Phase.PARKING, Phase.FORMING) else "idle"

    def all_done(self) -> bool:
        """The last step is applied, and somebody holds the result: nothing is left to train."""
        return bool(self.total) and self.reached >= self.total and self.seated() > 0

    def all_finished(self) -> bool:
        """Every train function has returned: of all who are there, or of those who were, while nobody is left."""
        seated = self.seated()
        return seated == self.num_finished and (seated > 0 or bool(self.digest))

    def spread_memo(self) -> None:
        alive = tuple(r.replica for r in self.replicas.values() if r.state is not ReplicaState.LAUNCHED)
        if alive:
            self.send(alive, wire.Keep(memo=self.memo()))


_SEATED = frozenset({ReplicaState.MEMBER, ReplicaState.PARKED})
