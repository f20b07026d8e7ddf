"""What controller and replicas say to each other: one frozen dataclass per message, one JSON line each.

Used by `orchestrator.core` (which consumes the replicas' messages as they are), by the controller actor and by
`actors.link`. Pure: it knows neither sockets nor torch nor Ray. Every message that could be late carries the number
of the generation it belongs to; the receiver drops what belongs to another one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

MAX_LINE_BYTES = 16 << 20
"""Longest message either side reads; a longer one ends the connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """An immutable membership, and everything a replica needs in order to enter it."""

    number: int
    incarnation: int
    """Incarnation of the controller that made it: older controllers are refused."""
    history: int
    """Counts how often the whole state was lost and training began again at step 0."""
    step: int
    """Number of steps every member has applied when it enters."""
    members: tuple[int, ...]
    """Replica ids in rank order."""
    ranges: tuple[tuple[int, int], ...]
    """Per rank the half-open range of logical shards it owns from the next step on."""
    held: tuple[tuple[int, ...], ...]
    """Per rank the shards whose gradients of `step` that rank holds already, or is computing."""
    todo: tuple[tuple[int, ...], ...]
    """Per rank the shards it still has to compute at `step`."""
    store: tuple[str, int]
    """Address of the rendezvous store."""
    sources: tuple[tuple[str, int], ...] = ()
    """Transfer addresses of those who hold the state of `step`."""
    fetch: tuple[int, ...] = ()
    """Replica ids that must fetch the state before they compute."""
    roll_forward: tuple[int, ...] = ()
    """Replica ids that apply the reduced gradient they hold, so that they too are at `step`."""
    vote: str = ""
    """For them, and for who fetches the state of a step it was in: the vote's result, as somebody who saw it reported it
    (base64)."""
    final: bool = False
    """The last step is history: no group is formed, only laggards catch up."""
    restore: tuple[int, ...] = ()
    """Replica ids that read the state of `step` from its checkpoint; those in `fetch` then have it from them."""

    @property
    def version(self) -> str:
        """Name of the state at its start, as the transfer protocol uses it."""
        return f"{self.history}:{self.step}"

    @property
    def prefix(self) -> str:
        """Store prefix, never used twice."""
        return f"{self.incarnation}/{self.number}"

    def rank_of(self, replica: int) -> int:
        """Rank of a replica; raises ValueError if it is no member."""
        return self.members.index(replica)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One committed step, as its members know it."""

    history: int
    generation: int
    step: int
    metrics: dict[str, float]
    samples: int
    step_s: float
    skipped: bool = False
    snapshot: str = ""
    """The attempt at a checkpoint for which its members keep the state after this step; empty: none."""
    thinned: bool = False
    """They should have, but were still busy with the one before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """Where a replica stands. In a parked replica it is also a promise (see `Parked`)."""

    generation: int = 0
    """Newest generation entered."""
    applied: int = 0
    """Steps applied to the state it holds; while a step is being applied it counts already."""
    fresh: bool = True
    """True while it holds no state of the run but the initial one."""
    reduced: bool = False
    """It holds the completely reduced gradient of step `applied`, and had not seen the vote's result."""
    kept: tuple[int, ...] = ()
    """Shards of step `applied` whose gradients it holds."""
    current: int = -1
    """Shard it is computing; it will be finished whatever happens."""
    done: bool = False
    """Its loop has seen the last step."""
    vote: str = ""
    """Result of the vote of step `applied - 1` (base64)."""


class Message:
    """Base of everything on the wire."""

    __slots__ = ()
    kind: ClassVar[str]


