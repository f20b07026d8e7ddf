"""Events and numbers in human words: one wording for the live line, `everstep events` and `everstep status`.

Pure: no clock, no I/O, neither ray nor torch.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import singledispatch
from math import floor, isfinite, log10

from everstep.orchestrator import events as ev


@singledispatch
def describe(event: ev.Event) -> str:
    """One line that says what happened, without time and run."""
    fields = ", ".join(f"{name} {value}" for name, value in event.to_dict().items() if name not in _HEAD)
    return f"{event.type.replace('_', ' ')}: {fields}"


_HEAD = ("v", "type", "time", "run")


@describe.register
def _(event: ev.RunStarted) -> str:
    return f"run {event.run} started" + (f" at step {event.step}" if event.step else "")


@describe.register
def _(event: ev.ControllerRestarted) -> str:
    found = f"; {count(len(event.replicas), 'replica')} found again" if event.replicas else ""
    return f"controller restarted{found}"


@describe.register
def _(event: ev.ReplicaLaunched) -> str:
    return f"replica {event.replica} launched"


@describe.register
def _(event: ev.ReplicaReady) -> str:
    took = f" after {seconds(event.start_s)}" if event.start_s else ""
    return f"replica {event.replica} ready{_on(event.node)}{took}"


@describe.register
def _(event: ev.ReplicaLost) -> str:
    return f"replica {event.replica} lost{_on(event.node)} ({event.cause or event.failure_class})"


@describe.register
def _(event: ev.ReplicaReleased) -> str:
    return f"replica {event.replica} left{_on(event.node)}{_because(event.reason)}"


@describe.register
def _(event: ev.GenerationFormed) -> str:
    replicas = count(len(event.replicas), "replica")
    nodes = f" on {count(len(set(event.nodes)), 'node')}" if event.nodes else ""
    return f"generation {event.generation}: {replicas}{nodes}, step {event.step}{_because(event.reason)}"


@describe.register
def _(event: ev.StepCommitted) -> str:
    parts = [f"step {event.step} committed", metrics(event.metrics), f"{event.samples} samples in"]
    return "  ".join(part for part in parts if part) + f" {seconds(event.step_s)}"


@describe.register
def _(event: ev.Recovery) -> str:
    parts = [f"generation {event.generation_after} after {seconds(event.total_s)}", f"step {event.step}"]
    parts.append(f"{count(event.steps_lost, 'step')} lost")
    if event.shards_recomputed:
        parts.append(f"{count(event.shards_recomputed, 'shard')} computed again")
    if event.bytes_transferred:
        parts.append(f"{amount_bytes(event.bytes_transferred)} transferred")
    why = "" if event.blamed_replica is not None else _because(event.cause)
    return f"{event.world_size_after} go on{why}: {', '.join(parts)}"


@describe.register
def _(event: ev.ScaleRequested) -> str:
    return f"scale to {count(event.replicas, 'replica')} asked for{_by(event.by)}"


@describe.register
def _(event: ev.StopRequested) -> str:
    return f"stop{' now' if event.now else ''} asked for{_by(event.by)}"


@describe.register
def _(event: ev.NodeDraining) -> str:
    left = f", {seconds(event.deadline_s)} left" if event.deadline_s else ""
    return f"node {short(event.node)} is being drained{left}{_by(event.by)}"


@describe.register
def _(event: ev.Waiting) -> str:
    have = count(event.replicas, "replica") if event.replicas else "no replica"
    return f"waiting: {have} left, {event.min_replicas} needed; the state is kept"


@describe.register
def _(event: ev.Resumed) -> str:
    return f"{count(event.replicas, 'replica')} again after waiting {seconds(event.waited_s)}"


@describe.register
def _(event: ev.StragglerRebalanced) -> str:
    owned = ", ".join(f"{n} to replica {r}" for r, n in zip(event.replicas, event.shards, strict=False))
    return f"logical shards dealt anew by speed at step {event.step}: {owned}"


@describe.register
def _(event: ev.NonFinite) -> str:
    whose = f" on replica {event.replica}" if event.replica is not None else ""
    done = {"skip": "its update is skipped", "ignore": "ignored", "stop": "the run stops"}
    return f"loss or gradient not finite at step {event.step}{whose}: {done.get(event.action, event.action)}"


@describe.register
def _(event: ev.UserError) -> str:
    return f"train function failed at step {event.step} on replica {event.replica}: {event.error}"


@describe.register
def _(event: ev.CheckpointCommitted) -> str:
    kept = f", {amount_bytes(event.referenced_bytes)} unchanged" if event.referenced_bytes else ""
    return f"checkpoint of step {event.step}: {amount_bytes(event.written_bytes)} in {seconds(event.seconds)}{kept}"


@describe.register
def _(event: ev.CheckpointDropped) -> str:
    return f"checkpoint of step {event.step} given up{_because(event.reason)}; the one before stays"


@describe.register
def _(event: ev.CheckpointThinned) -> str:
    return f"checkpoint of step {event.step} left out: storage is still busy with the one before"


@describe.register
def _(event: ev.CheckpointUsed) -> str:
    end = "; it was trained to its end before, a run of another name begins anew" if event.finished else ""
    return f"goes on from the checkpoint of step {event.step}{end}"


@describe.register
def _(event: ev.CheckpointRefused) -> str:
    return f"checkpoint of step {event.step} cannot be used{_because(event.reason)}"


@describe.register
def _(event: ev.StateLost) -> str:
    return f"no replica holds the state any more: back to step {event.step}"


@describe.register
def _(event: ev.RunEnded) -> str:
    spent = sum(event.buckets.values())
    wall = f" in {clock(spent)}" if spent else ""
    return f"run {event.outcome} after {count(event.step, 'step')}{wall}{_because(event.reason)}"


def metrics(values: Mapping[str, float], at_most: int = 3) -> str:
    """`loss 1.2345  accuracy 0.9`, the loss first."""
    names = sorted(values, key=lambda name: (name != "loss", name))[:at_most]
    return "  ".join(f"{name} {quantity(values[name])}" for name in names)


def quantity(value: float) -> str:
    """A metric: four decimals where that tells something, else three digits and an exponent."""
    if not isfinite(value) or value == 0 or 1e-3 <= abs(value) < 1e5:
        return f"{value:.4f}"
    return f"{value:.3g}"


def rate(value: float) -> str:
    """`3.2k`, `812`, `0.52`: two or three digits."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= size * 0.9995:
            return f"{value / size:.{1 if value < 99.95 * size else 0}f}{unit}"
    return f"{value:.{max(0, 1 - floor(log10(value)))}f}" if value > 0 else "0"


