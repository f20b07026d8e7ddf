"""From a choice of members to a standing generation: it is sent out, its connections form, joiners fetch."""

from __future__ import annotations

import math

from everstep.actors import wire
from everstep.orchestrator import events
from everstep.orchestrator.core import ending, reforms
from everstep.orchestrator.core import model as m
from everstep.orchestrator.core.membership import Plan, Shortage, choose, newest_step
from everstep.orchestrator.core.model import Phase, ReplicaState
from everstep.orchestrator.core.state import RunState
from everstep.policies.straggler import RebalanceState


def decide(run: RunState, survivors: list[m.Replica]) -> None:
    """All survivors are parked: choose the next generation and send it out, or wait for more replicas."""
    if not run.stop_wanted and not may_go_on(run):
        return
    reforms.parked(run)
    newest = newest_step(survivors)
    run.reached = newest or 0
    promised = run.generation is not None and any(r.replica in run.generation.members for r in survivors)
    if newest is None:
        survivors = without_void(run, survivors)
    if run.stop_wanted:
        ending.end(run, "stopped", run.stop_wanted)
        return
    if newest is None and run.searching:
        if run.phase is not Phase.GATHERING:
            wait_for_more(run, survivors, Shortage(have=len(survivors), need=run.settings.min_replicas))
        return
    if newest is None and run.now < run.fenced_at and not promised:
        # Nobody here holds the state. Those who held it might go on with it, all together, where we do not see them.
        wait_for_more(run, survivors, Shortage(have=len(survivors), need=run.settings.min_replicas))
        run.deadline = run.fenced_at
        return
    plan = choose(
        survivors=survivors,
        joiners=joiners(run, survivors),
        target=run.target,
        min_replicas=run.settings.min_replicas,
        logical_shards=run.settings.logical_shards,
        state_known=run.step > run.first_step,
        checkpoint_step=run.checkpoint_step,
        total=run.total,
        transfer_s=run.transfer_s,
    )
    if isinstance(plan, Shortage):
        wait_for_more(run, survivors, plan)
    else:
        send_out(run, plan)


def may_go_on(run: RunState) -> bool:
    """Is this the moment to send a generation out? If not, a later event or tick asks again.

    Where everybody is alive and yet it was stopped without anybody's wish, the same may happen again at once: the
    budget bounds how often in a row, and from the second time on there is a pause before the next try.
    """
    if not run.explained:
        run.explained = True
        verdict = run.budget.recover()
        if not verdict.allowed:
            cause = run.reform.cause if run.reform is not None else ""
            ending.end(run, "failed", f"BudgetExhausted: {verdict.reason}; the last: {cause}")
            return False
        tries = run.budget.recoveries
        if tries > 1:
            limits = run.settings.budget
            pause_s = min(limits.back_off_s * 2.0 ** min(tries - 2, 16), limits.back_off_cap_s)
            run.hold_until = run.deadline = run.now + pause_s
    return run.now >= run.hold_until and run.store[1] != 0


def without_void(run: RunState, survivors: list[m.Replica]) -> list[m.Replica]:
    """Nobody holds state. Who was fetching when the last source was lost has not even its initial state any more."""
    for replica in survivors:
        if replica.void:
            ending.release(run, replica, "the state it was fetching is lost")
    return [r for r in survivors if not r.void]


def joiners(run: RunState, survivors: list[m.Replica]) -> list[m.Replica]:
    """Newcomers to take. After a failure the survivors go on at once; newcomers join at the next boundary."""
    if run.phase is Phase.PARKING:
        staying = sum(not r.leaving for r in survivors)
        if staying >= run.settings.min_replicas:
            return []
    return [r for r in run.by_state(ReplicaState.READY) if not r.leaving]


def wait_for_more(run: RunState, survivors: list[m.Replica], shortage: Shortage) -> None:
    for replica in survivors:
        run.move(replica, ReplicaState.PARKED)
    if run.phase is not Phase.GATHERING:
        run.enter(Phase.GATHERING)
    run.deadline = None
    if run.waiting_since is None:
        run.waiting_since = run.now
        run.emit(events.Waiting(replicas=shortage.have, min_replicas=shortage.need))


