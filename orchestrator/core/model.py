"""Words of the controller's core: settings, phases, what it is told and what it orders.

Used by `machine` and `membership`, by the controller actor which translates, and by tests. Holds no logic but the
table of legal phase changes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from everstep.actors import wire
from everstep.orchestrator.events import Event
from everstep.policies.budget import BudgetLimits, FailureClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What the core needs to know of the run's configuration. Times in seconds."""

    run: str = "run"
    min_replicas: int = 1
    max_replicas: int = 1
    replicas: int = 1
    spares: int = 0
    logical_shards: int = 1
    heartbeat_s: float = 0.5
    heartbeat_timeout_s: float = 5.0
    hang_floor_s: float = 10.0
    first_step_s: float = 300.0
    start_timeout_s: float = 300.0
    park_timeout_s: float = 5.0
    form_timeout_s: float = 10.0
    settle_s: float = 2.0
    adopt_timeout_s: float = 35.0
    """After so long without a word of the controller a replica has stopped itself: it must be longer than the lease.
    So long a controller that came back waits for replicas of which it does not know that they are dead, and so long
    the last who hold the state may be silent before they are given up."""
    end_timeout_s: float = 10.0
    checkpoints: bool = False
    """The run writes checkpoints."""
    checkpoint_timeout_s: float = 600.0
    await_storage: bool = False
    """Replicas forget a step's record only when `Core.stored` said that it is in storage, not when it was emitted."""
    budget: BudgetLimits = field(default_factory=BudgetLimits)


class Phase(StrEnum):
    """Where the run stands."""

    ADOPTING = "adopting"
    """The controller came back and waits to hear from the replicas that were there."""
    GATHERING = "gathering"
    """No live generation: waiting for enough replicas. Survivors keep their state."""
    RUNNING = "running"
    """A generation trains."""
    PAUSING = "pausing"
    """A change is wanted: the members were asked to park at the next step boundary."""
    PARKING = "parking"
    """Something failed: the members were told to abort; waiting for their reports."""
    FORMING = "forming"
    """The next generation was sent out; waiting until its connections stand."""
    ENDING = "ending"
    """The outcome is known; waiting until every replica is gone."""
    ENDED = "ended"


TRANSITIONS: dict[Phase, frozenset[Phase]] = {
    Phase.ADOPTING: frozenset({Phase.RUNNING, Phase.PARKING, Phase.GATHERING, Phase.ENDING}),
    Phase.GATHERING: frozenset({Phase.FORMING, Phase.ENDING}),
    Phase.RUNNING: frozenset({Phase.PAUSING, Phase.PARKING, Phase.ENDING}),
    Phase.PAUSING: frozenset({Phase.PARKING, Phase.FORMING, Phase.GATHERING, Phase.ENDING}),
    Phase.PARKING: frozenset({Phase.FORMING, Phase.GATHERING, Phase.ENDING}),
    Phase.FORMING: frozenset({Phase.RUNNING, Phase.PARKING, Phase.ENDING}),
    Phase.ENDING: frozenset({Phase.ENDED}),
    Phase.ENDED: frozenset(),
}
"""Every legal change of phase. `diagram()` draws it for the documentation."""


def diagram() -> str:
    """The table as a Mermaid state diagram."""
    lines = ["stateDiagram-v2", f"    [*] --> {Phase.GATHERING}", f"    [*] --> {Phase.ADOPTING}"]
    lines += [f"    {a} --> {b}" for a, to in TRANSITIONS.items() for b in sorted(to)]
    return "\n".join([*lines, f"    {Phase.ENDED} --> [*]"])


class ReplicaState(StrEnum):
    """Where one replica stands, as the controller knows it."""

    LAUNCHED = "launched"
    """The actor was created; its process may still wait for room on the cluster."""
    WARMING = "warming"
    """Its process runs and builds the model."""
    READY = "ready"
    """Warm, waiting to be taken into a generation."""
    MEMBER = "member"
    """In the current generation."""
    PARKED = "parked"
    """Out of any generation, but holding state of the run."""
    RELEASED = "released"
    """Told to leave."""


LIVE_PHASES = frozenset({Phase.RUNNING, Phase.PAUSING, Phase.PARKING, Phase.FORMING})
"""There is a generation that is not over."""
OVER = frozenset({Phase.ENDING, Phase.ENDED})
"""The outcome is decided, nothing that happens changes it."""


