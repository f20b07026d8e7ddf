"""What fails: a replica, a collective, a node, the user's code. The generation is stopped, everyone reports."""

from __future__ import annotations

from dataclasses import replace

from everstep.actors import wire
from everstep.orchestrator import events
from everstep.orchestrator.core import ending, forming, reforms, training
from everstep.orchestrator.core import model as m
from everstep.orchestrator.core.model import LIVE_PHASES, OVER, Phase, ReplicaState
from everstep.orchestrator.core.state import RunState
from everstep.policies.budget import FailureClass
from everstep.policies.seeds import derive_seed

_MAX_CHARGED = 64
MAY_LIVE_ON = frozenset({FailureClass.NODE_LOSS, FailureClass.NETWORK})
"""Nobody has seen these processes end: behind a cut link they go on until their lease ends."""


def on_fault(run: RunState, event: wire.Fault) -> None:
    generation, replica = run.generation, run.replicas.get(event.replica)
    if generation is None or event.generation != generation.number or run.phase not in LIVE_PHASES:
        return
    if replica is None or replica.state is not ReplicaState.MEMBER or run.phase is Phase.PARKING:
        return
    park(run, f"collective failed on replica {event.replica}: {event.error[:200]}", None, planned=False)


def on_link_lost(run: RunState, event: m.LinkLost) -> None:
    replica = run.replicas.get(event.replica)
    if replica is not None and event.refused:
        lose(run, replica, "process gone: its host refuses the connection", None)


def on_died(run: RunState, event: m.ReplicaDied) -> None:
    replica = run.replicas.get(event.replica)
    if replica is not None:
        lose(run, replica, event.cause, event.failure)
        return
    replica = run.unexplained.pop(event.replica, None)
    if replica is not None:
        if run.reform is not None and run.reform.replica == event.replica:
            run.reform.cause = f"replica {event.replica} lost: {event.cause}"
        tell_loss(run, replica, event.cause, event.failure)


def on_node_gone(run: RunState, event: m.NodeGone) -> None:
    for replica in [r for r in run.replicas.values() if r.node == event.node]:
        lose(run, replica, f"node {event.node} died", FailureClass.NODE_LOSS)
    run.excluded.discard(event.node)


def lose(run: RunState, replica: m.Replica, cause: str, failure: FailureClass | None) -> None:
    """A replica is out for good. `failure` None: Ray will say later what it was."""
    run.remove(replica)
    if run.phase in OVER:
        return
    was = replica.state
    if was is ReplicaState.RELEASED:
        run.emit(events.ReplicaReleased(replica=replica.replica, node=replica.node, reason=replica.leaving))
        return
    if failure in MAY_LIVE_ON:
        run.fenced_at = max(run.fenced_at, replica.heard_s + run.settings.adopt_timeout_s)
    if not replica.finished:
        replica.since_s, replica.broken = run.now, run.number if was is ReplicaState.MEMBER else 0
        if failure is None:
            run.unexplained[replica.replica] = replica
        else:
            tell_loss(run, replica, cause, failure)
    member_lost(run, replica, was, cause)


def tell_loss(run: RunState, replica: m.Replica, cause: str, failure: FailureClass) -> None:
    """It is known why: record it, and charge it. Whose leaving was announced was preempted, however it ended."""
    if run.phase in OVER:
        return
    if replica.leaving:
        failure = FailureClass.PREEMPTION
    run.untold.append((replica, cause, failure))
    if replica.broken:
        key = (replica.broken, failure)
        if key in run.charged:
            return  # nor is it written down before the survivors have their orders
        run.charged[key] = None
        if len(run.charged) > _MAX_CHARGED:
            del run.charged[next(iter(run.charged))]
    run.tell_losses()
    newcomer = replica.state not in (ReplicaState.MEMBER, ReplicaState.PARKED)
    charge(run, failure, replica.replica, cause, newcomer=newcomer)


def charge(run: RunState, failure: FailureClass, replica: int, cause: str, *, newcomer: bool) -> None:
    uniform = (derive_seed(run.incarnation, replica) % 1024) / 1024
    verdict = run.budget.charge(failure, run.now, uniform)
    if verdict.allowed:
        run.relaunch_s = max(run.relaunch_s, run.now + verdict.wait_s)
    elif newcomer and run.phase in LIVE_PHASES:
        # A newcomer that cannot start must not end a run that trains; it is tried again, but seldom.
        run.relaunch_s = max(run.relaunch_s, run.now + run.settings.budget.back_off_cap_s)
    else:
        ending.end(run, "failed", f"BudgetExhausted: {verdict.reason}; the last: replica {replica}: {cause}")


