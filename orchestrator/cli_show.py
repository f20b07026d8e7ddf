"""What `everstep status` and `everstep events` print. Called by cli.py; turns plain data into text, nothing else."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from everstep.orchestrator import events as ev
from everstep.orchestrator.words import clock, describe, metrics, rate, seconds, short

_RUN_COLUMNS = ("RUN", "PHASE", "STEP", "REPLICAS", "WISHED", "GENERATION", "SAMPLES/S", "ETA")
_REPLICA_COLUMNS = ("REPLICA", "STATE", "RANK", "NODE", "HOST", "PID", "SHARDS", "STEP", "HEARD", "COMPUTE")


def runs_table(statuses: Sequence[Mapping[str, Any]]) -> str:
    """One line per run."""
    if not statuses:
        return "no run is live on this cluster"
    return table(_RUN_COLUMNS, [_run_row(status) for status in statuses])


def run_text(status: Mapping[str, Any]) -> str:
    """All that is known of one run: a head line, facts, and a line per replica."""
    facts = [(name, text) for name, text in _facts(status) if text]
    width = max((len(name) for name, _ in facts), default=0)
    lines = [_head(status), *(f"  {name:<{width}}  {text}" for name, text in facts)]
    if replicas := status.get("replicas"):
        lines += ["", table(_REPLICA_COLUMNS, [_replica_row(replica) for replica in replicas])]
    return "\n".join(lines)


def logged_status(run: str, events: Sequence[ev.Event]) -> dict[str, Any]:
    """What the log of a run tells whose controller cannot be asked, in the words of a live one's status."""
    status: dict[str, Any] = {"run": run, "phase": "not live, by its log", "step": None, "total": None}
    for event in events:
        if isinstance(event, ev.RunStarted | ev.GenerationFormed) and event.total is not None:
            status["total"] = event.total
        if isinstance(event, ev.RunStarted):
            status["started_at"] = event.time
        if isinstance(event, ev.GenerationFormed):
            status["generation"] = event.generation
        if isinstance(event, ev.StepCommitted):
            status |= {"step": event.step + 1, "metrics": dict(event.metrics)}
        if isinstance(event, ev.Recovery):
            status["last_recovery"] = event.to_dict()
        if isinstance(event, ev.RunEnded):
            status |= {"phase": "ended", "outcome": event.outcome, "step": event.step}
            status |= {"reason": event.reason, "buckets": dict(event.buckets)}
    return status


def event_line(event: ev.Event) -> str:
    """`2026-03-01 12:04:31  replica 2 lost on node ab12 (process killed)`, in local time."""
    return f"{_local(event.time)}  {describe(event)}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Left-aligned columns two spaces apart, without trailing blanks."""
    lines = [tuple(columns), *(tuple(row) for row in rows)]
    widths = [max(len(line[n]) for line in lines) for n in range(len(columns))]
    padded = (
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines
    )
    return "\n".join(line.rstrip() for line in padded)


def _run_row(status: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        str(status["run"]),
        _phase(status),
        _step(status),
        _text(status.get("world_size")),
        _text(status.get("target")),
        _text(status.get("generation")),
        _text(status.get("samples_per_s"), rate),
        _text(status.get("eta_s"), clock),
    )


def _replica_row(replica: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        _text(replica.get("replica")),
        _text(replica.get("state")),
        _text(replica.get("rank")),
        _text(replica.get("node"), short),
        _text(replica.get("host")),
        _text(replica.get("pid") or None),
        _shards(replica.get("shards")),
        _text(replica.get("step")),
        _text(replica.get("heartbeat_age_s"), lambda age: f"{seconds(age)} ago"),
        _text(replica.get("compute_s"), seconds),
    )


def _head(status: Mapping[str, Any]) -> str:
    generation = status.get("generation")
    return f"run {status['run']}: {_phase(status)}" + (f", generation {generation}" if generation else "")


def _facts(status: Mapping[str, Any]) -> list[tuple[str, str]]:
    return [
        ("reason", str(status.get("reason") or "")),
        ("step", "  ".join(part for part in (_step(status), metrics(status.get("metrics") or {})) if part)),
        ("speed", _speed(status)),
        ("replicas", _wish(status)),
        ("draining", ", ".join(short(str(node)) for node in status.get("draining") or ())),
        ("started", _local(status["started_at"]) if status.get("started_at") else ""),
        ("last recovery", _recovery(status.get("last_recovery"))),
        ("time", _buckets(status.get("buckets") or {})),
        (
            "controller",
            f"incarnation {status['incarnation']}" if (status.get("incarnation") or 1) > 1 else "",
        ),
    ]


def _phase(status: Mapping[str, Any]) -> str:
    return str(status.get("outcome") or status.get("phase") or "unknown")


def _step(status: Mapping[str, Any]) -> str:
    if status.get("step") is None:
        return "-"
    return f"{status['step']}" + (f"/{status['total']}" if status.get("total") else "")


def _speed(status: Mapping[str, Any]) -> str:
    speed, eta = status.get("samples_per_s"), status.get("eta_s")
    parts = [
        f"{rate(speed)} samples/s" if speed is not None else "",
        f"ETA {clock(eta)}" if eta is not None else "",
    ]
    return ", ".join(part for part in parts if part)


def _wish(status: Mapping[str, Any]) -> str:
    if status.get("target") is None:
        return ""
    limits = f" ({status.get('min_replicas')} to {status.get('max_replicas')})"
    spares = status.get("spares_ready")
    return f"{status.get('world_size')} of {status['target']} wished{limits}" + (
        f", {spares} spare ready" if spares == 1 else f", {spares} spares ready" if spares else ""
    )


def _recovery(values: Mapping[str, Any] | None) -> str:
    if not values:
        return ""
    event = ev.parse(json.dumps({"v": ev.VERSION, "type": "recovery", **values}))
    cause = f"; {event.cause}" if isinstance(event, ev.Recovery) and event.cause else ""
    return f"{describe(event)}{cause}"


def _buckets(buckets: Mapping[str, float]) -> str:
    total = sum(buckets.values())
    spent = sorted(((value, name) for name, value in buckets.items() if value > 0), reverse=True)
    return ", ".join(f"{name.replace('_', ' ')} {100 * value / total:.1f} %" for value, name in spent)


def _shards(shards: Any) -> str:
    return _text(len(shards) if isinstance(shards, Sequence) and not isinstance(shards, str) else shards)


def _text(value: Any, form: Any = str) -> str:
    return "-" if value is None or value == "" else str(form(value))


def _local(time: float) -> str:
    return datetime.fromtimestamp(time).strftime("%Y-%m-%d %H:%M:%S")
