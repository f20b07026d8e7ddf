"""What fails: a replica, a collective, a node, the user's code. The generation is stopped, everyone reports."""

from __future__ import annotations

from everstep.actors import wire
from everstep.orchestrator import events
from everstep.orchestrator.core import ending, forming, training
from everstep.orchestrator.core import model as m
from everstep.orchestrator.core.accounts import Reform
from everstep.orchestrator.core.model import LIVE_PHASES, Phase, ReplicaState
from everstep.orchestrator.core.state import RunState
from everstep.policies.budget import FailureClass
from everstep.policies.seeds import derive_seed


def on_fault(run: RunState, event: wire.Fault) -> None:
    generation = run.generation
    if generation is None or event.generation != generation.number or run.phase not in LIVE_PHASES:
        return
    if run.phase is not Phase.PARKING:
        park(run, f"collective failed on replica {event.replica}: {event.error[:200]}", None, planned=False)


def on_link_lost(run: RunState, event: m.LinkLost) -> None:
    replica = run.replicas.get(event.replica)
    if replica is None or not event.refused:
        return
    if replica.state is not ReplicaState.RELEASED:
        run.unexplained[event.replica] = (run.now, replica.node)
    lose(run, replica, "process gone: its host refuses the connection", None)


def on_died(run: RunState, event: m.ReplicaDied) -> None:
    replica = run.replicas.get(event.replica)
    if replica is not None:
        failure = FailureClass.PREEMPTION if "drained" in replica.leaving else event.failure
        lose(run, replica, event.cause, failure)
    elif event.replica in run.unexplained:
        _, node = run.unexplained.pop(event.replica)
        charge(run, event.failure, event.replica, event.cause)
        run.emit(
            events.ReplicaLost(
                replica=event.replica, node=node, cause=event.cause, failure_class=event.failure.value
            )
        )
        if run.reform is not None and run.reform.replica == event.replica:
            run.reform.cause = event.cause


def on_node_gone(run: RunState, event: m.NodeGone) -> None:
    for replica in [r for r in run.replicas.values() if r.node == event.node]:
        lose(run, replica, f"node {event.node} died", FailureClass.NODE_LOSS)
    run.excluded.discard(event.node)


def lose(run: RunState, replica: m.Replica, cause: str, failure: FailureClass | None) -> None:
    """A replica is out for good. `failure` None: Ray will say later what it was."""
    run.remove(replica)
    if replica.state is ReplicaState.RELEASED:
        run.emit(events.ReplicaReleased(replica=replica.replica, node=replica.node, reason=replica.leaving))
        return
    if run.phase is Phase.ENDING or replica.finished:
        return
    if failure is not None:
        run.emit(
            events.ReplicaLost(
                replica=replica.replica, node=replica.node, cause=cause, failure_class=failure.value
            )
        )
        charge(run, failure, replica.replica, cause)
    if replica.state in (ReplicaState.MEMBER, ReplicaState.PARKED):
        member_lost(run, replica, cause)


def member_lost(run: RunState, replica: m.Replica, cause: str) -> None:
    run.awaited.discard(replica.replica)
    run.fetching.discard(replica.replica)
    if run.phase in (Phase.RUNNING, Phase.PAUSING, Phase.FORMING):
        if replica.state is ReplicaState.MEMBER:
            park(run, f"replica {replica.replica} lost: {cause}", replica, planned=False)
    elif run.phase is Phase.PARKING and not run.awaited:
        decide_parked(run)


def charge(run: RunState, failure: FailureClass, replica: int, cause: str) -> None:
    uniform = (derive_seed(run.incarnation, replica) % 1024) / 1024
    verdict = run.budget.charge(failure, run.now, uniform)
    if not verdict.allowed:
        ending.end(run, "failed", f"BudgetExhausted: {verdict.reason}; the last: replica {replica}: {cause}")
    elif verdict.wait_s:
        run.relaunch_s = max(run.relaunch_s, run.now + verdict.wait_s)


