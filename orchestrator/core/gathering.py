"""Before a generation: replicas are launched, say hello, warm up, and as soon as enough are there, form one."""

from __future__ import annotations

from everstep.actors import wire
from everstep.orchestrator import events
from everstep.orchestrator.core import ending, failing, forming, training
from everstep.orchestrator.core import model as m
from everstep.orchestrator.core.model import Phase, ReplicaState
from everstep.orchestrator.core.state import RunState


def launch_missing(run: RunState) -> None:
    if run.now < run.relaunch_s or run.all_done():
        return
    wanted = run.target + run.settings.spares
    for _ in range(wanted - run.pool_size()):
        replica = m.Replica(replica=run.next_id, state=ReplicaState.LAUNCHED, since_s=run.now, heard_s=run.now)
        run.add(replica)
        run.next_id += 1
        run.out.append(m.Launch(replica=replica.replica, avoid_nodes=tuple(sorted(run.excluded))))
        run.emit(events.ReplicaLaunched(replica=replica.replica))


def on_hello(run: RunState, event: wire.Hello) -> None:
    replica = run.replicas.get(event.replica)
    if replica is None or replica.state is ReplicaState.RELEASED:
        # Given up, released, or of another life: it is fenced already, and now it hears so.
        run.send((event.replica,), wire.Release(reason="this replica is not part of the run any more"))
        return
    take_identity(run, replica, event)
    run.send((event.replica,), wire.Welcome(incarnation=run.incarnation, known_step=run.step))
    training.take_records(run, event.records)
    if replica.state is ReplicaState.LAUNCHED:
        run.move(replica, ReplicaState.WARMING)
    if event.ready and replica.state is ReplicaState.WARMING:
        warm(run, replica, event.signature, event.digest, event.total)
    repeat_orders(run, replica, event)


def take_identity(run: RunState, replica: m.Replica, event: wire.Hello) -> None:
    replica.node, replica.host, replica.pid = event.node, event.host, event.pid
    replica.transfer, replica.digest = event.transfer, event.digest
    replica.heard_s = run.now
    if event.node in run.excluded and not replica.leaving:
        run.mark_leaving(replica, f"node {event.node} is being drained")


def repeat_orders(run: RunState, replica: m.Replica, event: wire.Hello) -> None:
    """The connection was lost and is back: say again what may not have arrived."""
    generation = run.generation
    if generation is None or replica.state is not ReplicaState.MEMBER:
        return
    if run.phase is Phase.PARKING and replica.replica in run.awaited:
        run.send((replica.replica,), failing.abort_message(run))
    elif run.phase is Phase.FORMING and event.status.generation < generation.number:
        run.send((replica.replica,), wire.Form(generation=generation, memo=run.memo()))
    elif run.phase is Phase.PAUSING and replica.replica in run.awaited:
        run.send((replica.replica,), wire.Pause(generation=generation.number, incarnation=run.incarnation))
    elif run.phase is Phase.RUNNING and event.faulted:
        cause = f"replica {replica.replica} could not go on after its connection was lost"
        failing.park(run, cause, None, planned=False)


def on_ready(run: RunState, event: wire.Ready) -> None:
    replica = run.replicas.get(event.replica)
    if replica is not None and replica.state is ReplicaState.WARMING:
        warm(run, replica, event.signature, event.digest, event.total)


def warm(run: RunState, replica: m.Replica, signature: tuple[str, ...], digest: str, total: int) -> None:
    if run.reference is None:
        run.reference, run.total = signature, total
    problem = difference(run.reference, signature, run.total, total)
    if problem:
        text = f"replica {replica.replica} on {replica.host} registered other state than its peers: {problem}"
        run.emit(events.UserError(replica=replica.replica, step=run.step, error=f"StateMismatch: {text}"))
        if run.generation is None:
            ending.end(run, "failed", f"StateMismatch: {text}")
        else:
            ending.release(run, replica, text)
        return
    run.move(replica, ReplicaState.READY)
    replica.digest = digest
    run.wish = ""
    run.emit(
        events.ReplicaReady(
            replica=replica.replica, node=replica.node, host=replica.host, pid=replica.pid,
            start_s=run.now - replica.since_s,
        )  # fmt: skip
    )


def try_form(run: RunState) -> None:
    """Out of GATHERING as soon as enough are there."""
    ready = run.by_state(ReplicaState.READY)
    parked = run.by_state(ReplicaState.PARKED)
    have = len(ready) + len(parked)
    if have < run.settings.min_replicas or have == 0:
        run.gather_s = None
        return
    if run.generation is None and have < run.target:
        # A first start waits a little for the others: for those that warm up, and for settle_s.
        run.gather_s = run.now if run.gather_s is None else run.gather_s
        warming = bool(run.by_state(ReplicaState.WARMING))
        if run.now - run.gather_s < run.settings.settle_s * (10 if warming else 1):
            run.deadline = run.gather_s + run.settings.settle_s
            return
    forming.decide(run, parked)


def difference(ours: tuple[str, ...], theirs: tuple[str, ...], total: int, other_total: int) -> str:
    if total != other_total:
        return f"a loop of {other_total} steps, the others {total}"
    if ours == theirs:
        return ""
    missing, added = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
    return f"{added[:3] or 'nothing more'} where the others have {missing[:3] or 'nothing'}"