def member_lost(run: RunState, replica: m.Replica, was: ReplicaState, cause: str) -> None:
    """One of the generation is gone, if it was one (`was`: its state then)."""
    run.awaited.discard(replica.replica)
    run.fetching.discard(replica.replica)
    run.kept_sources.discard(replica.replica)
    if was is not ReplicaState.MEMBER:
        run.explained = run.explained or was is ReplicaState.PARKED
        return
    run.explained = True
    if run.phase is Phase.PARKING:
        reforms.blame(run, replica, cause)
    elif run.phase in LIVE_PHASES and not (replica.finished and run.all_done()):
        park(run, f"replica {replica.replica} lost: {cause}", replica, planned=False)


def park(run: RunState, cause: str, blamed: m.Replica | None, *, planned: bool) -> None:
    """Stop the generation: everyone leaves its collectives and reports."""
    generation = run.generation
    if generation is None or run.phase not in (*LIVE_PHASES, Phase.ADOPTING):
        return
    reforms.begin(run, cause, blamed, planned=planned)
    run.explained = planned or blamed is not None
    run.enter(Phase.PARKING)
    for replica in run.by_state(ReplicaState.PARKED):
        run.move(replica, ReplicaState.MEMBER)
    run.awaited = set(run.index[ReplicaState.MEMBER])
    run.deadline = run.now + run.settings.park_timeout_s
    if run.awaited:
        run.send(tuple(run.index[ReplicaState.MEMBER]), abort_message(run))


def abort_message(run: RunState) -> wire.Abort:
    assert run.generation is not None
    return wire.Abort(generation=run.generation.number, incarnation=run.incarnation)


def on_parked(run: RunState, event: wire.Parked) -> None:
    generation, replica = run.generation, run.replicas.get(event.replica)
    if generation is None or replica is None or event.generation != generation.number:
        return
    if replica.state is not ReplicaState.MEMBER:
        return
    if event.records:
        training.take_records(run, event.records)
    if run.phase is Phase.RUNNING:
        # Nobody asked: a pause that a former controller ordered has taken effect only now.
        park(run, "a pause was asked for before the controller came back", None, planned=True)
    if run.phase not in (Phase.PARKING, Phase.PAUSING):
        return
    take_status(run, replica, event.status)
    run.awaited.discard(event.replica)


def take_status(run: RunState, replica: m.Replica, status: wire.Status) -> None:
    """What it promises. A fetch that was under way has completed only if its step is there."""
    assert run.generation is not None
    if run.total and status.applied > run.total:
        status = replace(status, applied=run.total)
    replica.status = status
    replica.void = replica.void and (status.fresh or status.applied < run.generation.step)
    if replica.finished and not status.done:
        run.mark_finished(replica, False)


def decide_parked(run: RunState) -> None:
    """Everyone alive has reported."""
    if run.total < run.announced:
        ending.release_uninformed(run)
    if run.all_finished():
        ending.finish(run)
        return
    order = run.generation.members if run.generation else ()
    present = run.index[ReplicaState.MEMBER] | run.index[ReplicaState.PARKED]
    survivors = [present.pop(i) for i in order if i in present]
    # Not members, but they may hold what nobody else does.
    survivors += [r for _, r in sorted(present.items())]
    forming.decide(run, survivors)


def on_user_failed(run: RunState, event: wire.UserFailed) -> None:
    replica = run.replicas.get(event.replica)
    if replica is None or replica.state is ReplicaState.RELEASED:
        return
    run.emit(
        events.UserError(replica=event.replica, step=event.step, error=event.error, traceback=event.traceback)
    )
    was = replica.state
    newcomer = was not in (ReplicaState.MEMBER, ReplicaState.PARKED) and run.generation is not None
    fingerprint = (event.step, event.error)
    again = not newcomer and fingerprint in run.user_errors
    # After the last step nobody takes over what it was doing.
    at_the_end = bool(run.total) and event.step >= run.total
    # What ends a newcomer may be its node's fault; those who train are not to be ended by it.
    if not newcomer and (event.fatal or event.step == 0 or again or at_the_end):
        why = (
            ""
            if event.fatal or at_the_end
            else " at step 0"
            if event.step == 0
            else f" twice at step {event.step}"
        )
        head = event.error if event.fatal else f"TrainingError{why}: {event.error}"
        ending.end(run, "failed", f"{event.traceback.rstrip()}\n{head}")
        return
    # It has left its loop, and another one may get through where it did not: once for the same error.
    run.user_errors.add(fingerprint)
    ending.release(run, replica, f"its code raised {event.error}")
    charge(run, FailureClass.UNKNOWN, event.replica, f"user code raised {event.error}", newcomer=newcomer)
    if run.phase not in OVER:
        member_lost(run, replica, was, f"user code raised {event.error}")
