"""What the passing of time means: silence, missed deadlines, hangs. Called with every `Tick`."""

from __future__ import annotations

from everstep.orchestrator import events
from everstep.orchestrator.core import ending, failing
from everstep.orchestrator.core import model as m
from everstep.orchestrator.core.model import Phase, ReplicaState
from everstep.orchestrator.core.state import RunState
from everstep.policies.budget import FailureClass
from everstep.policies.hang import HangDeadline

_CLASSIFY_S = 30.0
"""How long a vanished process may wait for Ray to say why, before it counts as unknown."""


def on_tick(run: RunState, event: m.Tick) -> None:
    forgive_own_pause(run)
    now = run.now
    if run.phase is Phase.ENDING:
        if run.deadline is not None and now >= run.deadline:
            for replica in list(run.replicas.values()):
                ending.kill(run, replica, "the run is over")
        return
    expire_silent(run)
    for i, (since, node) in list(run.unexplained.items()):
        if now - since > _CLASSIFY_S:
            del run.unexplained[i]
            run.emit(
                events.ReplicaLost(replica=i, node=node, cause="process gone", failure_class="unknown")
            )
            failing.charge(run, FailureClass.UNKNOWN, i, "process gone, nobody knows why")
    if run.phase in (Phase.PARKING, Phase.FORMING) and run.deadline is not None and now >= run.deadline:
        phase_overdue(run)
    elif run.phase in (Phase.RUNNING, Phase.PAUSING):
        check_hang(run)


def forgive_own_pause(run: RunState) -> None:
    """If the controller itself stood still, silence proves nothing: give everybody that time back."""
    late = run.now - run.last_tick - run.settings.heartbeat_s if run.last_tick is not None else 0.0
    run.last_tick = run.now
    if late > run.settings.heartbeat_timeout_s / 4:
        for replica in run.replicas.values():
            replica.heard_s = min(replica.heard_s + late, run.now)
            replica.moved_s = min(replica.moved_s + late, run.now)
        if run.deadline is not None:
            run.deadline += late


def expire_silent(run: RunState) -> None:
    limit = run.settings.heartbeat_timeout_s
    for replica in list(run.replicas.values()):
        silent = run.now - replica.heard_s
        if replica.state in (ReplicaState.MEMBER, ReplicaState.PARKED, ReplicaState.READY) and silent > limit:
            give_up(run, replica, f"no heartbeat for {silent:.1f} s", FailureClass.NETWORK)
        elif replica.state is ReplicaState.WARMING and silent > run.settings.start_timeout_s:
            give_up(run, replica, f"not ready and silent for {silent:.0f} s", FailureClass.UNKNOWN)
        elif replica.state is ReplicaState.RELEASED and run.now - replica.since_s > run.settings.end_timeout_s:
            ending.kill(run, replica, "released but did not go")
            replica.since_s = run.now


def give_up(run: RunState, replica: m.Replica, cause: str, failure: FailureClass) -> None:
    if replica.replica in run.replicas:
        ending.kill(run, replica, cause)
        failing.lose(run, replica, cause, failure)


def phase_overdue(run: RunState) -> None:
    late = [run.replicas[i] for i in sorted(run.awaited) if i in run.replicas]
    if run.phase is Phase.FORMING:
        failing.park(run, "the generation could not be formed in time", None, planned=False)
        return
    run.deadline = run.now + run.settings.park_timeout_s
    for replica in late:
        give_up(run, replica, "did not answer the abort", FailureClass.NETWORK)


def check_hang(run: RunState) -> None:
    """Some wait in a collective, others do not move: the latter are hung."""
    generation = run.generation
    assert generation is not None
    policy = HangDeadline(floor_s=run.settings.hang_floor_s, first_step_s=run.settings.first_step_s)
    limit = policy.decide(run.durations)
    if run.all_done() or run.now - max(run.last_commit_s, run.committed_s) <= limit:
        return
    members = [run.replicas[i] for i in generation.members if i in run.replicas]
    waiting = [r for r in members if r.phase == "reduce"]
    still = [r for r in members if r.phase not in ("reduce", "user") and run.now - r.moved_s > limit]
    still += [
        r for r in members if r.phase == "user" and run.now - r.moved_s > max(limit, run.settings.first_step_s)
    ]
    if waiting and still:
        for replica in still:
            give_up(run, replica, f"hung in {replica.phase!r} for more than {limit:.0f} s", FailureClass.UNKNOWN)
    elif len(waiting) == len(members):
        failing.park(run, f"all replicas wait in a collective for more than {limit:.0f} s", None, planned=False)
