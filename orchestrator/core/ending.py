"""How a run ends: its outcome is decided once, then every replica is let go, politely or by force."""

from __future__ import annotations

from everstep.actors import wire
from everstep.orchestrator import events
from everstep.orchestrator.core import model as m
from everstep.orchestrator.core.model import Phase, ReplicaState
from everstep.orchestrator.core.state import RunState


def end(run: RunState, outcome: str, reason: str) -> None:
    if run.phase in (Phase.ENDING, Phase.ENDED):
        return
    run.outcome, run.reason = outcome, reason
    close_reform(run)
    run.enter(Phase.ENDING)
    run.emit(
        events.RunEnded(outcome=outcome, step=run.step, reason=reason, buckets=run.clock.read(run.now))
    )
    run.deadline = run.now + run.settings.end_timeout_s
    for replica in list(run.replicas.values()):
        release(run, replica, reason or outcome)


def finish(run: RunState) -> None:
    end(run, "finished", "")


def release(run: RunState, replica: m.Replica, reason: str) -> None:
    """Let a replica go: politely if its process listens, else by force."""
    if replica.state is ReplicaState.RELEASED:
        return
    unborn = replica.state is ReplicaState.LAUNCHED
    run.mark_leaving(replica, reason)
    run.move(replica, ReplicaState.RELEASED)
    replica.since_s = run.now
    run.awaited.discard(replica.replica)
    if unborn:
        kill(run, replica, reason)
    else:
        run.send((replica.replica,), wire.Release(reason=reason))


def kill(run: RunState, replica: m.Replica, reason: str) -> None:
    run.out.append(m.Kill(replica=replica.replica, reason=reason))


def on_finished(run: RunState, event: wire.Finished) -> None:
    replica = run.replicas.get(event.replica)
    if replica is None:
        return
    replica.finished = True
    replica.status = wire.Status(
        generation=run.number, applied=event.applied, fresh=False, done=True, vote=replica.status.vote
    )
    if not run.digest:
        run.value, run.digest = event.value, event.digest
    elif event.digest and event.digest != run.digest:
        end(run, "failed", f"InternalError: replica {event.replica} ended with other state than its peers")


def on_stop(run: RunState, event: m.Stop) -> None:
    if run.phase in (Phase.ENDING, Phase.ENDED):
        return
    run.emit(events.StopRequested(by=event.by, now=event.now))
    reason = f"stopped by {event.by}"
    if event.now or run.phase is not Phase.RUNNING:
        if not event.now and run.phase in (Phase.PAUSING, Phase.PARKING, Phase.FORMING):
            run.stop_wanted = reason
            return
        end(run, "stopped", reason)
        return
    run.stop_wanted = reason


def close_reform(run: RunState) -> None:
    """The first commit of the new generation ends the story of how it came about."""
    if run.reform is None or run.phase not in (Phase.RUNNING, Phase.FORMING):
        return
    if not run.reform.connected_s:
        run.reform.connected_s = run.now
    run.last_recovery = run.reform.closed(run.now)
    run.counts["recoveries"] += not run.reform.planned
    run.emit(run.last_recovery)
    run.reform = None
    run.clock.switch(run.bucket(), run.now)
