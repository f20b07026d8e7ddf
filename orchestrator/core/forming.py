"""From a choice of members to a standing generation: it is sent out, its connections form, joiners fetch."""

from __future__ import annotations

from everstep.actors import wire
from everstep.orchestrator import events
from everstep.orchestrator.core import ending
from everstep.orchestrator.core import model as m
from everstep.orchestrator.core.membership import Plan, Shortage, choose
from everstep.orchestrator.core.model import Phase, ReplicaState
from everstep.orchestrator.core.state import RunState
from everstep.policies.straggler import RebalanceState


def decide(run: RunState, survivors: list[m.Replica]) -> None:
    """All survivors are parked: choose the next generation and send it out, or wait for more replicas."""
    reform = run.reform
    if reform is not None:
        reform.parked_s = reform.parked_s or run.now
    for replica in survivors:
        run.move(replica, ReplicaState.PARKED)
    if run.stop_wanted:
        ending.end(run, "stopped", run.stop_wanted)
        return
    plan = choose(
        survivors=survivors,
        joiners=joiners(run, survivors),
        target=run.target,
        min_replicas=run.settings.min_replicas,
        logical_shards=run.settings.logical_shards,
        step=run.step,
        total=run.total,
    )
    if isinstance(plan, Shortage):
        wait_for_more(run, plan)
    else:
        send_out(run, plan)


def joiners(run: RunState, survivors: list[m.Replica]) -> list[m.Replica]:
    """Newcomers to take. After a failure the survivors go on at once; newcomers join at the next boundary."""
    ready = run.by_state(ReplicaState.READY)
    staying = sum(1 for r in survivors if not r.leaving)
    if run.phase is Phase.PARKING and staying >= run.settings.min_replicas:
        return []
    return [r for r in ready if not r.leaving]


def wait_for_more(run: RunState, shortage: Shortage) -> None:
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
    lost = 0
    if plan.state_lost:
        lost, run.history, run.step = run.step, run.history + 1, 0
        run.emit(events.StateLost(step=0))
    run.number += 1
    run.step = max(run.step, plan.step)
    generation = wire.Generation(
        number=run.number, incarnation=run.incarnation, history=run.history, step=plan.step,
        members=plan.members, ranges=plan.ranges, held=plan.held, todo=plan.todo, store=run.store,
        sources=tuple(run.replicas[i].transfer for i in plan.sources), fetch=plan.fetch,
        roll_forward=plan.roll_forward, vote=plan.vote if plan.roll_forward else "",
        final=bool(run.total) and plan.step >= run.total,
    )  # fmt: skip
    run.generation = generation
    run.counts["generations"] += 1
    run.fetching = set(plan.fetch)
    for i in plan.members:
        run.move(run.replicas[i], ReplicaState.MEMBER)
        run.replicas[i].heard_s = run.now
    let_go(run, plan)
    note_reform(run, plan, lost)
    run.enter(Phase.FORMING)
    run.awaited = set(plan.members)
    run.deadline = run.now + run.settings.form_timeout_s
    run.rebalance_state = RebalanceState()
    run.send(plan.members, wire.Form(generation=generation, memo=run.memo()))


def let_go(run: RunState, plan: Plan) -> None:
    """Survivors that are no members leave; at once, unless they alone hold what others must fetch."""
    serving = bool(plan.fetch) and not (set(plan.sources) & set(plan.members))
    run.kept_sources = set(plan.dropped) & set(plan.sources) if serving else set()
    if run.kept_sources:
        # They roll forward, if they must, and serve; the order tells them that they are no members.
        assert run.generation is not None
        run.send(tuple(run.kept_sources), wire.Form(generation=run.generation, memo=run.memo()))
    for i in plan.dropped:
        if i not in run.kept_sources:
            ending.release(run, run.replicas[i], run.replicas[i].leaving or "scaled down")


def note_reform(run: RunState, plan: Plan, lost: int) -> None:
    reform = run.reform
    assert run.generation is not None
    if reform is None:
        return
    reform.decided_s = run.now
    reform.generation_after = run.generation.number
    reform.world_size_after = len(plan.members)
    reform.step = plan.step
    reform.steps_lost += lost
    reform.rolled_forward = reform.rolled_forward or bool(plan.roll_forward)
    if not reform.planned:
        reform.shards_recomputed = sum(len(t) for t in plan.todo) if any(plan.held) else 0


def on_formed(run: RunState, event: wire.Formed) -> None:
    if run.phase is not Phase.FORMING or run.generation is None or event.generation != run.generation.number:
        return
    run.awaited.discard(event.replica)
    if run.awaited:
        return
    run.enter(Phase.RUNNING)
    run.deadline = None
    run.committed_s = run.last_commit_s = run.now
    run.durations = run.durations.restarted() if run.fetching else run.durations
    if run.reform is not None:
        run.reform.connected_s = run.now
    generation = run.generation
    run.emit(
        events.GenerationFormed(
            generation=generation.number, replicas=generation.members,
            nodes=tuple(run.replicas[i].node for i in generation.members if i in run.replicas),
            step=generation.step, reason=run.reform.cause if run.reform else "start",
            total=run.total or None,
        )  # fmt: skip
    )
    if generation.final:
        ending.close_reform(run)


def on_fetched(run: RunState, event: wire.Fetched) -> None:
    if run.generation is None or event.generation != run.generation.number:
        return
    run.fetching.discard(event.replica)
    if run.reform is not None:
        run.reform.num_bytes += event.num_bytes
        run.reform.transfer_s = max(run.reform.transfer_s, event.seconds)
    if not run.fetching:
        for i in run.kept_sources:
            if i in run.replicas:
                ending.release(run, run.replicas[i], run.replicas[i].leaving or "scaled down")
        run.kept_sources = set()
