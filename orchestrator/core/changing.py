"""Changes by wish: scaling, draining, leaving, joining. They happen at a step boundary and lose nothing."""

from __future__ import annotations

from everstep.actors import wire
from everstep.orchestrator import events
from everstep.orchestrator.core import ending, forming, reforms
from everstep.orchestrator.core import model as m
from everstep.orchestrator.core.model import Phase, ReplicaState
from everstep.orchestrator.core.state import RunState


def on_scale(run: RunState, event: m.Scale) -> None:
    run.target = event.replicas
    run.emit(events.ScaleRequested(replicas=event.replicas, by=event.by))
    shrink_pool(run)
    run.account()
    run.spread_memo()


def shrink_pool(run: RunState) -> None:
    """More processes than wished: those not needed go, the least useful first; members at the next boundary."""
    surplus = run.pool_size() - run.target - run.settings.spares
    for state in (ReplicaState.LAUNCHED, ReplicaState.WARMING, ReplicaState.READY):
        for replica in reversed(run.by_state(state)):
            if surplus <= 0:
                return
            if not replica.leaving:
                ending.release(run, replica, "scaled down")
                surplus -= 1


def on_drain(run: RunState, event: m.Drain) -> None:
    if event.node in run.excluded:
        return
    run.excluded.add(event.node)
    run.emit(events.NodeDraining(node=event.node, deadline_s=event.deadline_s or None, by=event.by))
    for replica in list(run.replicas.values()):
        if replica.node == event.node:
            run.mark_leaving(replica, f"node {event.node} is being drained by {event.by}")
            if replica.state in (ReplicaState.WARMING, ReplicaState.READY):
                ending.release(run, replica, replica.leaving)
    just_in_time(run)
    run.spread_memo()


def on_leaving(run: RunState, event: wire.Leaving) -> None:
    replica = run.replicas.get(event.replica)
    if replica is None or replica.state is ReplicaState.RELEASED:
        return
    run.mark_leaving(replica, event.reason or "it asked to leave")
    just_in_time(run)
    if replica.state in (ReplicaState.LAUNCHED, ReplicaState.WARMING, ReplicaState.READY):
        ending.release(run, replica, replica.leaving)


def just_in_time(run: RunState) -> None:
    """Everyone who holds the state has been told to go, and nobody is left to have it from: storage must have it soon."""
    members, generation = run.index[ReplicaState.MEMBER], run.generation
    if generation is None or not run.settings.checkpoints or run.saved_in == generation.number:
        return
    if members and all(replica.leaving for replica in members.values()):
        run.saved_in = generation.number
        run.send(tuple(members), wire.Snapshot(generation=generation.number, incarnation=run.incarnation))


def consider_change(run: RunState) -> None:
    """While a generation trains: is it over, or is another membership wanted, and is now the moment?"""
    if run.total < run.announced:
        ending.release_uninformed(run)
    if run.all_finished():
        ending.finish(run)
        return
    generation = run.generation
    assert generation is not None
    if run.reached > generation.step and (run.fetching or run.kept_sources):
        forming.all_fetched(run)  # it has committed a step, so everybody had the state
    if run.all_done() or run.phase is not Phase.RUNNING:
        return
    cause = change_wanted(run)
    if cause:
        run.wish = ""
        run.pausing_for = cause
        if run.reform is None:
            reforms.begin(run, cause, None, planned=True)
        run.enter(Phase.PAUSING)
        members = tuple(run.index[ReplicaState.MEMBER])
        run.awaited = set(members)
        run.send(members, wire.Pause(generation=generation.number, incarnation=run.incarnation))


def change_wanted(run: RunState) -> str:
    """Why the membership should change, or nothing. Costs no more than a glance at the counts, usually.

    Who must go, goes at the next boundary; everything else waits until the last change has led to a commit.
    """
    if run.stop_wanted:
        return run.stop_wanted
    members, ready = run.index[ReplicaState.MEMBER], run.index[ReplicaState.READY]
    num_staying, num_ready = len(members), len(ready)
    if run.num_leaving:
        leaving = [r.leaving for r in members.values() if r.leaving]
        num_staying -= len(leaving)
        num_ready -= sum(bool(r.leaving) for r in ready.values())
        if leaving and num_staying + num_ready >= max(run.settings.min_replicas, 1):
            return leaving[0]
    if run.reform is not None:
        return ""
    if num_staying > run.target:
        return f"scaled from {len(members)} to {run.target}"
    if num_ready and num_staying < run.target:
        if more_are_coming(run, num_staying + num_ready):
            return ""
        return f"{min(num_ready, run.target - num_staying)} joined"
    run.join_since = None
    return run.wish


def more_are_coming(run: RunState, have: int) -> bool:
    """Joiners on their way are waited for (not for long), so that all enter in one re-form: those that warm up, and
    those launched with one that is ready, which may find no room on the cluster."""
    warming, limit_s = run.index[ReplicaState.WARMING], run.settings.settle_s
    if warming:
        limit_s *= 5
    else:
        first_s = min(r.since_s for r in run.index[ReplicaState.READY].values())
        if not any(r.since_s >= first_s for r in run.index[ReplicaState.LAUNCHED].values()):
            limit_s = 0.0
    if have >= run.target or not limit_s:
        run.join_since = None
        return False
    run.join_since = run.now if run.join_since is None else run.join_since
    return run.now - run.join_since < limit_s
