"""Everything that can happen to a run, one frozen event each: the single record that all views are made from.

The controller's core creates events, the controller stamps them with time and run and appends them to the
log (`eventlog`), and live lines, `everstep status`, `everstep events` and reports read them. Pure: no clock, no
I/O, neither ray nor torch.

On the wire an event is one line of JSON: `{"v": 1, "type": "step_committed", "time": ..., "run": ..., ...}`.
A reader keeps what it does not know: an unknown type becomes `UnknownEvent`, unknown fields go to `extra`, and
both are written out again as they came. JSON has no NaN or infinity: they become null and are read as NaN.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite, nan
from typing import Any, Self

VERSION = 1
"""Raised when a field changes its meaning; new fields and new types do not raise it."""

_TYPES: dict[str, type[Event]] = {}


def _snake(name: str) -> str:
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Base of all events."""

    time: float = 0.0
    """Unix seconds on the controller's clock; 0.0 until the controller stamps it."""
    run: str = ""
    """The run's name; empty until the controller stamps it."""
    extra: Mapping[str, Any] = field(default_factory=dict)
    """Fields of a newer writer, kept as they came."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        # Also called for the copy that slots=True makes of each class: the last one, the real one, stays.
        _TYPES[_snake(cls.__name__)] = cls

    @property
    def type(self) -> str:
        """The class name in snake case, as it stands in JSON."""
        return _snake(type(self).__name__)

    def stamped(self, time: float, run: str) -> Self:
        """The same event with its time (unix seconds) and run."""
        return dataclasses.replace(self, time=time, run=run)

    def to_dict(self) -> dict[str, Any]:
        """The JSON object as a dict, `v` and `type` first."""
        names = [f.name for f in dataclasses.fields(self) if f.name != "extra"]
        values = {name: _plain(getattr(self, name)) for name in names}
        return {"v": VERSION, "type": self.type, **values, **self.extra}

    def to_json(self) -> str:
        """One line of JSON without a line break at its end."""
        return json.dumps(self.to_dict(), separators=(",", ":"), allow_nan=False, ensure_ascii=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStarted(Event):
    """A controller took up a new run."""

    incarnation: int = 1
    step: int = 0
    """First step to be committed."""
    total: int | None = None
    """Steps of the whole run, where already known."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """`RunConfig.to_dict()`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControllerRestarted(Event):
    """The controller came back and re-adopted the run's replicas."""

    incarnation: int
    replicas: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLaunched(Event):
    """An actor was asked for; where it will run is not known yet."""

    replica: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReady(Event):
    """A replica built its model, warmed up and can join at the next commit boundary."""

    replica: int
    node: str = ""
    host: str = ""
    pid: int = 0
    start_s: float = 0.0
    """Seconds from launch to ready."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLost(Event):
    """A replica died, or was given up."""

    replica: int
    node: str = ""
    cause: str = ""
    """In words, such as `process killed`."""
    failure_class: str = "unknown"
    """The budget it counts against, a field of FailureConfig."""
    last_log: str = ""
    """The last lines that it printed, where they could be had."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaReleased(Event):
    """A replica left as it was told to."""

    replica: int
    node: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationFormed(Event):
    """A membership is connected and goes on at `step`."""

    generation: int
    replicas: tuple[int, ...]
    """In rank order."""
    nodes: tuple[str, ...] = ()
    """The node of each replica."""
    step: int
    reason: str = ""
    total: int | None = None
    """Steps of the whole run, where known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCommitted(Event):
    """A step became part of history."""

    step: int
    generation: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    """As given to `step.commit`, averaged over the global batch."""
    samples: int = 0
    world_size: int = 0
    step_s: float = 0.0
    """Seconds since the commit before, on the slowest replica."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery(Event):
    """Membership changed: what it took, from the first sign to the next committed step."""

    generation_before: int
    generation_after: int
    cause: str = ""
    """In words: whose loss, or whose wish."""
    blamed_replica: int | None = None
    """None when nobody failed, such as after `scale`."""
    blamed_node: str = ""
    phases: Mapping[str, float] = field(default_factory=dict)
    """Seconds by phase: notice, decide, connect, transfer, redo."""
    total_s: float = 0.0
    bytes_transferred: int = 0
    world_size_before: int = 0
    world_size_after: int = 0
    step: int = 0
    """The step at which the new generation goes on."""
    shards_recomputed: int = 0
    """Logical shards of that step that had to be computed again."""
    steps_lost: int = 0
    """Committed steps that had to be done again; 0 unless all state was lost."""
    rolled_forward: bool = False
    """True when the broken step was applied by all survivors instead of being done again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaleRequested(Event):
    """Somebody wishes for another number of replicas."""

    replicas: int
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested(Event):
    """Somebody wants the run to end."""

    by: str = ""
    now: bool = False
    """True: not even the current step is finished."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDraining(Event):
    """A node is being taken away; its replicas leave at the next commit boundary."""

    node: str
    deadline_s: float | None = None
    """Seconds from now until the node goes, where told."""
    by: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting(Event):
    """Fewer than `min_replicas` are left; the survivors keep the state."""

    replicas: int
    min_replicas: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Event):
    """Enough replicas again after `Waiting`."""

    replicas: int
    waited_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerRebalanced(Event):
    """Logical shards were dealt anew by measured speed."""

    step: int
    replicas: tuple[int, ...] = ()
    """In rank order."""
    shards: tuple[int, ...] = ()
    """How many logical shards each of them now owns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NonFinite(Event):
    """A loss or gradient was NaN or infinite."""

    step: int
    action: str = ""
    """What was done: stop, skip or ignore."""
    replica: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class UserError(Event):
    """The user's train function raised."""

    replica: int
    step: int
    error: str = ""
    """Type and message."""
    traceback: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointCommitted(Event):
    """The state after `step` steps is in storage, whole."""

    step: int
    written_bytes: int = 0
    referenced_bytes: int = 0
    """Bytes that had not changed since an older checkpoint, and were not written again."""
    seconds: float = 0.0
    """From the snapshot until it was committed."""
    parts: int = 0
    """Replicas that wrote it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointDropped(Event):
    """A checkpoint was begun and will not be: nothing of it is visible, the one before stays the newest."""

    step: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointThinned(Event):
    """A checkpoint was due while the one before was still being written, so it was left out."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointUsed(Event):
    """Training begins with the state of a checkpoint."""

    step: int
    finished: bool = False
    """It is that of the last step: nothing is left to train."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointRefused(Event):
    """A checkpoint was to be read, and is not what was written; an older one is taken."""

    step: int
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateLost(Event):
    """No survivor holds the state any more; the run goes back to `step`, that of the newest checkpoint."""

    step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEnded(Event):
    """The last event of every run."""

    outcome: str
    """finished, stopped or failed."""
    step: int = 0
    """Steps committed."""
    reason: str = ""
    buckets: Mapping[str, float] = field(default_factory=dict)
    """Seconds of wall time by bucket; they sum to the run's wall time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UnknownEvent(Event):
    """An event of a type that this version does not know, or with a meaning newer than its own."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    """The whole JSON object."""

    @property
    def type(self) -> str:
        """The type as the writer named it."""
        return str(self.fields.get("type", "unknown"))

    def to_dict(self) -> dict[str, Any]:
        """The JSON object as it came."""
        return dict(self.fields)


def parse(line: str) -> Event:
    """The event of one line of JSON. Raises ValueError when the line is no JSON object with a `type`."""
    values = json.loads(line)
    if not isinstance(values, dict) or not isinstance(values.get("type"), str):
        raise ValueError(f"not an event: {line[:80]!r}")
    cls = _TYPES.get(values["type"])
    unknown = UnknownEvent(time=values.get("time") or 0.0, run=str(values.get("run", "")), fields=values)
    if cls is None or cls is UnknownEvent or values.get("v", 0) > VERSION:
        return unknown
    fields = {f.name: f for f in dataclasses.fields(cls)}
    known = {name: _read(fields[name], value) for name, value in values.items() if name in fields}
    extra = {
        name: value for name, value in values.items() if name not in fields and name not in ("v", "type")
    }
    try:
        return cls(**{**known, "extra": extra})
    except TypeError:  # a field that we need is missing: another version's idea of this event
        return unknown


def event_types() -> Mapping[str, type[Event]]:
    """All event classes of this version by their JSON name."""
    return {name: cls for name, cls in _TYPES.items() if cls is not UnknownEvent}


def _plain(value: Any) -> Any:
    if isinstance(value, float):
        return value if isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value


def _read(field: dataclasses.Field[Any], value: Any) -> Any:
    if isinstance(value, list):
        return tuple(value)
    if isinstance(value, Mapping) and "float" in str(field.type):
        return {key: nan if item is None else item for key, item in value.items()}
    return nan if value is None and field.type == "float" else value