# ---- replica to controller


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello(Message):
    """First message of a connection; also after a lost one and after a restart of the controller."""

    kind: ClassVar[str] = "hello"
    run: str
    token: str
    replica: int
    pid: int
    node: str
    host: str
    transfer: tuple[str, int]
    status: Status = field(default_factory=Status)
    generation: Generation | None = None
    ready: bool = False
    faulted: bool = False
    """It cannot go on in its generation: a collective failed, or it promised not to."""
    memo: dict[str, Any] = field(default_factory=dict)
    """The controller's own memory, as last received."""
    records: tuple[Record, ...] = ()
    signature: tuple[str, ...] = ()
    digest: str = ""
    total: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready(Message):
    """Model built, everything registered, waiting for a generation."""

    kind: ClassVar[str] = "ready"
    replica: int
    signature: tuple[str, ...]
    """Lines that must be equal on all replicas: names, dtypes, shapes, reduction layout."""
    digest: str
    """Hash of the initial state."""
    total: int
    """Number of steps the loop will make."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat(Message):
    """Heartbeat."""

    kind: ClassVar[str] = "beat"
    replica: int
    seq: int
    generation: int
    applied: int
    phase: str
    progress: int
    """Changes whenever the training thread moves."""
    compute_s: float = 0.0
    """Seconds of computation per logical shard, smoothed; 0 while unknown."""
    wait_s: float = 0.0
    """Seconds since `progress` last changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault(Message):
    """A collective failed, or the generation could not be formed or entered."""

    kind: ClassVar[str] = "fault"
    replica: int
    generation: int
    error: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Parked(Message):
    """Answer to `Abort`, or to a pause at a step boundary.

    It is a promise: this replica will never commit in `generation` or an older one, and `status` stays true until it
    enters a newer one.
    """

    kind: ClassVar[str] = "parked"
    replica: int
    generation: int
    boundary: bool
    status: Status
    records: tuple[Record, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Formed(Message):
    """This replica's connections of the generation stand."""

    kind: ClassVar[str] = "formed"
    replica: int
    generation: int
    connect_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Fetched(Message):
    """A joiner holds the state now."""

    kind: ClassVar[str] = "fetched"
    replica: int
    generation: int
    num_bytes: int
    seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused(Message):
    """The checkpoint that this replica was to read is not what was written."""

    kind: ClassVar[str] = "refused"
    replica: int
    generation: int
    step: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class NoPart(Message):
    """This replica's part of a checkpoint will not come."""

    kind: ClassVar[str] = "no_part"
    replica: int
    step: int
    attempt: str
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Committed(Message):
    """A step is history. Sent by rank 0; others keep the record until it is acknowledged."""

    kind: ClassVar[str] = "committed"
    replica: int
    generation: int
    record: Record


@dataclass(frozen=True, slots=True, kw_only=True)
class UserFailed(Message):
    """An exception left the user's code."""

    kind: ClassVar[str] = "user_failed"
    replica: int
    step: int
    error: str
    """Type and message."""
    traceback: str
    fatal: bool
    """It would happen again anywhere: do not try another replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Message):
    """The user's function returned."""

    kind: ClassVar[str] = "finished"
    replica: int
    applied: int
    digest: str
    value: Any
    problem: str = ""
    """Why `value` is None, although the function returned something."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving(Message):
    """This replica was told to go (SIGTERM) and asks to leave at the next step boundary."""

    kind: ClassVar[str] = "leaving"
    replica: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Stacks(Message):
    """Python stacks of all threads, on request."""

    kind: ClassVar[str] = "stacks"
    replica: int
    text: str


# ---- controller to replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Welcome(Message):
    """Answer to `Hello`."""

    kind: ClassVar[str] = "welcome"
    incarnation: int
    known_step: int
    peers: tuple[tuple[str, int], ...] = ()
    """Transfer addresses of some members: a newcomer asks one of them what it will have to receive."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack(Message):
    """Answer to `Beat`: renews the lease; records below `known_step` may be forgotten."""

    kind: ClassVar[str] = "ack"
    seq: int
    known_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Abort(Message):
    """Leave every collective of this generation and report `Parked`."""

    kind: ClassVar[str] = "abort"
    generation: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Pause(Message):
    """Ask all to park at the next step boundary."""

    kind: ClassVar[str] = "pause"
    generation: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Snapshot(Message):
    """Ask all to keep the state after the next step for a checkpoint."""

    kind: ClassVar[str] = "snapshot"
    generation: int
    incarnation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Form(Message):
    """Enter this generation."""

    kind: ClassVar[str] = "form"
    generation: Generation
    memo: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep(Message):
    """Remember the controller's memory for it."""

    kind: ClassVar[str] = "keep"
    memo: dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Release(Message):
    """Leave the run and exit."""

    kind: ClassVar[str] = "release"
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class DumpStacks(Message):
    """Send `Stacks`."""

    kind: ClassVar[str] = "dump_stacks"


_KINDS: dict[str, type[Any]] = {
    cls.kind: cls
    for cls in (
        Hello,
        Ready,
        Beat,
        Fault,
        Parked,
        Formed,
        Fetched,
        Refused,
        NoPart,
        Committed,
        UserFailed,
        Finished,
        Leaving,
        Stacks,
        Welcome,
        Ack,
        Abort,
        Pause,
        Snapshot,
        Form,
        Keep,
        Release,
        DumpStacks,
    )
}

_NESTED: dict[str, type[Any]] = {"status": Status, "record": Record}


def encode(message: Message) -> bytes:
    """One message as one line of JSON, newline included."""
    body = {name: _plain(getattr(message, name)) for name in _names(type(message))}
    return json.dumps({"kind": message.kind, **body}, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> Message:
    """The message in one line. Raises ValueError for anything that is not one, whatever the bytes."""
    try:
        body = json.loads(line)
        cls = _KINDS[body.pop("kind")]
        return cls(**{name: _restore(name, value) for name, value in body.items()})  # type: ignore[no-any-return]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ValueError(f"not a message: {line[:80]!r} ({error})") from error


_FIELDS: dict[type[Any], tuple[str, ...]] = {}


def _names(cls: type[Any]) -> tuple[str, ...]:
    names = _FIELDS.get(cls)
    if names is None:
        names = _FIELDS[cls] = tuple(f.name for f in fields(cls))
    return names


def _plain(value: Any) -> Any:
    if isinstance(value, Status | Record | Generation):
        return {name: _plain(getattr(value, name)) for name in _names(type(value))}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _restore(name: str, value: Any) -> Any:
    if name in _NESTED:
        return _NESTED[name](**{k: _tuples(v) if k == "kept" else v for k, v in value.items()})
    if name == "generation" and isinstance(value, dict):
        return Generation(**{k: _tuples(v) for k, v in value.items()})
    if name == "records":
        return tuple(Record(**item) for item in value)
    if name in ("transfer", "signature", "peers"):
        return _tuples(value)
    return value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(item) for item in value) if isinstance(value, list) else value
