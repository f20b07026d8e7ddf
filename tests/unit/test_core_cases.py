"""Scenes on the controller's core alone: what users of other systems reported, and what we promise.

Each test is one promise. The number is that of the report in CASES. More scenes are in test_core_promises.py.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest

from everstep.actors import wire
from everstep.orchestrator import events as ev
from everstep.orchestrator.core import Phase, ReplicaState, machine, training
from everstep.orchestrator.core import model as m
from everstep.orchestrator.core.state import RunState
from everstep.policies.budget import BudgetLimits
from tests.core_stage import CRASH, Stage, restarted

ROOT = Path(__file__).resolve().parent.parent.parent


# ---- CASES


def test_a_kill_in_a_long_local_computation_is_acted_on_at_once() -> None:  # case 1
    stage = Stage().start()
    stage.commit()
    stage.wait(5.0)
    for i in (0, 1, 2):
        stage.status[i] = replace(stage.status[i], kept=(i,), current=i + 3)
    before = stage.now
    stage.die(1)
    assert stage.now == before  # nobody was waited for
    assert stage.told(wire.Abort) == [(0, 2)]
    assert stage.generation.members == (0, 2)
    # What was computed is kept, what is being computed is finished; only the dead one's shards are done again.
    assert stage.generation.held == ((0, 3), (2, 5))
    assert sorted(s for part in stage.generation.todo for s in part) == [1, 4, 6, 7]
    assert stage.core.phase is Phase.RUNNING


def test_no_rank_is_special_three_times_in_a_row() -> None:  # case 2
    stage = Stage(replicas=4, budget=BudgetLimits()).start()
    for rank_0 in (0, 1, 2):
        assert stage.generation.members[0] == rank_0
        stage.commit()
        del stage.status[rank_0]
        stage.feed(m.NodeGone(node=f"n{rank_0}"))
        assert stage.core.phase is Phase.RUNNING
    assert stage.generation.members == (3,)
    assert stage.core.outcome == ""


def test_training_goes_on_without_the_controller_and_a_kill_after_its_return_is_survived() -> None:  # case 3
    stage = Stage().start()
    for _ in range(10):
        stage.commit()
    after = restarted(stage, adopt={"step": 10})
    for i in (0, 1, 2):
        after.hello(i)
    assert after.core.phase is Phase.RUNNING
    assert after.told(wire.Form) == []  # nobody was disturbed
    assert (after.core.step, after.generation.number) == (10, 1)
    after.die(0)
    assert after.generation.members == (1, 2)
    assert after.generation.step == 10
    after.commit()
    assert [e.step for e in after.emitted(ev.StepCommitted)] == [10]


def test_a_fourth_joins_a_running_three_and_nobody_fails() -> None:  # case 4
    stage = Stage(replicas=3).start()
    for _ in range(25):
        stage.commit()
    stage.feed(m.Scale(replicas=4, by="a user"))
    stage.hello(3)
    assert stage.told(wire.Pause) == [(0, 1, 2)]
    stage.commit()
    assert stage.generation.members == (0, 1, 2, 3)
    assert (stage.generation.step, stage.generation.fetch) == (26, (3,))
    assert stage.generation.sources == (("n0", 0), ("n1", 1), ("n2", 2))
    assert stage.emitted(ev.ReplicaLost) == []
    stage.commit()
    (recovery,) = stage.emitted(ev.Recovery)
    assert (recovery.world_size_after, recovery.steps_lost, recovery.blamed_replica) == (4, 0, None)


def test_the_third_crash_stops_a_run_with_a_budget_of_two_however_fast_others_join() -> None:  # case 5
    stage = Stage(budget=BudgetLimits(process_crash=2, back_off_s=0.1)).start()
    for victim, newcomer in ((0, 3), (1, 4)):
        stage.commit()
        stage.die(victim)
        stage.wait(0.5)
        stage.hello(newcomer)
        stage.commit()
        assert newcomer in stage.generation.members
    stage.commit()
    stage.die(2)
    assert stage.core.phase is Phase.ENDING
    assert stage.core.outcome == "failed"
    assert "process_crash: budget of 2" in stage.core.reason
    assert "replica 2: killed" in stage.core.reason


def test_the_crash_budget_survives_the_controller() -> None:  # case 5
    stage = Stage(budget=BudgetLimits(process_crash=1, back_off_s=0.0)).start()
    stage.commit()
    stage.die(0)
    after = restarted(stage, budget=BudgetLimits(process_crash=1, back_off_s=0.0))
    for i in (1, 2):
        after.hello(i)
    after.die(1)
    assert after.core.outcome == "failed"


def test_an_exception_at_step_0_is_shown_and_not_tried_again() -> None:  # case 6
    stage = Stage().start()
    launched = len(stage.launches)
    stage.feed(
        wire.UserFailed(replica=1, step=0, error="ValueError: no", traceback="Traceback\n  ...", fatal=False)
    )
    assert (stage.core.outcome, len(stage.launches)) == ("failed", launched)
    assert stage.core.reason.startswith("Traceback")
    assert "ValueError: no" in stage.core.reason
    assert {i for who in stage.told(wire.Release) for i in who} == {0, 1, 2}
    stage.die(0, 1, 2)
    assert stage.core.phase is Phase.ENDED


def test_the_same_exception_twice_at_one_step_ends_the_run() -> None:  # case 6
    stage = Stage().start()
    stage.commit()
    for i, outcome in ((1, ""), (2, "failed")):
        failed = wire.UserFailed(
            replica=i, step=1, error="ValueError: no", traceback="Traceback", fatal=False
        )
        stage.feed(failed)
        assert stage.core.outcome == outcome
    assert "twice at step 1" in stage.core.reason


def test_nobody_is_killed_for_waiting_after_the_last_step() -> None:  # case 7
    stage = Stage()
    stage.total = 3
    stage.start()
    for _ in range(3):
        stage.commit()
    for i in (0, 1):
        stage.feed(wire.Finished(replica=i, applied=3, digest="d", value=i))
    for _ in range(800):
        stage.now += 0.5
        for i, phase in ((0, "done"), (1, "done"), (2, "user")):
            stage.beat(i, phase, progress=1)
        stage.feed(m.Tick())
    assert (stage.core.phase, stage.kills) == (Phase.RUNNING, [])
    stage.feed(wire.Finished(replica=2, applied=3, digest="d", value=2))
    assert (stage.core.outcome, stage.core.step, stage.core.value) == ("finished", 3, 0)


def test_a_replica_with_sigterm_leaves_at_a_boundary_and_the_run_goes_on() -> None:  # case 8
    stage = Stage().start()
    stage.commit()
    stage.feed(wire.Leaving(replica=1, reason="SIGTERM"))
    assert stage.told(wire.Abort) == []
    assert stage.told(wire.Pause) == [(0, 1, 2)]
    stage.commit()
    assert stage.generation.members == (0, 2)
    assert stage.generation.step == 2
    assert stage.told(wire.Release) == [(1,)]
    stage.die(1)
    assert [e.failure_class for e in stage.emitted(ev.ReplicaLost)] == []
    assert [e.replica for e in stage.emitted(ev.ReplicaReleased)] == [1]


def test_runs_on_two_nodes_and_grows_to_four_without_a_restart() -> None:  # case 12
    stage = Stage(replicas=4).start(num=2)
    assert stage.generation.members == (0, 1)
    stage.wait(60.0)
    # The wish for two more stays visible as two actors that wait for room.
    assert len(stage.launches) == 4
    assert stage.kills == []
    stage.commit()
    stage.hello(2)
    stage.commit()
    stage.commit()
    stage.hello(3)
    stage.commit()
    assert stage.generation.members == (0, 1, 2, 3)
    assert stage.emitted(ev.ReplicaLost) == []


def test_a_healthy_node_is_used_again_after_its_back_off() -> None:  # case 13
    stage = Stage(budget=BudgetLimits(back_off_s=4.0)).start()
    stage.commit()
    stage.die(1)
    assert len(stage.launches) == 3
    stage.wait(1.9)
    assert len(stage.launches) == 3  # at least half of 4 s
    stage.wait(2.2)
    assert len(stage.launches) == 4
    assert stage.launches[-1].avoid_nodes == ()


def test_scaling_down_and_up_is_one_re_form_each() -> None:  # case 14
    stage = Stage(replicas=4).start()
    stage.commit()
    stage.feed(m.Scale(replicas=3, by="a user"))
    stage.commit()
    assert (stage.num_reforms, stage.generation.members) == (2, (0, 1, 2))
    assert stage.told(wire.Release) == [(3,)]
    stage.commit()
    stage.feed(m.Scale(replicas=6, by="a user"))
    for i in (4, 5, 6):
        stage.hello(i, ready=False)
    for i in (4, 5, 6):  # they become ready one after the other
        assert stage.core.phase is Phase.RUNNING
        stage.feed(wire.Ready(replica=i, signature=("w",), digest="d", total=100))
    stage.commit()
    assert (stage.num_reforms, stage.generation.members) == (3, (0, 1, 2, 4, 5, 6))


def test_half_of_the_replicas_dead_in_one_moment_are_one_recovery() -> None:  # case 15
    stage = Stage(replicas=8, budget=BudgetLimits(process_crash=2)).start()
    stage.commit()
    for i in (1, 3, 5, 7):
        del stage.status[i]
    for i in (1, 3, 5, 7):
        stage.now += 0.2  # within a second
        stage.feed(m.LinkLost(replica=i, refused=True))
    assert (stage.num_reforms, stage.generation.members) == (2, (0, 2, 4, 6))
    for i in (1, 3, 5, 7):
        stage.feed(m.ReplicaDied(replica=i, cause="killed", failure=CRASH))
    stage.commit()
    assert len(stage.emitted(ev.Recovery)) == 1
    assert len(stage.emitted(ev.ReplicaLost)) == 4
    assert stage.core.outcome == ""  # nor is it four times charged
    assert stage.core.budget.totals == {"process_crash": 1}


def test_more_candidates_than_wanted_wait_as_spares() -> None:  # case 18
    stage = Stage(replicas=3, spares=2).start(num=5)
    assert len(stage.generation.members) == 3
    assert list(stage.core.index[ReplicaState.READY]) == [3, 4]
    for _ in range(3):
        stage.commit()
    assert stage.num_reforms == 1
    stage.die(0)
    stage.commit()
    stage.commit()
    assert stage.generation.members == (1, 2, 3)  # warm, at the next boundary


def test_a_blocked_replica_is_freed_at_once_when_another_one_fails() -> None:  # case 20
    stage = Stage().start()
    stage.commit()
    stage.beat(1, "reduce")
    before = stage.now
    stage.feed(wire.Fault(replica=0, generation=1, error="reset by peer"))
    assert stage.told(wire.Abort) == [(0, 1, 2)]
    assert (stage.now, stage.generation.number, stage.core.phase) == (before, 2, Phase.RUNNING)


def test_preemptions_do_not_eat_the_crash_budget() -> None:  # case 24
    stage = Stage(replicas=7, budget=BudgetLimits(process_crash=1, back_off_s=0.0)).start()
    for i in range(5):
        stage.commit()
        stage.feed(m.Drain(node=f"n{i}", by="the cluster", deadline_s=30.0))
        # It is killed before the boundary: still announced, still a preemption.
        stage.die(i, cause="killed")
        stage.commit()
    assert stage.core.outcome == ""
    assert {e.failure_class for e in stage.emitted(ev.ReplicaLost)} == {"preemption"}
    stage.die(5)
    assert stage.core.outcome == ""
    stage.commit()
    stage.die(6)
    assert stage.core.outcome == "failed"


def test_a_frozen_replica_is_ejected_and_changes_nothing_when_it_wakes() -> None:  # case 25
    stage = Stage(min_replicas=3).start()
    stage.commit()
    frozen_status = replace(stage.status[2], applied=2, vote="alone")
    stage.silent.add(2)
    stage.wait(6.0, beating=(0, 1))
    assert stage.kills == [2]
    assert stage.core.phase is Phase.GATHERING  # so that nothing else can have committed step 1
    record = wire.Record(history=0, generation=1, step=1, metrics={}, samples=8, step_s=0.1)
    picture = (stage.core.step, stage.core.number, stage.core.phase, len(stage.sent))
    stage.feed(wire.Committed(replica=2, generation=1, record=record))
    stage.feed(wire.Parked(replica=2, generation=1, boundary=True, status=frozen_status, records=(record,)))
    stage.feed(wire.Fault(replica=2, generation=1, error="late"))
    stage.feed(wire.Finished(replica=2, applied=2, digest="other", value=None))
    stage.feed(wire.Beat(replica=2, seq=9, generation=1, applied=2, phase="compute", progress=5))
    assert (
        stage.core.step,
        stage.core.number,
        stage.core.phase,
        len(stage.sent),
    ) == picture  # no lease either
    stage.hello(2, status=frozen_status, records=(record,))
    assert stage.told(wire.Release) == [(2,)]
    assert stage.core.step == 1


def test_it_matters_that_a_given_up_replica_is_not_believed() -> None:
    """The test above can fail: with a controller that believes any commit, it does."""

    def believe_anybody(run: RunState, event: wire.Committed) -> None:
        training.take_records(run, (event.record,))

    with (
        mock.patch.dict(machine._HANDLERS, {wire.Committed: believe_anybody}),
        pytest.raises(AssertionError),
    ):
        test_a_frozen_replica_is_ejected_and_changes_nothing_when_it_wakes()


def test_a_controller_that_stood_still_blames_nobody() -> None:  # case 26
    stage = Stage().start()
    stage.commit()
    stage.now += 20.0
    stage.feed(m.Tick())
    assert (stage.kills, stage.core.phase) == ([], Phase.RUNNING)


def test_connections_that_break_and_come_back_disturb_nobody() -> None:  # case 26
    stage = Stage().start()
    stage.commit()
    for i in (0, 1, 2):
        stage.feed(m.LinkLost(replica=i, refused=False))
    stage.wait(1.0, beating=())
    for i in (0, 1, 2):
        stage.hello(i)
    assert stage.num_reforms == 1
    assert stage.emitted(ev.ReplicaLost) == []


def test_who_holds_the_gil_is_replaced_and_not_waited_for() -> None:  # case 27
    stage = Stage().start()
    stage.commit()
    stage.silent.add(1)
    stage.wait(6.0, beating=(0, 2))
    assert stage.kills == [1]
    assert stage.generation.members == (0, 2)
    assert len(stage.launches) == 4


def test_who_beats_but_does_not_move_while_others_wait_for_it_is_replaced() -> None:  # case 25
    stage = Stage(first_step_s=20.0).start()
    for _ in range(5):
        stage.now += 0.2
        stage.commit()
    for _ in range(30):
        stage.now += 0.5
        for i, phase in ((0, "reduce"), (1, "compute"), (2, "reduce")):
            stage.beat(i, phase, progress=1)
        stage.feed(m.Tick())
    assert stage.kills == [1]
    assert stage.generation.members == (0, 2)
