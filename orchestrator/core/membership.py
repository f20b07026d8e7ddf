"""Who belongs to the next generation, at which step, and who has to do what to get there.

One pure function, `choose`, called by `forming` once all survivors have reported. It is the place where a step is
rolled forward or done again (DESIGN.md §5, "Commit"), so its rules stand here in full:

1. The newest step any survivor has applied is history: others may have seen it. The generation starts there.
2. A survivor one step behind that holds the completely reduced gradient applies it (it voted only after its
   reduction was complete, and the step was applied by somebody, so everybody's reduction was complete). It needs the
   vote's result for that; where nobody who saw it is left, it fetches the state instead.
3. Whoever holds neither, newcomers above all, fetches the state from those who do.
4. If nobody applied the step that was under way, all discard its reduction, keep the gradients of the shards they
   have computed, and compute only the shards that nobody holds.
5. After the last step nothing is trained: whoever holds the result, or can roll forward to it, is a member of the
   final generation. Nobody fetches there, because who is done serves no more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from everstep.orchestrator.core.model import Replica
from everstep.policies.deal import deal, redeal

MAX_SOURCES = 32
"""Replicas that serve a state at the same time; a joiner talks to all of them at once."""

_Shards = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The next membership, still without number and addresses."""

    step: int
    members: tuple[int, ...]
    ranges: tuple[tuple[int, int], ...]
    held: _Shards
    todo: _Shards
    sources: tuple[int, ...]
    """Who serves the state; empty when nobody must fetch it."""
    fetch: tuple[int, ...]
    roll_forward: tuple[int, ...]
    vote: str
    dropped: tuple[int, ...]
    """Survivors that are not members any more."""
    kept: tuple[int, ...]
    """Those of them that alone hold the state, and must serve it first."""
    state_lost: bool
    """No survivor holds any state although steps had been committed."""
    final: bool
    restore: tuple[int, ...] = ()
    """Who reads the state from storage."""
    """The last step is history."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Not enough replicas for a generation."""

    have: int
    need: int


def newest_step(survivors: Sequence[Replica]) -> int | None:
    """Steps applied to the newest state that any of them holds; None if nobody holds any."""
    return max((r.status.applied for r in survivors if r.holds_state), default=None)


def choose(
    *,
    survivors: Sequence[Replica],
    joiners: Sequence[Replica],
    target: int,
    min_replicas: int,
    logical_shards: int,
    state_known: bool,
    total: int,
    transfer_s: float = 0.0,
    checkpoint_step: int = 0,
) -> Plan | Shortage:
    """The next membership.

    Args:
        survivors: who holds state of the run or was a member before its first step; in rank order, all parked.
        joiners: warm newcomers, oldest first; they are taken only as far as `target` asks for them.
        target: wished number of replicas.
        min_replicas: below this the run waits.
        logical_shards: V.
        state_known: at least one step was committed.
        total: number of steps of the run; 0 while unknown.
        transfer_s: what the last transfer of the state took; 0 while unknown.
        checkpoint_step: steps in the newest whole checkpoint, for when nobody holds the state; 0: there is none.
    """
    holders = [r for r in survivors if r.holds_state]
    if not holders:
        members = _take(survivors, joiners, min(target, logical_shards), min_replicas)
        if len(members) < max(min_replicas, 1):
            return Shortage(have=len(members), need=max(min_replicas, 1))
        return _from_storage(survivors, members, logical_shards, state_known, total, checkpoint_step)
    newest = max(r.status.applied for r in holders)
    current = [r for r in holders if r.status.applied == newest]
    vote = next((r.status.vote for r in current if r.status.vote), "")
    # Without the vote's result nobody can roll forward. Mostly nobody is behind, and in a large run each look at all costs.
    late = len(current) < len(holders)
    behind = [r for r in holders if late and vote and r.status.applied == newest - 1 and r.status.reduced]
    holding = {r.replica for r in current}
    holding.update(r.replica for r in behind)
    final = bool(total) and newest >= total
    if final:
        members = [r for r in survivors if r.replica in holding]
    else:
        members = _take(survivors, joiners, min(target, logical_shards), min_replicas)
        if len(members) < min_replicas:
            return Shortage(have=len(members), need=min_replicas)
    ids = tuple(r.replica for r in members)
    inside = set(ids)
    fetch = tuple(i for i in ids if i not in holding)
    kept = tuple(r.replica for r in current)[:MAX_SOURCES] if fetch and not inside & holding else ()
    serving = tuple(r.replica for r in (*current, *behind) if r.replica in inside)
    roll_forward = tuple(r.replica for r in behind if r.replica in inside)
    # A step late, with or without the reduced gradient: the loop there has not heard that step's metrics.
    told = late and any(r.holds_state and r.status.applied < newest for r in members)
    if final:
        nothing: _Shards = tuple(() for _ in ids)
        held, todo, ranges = nothing, nothing, tuple((0, 0) for _ in ids)
    else:
        kept_shards = _kept(members, newest, holding, logical_shards)
        held, todo, ranges = _shares(members, kept_shards, set(fetch), logical_shards, transfer_s)
    return Plan(
        step=newest, members=ids, ranges=ranges, held=held, todo=todo, fetch=fetch,
        sources=(kept or serving[:MAX_SOURCES]) if fetch else (),
        roll_forward=roll_forward, vote=vote if told else "",
        dropped=tuple(r.replica for r in survivors if r.replica not in inside),
        kept=kept, state_lost=False, final=final,
    )  # fmt: skip


