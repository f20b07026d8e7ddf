"""A controller that came back: it hears all replicas out before it decides anything."""

from __future__ import annotations

from typing import Any

from everstep.actors import wire
from everstep.orchestrator import events
from everstep.orchestrator.core import failing, gathering, training
from everstep.orchestrator.core import model as m
from everstep.orchestrator.core.accounts import Clock
from everstep.orchestrator.core.model import Phase, ReplicaState
from everstep.orchestrator.core.state import RunState
from everstep.policies.budget import RestartBudget


def on_adopt(run: RunState, event: m.Adopt) -> None:
    """The first event of a controller that came back."""
    run.started = True
    run.incarnation = event.incarnation
    run.clock = Clock(since_s=run.now)
    run.phase = Phase.ADOPTING
    run.expected = set(event.replicas)
    run.deadline = run.now + run.settings.adopt_timeout_s
    run.next_id = max(event.replicas, default=-1) + 1
    finish_adopting(run, force=False)


def on_hello(run: RunState, event: wire.Hello) -> None:
    """One of them has found us."""
    run.adopting[event.replica] = event
    run.send((event.replica,), wire.Welcome(incarnation=run.incarnation, known_step=0))
    run.expected.discard(event.replica)
    finish_adopting(run, force=False)


def on_beat(run: RunState, event: wire.Beat) -> None:
    """Its lease must not end while we wait for the others."""
    if event.replica in run.adopting:
        run.send((event.replica,), wire.Ack(seq=event.seq, known_step=0))


def on_committed(run: RunState, event: wire.Committed) -> None:
    """Training goes on meanwhile."""
    run.records[event.record.step] = event.record


def on_died(run: RunState, event: m.ReplicaDied) -> None:
    """One of them will not come."""
    run.expected.discard(event.replica)
    run.adopting.pop(event.replica, None)
    finish_adopting(run, force=False)


def on_tick(run: RunState, event: m.Tick) -> None:
    """Those that have not come by now are not waited for."""
    if run.deadline is not None and run.now >= run.deadline:
        finish_adopting(run, force=True)


def finish_adopting(run: RunState, *, force: bool) -> None:
    if run.expected and not force:
        return
    hellos = run.adopting
    restore(run, max((h.memo for h in hellos.values()), key=memo_age, default={}))
    newest = max(
        (h.generation for h in hellos.values() if h.generation is not None), key=lambda g: g.number, default=None
    )
    adopt_replicas(run, newest)
    for i in run.expected:
        run.out.append(m.Kill(replica=i, reason="did not come back to the restarted controller"))
    run.expected = set()
    run.deadline = None
    run.emit(events.ControllerRestarted(incarnation=run.incarnation, replicas=tuple(sorted(hellos))))
    resume_after_adoption(run, newest)


def restore(run: RunState, memo: dict[str, Any]) -> None:
    if not memo:
        return
    run.target = memo["target"]
    run.next_id = max(run.next_id, memo["next_id"])
    run.history, run.number = memo["history"], memo["number"]
    run.budget = RestartBudget.from_json(memo["budget"], run.settings.budget)
    run.excluded = set(memo["excluded"])
    run.clock.seconds.update(memo["seconds"])
    run.counts.update(memo["counts"])


def adopt_replicas(run: RunState, newest: wire.Generation | None) -> None:
    members = set(newest.members) if newest else set()
    for i, hello in run.adopting.items():
        member = i in members or not hello.status.fresh
        state = (
            ReplicaState.MEMBER if member else ReplicaState.READY if hello.ready else ReplicaState.WARMING
        )
        replica = m.Replica(replica=i, state=state, since_s=run.now, status=hello.status)
        replica.heard_s = replica.moved_s = run.now
        run.add(replica)
        gathering.take_identity(run, replica, hello)
        if hello.signature and run.reference is None:
            run.reference, run.total = hello.signature, hello.total
    run.number = max([run.number, newest.number if newest else 0])
    run.generation = newest
    if newest is not None:
        run.history = max(run.history, newest.history)
        run.step = newest.step
    known = [h.status.applied for h in run.adopting.values() if not h.status.fresh]
    records = [r for h in run.adopting.values() for r in h.records] + list(run.records.values())
    run.records = {}
    # Steps whose records were acknowledged to the former controller are in its log already.
    oldest = min((r.step for r in records if r.history == run.history), default=max(known, default=0))
    run.step = max(run.step, oldest)
    training.take_records(run, records)


def resume_after_adoption(run: RunState, newest: wire.Generation | None) -> None:
    run.committed_s = run.last_commit_s = run.now
    if newest is None:
        run.enter(Phase.GATHERING)
        return
    here = {h.replica: h for h in run.adopting.values()}
    whole = all(i in here for i in newest.members) and len(newest.members) > 0
    at_ease = whole and all(
        not here[i].faulted and here[i].status.generation == newest.number for i in newest.members
    )
    run.adopting = {}
    if at_ease:
        run.enter(Phase.RUNNING)
        return
    run.number = max(run.number, newest.number)
    failing.park(run, "replicas were lost while the controller was away" if not whole else "re-formed after the "
               "controller came back", None, planned=False)  # fmt: skip


def memo_age(memo: dict[str, Any]) -> tuple[int, int]:
    return (int(memo.get("incarnation", 0)), int(memo.get("version", 0)))