def seconds(value: float) -> str:
    """`84 ms`, `4.1 s`, `0:12:04`."""
    if value < 0.9995:
        return f"{value * 1000:.{0 if value >= 0.00995 else 1}f} ms"
    return f"{value:.1f} s" if value < 99.95 else clock(value)


def clock(value: float) -> str:
    """Seconds as h:mm:ss."""
    whole = round(value)
    return f"{whole // 3600}:{whole // 60 % 60:02}:{whole % 60:02}"


def amount_bytes(value: float) -> str:
    """`1.5 GiB`."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def count(number: int, noun: str) -> str:
    """`1 replica`, `3 replicas`."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def short(node: str) -> str:
    """A node id of Ray is 56 hex digits; the first 8 tell nodes apart. Other names stay whole."""
    is_id = len(node) >= 32 and all(digit in "0123456789abcdef" for digit in node)
    return node[:8] if is_id else node


def listed(names: Iterable[object]) -> str:
    """`a, b and c`."""
    words = [str(name) for name in names]
    return " and ".join(part for part in (", ".join(words[:-1]), *words[-1:]) if part)


def _on(node: str) -> str:
    return f" on node {short(node)}" if node else ""


def _by(who: str) -> str:
    return f" by {who}" if who else ""


def _because(reason: str) -> str:
    return f" ({reason})" if reason else ""
