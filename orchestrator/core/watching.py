"""What the passing of time means: silence, missed deadlines, hangs. Called with every `Tick`."""

from __future__ import annotations

import math

from everstep.orchestrator.core import checkpointing, ending, failing, training
from everstep.orchestrator.core import model as m
from everstep.orchestrator.core.model import OVER, Phase, ReplicaState
from everstep.orchestrator.core.state import RunState
from everstep.policies.budget import FailureClass
from everstep.policies.hang import HangDeadline

_CLASSIFY_S = 30.0
"""How long a vanished process may wait for Ray to say why, before it counts as unknown."""
_HEARD = frozenset({ReplicaState.MEMBER, ReplicaState.PARKED, ReplicaState.READY})
"""Replicas whose heartbeats are waited for. While it warms up, imports may keep a process from beating for long."""
_WAITS = frozenset({"reduce", "wait", "done"})
"""Phases of the training thread (`Member.moved`) in which it waits for others."""


def on_tick(run: RunState, event: m.Tick) -> None:
    forgive_own_pause(run)
    if run.phase in OVER:
        if run.phase is Phase.ENDING and run.deadline is not None and run.now >= run.deadline:
            ending.force(run)
        return
    expire_silent(run)
    expire_unexplained(run)
    checkpointing.expire(run)
    if run.phase in (Phase.PARKING, Phase.FORMING):
        if run.deadline is not None and run.now >= run.deadline:
            phase_overdue(run)
    elif run.phase in (Phase.RUNNING, Phase.PAUSING):
        check_hang(run)
    training.check_gap(run)


def forgive_own_pause(run: RunState) -> None:
    """If the controller itself stood still, silence proves nothing: give everybody that time back."""
    late = run.now - run.last_tick - run.settings.heartbeat_s if run.last_tick is not None else 0.0
    run.last_tick = run.now
    if late > run.settings.heartbeat_timeout_s / 4:
        for replica in run.replicas.values():
            replica.heard_s = min(replica.heard_s + late, run.now)
            replica.moved_s = min(replica.moved_s + late, run.now)
        run.last_commit_s = min(run.last_commit_s + late, run.now)
        if run.deadline is not None:
            run.deadline += late


def expire_silent(run: RunState) -> None:
    """Who has not been heard of for too long is given up.

    But when all who hold the state are silent at once, it is more likely that we are cut off than that all are dead,
    and giving them up would throw the state away: they have until their lease must have ended.
    """
    limit, start_limit = run.settings.heartbeat_timeout_s, run.settings.start_timeout_s
    silent = []
    for replica in list(run.replicas.values()):
        since = run.now - replica.heard_s
        if replica.state in _HEARD and since > limit:
            silent.append(replica)
        elif replica.state is ReplicaState.WARMING and run.now - replica.warming_s > start_limit:
            text = f"not ready after {run.now - replica.warming_s:.0f} s"
            give_up(run, replica, text, FailureClass.UNKNOWN)
        elif (
            replica.state is ReplicaState.RELEASED and run.now - replica.since_s > run.settings.end_timeout_s
        ):
            ending.kill(run, replica, "released but did not go")
            replica.since_s = run.now
    if not silent:
        return
    last = are_last_holders(run, silent)
    for replica in silent:
        since = run.now - replica.heard_s
        if replica.state is ReplicaState.READY or not last or since > run.settings.adopt_timeout_s:
            give_up(run, replica, f"no heartbeat for {since:.1f} s", FailureClass.NETWORK)


def are_last_holders(run: RunState, suspects: list[m.Replica]) -> bool:
    """Without these nobody would be left who holds the state."""
    without = {r.replica for r in suspects}
    seated = (run.index[ReplicaState.MEMBER], run.index[ReplicaState.PARKED])
    return not any(i not in without and not r.void for part in seated for i, r in part.items())


def expire_unexplained(run: RunState) -> None:
    for i, replica in list(run.unexplained.items()):
        if run.now - replica.since_s > _CLASSIFY_S:
            del run.unexplained[i]
            failing.tell_loss(run, replica, "process gone, nobody knows why", FailureClass.UNKNOWN)


def give_up(run: RunState, replica: m.Replica, cause: str, failure: FailureClass) -> None:
    if replica.replica in run.replicas and run.phase not in OVER:
        ending.kill(run, replica, cause)
        failing.lose(run, replica, cause, failure)


def phase_overdue(run: RunState) -> None:
    if run.phase is Phase.FORMING:
        failing.park(run, "the generation could not be formed in time", None, planned=False)
        return
    run.deadline = run.now + run.settings.park_timeout_s
    late = [run.replicas[i] for i in sorted(run.awaited) if i in run.replicas]
    run.awaited.intersection_update(run.replicas)
    if are_last_holders(run, late) and all(run.now - r.heard_s > run.settings.heartbeat_s * 2 for r in late):
        return  # silent, all of them: see `expire_silent`
    for replica in late:
        give_up(run, replica, "did not answer the abort", FailureClass.NETWORK)


def check_hang(run: RunState) -> None:
    """Some wait for others that do not move: the latter are hung. All wait: an order or an error got lost.

    While nobody waits nobody is given up: what stands still then is the user's code or what it reads from, on all
    replicas at once, and ending them would throw the state away.
    """
    policy = HangDeadline(floor_s=run.settings.hang_floor_s, first_step_s=run.settings.first_step_s)
    limit = policy.decide(run.durations)
    if run.now - run.last_commit_s <= limit:
        return
    members = run.by_state(ReplicaState.MEMBER)
    waiting = [r for r in members if r.phase in _WAITS]
    stuck = any(r.phase != "done" and run.now - r.moved_s > limit for r in waiting)
    # After the last step the user's code may take its time; before it, between two steps, as long as a first step.
    hung = [] if run.all_done() else [r for r in members if run.now - r.moved_s > hang_limit(run, r, limit)]
    if stuck and hung:
        for replica in hung:
            give_up(
                run, replica, f"hung in {replica.phase!r} for more than {limit:.0f} s", FailureClass.UNKNOWN
            )
    elif stuck and (run.all_done() or len(waiting) == len(members)):
        failing.park(
            run, f"all replicas wait for each other for more than {limit:.0f} s", None, planned=False
        )


def hang_limit(run: RunState, replica: m.Replica, limit: float) -> float:
    if replica.phase in _WAITS:
        return math.inf
    return max(limit, run.settings.first_step_s) if replica.phase == "user" else limit
