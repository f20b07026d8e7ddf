"""Before a generation: replicas are launched, say hello, warm up, and as soon as enough are there, form one."""

from __future__ import annotations

from itertools import islice

from everstep.actors import wire
from everstep.orchestrator import events
from everstep.orchestrator.core import ending, failing, forming, training
from everstep.orchestrator.core import model as m
from everstep.orchestrator.core.model import Phase, ReplicaState
from everstep.orchestrator.core.state import RunState
from everstep.policies.budget import FailureClass

_PEERS = 3
"""Members that a newcomer is told of; one that answers is enough."""
_NEWCOMERS = frozenset({ReplicaState.LAUNCHED, ReplicaState.WARMING, ReplicaState.READY})


def launch_missing(run: RunState) -> None:
    missing = run.target + run.settings.spares - run.pool_size()
    if missing <= 0 or run.now < run.relaunch_s or run.all_done() or run.stop_wanted:
        return
    if run.unexplained:
        return  # what became of those that vanished decides how long to wait
    avoid = tuple(sorted(run.excluded))
    for _ in range(missing):
        replica = m.Replica(
            replica=run.next_id, state=ReplicaState.LAUNCHED, since_s=run.now, heard_s=run.now
        )
        run.add(replica)
        run.next_id += 1
        run.out.append(m.Launch(replica=replica.replica, avoid_nodes=avoid))
        run.emit(events.ReplicaLaunched(replica=replica.replica))


def on_hello(run: RunState, event: wire.Hello) -> None:
    replica = run.replicas.get(event.replica)
    if replica is None or replica.state is ReplicaState.RELEASED:
        # Given up, released, or of another life: it is fenced already, and now it hears so.
        run.send((event.replica,), wire.Release(reason="this replica is not part of the run any more"))
        return
    if replica.state in _NEWCOMERS and event.generation is not None:
        # It was in a generation that this controller knows nothing of, and others have gone on without it.
        ending.release(run, replica, "it belongs to a generation that is over")
        return
    take_identity(run, replica, event)
    members = islice(run.index[ReplicaState.MEMBER].values(), _PEERS)
    peers = tuple(r.transfer for r in members) if replica.state in _NEWCOMERS else ()
    welcome = wire.Welcome(incarnation=run.incarnation, known_step=run.known_step(), peers=peers)
    run.send((event.replica,), welcome)
    run.send((event.replica,), wire.Keep(memo=run.memo()))
    if replica.state is ReplicaState.LAUNCHED:
        run.move(replica, ReplicaState.WARMING)
        replica.warming_s = replica.moved_s = run.now
    if event.node in run.excluded:
        run.mark_leaving(replica, f"node {event.node} is being drained")
    if replica.state in _NEWCOMERS:
        if replica.leaving:
            ending.release(run, replica, replica.leaving)
        elif event.ready and replica.state is ReplicaState.WARMING:
            warm(run, replica, event.signature, event.digest, event.total)
        return
    training.take_records(run, event.records)
    repeat_orders(run, replica, event)


def take_identity(run: RunState, replica: m.Replica, event: wire.Hello) -> None:
    replica.node, replica.host, replica.pid = event.node, event.host, event.pid
    replica.transfer, replica.digest = event.transfer, event.digest
    replica.heard_s = run.now


def repeat_orders(run: RunState, replica: m.Replica, event: wire.Hello) -> None:
    """The connection was lost and is back: say again what may not have arrived, hear again what was not heard."""
    generation = run.generation
    if generation is not None and replica.replica in run.kept_sources and event.generation != generation:
        run.send(
            (replica.replica,), wire.Form(generation=generation, memo=run.memo())
        )  # it has to serve the state
    if generation is None or replica.state is not ReplicaState.MEMBER:
        return
    if run.phase is Phase.PARKING and replica.replica in run.awaited:
        run.send((replica.replica,), failing.abort_message(run))
    elif run.phase is Phase.FORMING:
        # It may have entered already and still be connecting; if its connections stand, it says so again.
        run.send((replica.replica,), wire.Form(generation=generation, memo=run.memo()))
    elif event.faulted and (run.phase is Phase.RUNNING or replica.replica in run.awaited):
        # A collective failed, or it parked at a boundary; what it said about that is lost.
        cause = f"replica {replica.replica} could not go on after its connection was lost"
        failing.park(run, cause, None, planned=run.phase is Phase.PAUSING)
    elif run.phase is Phase.PAUSING and replica.replica in run.awaited:
        run.send((replica.replica,), wire.Pause(generation=generation.number, incarnation=run.incarnation))


def on_ready(run: RunState, event: wire.Ready) -> None:
    replica = run.replicas.get(event.replica)
    if replica is not None and replica.state is ReplicaState.WARMING:
        warm(run, replica, event.signature, event.digest, event.total)


def warm(run: RunState, replica: m.Replica, signature: tuple[str, ...], digest: str, total: int) -> None:
    if run.reference is None:
        run.reference, run.total, run.announced = signature, total, total
    problem = difference(run.reference, signature, run.announced, total)
    if problem:
        text = f"replica {replica.replica} on {replica.host} registered other state than its peers: {problem}"
        run.emit(events.UserError(replica=replica.replica, step=run.step, error=f"StateMismatch: {text}"))
        if run.generation is None:
            ending.end(run, "failed", f"StateMismatch: {text}")
        else:
            ending.release(run, replica, text)
            failing.charge(run, FailureClass.UNKNOWN, replica.replica, text, newcomer=True)
        return
    run.move(replica, ReplicaState.READY)
    replica.digest = digest
    run.emit(
        events.ReplicaReady(
            replica=replica.replica,
            node=replica.node,
            host=replica.host,
            pid=replica.pid,
            start_s=run.now - replica.since_s,
        )
    )


def try_form(run: RunState) -> None:
    """Out of GATHERING as soon as enough are there."""
    if run.stop_wanted:
        ending.end(run, "stopped", run.stop_wanted)
        return
    if run.all_finished():
        ending.finish(run)
        return
    have = len(run.index[ReplicaState.READY]) + len(run.index[ReplicaState.PARKED])
    run.deadline = None
    if have < max(run.settings.min_replicas, 1) and not run.all_done():
        run.gather_s = None
        return
    if run.generation is None and have < run.target:
        # A first start waits a little for the others: for those that warm up, and for settle_s.
        run.gather_s = run.now if run.gather_s is None else run.gather_s
        until = run.gather_s + run.settings.settle_s * (10 if run.index[ReplicaState.WARMING] else 1)
        if run.now < until:
            run.deadline = until
            return
    forming.decide(run, run.by_state(ReplicaState.PARKED))


def difference(ours: tuple[str, ...], theirs: tuple[str, ...], total: int, other_total: int) -> str:
    if total != other_total:
        return f"a loop of {other_total} steps, the others {total}"
    if ours == theirs:
        return ""
    missing, added = sorted(set(ours) - set(theirs)), sorted(set(theirs) - set(ours))
    return f"{added[:3] or 'nothing more'} where the others have {missing[:3] or 'nothing'}"
