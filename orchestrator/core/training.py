"""The calm part: heartbeats, commits in order and once each, and dealing shards anew when speeds differ."""

from __future__ import annotations

import math
from collections.abc import Iterable

from everstep.actors import wire
from everstep.orchestrator import events
from everstep.orchestrator.core import checkpointing, reforms
from everstep.orchestrator.core.model import OVER, Phase, ReplicaState
from everstep.orchestrator.core.state import RunState
from everstep.policies.straggler import RebalanceObservation


def on_beat(run: RunState, event: wire.Beat) -> None:
    replica = run.replicas.get(event.replica)
    if replica is None:
        return  # no answer, no lease: who was given up while it stood still ends by itself
    replica.phase = event.phase
    if 0.0 < event.compute_s < math.inf:
        replica.compute_s = event.compute_s
    if event.progress != replica.progress:
        replica.progress, replica.moved_s = event.progress, run.now
    run.send((event.replica,), wire.Ack(seq=event.seq, known_step=run.known_step()))


def on_committed(run: RunState, event: wire.Committed) -> None:
    # A commit of a generation that is over is still true: until its sender is given up, nobody goes on without it.
    # Of one that was given up it may be false: the others may have done that step again.
    replica = run.replicas.get(event.replica)
    if replica is not None and replica.state in (ReplicaState.MEMBER, ReplicaState.PARKED):
        take_records(run, (event.record,))


def take_records(run: RunState, records: Iterable[wire.Record]) -> None:
    """Records of the run's members: every step is told once, in order, whoever tells it first."""
    if run.phase in OVER:
        return
    number = run.generation.number if run.generation else 0
    for record in records:
        if record.history != run.history:
            continue
        if record.step >= run.step:
            if (record.snapshot or record.thinned) and record.step not in run.records:
                checkpointing.on_snapshot(run, record)
            run.records[record.step] = record
        if record.generation == number and record.step >= run.reached:
            advance(run, record)
    publish(run)


def advance(run: RunState, record: wire.Record) -> None:
    """The present generation has come one step further."""
    run.reached = record.step + 1
    run.durations = run.durations.added(max(run.now - run.last_commit_s, 0.0))
    run.last_commit_s = run.now
    reforms.close(run)
    check_speeds(run, record.step)


def publish(run: RunState) -> None:
    while run.step in run.records:
        record = run.records.pop(run.step)
        run.step = record.step + 1
        run.metrics = dict(record.metrics)
        run.step_s = record.step_s
        run.budget.committed(1)
        if record.skipped:
            run.emit(events.NonFinite(step=record.step, action="skip"))
        run.emit(
            events.StepCommitted(
                step=record.step,
                generation=record.generation,
                metrics=record.metrics,
                samples=record.samples,
                world_size=len(run.generation.members) if run.generation else 0,
                step_s=record.step_s,
            )
        )


def fill_gap(run: RunState) -> None:
    """Steps that are history, but whose record died with those who had it: they are told without metrics."""
    number = run.generation.number if run.generation else 0
    for step in range(run.step, run.reached):
        blank = wire.Record(
            history=run.history, generation=number, step=step, metrics={}, samples=0, step_s=0.0
        )
        run.records.setdefault(step, blank)
    run.gap_since = None
    publish(run)


def check_gap(run: RunState) -> None:
    """A record that is missing is waited for, but not for ever."""
    if run.reached <= run.step:
        run.gap_since = None
    elif run.gap_since is None:
        run.gap_since = run.now
    elif run.now - run.gap_since > run.settings.heartbeat_timeout_s:
        fill_gap(run)


def check_speeds(run: RunState, step: int) -> None:
    """Deal the shards anew when that would pay and has for a while."""
    generation = run.generation
    if run.phase is not Phase.RUNNING or generation is None or len(generation.members) < 2:
        return
    pace = [run.replicas[i].compute_s or None for i in generation.members if i in run.replicas]
    if len(pace) != len(generation.members):
        return
    decision = run.rebalance.decide(
        RebalanceObservation(
            step=step,
            seconds_per_shard=pace,
            ranges=[range(*r) for r in generation.ranges],
            step_s=run.durations.recent_s,
        ),
        run.rebalance_state,
    )
    run.rebalance_state = decision.state
    if decision.ranges is not None:
        run.emit(
            events.StragglerRebalanced(
                step=step, replicas=generation.members, shards=tuple(len(r) for r in decision.ranges)
            )
        )
        run.wish = "shards dealt by measured speed"