def park(run: RunState, cause: str, blamed: m.Replica | None, *, planned: bool) -> None:
    """Stop the generation: everyone leaves its collectives and reports."""
    generation = run.generation
    if generation is None or run.phase not in (*LIVE_PHASES, Phase.ADOPTING):
        return
    open_reform(run, cause, blamed, planned=planned)
    if run.phase is Phase.ENDING:
        return
    run.enter(Phase.PARKING)
    members = run.by_state(ReplicaState.MEMBER) + run.by_state(ReplicaState.PARKED)
    run.awaited = {r.replica for r in members}
    for replica in members:
        run.move(replica, ReplicaState.MEMBER)
    run.deadline = run.now + run.settings.park_timeout_s
    if run.awaited:
        run.send(tuple(run.awaited), abort_message(run))
    else:
        decide_parked(run)


def open_reform(run: RunState, cause: str, blamed: m.Replica | None, *, planned: bool) -> None:
    generation = run.generation
    assert generation is not None
    if run.reform is not None and (planned or not run.reform.planned):
        if blamed is not None and run.reform.replica is None:
            run.reform.replica, run.reform.node, run.reform.cause = blamed.replica, blamed.node, cause
        run.reform.parked_s = 0.0
        run.stuck += not planned
    else:
        run.reform = Reform(
            cause=cause, planned=planned, noticed_s=run.now, generation_before=generation.number,
            world_size_before=len(generation.members), replica=blamed.replica if blamed else None,
            node=blamed.node if blamed else "", step=run.step,
        )  # fmt: skip
        if not planned:
            run.stuck += 1
    if run.stuck > run.settings.max_fruitless_recoveries:
        ending.end(run, "failed", f"{run.stuck} re-forms without a newly committed step; the last: {cause}")


def abort_message(run: RunState) -> wire.Abort:
    assert run.generation is not None
    return wire.Abort(generation=run.generation.number, incarnation=run.incarnation)


def on_parked(run: RunState, event: wire.Parked) -> None:
    generation, replica = run.generation, run.replicas.get(event.replica)
    if generation is None or replica is None or event.generation != generation.number:
        return
    training.take_records(run, event.records)
    if run.phase not in (Phase.PARKING, Phase.PAUSING) or replica.state is not ReplicaState.MEMBER:
        return
    replica.status = event.status
    replica.finished = replica.finished and event.status.done
    run.awaited.discard(event.replica)
    if not run.awaited:
        decide_parked(run)


def decide_parked(run: RunState) -> None:
    """Everyone alive has reported."""
    if run.phase not in (Phase.PARKING, Phase.PAUSING):
        return
    members = set(run.generation.members) if run.generation else set()
    order = {i: n for n, i in enumerate(run.generation.members)} if run.generation else {}
    present = run.by_state(ReplicaState.MEMBER) + run.by_state(ReplicaState.PARKED)
    survivors = [r for r in present if r.replica in members or not r.status.fresh]
    survivors.sort(key=lambda r: order.get(r.replica, len(order) + r.replica))
    if run.all_finished():
        ending.finish(run)
        return
    forming.decide(run, survivors)


def on_user_failed(run: RunState, event: wire.UserFailed) -> None:
    replica = run.replicas.get(event.replica)
    if replica is None or run.phase in (Phase.ENDING, Phase.ENDED):
        return
    run.emit(
        events.UserError(replica=event.replica, step=event.step, error=event.error, traceback=event.traceback)
    )
    fingerprint = (event.step, event.error)
    again = fingerprint in run.user_errors
    run.user_errors.add(fingerprint)
    joining = replica.state is not ReplicaState.MEMBER and run.generation is not None and not event.fatal
    if joining:
        # A newcomer that cannot start must not end a run that trains; it is not tried again for ever either.
        lose(run, replica, f"user code failed while it warmed up: {event.error}", FailureClass.UNKNOWN)
        return
    if event.fatal or event.step == 0 or again:
        why = "" if event.fatal else " at step 0" if event.step == 0 else f" twice at step {event.step}"
        ending.end(run, "failed", f"{event.traceback.rstrip()}\nTrainingError{why}: {event.error}")
        return
    lose(run, replica, f"user code raised {event.error}", None)