def _from_storage(
    survivors: Sequence[Replica],
    members: Sequence[Replica],
    logical_shards: int,
    state_known: bool,
    total: int,
    checkpoint_step: int,
) -> Plan:
    """Nobody holds the state: it is the very first generation, or all was lost. The first member's state is that of the
    newest checkpoint, or else its initial one, and the others have it from there."""
    ids = tuple(r.replica for r in members)
    if checkpoint_step:
        fetch = ids[1:]
    else:
        fetch = tuple(r.replica for r in members if r.digest != members[0].digest)
    final = bool(total) and checkpoint_step >= total
    held, todo, ranges = _shares(members, [() for _ in members], set(), logical_shards, 0.0)
    if final:
        held, todo, ranges = tuple(() for _ in ids), tuple(() for _ in ids), tuple((0, 0) for _ in ids)
    return Plan(
        step=checkpoint_step, members=ids, ranges=ranges, held=held, todo=todo, fetch=fetch,
        sources=tuple(i for i in ids if i not in fetch)[:MAX_SOURCES] if fetch else (),
        roll_forward=(), vote="", dropped=tuple(r.replica for r in survivors if r.replica not in set(ids)),
        kept=(), state_lost=state_known, final=final, restore=ids[:1] if checkpoint_step else (),
    )  # fmt: skip


def _take(survivors: Sequence[Replica], joiners: Sequence[Replica], target: int, low: int) -> list[Replica]:
    """Members in rank order: those who stay, then newcomers; whoever wants to leave stays while it is needed."""
    members = [r for r in survivors if not r.leaving][:target]
    members += joiners[: max(target - len(members), 0)]
    if len(members) < low:
        chosen = {r.replica for r in members}
        reluctant = [r for r in survivors if r.replica not in chosen]
        members += reluctant[: low - len(members)]
    return members


def _kept(
    members: Sequence[Replica], newest: int, holding: set[int], logical_shards: int
) -> list[tuple[int, ...]]:
    """Per member the shards of step `newest` whose gradient it will hold without being asked again."""
    kept: list[tuple[int, ...]] = []
    for replica in members:
        status = replica.status
        if status.applied != newest or replica.replica not in holding:
            kept.append(())
        else:
            kept.append(status.kept if status.current < 0 else (*status.kept, status.current))
    every = [shard for shards in kept for shard in shards]
    if len(set(every)) == len(every) and (not every or 0 <= min(every) <= max(every) < logical_shards):
        return kept
    # Two hold one shard, or one that does not exist. It cannot be, but a replica's word must not stop the controller.
    left = set(range(logical_shards))
    for rank, shards in enumerate(kept):
        kept[rank] = tuple(sorted(left.intersection(shards)))
        left.difference_update(shards)
    return kept


def _shares(
    members: Sequence[Replica],
    kept: Sequence[tuple[int, ...]],
    fetch: set[int],
    logical_shards: int,
    transfer_s: float,
) -> tuple[_Shards, _Shards, tuple[tuple[int, int], ...]]:
    """(held, todo, ranges): who keeps and who computes which shards in the first step, and in all later ones."""
    spans = deal(logical_shards, len(members), speeds_of(members))
    ranges = tuple((s.start, s.stop) for s in spans)
    able = [rank for rank, r in enumerate(members) if r.replica not in fetch]
    missing = logical_shards - sum(map(len, kept))
    if not able or not worth_hiding(members, len(able), missing, transfer_s):
        able = list(range(len(members)))
    speeds = speeds_of([members[rank] for rank in able])
    if any(kept):
        parts = redeal(logical_shards, [kept[rank] for rank in able], speeds)
    else:
        parts = tuple(tuple(s) for s in deal(logical_shards, len(able), speeds))
    todo: list[tuple[int, ...]] = [()] * len(members)
    for rank, part in zip(able, parts, strict=True):
        todo[rank] = part
    return tuple(kept), tuple(todo), ranges


def worth_hiding(members: Sequence[Replica], num_able: int, num_shards: int, transfer_s: float) -> bool:
    """Whether a step is done sooner when those who fetch the state compute nothing of it: the transfer is hidden behind
    the others' computation then, but they have more of that. Joiners hold the last ranks, so the smaller shares."""
    known = [r.compute_s for r in members if r.compute_s > 0.0]
    if not known or not transfer_s:
        return False
    shard_s, size = sum(known) / len(known), len(members)
    with_them_s = max(-(-num_shards // size) * shard_s, transfer_s + num_shards // size * shard_s)
    without_s = max(transfer_s, -(-num_shards // num_able) * shard_s)
    return without_s < with_them_s


def speeds_of(members: Sequence[Replica]) -> list[float] | None:
    """Shards per second of each member, or None while any is unknown."""
    seconds = [r.compute_s for r in members]
    slowest, fastest = max(seconds), min(seconds)
    # Noise of a few percent must not move shards at every re-form; but whatever the straggler policy asks to deal anew
    # (15 % less compute time, so one at least 1 / 0.85 times as slow as another) must be dealt anew.
    if fastest <= 0.0 or slowest <= 1.1 * fastest:
        return None
    return [1.0 / s for s in seconds]