def send_out(run: RunState, plan: Plan) -> None:
    if run.waiting_since is not None:
        run.emit(events.Resumed(replicas=len(plan.members), waited_s=run.now - run.waiting_since))
        run.waiting_since = None
    run.number += 1
    lost = run.step - plan.step
    if plan.state_lost:
        run.history, run.first_number = run.history + 1, run.number
        run.begin_at(plan.step)
        run.total = run.announced
        run.records.clear()
        run.emit(events.StateLost(step=plan.step))
    elif plan.restore:
        run.begin_at(plan.step)
    if plan.restore:
        run.emit(events.CheckpointUsed(step=plan.step, finished=plan.final))
    run.reached = plan.step
    if not plan.final:
        # Whoever had finished is gone, and its last steps with it: without ordered reduction they may come out otherwise.
        run.value, run.digest, run.value_problem = None, "", ""
    generation = wire.Generation(
        number=run.number,
        incarnation=run.incarnation,
        history=run.history,
        step=plan.step,
        members=plan.members,
        ranges=plan.ranges,
        held=plan.held,
        todo=plan.todo,
        store=run.store,
        sources=tuple(run.replicas[i].transfer for i in plan.sources),
        fetch=plan.fetch,
        roll_forward=plan.roll_forward,
        vote=plan.vote,
        final=plan.final,
        restore=plan.restore,
    )
    run.generation = generation
    run.counts["generations"] += 1
    for i in plan.members:
        run.move(run.replicas[i], ReplicaState.MEMBER)
    for i in plan.kept:
        run.move(run.replicas[i], ReplicaState.PARKED)
    run.fetching = {*plan.fetch, *plan.restore}
    for i in run.fetching:
        run.replicas[i].void = True
        run.replicas[i].joined_step = plan.step
    run.enter(Phase.FORMING)
    run.awaited = set(plan.members)
    run.deadline = run.now + run.settings.form_timeout_s
    run.rebalance_state = RebalanceState()
    run.send((*plan.members, *plan.kept), wire.Form(generation=generation, memo=run.memo()))
    let_go(run, plan)
    reforms.decided(run, plan, max(lost, 0))


def let_go(run: RunState, plan: Plan) -> None:
    """Survivors that are no members leave; at once, unless they alone hold what others must fetch."""
    run.kept_sources = set(plan.kept)
    for i in plan.dropped:
        if i not in run.kept_sources:
            ending.release(run, run.replicas[i], run.replicas[i].leaving or "scaled down")


def on_formed(run: RunState, event: wire.Formed) -> None:
    if (
        run.phase is Phase.FORMING
        and run.generation is not None
        and event.generation == run.generation.number
    ):
        run.awaited.discard(event.replica)


def formed(run: RunState) -> None:
    """All connections stand."""
    generation = run.generation
    assert generation is not None
    run.enter(Phase.RUNNING)
    run.deadline = None
    run.last_commit_s = run.now
    # Whoever fetches has its first steps before it, also if it holds the state by now.
    run.durations = run.durations.restarted() if generation.fetch or generation.restore else run.durations
    if run.reform is not None:
        run.reform.connected_s = run.now
    run.emit(
        events.GenerationFormed(
            generation=generation.number,
            replicas=generation.members,
            nodes=tuple(run.replicas[i].node for i in generation.members if i in run.replicas),
            step=generation.step,
            reason=run.reform.cause if run.reform else "start",
            total=run.total or None,
        )
    )
    if generation.final:
        reforms.close(run)


def on_fetched(run: RunState, event: wire.Fetched) -> None:
    """A joiner holds the state now. While the generation is being stopped its `Parked` says what it holds, not this."""
    generation, replica = run.generation, run.replicas.get(event.replica)
    if generation is None or event.generation != generation.number or run.phase is Phase.PARKING:
        return
    if replica is None or event.replica not in run.fetching:
        return
    replica.void = False
    run.fetching.discard(event.replica)
    run.transfer_s = event.seconds if 0.0 < event.seconds < math.inf else run.transfer_s
    if run.reform is not None:
        run.reform.num_bytes += event.num_bytes
        run.reform.transfer_s = max(run.reform.transfer_s, event.seconds)
    if not run.fetching:
        all_fetched(run)


def all_fetched(run: RunState) -> None:
    """Nobody needs those any more that only served the state."""
    for i in run.fetching:
        if i in run.replicas:
            run.replicas[i].void = False
    run.fetching = set()
    kept, run.kept_sources = run.kept_sources, set()
    for i in kept:
        if i in run.replicas:
            ending.release(run, run.replicas[i], run.replicas[i].leaving or "scaled down")
    if run.phase in (Phase.RUNNING, Phase.PAUSING):
        run.account()
