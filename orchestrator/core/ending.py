"""How a run ends: its outcome is decided once, then every replica is let go, politely or by force."""

from __future__ import annotations

from everstep.actors import wire
from everstep.orchestrator import events
from everstep.orchestrator.core import model as m
from everstep.orchestrator.core import reforms, training
from everstep.orchestrator.core.model import OVER, Phase, ReplicaState
from everstep.orchestrator.core.state import RunState


def end(run: RunState, outcome: str, reason: str) -> None:
    if run.phase in OVER:
        return
    run.tell_losses()
    training.fill_gap(run)
    run.outcome, run.reason = outcome, reason
    reforms.close(run)
    run.enter(Phase.ENDING)
    run.emit(events.RunEnded(outcome=outcome, step=run.step, reason=reason, buckets=run.clock.read(run.now)))
    run.awaited, run.fetching = set(), set()
    run.deadline = run.now + run.settings.end_timeout_s
    run.spread_memo()  # the outcome outlives this controller as long as any replica does
    for replica in list(run.replicas.values()):
        release(run, replica, reason or outcome)


def finish(run: RunState) -> None:
    """All have finished. A checkpoint whose parts are there is waited for: storage answers, in whatever way."""
    if any(attempt.committing for attempt in run.attempts.values()):
        return
    end(run, "finished", run.value_problem)


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
    replica.num_kills += 1
    run.out.append(m.Kill(replica=replica.replica, reason=reason))


def force(run: RunState) -> None:
    """The run is over and some are still there: end them; who was ended before and still is there is left to its
    lease, because nobody can reach it."""
    for replica in list(run.replicas.values()):
        killed_before = replica.num_kills > 0
        kill(run, replica, "the run is over")
        if killed_before:
            run.remove(replica)
    run.deadline = run.now + run.settings.end_timeout_s


def on_finished(run: RunState, event: wire.Finished) -> None:
    replica = run.replicas.get(event.replica)
    if replica is None or replica.state not in (ReplicaState.MEMBER, ReplicaState.PARKED):
        return
    run.mark_finished(replica, True)
    replica.status = wire.Status(
        generation=run.number, applied=event.applied, fresh=False, done=True, vote=replica.status.vote
    )
    if event.applied < run.total:
        run.total = event.applied  # the loop was left by `break`: the run has so many steps
    if not run.digest:
        run.value, run.digest, run.value_problem = event.value, event.digest, event.problem
    elif event.digest and event.digest != run.digest:
        end(run, "failed", f"InternalError: replica {event.replica} ended with other state than its peers")


def release_uninformed(run: RunState) -> None:
    """The loop was left by `break`. All who did the last step leave it likewise, but a joiner that came after it cannot
    know, and waits for them in vain."""
    for replica in run.by_state(ReplicaState.MEMBER):
        if replica.joined_step == run.total and not replica.finished:
            run.fetching.discard(replica.replica)
            release(run, replica, "the loop was left before it joined")


def on_fail(run: RunState, event: m.Fail) -> None:
    end(run, "failed", event.reason)


def on_stop(run: RunState, event: m.Stop) -> None:
    run.emit(events.StopRequested(by=event.by, now=event.now))
    reason = f"stopped by {event.by}"
    if event.now:
        end(run, "stopped", reason)
    else:  # at the next boundary, or at once where nothing trains
        run.stop_wanted = run.stop_wanted or reason
        run.spread_memo()
