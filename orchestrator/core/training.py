"""The calm part: heartbeats, commits in order and once each, and dealing shards anew when speeds differ."""

from __future__ import annotations

from collections.abc import Iterable

from everstep.actors import wire
from everstep.orchestrator import events
from everstep.orchestrator.core import ending
from everstep.orchestrator.core.model import Phase
from everstep.orchestrator.core.state import RunState
from everstep.policies.straggler import RebalanceObservation


def on_beat(run: RunState, event: wire.Beat) -> None:
    replica = run.replicas.get(event.replica)
    if replica is None:
        return  # no answer, no lease: who was given up while it stood still ends by itself
    replica.phase = event.phase
    if event.compute_s > 0.0:
        replica.compute_s = event.compute_s
    if event.progress != replica.progress:
        replica.progress, replica.moved_s = event.progress, run.now
    run.send((event.replica,), wire.Ack(seq=event.seq, known_step=run.step))


def on_committed(run: RunState, event: wire.Committed) -> None:
    if run.generation is None or run.phase in (Phase.ENDING, Phase.ENDED):
        return
    # A commit of a generation that is over is still true: its sender promised only after it had sent this.
    take_records(run, (event.record,))


def take_records(run: RunState, records: Iterable[wire.Record]) -> None:
    for record in records:
        if record.history == run.history and record.step >= run.step:
            run.records[record.step] = record
    while run.step in run.records:
        commit(run, run.records.pop(run.step))


def commit(run: RunState, record: wire.Record) -> None:
    run.step = record.step + 1
    run.metrics = dict(record.metrics)
    run.step_s = record.step_s
    run.stuck = 0
    run.budget.committed(1)
    generation = run.generation
    size = len(generation.members) if generation else 0
    if record.skipped:
        run.emit(events.NonFinite(step=record.step, action="skip"))
    run.emit(
        events.StepCommitted(
            step=record.step, generation=record.generation, metrics=record.metrics, samples=record.samples,
            world_size=size, step_s=record.step_s,
        )  # fmt: skip
    )
    if generation is not None and record.generation == generation.number:
        run.durations = run.durations.added(max(run.now - run.last_commit_s, 0.0))
        ending.close_reform(run)
        check_speeds(run, record.step)
    run.last_commit_s = run.now


def check_speeds(run: RunState, step: int) -> None:
    """Deal the shards anew when that would pay and has for a while."""
    generation = run.generation
    if run.phase is not Phase.RUNNING or generation is None or len(generation.members) < 2:
        return
    pace = [run.replicas[i].compute_s or None for i in generation.members if i in run.replicas]
    if len(pace) != len(generation.members):
        return
    decision = run.rebalance.decide(
        RebalanceObservation(step=step, seconds_per_shard=pace, ranges=[range(*r) for r in generation.ranges]),
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
