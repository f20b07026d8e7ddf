"""A controller that came back: it hears the replicas out before it decides anything.

What it must not do is go on with some while others, of which it knows nothing, go on without it. A replica's `Hello`
carries the newest generation it was told of, so two things are safe:

- Every member of the newest generation known is here: nobody can be in a newer one that trains, because that would
  have needed the state of at least one of them, and whoever gave it was told of that generation.
- A lease has passed: who has not come by then has stopped itself.
"""

from __future__ import annotations

from typing import Any

from everstep.actors import wire
from everstep.orchestrator import events
from everstep.orchestrator.core import ending, failing, gathering, training
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
    run.began_s = run.now
    run.phase = Phase.ADOPTING
    run.searching = event.search
    run.adopt = event
    run.expected = set(event.replicas)
    run.deadline = run.fenced_at = run.now + run.settings.adopt_timeout_s
    finish_adopting(run, force=not event.replicas)


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


def on_died(run: RunState, event: m.ReplicaDied) -> None:
    """One of them will not come."""
    run.expected.discard(event.replica)
    run.adopting.pop(event.replica, None)
    run.postponed.append(event)
    finish_adopting(run, force=False)


def on_tick(run: RunState, event: m.Tick) -> None:
    """Those that have not come by now are not waited for."""
    if run.deadline is not None and run.now >= run.deadline:
        finish_adopting(run, force=True)


def on_stop(run: RunState, event: m.Stop) -> None:
    run.postponed.append(event)
    if event.now:
        finish_adopting(run, force=True)


def postpone(run: RunState, event: m.CoreEvent) -> None:
    """It is looked at when it is known who is there."""
    run.postponed.append(event)


def finish_adopting(run: RunState, *, force: bool) -> None:
    newest = max(
        (h.generation for h in run.adopting.values() if h.generation is not None),
        key=lambda g: (g.incarnation, g.number), default=None,
    )  # fmt: skip
    all_here = newest is not None and all(i in run.adopting for i in newest.members)
    if run.expected and not all_here and not force:
        return
    hellos, run.adopting = run.adopting, {}
    memo = max((h.memo for h in hellos.values()), key=memo_age, default={})
    restore(run, memo, newest)
    run.emit(events.ControllerRestarted(incarnation=run.incarnation, replicas=tuple(sorted(hellos))))
    adopt_replicas(run, hellos, newest)
    adopt_absent(run, newest, all_here=all_here)
    adopt_history(run, hellos)
    resume(run, hellos, newest, all_here=all_here, memo=memo)


def restore(run: RunState, memo: dict[str, Any], newest: wire.Generation | None) -> None:
    run.generation = newest
    if newest is not None:
        run.number, run.history, run.first_number = newest.number, newest.history, newest.number
    if not memo:
        return
    run.target, run.next_id, run.stop_wanted = memo["target"], memo["next_id"], memo["stop"]
    if memo["history"] >= run.history:
        run.history, run.first_number = memo["history"], memo["first"]
    run.number = max(run.number, memo["number"])
    run.budget = RestartBudget.from_json(memo["budget"], run.settings.budget)
    run.relaunch_s = run.budget.retry_at_s
    run.excluded = set(memo["excluded"])
    run.user_errors = {(step, error) for step, error in memo["user_errors"]}
    run.counts.update(memo["counts"])
    run.began_s = memo["began_s"]
    run.clock.seconds.update(memo["seconds"])
    # Since the memo was written the run went on, for most of the time by training.
    run.clock.seconds["productive" if newest is not None else "idle"] += max(
        run.clock.since_s - memo["at_s"], 0.0
    )


def adopt_replicas(run: RunState, hellos: dict[int, wire.Hello], newest: wire.Generation | None) -> None:
    for i, hello in hellos.items():
        state = ReplicaState.READY if hello.ready else ReplicaState.WARMING
        if newest is not None and (i in newest.members or hello.transfer in newest.sources):
            state = ReplicaState.MEMBER
        replica = m.Replica(replica=i, state=state, since_s=run.now, status=hello.status)
        replica.heard_s = replica.moved_s = replica.warming_s = run.now
        order = hello.generation
        replica.void = order is not None and i in (*order.fetch, *order.restore) and (
            hello.status.fresh or hello.status.applied < order.step
        )  # fmt: skip
        if order is not None and i in order.fetch:
            replica.joined_step = order.step
        gathering.take_identity(run, replica, hello)
        run.add(replica)
        if hello.ready and run.reference is None:
            run.reference, run.total, run.announced = hello.signature, hello.total, hello.total
        if state is not ReplicaState.MEMBER and order is not None:
            ending.release(run, replica, "it belongs to a generation that is over")
        elif hello.node in run.excluded:
            run.mark_leaving(replica, f"node {hello.node} is being drained")
            if state is not ReplicaState.MEMBER:
                ending.release(run, replica, replica.leaving)


