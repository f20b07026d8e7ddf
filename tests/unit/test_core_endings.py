"""Scenes on the controller's core alone: how runs end, and how a controller that came back takes them up.

Each test is one promise.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep.actors import wire
from everstep.orchestrator import events as ev
from everstep.orchestrator.core import Phase, ReplicaState
from everstep.orchestrator.core import model as m
from everstep.policies.budget import BudgetLimits, FailureClass
from tests.core_stage import CRASH, Stage, restarted


def adopted(stage: Stage, *who: int, **adopt: object) -> Stage:
    """A new controller to which these replicas have spoken."""
    after = restarted(stage, adopt=dict(adopt))
    for i in who:
        after.hello(i)
    return after


# ---- stopping and ending


@pytest.mark.parametrize(
    "phase", [Phase.GATHERING, Phase.FORMING, Phase.RUNNING, Phase.PAUSING, Phase.PARKING]
)
def test_a_stop_is_obeyed_in_every_phase(phase: Phase) -> None:
    stage = Stage(replicas=2, min_replicas=2)
    stage.feed(m.Start(incarnation=1))
    stage.hello(0)
    if phase is Phase.FORMING:
        stage.silent.add(0)
    if phase is not Phase.GATHERING:
        stage.hello(1)
    if phase is Phase.PAUSING:
        stage.hello(2)
        stage.feed(m.Scale(replicas=3, by="a user"))
        stage.hello(2)
    if phase is Phase.PARKING:
        stage.silent.add(0)
        stage.feed(wire.Fault(replica=1, generation=1, error="reset"))
    assert stage.core.phase is phase
    stage.feed(m.Stop(by="a user"))
    if phase is Phase.FORMING:
        stage.feed(wire.Formed(replica=0, generation=1, connect_s=0.0))
        stage.silent.clear()
        stage.enter_all()
    if phase is Phase.PARKING:
        stage.silent.clear()
        stage.park(0, 1)
    if stage.core.phase is Phase.PAUSING:
        stage.commit()
    assert (stage.core.outcome, stage.core.reason) == ("stopped", "stopped by a user")
    assert stage.core.step == (1 if phase in (Phase.FORMING, Phase.RUNNING, Phase.PAUSING) else 0)


def test_stop_now_waits_for_nothing() -> None:
    stage = Stage().start()
    stage.feed(m.Stop(by="a user", now=True))
    assert stage.core.outcome == "stopped"
    assert isinstance(stage.events[-1], ev.RunEnded)


def test_nobody_is_launched_for_a_run_that_stops() -> None:
    stage = Stage().start()
    stage.silent |= {0, 1}
    stage.feed(m.Stop(by="a user"))
    stage.die(2)
    stage.wait(3.0, beating=(0, 1))
    assert len(stage.launches) == 3


def test_the_run_is_over_when_all_are_gone_and_no_event_follows() -> None:
    stage = Stage(replicas=2).start()
    stage.hello(2)
    stage.feed(m.Stop(by="a user", now=True))
    assert stage.core.phase is Phase.ENDING
    stage.feed(m.Scale(replicas=3, by="late"))
    stage.feed(wire.Committed(replica=0, generation=1, record=wire.Record(
        history=0, generation=1, step=0, metrics={}, samples=1, step_s=0.1)))  # fmt: skip
    stage.die(0, 1)
    assert stage.core.phase is Phase.ENDED
    assert isinstance(stage.events[-1], ev.RunEnded)


def test_who_does_not_leave_is_killed_and_who_cannot_be_reached_is_not_waited_for() -> None:
    stage = Stage(replicas=2, end_timeout_s=10.0).start()
    stage.feed(m.Stop(by="a user", now=True))
    stage.wait(10.5, beating=())
    assert stage.kills == [0, 1]
    stage.wait(10.5, beating=())
    assert stage.core.phase is Phase.ENDED
    assert stage.kills == [0, 1, 0, 1]


def test_all_lost_while_ending_is_an_end() -> None:
    stage = Stage(replicas=2).start()
    stage.feed(m.Stop(by="a user", now=True))
    for i in (0, 1):
        stage.feed(m.LinkLost(replica=i, refused=True))
    assert stage.core.phase is Phase.ENDED


def test_a_released_replica_that_does_not_go_is_killed() -> None:
    stage = Stage(replicas=3, end_timeout_s=10.0).start()
    stage.feed(m.Scale(replicas=2, by="a user"))
    stage.commit()
    assert stage.told(wire.Release) == [(2,)]
    stage.wait(10.5)
    assert stage.kills == [2]
    assert stage.core.phase is Phase.RUNNING


def test_a_process_whose_end_nobody_explains_counts_as_unknown() -> None:
    stage = Stage(budget=BudgetLimits(unknown=0)).start()
    stage.silent.add(2)
    stage.feed(m.LinkLost(replica=2, refused=True))
    stage.wait(5.0, beating=(0, 1))
    # How long to wait before the next one hangs on what it was.
    assert (stage.core.outcome, len(stage.launches)) == ("", 3)
    stage.wait(30.0, beating=(0, 1))
    assert "unknown" in stage.core.reason


def test_an_exception_after_the_last_step_is_shown_and_nothing_is_trained_again() -> None:
    stage = Stage(replicas=1)
    stage.total = 1
    stage.start()
    stage.commit()
    stage.feed(wire.UserFailed(replica=0, step=1, error="OSError: no", traceback="Traceback", fatal=False))
    assert stage.core.outcome == "failed"
    assert "OSError: no" in stage.core.reason


def test_a_replica_whose_code_raised_is_released_and_replaced() -> None:
    stage = Stage().start()
    stage.commit()
    stage.feed(wire.UserFailed(replica=1, step=1, error="OSError: no", traceback="Traceback", fatal=False))
    assert stage.told(wire.Release) == [(1,)]
    assert stage.generation.members == (0, 2)
    stage.wait(1.0)
    assert len(stage.launches) == 4


def test_a_newcomer_that_cannot_go_on_ends_nobody_elses_run() -> None:
    stage = Stage().start()
    stage.commit()
    stage.feed(m.Scale(replicas=4, by="a user"))
    stage.hello(3, ready=False)
    stage.feed(wire.UserFailed(replica=3, step=0, error="NonFiniteLoss: x", traceback="T", fatal=True))
    assert (stage.core.phase, stage.core.outcome) == (Phase.RUNNING, "")
    assert stage.told(wire.Release) == [(3,)]
    stage.feed(wire.UserFailed(replica=0, step=1, error="NonFiniteLoss: x", traceback="T", fatal=True))
    assert stage.core.outcome == "failed"


def test_a_break_ends_the_run_also_where_a_joiner_has_just_entered() -> None:
    stage = Stage(replicas=2).start()
    stage.commit()
    stage.feed(m.Scale(replicas=3, by="a user"))
    stage.hello(2)
    stage.commit()
    assert stage.generation.members == (0, 1, 2) and stage.generation.fetch == (2,)
    for i in (0, 1):
        stage.feed(wire.Finished(replica=i, applied=2, digest="d", value=None))
    assert (stage.core.outcome, stage.core.step) == ("finished", 2)


def test_a_break_ends_the_run_also_where_the_joiners_first_generation_broke() -> None:
    stage = Stage(replicas=3).start()
    stage.commit()
    stage.feed(m.Scale(replicas=4, by="a user"))
    stage.hello(3)
    stage.commit()
    assert stage.generation.fetch == (3,)
    stage.feed(wire.Fetched(replica=3, generation=2, num_bytes=1, seconds=0.1))
    stage.die(2)
    assert stage.generation.members == (0, 1, 3) and not stage.generation.fetch
    for i in (0, 1):
        stage.feed(wire.Finished(replica=i, applied=2, digest="d", value=None))
    assert (stage.core.outcome, stage.core.step) == ("finished", 2)


def test_who_was_lost_at_a_break_is_not_replaced_and_the_end_stands() -> None:
    stage = Stage(replicas=2).start()
    stage.commit()
    stage.status[0] = replace(stage.status[0], done=True)
    stage.feed(wire.Finished(replica=0, applied=1, digest="d", value=5))
    stage.die(1)
    assert (stage.core.outcome, stage.core.value, stage.core.step) == ("finished", 5, 1)
    assert len(stage.launches) == 2


# ---- a controller that came back


def test_a_member_that_was_lost_meanwhile_is_a_re_form() -> None:
    stage = Stage().start()
    for _ in range(3):
        stage.commit()
    after = restarted(stage, adopt={"step": 3})
    del after.status[2]
    after.hello(0)
    after.hello(1)
    assert after.core.phase is Phase.ADOPTING
    after.feed(m.ReplicaDied(replica=2, cause="killed", failure=CRASH))
    assert after.generation.members == (0, 1)
    assert (after.generation.number, after.generation.incarnation, after.generation.step) == (2, 2, 3)
    assert [e.replica for e in after.emitted(ev.ReplicaLost)] == [2]


def test_a_member_that_does_not_come_has_its_lease_and_is_then_left_behind() -> None:
    stage = Stage().start()
    stage.commit()
    after = restarted(stage, adopt={"step": 1}, adopt_timeout_s=35.0)
    after.silent.add(2)
    after.hello(0)
    after.hello(1)
    after.wait(34.0, beating=(0, 1))
    assert after.core.phase is Phase.ADOPTING
    after.wait(1.5, beating=(0, 1))
    assert after.generation.members == (0, 1)
    assert after.kills == [2]


def test_who_was_left_behind_by_the_former_controller_stays_out() -> None:
    stage = Stage().start()
    stage.commit()
    zombie, order = replace(stage.status[2], applied=2, vote="alone"), stage.orders[2]
    stage.silent.add(2)
    stage.feed(m.LinkLost(replica=2, refused=True))
    assert stage.generation.members == (0, 1)
    after = restarted(stage, adopt={"step": 1})
    after.hello(2, status=zombie, generation=order)
    after.hello(0)
    after.hello(1)
    assert after.core.phase is Phase.RUNNING
    assert after.told(wire.Release) == [(2,)]
    after.commit()
    assert after.core.step == 2


def test_newcomers_keep_no_controller_from_going_on() -> None:
    stage = Stage(replicas=4).start(num=2)  # two wait for room
    stage.commit()
    after = adopted(stage, 0, 1, step=1)
    assert after.core.phase is Phase.RUNNING
    assert sorted(after.core.index[ReplicaState.LAUNCHED]) == [2, 3]
    assert after.launches == []
    after.hello(2)
    after.wait(2.5)  # replica 3, launched with it, may come too
    after.commit()
    assert after.generation.members == (0, 1, 2)


def test_commands_and_news_that_come_while_adopting_are_not_lost() -> None:
    stage = Stage(replicas=3).start()
    stage.commit()
    stage.status[3] = wire.Status()
    after = restarted(stage, adopt={"step": 1})
    after.hello(0)
    after.hello(3, ready=False)
    after.feed(wire.Ready(replica=3, signature=("w",), digest="d", total=100))
    after.feed(m.Scale(replicas=4, by="a user"))
    after.feed(wire.Leaving(replica=0, reason="SIGTERM"))
    after.hello(1)
    after.hello(2)
    assert after.core.phase is Phase.PAUSING
    after.commit()
    assert after.generation.members == (1, 2, 3)
    assert after.core.target == 4


def test_a_stop_while_adopting_leaves_nobody_behind() -> None:
    stage = Stage(replicas=2).start()
    after = restarted(stage)
    after.hello(0)
    after.feed(m.Stop(by="a user", now=True))
    assert after.core.outcome == "stopped"
    assert (after.told(wire.Release), after.kills) == ([(0,)], [1])
    after.die(0, 1)
    assert after.core.phase is Phase.ENDED


def test_who_finished_while_the_controller_was_away_has_finished() -> None:
    stage = Stage(replicas=2)
    stage.total = 1
    stage.start()
    stage.commit()
    after = restarted(stage, adopt={"step": 1})
    after.total = 1
    after.hello(0)
    after.feed(wire.Finished(replica=0, applied=1, digest="d", value=7))  # before the other one is there
    after.hello(1)
    after.feed(wire.Finished(replica=1, applied=1, digest="d", value=7))
    assert (after.core.outcome, after.core.value) == ("finished", 7)


def test_a_pause_that_the_former_controller_asked_for_is_answered() -> None:
    stage = Stage().start()
    stage.commit()
    stage.feed(m.Stop(by="a user"))
    memo = stage.memos[0]
    after = adopted(stage, 0, 1, 2, step=1)
    assert memo["stop"] == "stopped by a user"
    assert after.core.phase is Phase.PAUSING  # it has not forgotten

    stage = Stage().start()
    stage.commit()
    after = adopted(stage, 0, 1, 2, step=1)
    assert after.core.phase is Phase.RUNNING
    for i in (0, 1, 2):  # this pause it knows nothing of
        after.park(i, 1, applied=2)
    assert (after.core.phase, after.generation.number, after.generation.step) == (Phase.RUNNING, 2, 2)
    assert after.core.budget.recoveries == 0


def test_an_outcome_outlives_the_controller() -> None:
    stage = Stage(replicas=2).start()
    stage.silent |= {0, 1}
    stage.memos[0] = {}
    stage.silent.discard(0)
    stage.feed(m.Stop(by="a user", now=True))
    after = restarted(stage)
    after.hello(0)
    after.hello(1, memo={})
    assert (after.core.outcome, after.core.phase) == ("stopped", Phase.ENDING)


def test_the_state_of_all_lost_with_the_controller_is_said_to_be_lost() -> None:
    after = Stage(replicas=1, adopt_timeout_s=35.0)
    after.feed(m.Adopt(incarnation=3, replicas=(), history=1, step=40, next_id=9))
    assert [launch.replica for launch in after.launches] == [
        10
    ]  # an id that may have been given out is not reused
    after.hello(10)
    after.wait(36.0)  # who may train on somewhere has stopped by then
    assert (after.generation.history, after.generation.step) == (2, 0)
    assert len(after.emitted(ev.StateLost)) == 1


def test_steps_are_told_once_over_a_restart_and_none_is_left_out() -> None:
    stage = Stage(replicas=2, await_storage=True).start()
    records = []
    for step in range(6):
        stage.commit()
        records.append(wire.Record(history=0, generation=1, step=step, metrics={}, samples=8, step_s=0.1))
    told = stage.emitted(ev.StepCommitted)
    for event in told[:4]:
        stage.core.stored(event)  # the last two never reach storage
    stage.beat(0)
    ack = next(s.message for s in reversed(stage.sent) if isinstance(s.message, wire.Ack))
    assert ack.known_step == 4
    after = restarted(stage, adopt={"step": 4})
    for i in (0, 1):
        after.hello(i, records=tuple(records[3:]))
    assert [e.step for e in after.emitted(ev.StepCommitted)] == [4, 5]


def test_the_time_of_a_run_is_booked_over_restarts() -> None:
    stage = Stage(replicas=2).start()
    began = stage.core.began_s
    stage.commit()
    after = adopted(stage, 0, 1, step=1)
    after.wait(3.0)
    assert after.core.began_s == began
    assert sum(after.core.clock.read(after.now).values()) == pytest.approx(after.now - began, abs=1e-6)


def test_deaths_while_adopting_are_charged() -> None:
    stage = Stage(budget=BudgetLimits(process_crash=0)).start()
    after = restarted(stage, budget=BudgetLimits(process_crash=0))
    after.hello(0)
    after.hello(1)
    after.die(2)
    assert (after.core.outcome, FailureClass.PROCESS_CRASH.value in after.core.reason) == ("failed", True)


@pytest.mark.parametrize(
    ("failure", "waits"), [(FailureClass.NODE_LOSS, True), (FailureClass.PROCESS_CRASH, False)]
)
def test_whoever_may_train_on_behind_a_cut_link_has_its_lease_before_a_run_is_begun_anew(
    failure: FailureClass, waits: bool
) -> None:
    """Nothing was stored, nobody came back: only the lost replica's own death proves that it is in no generation."""
    after = restarted(Stage(replicas=1).start(), adopt={"step": 0})
    after.status.clear()
    after.feed(m.ReplicaDied(replica=0, cause="lost", failure=failure))
    newcomer = after.launches[-1].replica
    after.hello(newcomer)
    after.wait(30.0)
    assert (after.core.generation is None) == waits
    after.wait(10.0)
    assert after.generation.members == (newcomer,)


def test_a_joiner_that_has_trained_since_holds_the_state_also_for_a_new_controller() -> None:
    stage = Stage(replicas=2, max_replicas=3).start()
    stage.feed(m.Scale(replicas=3, by="test"))
    stage.hello(2)
    stage.commit()
    assert stage.generation.fetch == (2,)
    for _ in range(3):
        stage.commit()
    after = restarted(stage)
    after.die(0, 1)
    after.hello(2)
    assert after.core.reached == 4
    assert after.generation.members == (2,) and after.generation.step == 4
