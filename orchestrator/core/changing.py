"""Changes by wish: scaling, draining, leaving, joining. They happen at a step boundary and lose nothing."""

from __future__ import annotations

from everstep.actors import wire
from everstep.orchestrator import events
from everstep.orchestrator.core import ending, failing
from everstep.orchestrator.core import model as m
from everstep.orchestrator.core.model import Phase, ReplicaState
from everstep.orchestrator.core.state import RunState


def on_scale(run: RunState, event: m.Scale) -> None:
    run.target = event.replicas
    run.emit(events.ScaleRequested(replicas=event.replicas, by=event.by))
    shrink_pool(run)
    run.spread_memo()


def shrink_pool(run: RunState) -> None:
    """More processes than wished: those not needed go, the least useful first; members at the next boundary."""
    wanted = run.target + run.settings.spares
    for state in (ReplicaState.LAUNCHED, ReplicaState.WARMING, ReplicaState.READY):
        for replica in reversed(run.by_state(state)):
            if run.pool_size() > wanted:
                ending.release(run, replica, "scaled down")


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
    run.spread_memo()


def on_leaving(run: RunState, event: wire.Leaving) -> None:
    replica = run.replicas.get(event.replica)
    if replica is None or replica.state is ReplicaState.RELEASED:
        return
    run.mark_leaving(replica, event.reason)
    if replica.state in (ReplicaState.LAUNCHED, ReplicaState.WARMING, ReplicaState.READY):
        ending.release(run, replica, event.reason)


def consider_change(run: RunState) -> None:
    """In RUNNING: is another membership wanted, and is now the moment?"""
    if run.all_finished():
        ending.finish(run)
        return
    if run.all_done() or run.generation is None:
        return
    cause = change_wanted(run)
    if cause:
        run.wish = ""
        failing.open_reform(run, cause, None, planned=True)
        if run.phase is not Phase.RUNNING:
            return
        run.enter(Phase.PAUSING)
        run.awaited = set(run.generation.members)
        run.send(
            run.generation.members,
            wire.Pause(generation=run.generation.number, incarnation=run.incarnation),
        )


def change_wanted(run: RunState) -> str:
    assert run.generation is not None
    if run.stop_wanted:
        return run.stop_wanted
    members = [run.replicas[i] for i in run.generation.members if i in run.replicas]
    staying = [r for r in members if not r.leaving]
    ready = [r for r in run.by_state(ReplicaState.READY) if not r.leaving]
    enough = len(staying) + len(ready) >= run.settings.min_replicas and bool(staying or ready)
    if len(staying) < len(members) and enough:
        return next(r.leaving for r in members if r.leaving)
    if len(staying) > run.target:
        return f"scaled from {len(members)} to {run.target}"
    if ready and len(staying) < run.target:
        if more_are_coming(run, len(staying) + len(ready)):
            return ""
        return f"{min(len(ready), run.target - len(staying))} joined"
    run.join_since = None
    return run.wish


def more_are_coming(run: RunState, have: int) -> bool:
    """Joiners that warm up at this moment are waited for (not for long), so that all enter in one re-form."""
    warming = bool(run.by_state(ReplicaState.WARMING))
    if have >= run.target or not warming:
        run.join_since = None
        return False
    run.join_since = run.now if run.join_since is None else run.join_since
    return run.now - run.join_since < 5 * run.settings.settle_s
