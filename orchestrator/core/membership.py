"""Who belongs to the next generation, at which step, and who has to do what to get there.

One pure function, `choose`, called by `machine` once all survivors have reported. It is the place where a step is
rolled forward or done again (DESIGN.md §5, "Commit"), so its rules stand here in full:

1. The newest step any survivor has applied is history: others may have seen it. The generation starts there.
2. A survivor one step behind that holds the completely reduced gradient applies it (it voted only after its
   reduction was complete, and the step was applied by somebody, so everybody's reduction was complete).
3. Whoever holds neither, newcomers above all, fetches the state from those who do.
4. If nobody applied the step that was under way, all discard its reduction, keep the gradients of the shards they
   have computed, and compute only the shards that nobody holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.orchestrator.core.model import Replica
from everstep.policies.deal import deal, redeal


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The next membership, still without number and addresses."""

    step: int
    members: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    held: tuple[tuple[int, ...], ...]
    todo: tuple[tuple[int, ...], ...]
    sources: tuple[int, ...]
    fetch: tuple[int, ...]
    roll_forward: tuple[int, ...]
    vote: str
    dropped: tuple[int, ...]
    """Survivors that are not members any more."""
    state_lost: bool
    """No survivor holds any state although steps had been committed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Not enough replicas for a generation."""

    have: int
    need: int


def choose(
    *,
    survivors: Sequence[Replica],
    joiners: Sequence[Replica],
    target: int,
    min_replicas: int,
    logical_shards: int,
    step: int,
    total: int,
) -> Plan | Shortage:
    """The next membership.

    Args:
        survivors: who holds state of the run or was a member before its first step; in rank order, all parked.
        joiners: warm newcomers, oldest first; they are taken only as far as `target` asks for them.
        target: wished number of replicas.
        min_replicas: below this the run waits.
        logical_shards: V.
        step: the step the run stands at, as far as commits were reported.
        total: number of steps of the run; 0 while unknown.
    """
    holders = [r for r in survivors if not r.status.fresh]
    newest = max((r.status.applied for r in holders), default=0)
    staying = [r for r in survivors if not r.leaving]
    if total and newest >= total:
        members = list(survivors)  # nothing is left to train: everyone may only catch up
    else:
        members = _take(staying, survivors, joiners, target, min_replicas)
        if len(members) < min_replicas:
            return Shortage(have=len(members), need=min_replicas)
    return _plan(members, survivors, holders, newest, logical_shards, step)


def _take(
    staying: Sequence[Replica], survivors: Sequence[Replica], joiners: Sequence[Replica], target: int, low: int
) -> list[Replica]:
    """Members in rank order: those who stay, then newcomers; whoever wants to leave stays while it is needed."""
    members = list(staying[:target])
    members += joiners[: max(target - len(members), 0)]
    if len(members) < low:
        chosen = {r.replica for r in members}
        reluctant = [r for r in survivors if r.replica not in chosen]
        members += reluctant[: low - len(members)]
    return members


def _plan(
    members: Sequence[Replica],
    survivors: Sequence[Replica],
    holders: Sequence[Replica],
    newest: int,
    logical_shards: int,
    step: int,
) -> Plan:
    behind = {r.replica for r in holders if r.status.applied == newest - 1 and r.status.reduced}
    current = {r.replica for r in holders if r.status.applied == newest}
    has_state = current | behind
    ids = tuple(r.replica for r in members)
    if holders:
        fetch = tuple(i for i in ids if i not in has_state)
    else:  # the very first generation: whoever was initialized otherwise takes the state of the first
        fetch = tuple(r.replica for r in members if r.digest != members[0].digest)
    sources = tuple(sorted(current)) + tuple(sorted(behind)) if holders else ids[:1]
    kept = [_kept(r, newest, has_state) for r in members]
    held, todo, ranges = _shares(members, kept, logical_shards)
    return Plan(
        step=newest,
        members=ids,
        ranges=ranges,
        held=held,
        todo=todo,
        sources=sources,
        fetch=fetch,
        roll_forward=tuple(i for i in sorted(behind)),
        vote=next((r.status.vote for r in holders if r.status.applied == newest), ""),
        dropped=tuple(r.replica for r in survivors if r.replica not in set(ids)),
        state_lost=not holders and step > 0,
    )


def _kept(replica: Replica, newest: int, has_state: set[int]) -> tuple[int, ...]:
    """Shards of step `newest` whose gradient this member will hold without being asked again."""
    status = replica.status
    if replica.replica not in has_state or status.applied != newest:
        return ()
    return tuple(sorted({*status.kept, *((status.current,) if status.current >= 0 else ())}))


def _shares(
    members: Sequence[Replica], kept: Sequence[tuple[int, ...]], logical_shards: int
) -> tuple[tuple[tuple[int, ...], ...], tuple[tuple[int, ...], ...], tuple[tuple[int, int], ...]]:
    speeds = speeds_of(members)
    spans = deal(logical_shards, len(members), speeds)
    ranges = tuple((s.start, s.stop) for s in spans)
    if not any(kept):
        return tuple(() for _ in members), tuple(tuple(s) for s in spans), ranges
    return tuple(kept), redeal(logical_shards, kept, speeds), ranges


def speeds_of(members: Sequence[Replica]) -> list[float] | None:
    """Shards per second of each member, or None while any is unknown."""
    if any(r.compute_s <= 0.0 for r in members):
        return None
    speeds = [1.0 / r.compute_s for r in members]
    # Noise of a few percent must not move shards at every re-form.
    return speeds if max(speeds) > 1.25 * min(speeds) else None