def adopt_absent(run: RunState, newest: wire.Generation | None, *, all_here: bool) -> None:
    """Replicas that exist, or did, and have not come."""
    for i in sorted(run.expected):
        # If all who may train are here, the others are newcomers that will find us; else they had their time.
        replica = m.Replica(replica=i, state=ReplicaState.LAUNCHED, since_s=run.now, heard_s=run.now)
        run.add(replica)
        if not all_here:
            ending.release(run, replica, "it did not come back to the restarted controller")
    died = {event.replica for event in run.postponed if isinstance(event, m.ReplicaDied)}
    for i in newest.members if newest is not None else ():
        if i not in run.replicas and i not in died:
            run.emit(events.ReplicaLost(replica=i, cause="lost while the controller was away"))
    for i in sorted(died):
        member = newest is not None and i in newest.members
        state = ReplicaState.MEMBER if member else ReplicaState.LAUNCHED
        gone = m.Replica(replica=i, state=state, since_s=run.now, broken=run.number if member else 0)
        run.unexplained[i] = gone
    run.expected = set()
    # Ids that were given out after the memo was written are not given out again.
    known = max((*run.replicas, *(newest.members if newest else ()), *died), default=-1)
    assert run.adopt is not None
    run.next_id = max(run.next_id, known + 1, run.adopt.next_id) + run.target + run.settings.spares


def adopt_history(run: RunState, hellos: dict[int, wire.Hello]) -> None:
    """Which steps were told already: those that are stored, or else those that no record is left of."""
    assert run.adopt is not None
    members = run.index[ReplicaState.MEMBER].values()
    run.reached = max((r.status.applied for r in members if r.holds_state), default=0)
    records = [r for h in hellos.values() for r in h.records if h.replica in run.index[ReplicaState.MEMBER]]
    told = run.adopt.step
    if told is None:
        # Whoever is applying a step at this moment has no record of it yet: begin with the newest record there is.
        known = {r.step for r in records if r.history == run.history}
        told = max(known, default=run.reached - 1) + 1
        while told - 1 in known:
            told -= 1
    elif run.adopt.history < run.history:
        told = 0
        for _ in range(run.adopt.history, run.history):
            run.emit(events.StateLost(step=0))
    run.history = max(run.history, run.adopt.history)
    run.step = told
    if run.durable_step is not None:
        run.durable_step = told if run.adopt.step is not None else 0
    training.take_records(run, records)


def resume(
    run: RunState,
    hellos: dict[int, wire.Hello],
    newest: wire.Generation | None,
    *,
    all_here: bool,
    memo: dict[str, Any],
) -> None:
    run.deadline = None
    run.last_commit_s = run.now
    if memo.get("outcome"):
        ending.end(run, memo["outcome"], memo["reason"])
        return
    died = [event for event in run.postponed if isinstance(event, m.ReplicaDied)]
    all_known = all(event.failure not in failing.MAY_LIVE_ON for event in died)
    if newest is None and not memo.get("number") and not run.step and all_known:
        run.fenced_at = (
            0.0  # there has been no generation yet: nobody is left behind a cut link who could be in one
        )
    if newest is None:
        run.enter(Phase.GATHERING)
        return
    at_ease = all_here and all(
        not hellos[i].faulted and hellos[i].status.generation == newest.number for i in newest.members
    )
    if at_ease:
        run.enter(Phase.RUNNING)
        for replica in run.by_state(ReplicaState.MEMBER):
            if replica.replica not in newest.members:
                ending.release(run, replica, "it has served the state")
        return
    failing.park(
        run,
        "re-formed after the controller came back" if all_here else "replicas were lost while the controller was away",
        None, planned=all_here,
    )  # fmt: skip
    run.explained = True


def memo_age(memo: dict[str, Any]) -> tuple[int, int]:
    return (int(memo.get("incarnation", 0)), int(memo.get("version", 0)))