@dataclass(slots=True, kw_only=True)
class Replica:
    """The controller's view of one replica."""

    replica: int
    state: ReplicaState
    since_s: float
    """When it was launched; when it was released; when it vanished."""
    node: str = ""
    host: str = ""
    pid: int = 0
    transfer: tuple[str, int] = ("", 0)
    digest: str = ""
    """Hash of the state it initialized itself with."""
    status: wire.Status = field(default_factory=wire.Status)
    warming_s: float = 0.0
    """When its process first spoke."""
    heard_s: float = 0.0
    phase: str = ""
    progress: int = 0
    moved_s: float = 0.0
    """When `progress` last changed."""
    compute_s: float = 0.0
    leaving: str = ""
    """Why it should leave at the next boundary; empty if it should stay."""
    finished: bool = False
    """Its train function has returned. Changed by `RunState.mark_finished` alone."""
    broken: int = 0
    """Once it is lost: the generation that broke of it; 0 if it was in none."""
    num_kills: int = 0
    """How often its end was ordered."""
    void: bool = False
    """It began to fetch a state, into its live weights, and may never have finished: it holds nothing, not even what
    it was initialized with."""

    joined_step: int = -1
    """Steps in the state that it fetched last. It has not seen how the step before came out."""

    @property
    def holds_state(self) -> bool:
        """It holds state of the run, as of its `status`."""
        return not self.status.fresh and not self.void


# ---- what the core is told, besides the replicas' own messages (`actors.wire`)


class ClusterEvent:
    """Base of everything that did not come from a replica."""

    __slots__ = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Start(ClusterEvent):
    """A new run begins."""

    incarnation: int
    search: bool = False
    """Storage is being looked at for a checkpoint to begin with; `CheckpointFound` will tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adopt(ClusterEvent):
    """The controller came back; these replicas exist on the cluster."""

    incarnation: int
    replicas: tuple[int, ...]
    history: int = 0
    """How many times the state was lost so far, as the stored events say."""
    step: int | None = None
    """Steps of that history whose `StepCommitted` is in storage, so that none is told twice. None: not known; then the
    replicas' records decide, and steps that were stored but not yet acknowledged to them are told again."""
    next_id: int = 0
    """First replica id that was not given out, as the stored events say."""
    search: bool = False
    """Storage is being looked at for the newest checkpoint; `CheckpointFound` will tell."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tick(ClusterEvent):
    """Time has passed. Due whenever `Core.next_deadline_s()` is reached; harmless at any moment."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartWritten(ClusterEvent):
    """A keeper has written one replica's part of a checkpoint."""

    report: dict[str, Any]
    """`step`, `attempt`, `generation`, `rank`, `world_size`, and what the commit needs of it (see `actors.keeper`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDone(ClusterEvent):
    """An answer to `CommitCheckpoint`."""

    step: int
    attempt: str
    problem: str = ""
    """Why it was not committed; empty if it was."""
    written_bytes: int = 0
    referenced_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointFound(ClusterEvent):
    """The newest whole checkpoint in storage: what a start has to wait for, and the answer to `FindCheckpoint`."""

    step: int
    """0: there is none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLost(ClusterEvent):
    """A replica's control connection closed. `refused`: its host answers, its process is gone."""

    replica: int
    refused: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaDied(ClusterEvent):
    """Ray, or the failure to create it, says that a replica is dead for good."""

    replica: int
    cause: str
    failure: FailureClass


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale(ClusterEvent):
    """The user wants this many replicas (already checked against the limits)."""

    replicas: int
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain(ClusterEvent):
    """Replicas on this node shall leave at the next step boundary, and none be started there."""

    node: str
    by: str
    deadline_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeGone(ClusterEvent):
    """Ray says that a node is dead."""

    node: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail(ClusterEvent):
    """The run cannot go on."""

    reason: str
    """Its first word is the kind of the error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(ClusterEvent):
    """End the run: at the next step boundary, or at once."""

    by: str
    now: bool = False


# ---- what the core orders


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Create a replica, not on these nodes."""

    replica: int
    avoid_nodes: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """End a replica's process, whatever it does."""

    replica: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Send one message to these replicas."""

    replicas: tuple[int, ...]
    message: wire.Message


@dataclass(frozen=True, slots=True, kw_only=True)
class Emit:
    """Write an event to the run's record."""

    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class CommitCheckpoint:
    """Make these parts the checkpoint of `step`, and answer with `CheckpointDone`."""

    step: int
    attempt: str
    parts: tuple[dict[str, Any], ...]
    """What the keepers reported, in rank order."""
    live: tuple[tuple[int, str], ...] = ()
    """Step and attempt of what is being written besides: nothing of it may be deleted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FindCheckpoint:
    """Put the checkpoint of step `refused` aside, look for the newest whole one, and answer with `CheckpointFound`."""

    refused: int
    reason: str


Command = Launch | Kill | Send | Emit | CommitCheckpoint | FindCheckpoint
CoreEvent = ClusterEvent | wire.Message
