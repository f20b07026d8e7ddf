"""Checkpoints as the controller sees them: which are being written, whose parts have come, which is the newest whole one.

The replicas' votes decide when a snapshot is taken; its `Record` tells us, the keepers of the nodes bring the parts. When
all parts of one attempt are there it is committed, by one conditional write that the controller actor does. Nothing in
here ever holds training up.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from everstep.actors import wire
from everstep.orchestrator import events
from everstep.orchestrator.core import model as m
from everstep.orchestrator.core.model import OVER
from everstep.orchestrator.core.state import RunState

_MAX_DROPPED = 64


@dataclass(slots=True, kw_only=True)
class Attempt:
    """One try to write the state after `step` steps."""

    step: int
    name: str
    since_s: float
    parts: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By rank."""
    committing: bool = False


def on_snapshot(run: RunState, record: wire.Record) -> None:
    """The members hold the state after this step, and write it now. Or they should have, and were busy."""
    if record.snapshot:
        attempt_of(run, record.step + 1, record.snapshot)
    elif record.thinned:
        run.emit(events.CheckpointThinned(step=record.step + 1))


def attempt_of(run: RunState, step: int, name: str) -> Attempt | None:
    """The attempt, a new one if need be; None for one that is over already."""
    if step <= run.checkpoint_step or (step, name) in run.dropped_attempts or run.phase in OVER:
        return None
    attempt = run.attempts.get((step, name))
    if attempt is None:
        attempt = run.attempts[step, name] = Attempt(step=step, name=name, since_s=run.now)
    return attempt


def on_part(run: RunState, event: m.PartWritten) -> None:
    """A keeper has written one. With the last one the attempt can be committed."""
    report = event.report
    attempt = attempt_of(run, report["step"], report["attempt"])
    if attempt is None or attempt.committing:
        return
    attempt.parts[report["rank"]] = report
    if len(attempt.parts) == report["world_size"]:
        attempt.committing = True
        parts = tuple(part for _, part in sorted(attempt.parts.items()))
        live = tuple(key for key in run.attempts if key != (attempt.step, attempt.name))
        run.out.append(m.CommitCheckpoint(step=attempt.step, attempt=attempt.name, parts=parts, live=live))


def on_no_part(run: RunState, event: wire.NoPart) -> None:
    """One part will not come: this attempt is over."""
    attempt = run.attempts.get((event.step, event.attempt))
    if attempt is not None and not attempt.committing:
        drop(run, attempt, f"replica {event.replica}: {event.reason}")


def on_done(run: RunState, event: m.CheckpointDone) -> None:
    """It was committed, or could not be."""
    attempt = run.attempts.get((event.step, event.attempt))
    if attempt is None:
        return
    if event.problem:
        drop(run, attempt, event.problem)
        return
    del run.attempts[event.step, event.attempt]
    run.checkpoint_step = event.step
    run.emit(
        events.CheckpointCommitted(
            step=event.step, written_bytes=event.written_bytes, referenced_bytes=event.referenced_bytes,
            seconds=run.now - attempt.since_s, parts=len(attempt.parts),
        )
    )  # fmt: skip
    for older in [a for a in run.attempts.values() if a.step <= event.step]:
        drop(run, older, f"step {event.step} was written before it")


def expire(run: RunState) -> None:
    """An attempt whose parts do not come holds nothing but a place in a table; it is told and forgotten."""
    for attempt in [
        a for a in run.attempts.values() if run.now - a.since_s > run.settings.checkpoint_timeout_s
    ]:
        if not attempt.committing:
            drop(run, attempt, f"not all parts came within {run.settings.checkpoint_timeout_s:.0f} s")


def drop(run: RunState, attempt: Attempt, reason: str) -> None:
    del run.attempts[attempt.step, attempt.name]
    run.dropped_attempts[attempt.step, attempt.name] = None  # its other parts may still come
    while len(run.dropped_attempts) > _MAX_DROPPED:
        del run.dropped_attempts[next(iter(run.dropped_attempts))]
    run.emit(events.CheckpointDropped(step=attempt.step, reason=reason))
