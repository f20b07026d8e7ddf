"""The story of one change of membership, from its first sign to the next commit; it becomes one `Recovery` event.

Used by the parts of the protocol that stop generations and start them. Decides nothing.
"""

from __future__ import annotations

from everstep.orchestrator.core import model as m
from everstep.orchestrator.core.accounts import Reform
from everstep.orchestrator.core.membership import Plan
from everstep.orchestrator.core.model import Phase
from everstep.orchestrator.core.state import RunState


def begin(run: RunState, cause: str, blamed: m.Replica | None, *, planned: bool) -> None:
    """A generation is about to be stopped. What fails while a story is open belongs to it: one recovery, not many."""
    generation, reform = run.generation, run.reform
    assert generation is not None
    if reform is not None and (planned or not reform.planned):
        if blamed is not None and reform.replica is None:
            reform.replica, reform.node, reform.cause = blamed.replica, blamed.node, cause
        reform.parked_s = 0.0
        return
    run.reform = Reform(
        cause=cause, planned=planned, noticed_s=run.now, generation_before=generation.number,
        world_size_before=len(generation.members), replica=blamed.replica if blamed else None,
        node=blamed.node if blamed else "", step=run.step,
    )  # fmt: skip


def blame(run: RunState, replica: m.Replica, cause: str) -> None:
    """A survivor's failed collective may be heard of first; this is why it failed. Only the first to fail is to blame."""
    reform = run.reform
    if reform is not None and reform.replica is None:
        reform.replica, reform.node, reform.planned = replica.replica, replica.node, False
        reform.cause = f"replica {replica.replica} lost: {cause}"


def parked(run: RunState) -> None:
    """Everybody has reported."""
    if run.reform is not None:
        run.reform.parked_s = run.reform.parked_s or run.now


def decided(run: RunState, plan: Plan, lost: int) -> None:
    """The next generation is sent out. `lost`: committed steps that have to be done again."""
    reform, generation = run.reform, run.generation
    if reform is None or generation is None:
        return
    reform.decided_s = run.now
    reform.generation_after = generation.number
    reform.world_size_after = len(plan.members)
    reform.step = plan.step
    reform.steps_lost += lost
    reform.rolled_forward = reform.rolled_forward or bool(plan.roll_forward)
    if not reform.planned:
        reform.shards_recomputed = sum(len(t) for t in plan.todo) if any(plan.held) else 0


def close(run: RunState) -> None:
    """The first commit of the new generation ends the story of how it came about."""
    reform = run.reform
    if reform is None or run.phase not in (Phase.RUNNING, Phase.PAUSING) or not reform.connected_s:
        return  # nothing has come of it
    run.last_recovery = reform.closed(run.now)
    run.counts["recoveries"] += not reform.planned
    run.emit(run.last_recovery)
    run.reform = None
    if run.phase is Phase.PAUSING:  # the next change is wanted already, and its story begins here
        begin(run, run.pausing_for, None, planned=True)
    run.account()
