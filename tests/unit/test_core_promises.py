"""Scenes on the controller's core alone: the promises of the protocol beyond the reported cases.

Each test is one promise; those about lost words and bad moments were found by the simulation.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from everstep.actors import wire
from everstep.orchestrator import events as ev
from everstep.orchestrator.core import Phase
from everstep.orchestrator.core import model as m
from everstep.policies.budget import BudgetLimits
from tests.core_stage import Stage


def record(step: int, generation: int = 1, history: int = 0) -> wire.Record:
    return wire.Record(
        history=history, generation=generation, step=step, metrics={"loss": 1.0}, samples=8, step_s=0.1
    )


# ---- starting and joining


def test_a_first_start_waits_a_moment_for_the_others_and_not_longer() -> None:
    stage = Stage(replicas=4, settle_s=2.0)
    stage.feed(m.Start(incarnation=1))
    stage.hello(0)
    assert stage.core.next_deadline_s() <= stage.now + 2.0
    stage.wait(1.5)
    assert stage.core.phase is Phase.GATHERING
    stage.wait(1.0)
    assert stage.generation.members == (0,)


def test_a_first_start_waits_for_those_that_warm_up() -> None:
    stage = Stage(replicas=3, settle_s=2.0)
    stage.feed(m.Start(incarnation=1))
    stage.hello(0)
    stage.hello(1, ready=False)
    stage.wait(10.0)
    assert stage.core.phase is Phase.GATHERING
    stage.feed(wire.Ready(replica=1, signature=("w",), digest="d", total=100))
    assert stage.generation.members == (0, 1)


def test_joiners_launched_together_enter_together_also_when_one_has_not_spoken_yet() -> None:
    stage = Stage(replicas=3, max_replicas=6, settle_s=2.0).start()
    stage.feed(m.Scale(replicas=5, by="test"))
    stage.hello(3)
    stage.wait(1.0)
    assert stage.core.phase is Phase.RUNNING, "replica 4 was launched with it"
    stage.hello(4)
    stage.commit()
    assert stage.generation.members == (0, 1, 2, 3, 4)


def test_a_joiner_waits_only_a_moment_for_those_that_find_no_room_and_not_for_older_ones() -> None:
    stage = Stage(replicas=3, max_replicas=6, settle_s=2.0).start()
    stage.feed(m.Scale(replicas=5, by="test"))
    stage.hello(3)
    stage.wait(2.5)
    assert stage.core.phase is Phase.PAUSING
    stage.commit()
    assert stage.generation.members == (0, 1, 2, 3)
    stage.commit()
    stage.wait(1.0)
    stage.feed(m.Scale(replicas=6, by="test"))
    stage.hello(5)
    assert stage.core.phase is Phase.PAUSING, "replica 4 has found no room since long"


@pytest.mark.parametrize(
    ("transfer_s", "todo"),
    [
        (0.0, ((0, 1), (2, 3), (4, 5), (6, 7))),  # not known yet
        (0.5, ((0, 1), (2, 3), (4, 5), (6, 7))),  # in half a shard's time it can still do its part
        (1.5, ((0, 1, 2), (3, 4, 5), (6, 7), ())),
        (99.0, ((0, 1, 2), (3, 4, 5), (6, 7), ())),
    ],
)
def test_who_computes_while_a_joiner_receives_the_state(transfer_s: float, todo: object) -> None:
    """With a slow transfer the others compute its first step, so that nobody waits longer than for the bytes."""
    stage = Stage(replicas=3, max_replicas=4).start()
    for i in range(3):
        stage.feed(
            wire.Beat(replica=i, seq=1, generation=1, applied=0, phase="compute", progress=1, compute_s=1.0)
        )
    stage.core.transfer_s = transfer_s
    stage.feed(m.Scale(replicas=4, by="test"))
    stage.hello(3)
    stage.commit()
    assert stage.generation.fetch == (3,)
    assert stage.generation.todo == todo
    assert stage.generation.ranges == ((0, 2), (2, 4), (4, 6), (6, 8))


def test_a_crowd_of_joiners_takes_part_in_its_first_step() -> None:
    """One that holds the state would compute for all of them: longer than the transfer takes."""
    stage = Stage(replicas=1, max_replicas=4).start()
    stage.feed(
        wire.Beat(replica=0, seq=1, generation=1, applied=0, phase="compute", progress=1, compute_s=1.0)
    )
    stage.core.transfer_s = 5.0
    stage.feed(m.Scale(replicas=4, by="test"))
    for i in (1, 2, 3):
        stage.hello(i)
    stage.commit()
    assert stage.generation.fetch == (1, 2, 3)
    assert stage.generation.todo == ((0, 1), (2, 3), (4, 5), (6, 7))


def test_a_generation_is_not_sent_out_before_the_store_stands() -> None:
    stage = Stage(replicas=1)
    stage.core.store = ("", 0)
    stage.feed(m.Start(incarnation=1))
    stage.hello(0)
    stage.wait(1.0)
    assert stage.core.generation is None
    stage.core.store = ("store", 1)
    stage.wait(0.5)
    assert stage.core.phase is Phase.RUNNING


def test_whoever_was_initialized_otherwise_takes_the_first_members_state() -> None:
    stage = Stage(replicas=3)
    stage.feed(m.Start(incarnation=1))
    for i, digest in ((0, "d"), (1, "other"), (2, "d")):
        stage.hello(i, digest=digest)
    assert (stage.generation.fetch, stage.generation.sources) == ((1,), (("n0", 0), ("n2", 2)))


def test_other_registered_state_is_a_user_error_at_the_start_and_refused_later() -> None:
    stage = Stage(replicas=2)
    stage.feed(m.Start(incarnation=1))
    stage.hello(0)
    stage.hello(1, signature=("other",))
    assert stage.core.outcome == "failed"
    assert "StateMismatch" in stage.core.reason

    stage = Stage(replicas=2, budget=BudgetLimits(unknown=1, back_off_s=0.1, back_off_cap_s=60.0)).start()
    stage.commit()
    stage.feed(m.Scale(replicas=3, by="a user"))
    for i in (2, 3, 4):
        stage.wait(2.0)
        if i in stage.core.replicas:
            stage.hello(i, signature=("other",))
    # It is tried again, but ever more seldom, and the run that trains does not end of it.
    assert (stage.core.outcome, len(stage.launches)) == ("", 4)
    assert stage.core.phase is Phase.RUNNING


def test_newcomers_that_cannot_start_do_not_end_a_run_that_trains() -> None:
    budget = BudgetLimits(process_crash=2, back_off_s=0.1, back_off_cap_s=60.0)
    stage = Stage(replicas=2, max_replicas=3, budget=budget).start()
    stage.feed(m.Scale(replicas=3, by="a user"))
    for _ in range(240):
        newest = stage.launches[-1].replica
        if newest in stage.core.replicas and newest > 1:
            stage.die(newest, cause="crashed at import")
        stage.wait(1.0)
    assert (stage.core.phase, stage.core.outcome) == (Phase.RUNNING, "")
    assert len(stage.launches) <= 9


def test_joiners_on_a_node_that_is_drained_are_not_taken() -> None:
    stage = Stage(replicas=2).start()
    stage.feed(m.Drain(node="n2", by="a user"))
    stage.feed(m.Scale(replicas=3, by="a user"))
    assert stage.launches[-1].avoid_nodes == ("n2",)
    stage.hello(2, ready=False)
    assert stage.told(wire.Release) == [(2,)]
    assert len(stage.launches) == 4


# ---- state


def test_those_who_only_serve_the_state_are_released_after_the_transfer() -> None:
    stage = Stage(replicas=2, min_replicas=2).start()
    stage.commit()
    for i in (0, 1):
        stage.feed(wire.Leaving(replica=i, reason="SIGTERM"))
    assert stage.core.phase is Phase.RUNNING  # nobody to take over yet
    for i in (2, 3):
        stage.hello(i)
    stage.commit()
    assert (stage.generation.members, stage.generation.fetch) == ((2, 3), (2, 3))
    assert stage.generation.sources == (("n0", 0), ("n1", 1))
    assert stage.told(wire.Form)[-1] == (2, 3, 0, 1)  # they are told what to serve
    assert stage.told(wire.Release) == []
    stage.feed(wire.Fetched(replica=2, generation=2, num_bytes=10, seconds=0.1))
    assert stage.told(wire.Release) == []
    stage.feed(wire.Fetched(replica=3, generation=2, num_bytes=10, seconds=0.1))
    assert sorted(stage.told(wire.Release)) == [(0,), (1,)]


def test_the_first_commit_proves_that_everybody_has_fetched() -> None:
    stage = Stage(replicas=1).start()
    stage.commit()
    stage.feed(wire.Leaving(replica=0, reason="SIGTERM"))
    stage.hello(1)
    stage.commit()
    assert stage.told(wire.Release) == []
    stage.commit()  # what it said about its fetch was lost
    assert stage.told(wire.Release) == [(0,)]


def test_too_few_replicas_wait_with_their_state_and_go_on() -> None:
    stage = Stage(replicas=3, min_replicas=2).start()
    for _ in range(4):
        stage.commit()
    stage.die(0, 1)
    assert stage.core.phase is Phase.GATHERING
    (waiting,) = stage.emitted(ev.Waiting)
    assert (waiting.replicas, waiting.min_replicas) == (1, 2)
    stage.wait(30.0)
    stage.hello(3)
    assert stage.generation.members == (2, 3)
    assert (stage.generation.step, stage.generation.fetch) == (4, (3,))
    (resumed,) = stage.emitted(ev.Resumed)
    assert resumed.waited_s == pytest.approx(30.0)
    assert stage.emitted(ev.StateLost) == []


def test_the_whole_state_lost_begins_a_new_history() -> None:
    stage = Stage(replicas=2).start()
    for _ in range(4):
        stage.commit()
    stage.die(0, 1)
    for i in (2, 3):
        stage.hello(i)
    assert (stage.generation.history, stage.generation.step, stage.generation.fetch) == (1, 0, ())
    assert len(stage.emitted(ev.StateLost)) == 1
    # What is still on its way from the old history is not believed.
    stage.feed(wire.Committed(replica=2, generation=1, record=record(0, history=0)))
    assert stage.core.step == 0
    stage.commit()
    (recovery,) = stage.emitted(ev.Recovery)
    assert recovery.steps_lost == 4


def test_who_was_fetching_when_the_last_source_died_is_not_taken_for_fresh() -> None:
    stage = Stage(replicas=2).start(num=1)
    stage.commit()
    stage.hello(1)
    stage.commit()
    assert stage.generation.fetch == (1,)
    stage.status[1] = wire.Status()  # in the middle of it: its own weights are half overwritten
    stage.die(0)
    assert stage.told(wire.Release) == [(1,)]
    assert stage.core.phase is Phase.GATHERING


def test_replicas_on_lost_nodes_have_their_lease_before_the_state_is_given_up() -> None:
    stage = Stage(replicas=2, adopt_timeout_s=35.0).start()
    stage.commit()
    for i in (0, 1):
        del stage.status[i]
        stage.feed(
            m.NodeGone(node=f"n{i}")
        )  # or cut off, where they train on for as long as their leases last
    for i in (2, 3):
        stage.hello(i)
    stage.wait(30.0)
    assert stage.core.phase is Phase.GATHERING
    stage.wait(6.0)
    assert stage.generation.members == (2, 3)


def test_silence_of_all_who_hold_the_state_is_not_taken_for_their_death() -> None:
    stage = Stage(adopt_timeout_s=35.0).start()
    stage.commit()
    stage.wait(20.0, beating=())
    assert (stage.kills, stage.core.phase) == ([], Phase.RUNNING)
    for i in (0, 1, 2):
        stage.hello(i)
    assert stage.num_reforms == 1
    stage.wait(36.0, beating=())
    assert sorted(stage.kills) == [0, 1, 2]  # their leases are over


# ---- deadlines


def test_a_joiner_has_the_time_of_a_first_step_however_fast_it_fetched() -> None:
    stage = Stage(replicas=2, first_step_s=300.0).start()
    for _ in range(20):
        stage.wait(0.1)
        stage.commit()
    stage.feed(m.Scale(replicas=3, by="a user"))
    stage.hello(2)
    stage.silent.add(0)  # its word about its connections comes last
    for i in (0, 1):
        stage.park(i, 1, applied=21)
    assert (stage.core.phase, stage.generation.fetch) == (Phase.FORMING, (2,))
    stage.feed(wire.Fetched(replica=2, generation=2, num_bytes=1, seconds=0.1))
    stage.silent.clear()
    stage.feed(wire.Formed(replica=0, generation=2, connect_s=0.1))
    stage.enter_all()
    assert stage.core.phase is Phase.RUNNING
    for _ in range(60):
        stage.now += 0.5
        for i in (0, 1, 2):
            stage.beat(i, phase="compute" if i == 2 else "reduce", progress=7)
        stage.feed(m.Tick())
    assert stage.kills == []


# ---- commit


def split_vote(stage: Stage) -> None:
    """Replica 0 has applied step 1; 1 has the reduced gradient, but not the vote; 2 dies."""
    stage.commit()
    stage.status[0] = replace(stage.status[0], applied=2, vote="it was good")
    stage.status[1] = replace(stage.status[1], applied=1, reduced=True)
    stage.die(2)


def test_a_step_that_one_survivor_has_applied_is_rolled_forward() -> None:
    stage = Stage().start()
    split_vote(stage)
    assert (stage.generation.step, stage.generation.fetch) == (2, ())
    assert (stage.generation.roll_forward, stage.generation.vote) == ((1,), "it was good")


def test_a_step_that_nobody_has_applied_is_done_again() -> None:
    stage = Stage().start()
    stage.commit()
    for i in (0, 1):
        stage.status[i] = replace(stage.status[i], reduced=True, kept=(i,))
    stage.die(2)
    assert (stage.generation.step, stage.generation.roll_forward, stage.generation.vote) == (1, (), "")
    assert stage.generation.held == ((0,), (1,))


def test_without_the_votes_result_nobody_rolls_forward_but_fetches() -> None:
    stage = Stage().start()
    stage.commit()
    stage.status[0] = replace(stage.status[0], applied=2, vote="")  # it has fetched that state itself
    stage.status[1] = replace(stage.status[1], applied=1, reduced=True)
    stage.die(2)
    assert (stage.generation.roll_forward, stage.generation.fetch) == ((), (1,))
    assert stage.generation.sources == (("n0", 0),)


def test_a_step_told_by_one_who_dies_at_once_is_done_again_and_told_once() -> None:
    stage = Stage().start()
    stage.total = 2
    stage.commit()
    stage.feed(wire.Committed(replica=0, generation=1, record=record(1)))
    stage.die(0)
    assert stage.generation.step == 1  # nobody else had applied it
    stage.commit()
    stage.commit()
    assert [e.step for e in stage.emitted(ev.StepCommitted)] == [0, 1, 2]
    assert len(stage.emitted(ev.Recovery)) == 1


def test_a_record_that_comes_after_the_promise_is_waited_for() -> None:
    stage = Stage().start()
    split_vote(stage)  # replica 0 was applying when it promised: its record is not there yet
    stage.commit(step=2)
    assert stage.core.step == 1
    stage.feed(wire.Committed(replica=0, generation=1, record=record(1)))
    assert [e.step for e in stage.emitted(ev.StepCommitted)] == [0, 1, 2]


def test_a_record_that_never_comes_leaves_no_gap() -> None:
    stage = Stage(heartbeat_timeout_s=5.0).start()
    split_vote(stage)
    stage.commit(step=2)
    stage.wait(6.0)
    told = stage.emitted(ev.StepCommitted)
    assert [(e.step, dict(e.metrics)) for e in told] == [(0, {"loss": 1.0}), (1, {}), (2, {"loss": 1.0})]


def test_after_the_last_step_only_who_has_it_is_needed() -> None:
    stage = Stage()
    stage.total = 2
    stage.start()
    split_vote(stage)
    assert (stage.generation.final, stage.generation.roll_forward) == (True, (1,))
    launched = len(stage.launches)
    stage.feed(wire.Finished(replica=0, applied=2, digest="d", value=None))
    stage.die(0)  # it has finished: nothing is lost with it
    assert stage.core.phase is Phase.RUNNING
    assert len(stage.launches) == launched
    stage.feed(wire.Finished(replica=1, applied=2, digest="d", value=None))
    assert stage.core.outcome == "finished"


def test_other_weights_at_the_end_are_our_bug_and_said_so() -> None:
    stage = Stage(replicas=2)
    stage.total = 1
    stage.start()
    stage.commit()
    stage.feed(wire.Finished(replica=0, applied=1, digest="d", value=None))
    stage.feed(wire.Finished(replica=1, applied=1, digest="e", value=None))
    assert stage.core.reason.startswith("InternalError")


def test_who_finished_alone_and_died_does_not_decide_what_the_others_must_end_with() -> None:
    stage = Stage(replicas=2)
    stage.total = 1
    stage.start()
    stage.feed(wire.Finished(replica=0, applied=1, digest="d", value=1))
    stage.die(0)
    stage.commit()  # done again, in another generation: plain all-reduce gives other bits there
    stage.feed(wire.Finished(replica=1, applied=1, digest="e", value=2))
    assert (stage.core.outcome, stage.core.value) == ("finished", 2)


# ---- retries


def test_re_forms_that_nobody_explains_become_slower_and_end() -> None:
    stage = Stage(budget=BudgetLimits(recoveries_without_progress=3, back_off_s=1.0)).start()
    stage.commit()
    waits = []
    while not stage.core.outcome:
        before, number = stage.now, stage.core.number
        stage.feed(wire.Fault(replica=0, generation=number, error="could not connect"))
        while stage.core.phase is Phase.PARKING:
            stage.wait(0.5)
        waits.append(stage.now - before)
    assert waits == [0.0, 1.0, 2.0, 0.0]
    assert "3 recoveries without a newer committed step" in stage.core.reason
    assert "could not connect" in stage.core.reason


def test_losses_do_not_count_as_re_forms_that_nobody_explains() -> None:
    stage = Stage(replicas=8).start()
    for i in range(6):
        stage.silent.add(i)  # dead, and not known to be
        stage.feed(wire.Fault(replica=7, generation=stage.core.number, error="reset"))
        assert stage.core.phase is Phase.PARKING
        stage.die(i)
        assert stage.core.phase is Phase.RUNNING
    assert (stage.core.outcome, stage.core.budget.recoveries) == ("", 0)
    stage.commit()
    (recovery,) = stage.emitted(ev.Recovery)
    assert (recovery.blamed_replica, recovery.cause) == (0, "replica 0 lost: killed")


# ---- lost words and bad moments


def test_a_pause_is_answered_again_when_the_answer_was_lost() -> None:
    stage = Stage(replicas=3).start()
    stage.commit()
    stage.feed(wire.Leaving(replica=2, reason="SIGTERM"))
    stage.silent.add(1)
    stage.commit()  # 1 parks too, but its line is down
    assert (stage.core.phase, stage.core.awaited) == (Phase.PAUSING, {1})
    stage.silent.discard(1)
    stage.hello(1, faulted=True)
    assert stage.generation.members == (0, 1)
    assert stage.core.phase is Phase.RUNNING


def test_a_generations_standing_is_heard_again_when_the_word_was_lost() -> None:
    stage = Stage(replicas=2)
    stage.feed(m.Start(incarnation=1))
    stage.silent.add(1)
    for i in (0, 1):
        stage.hello(i)
    assert stage.core.phase is Phase.FORMING
    stage.orders[1] = stage.generation
    stage.enter(1)
    stage.silent.discard(1)
    stage.hello(1)
    assert stage.core.phase is Phase.RUNNING


def test_an_order_is_sent_again_when_it_was_lost() -> None:
    stage = Stage(replicas=2)
    stage.feed(m.Start(incarnation=1))
    stage.silent.add(1)
    for i in (0, 1):
        stage.hello(i)
    stage.silent.discard(1)
    stage.hello(1)
    assert stage.core.phase is Phase.RUNNING
    stage.silent.add(0)
    stage.feed(wire.Fault(replica=1, generation=1, error="reset"))
    assert stage.core.phase is Phase.PARKING
    stage.silent.discard(0)
    stage.hello(0)
    assert stage.generation.number == 2


def test_a_pause_asked_for_after_the_last_step_keeps_nobody_from_finishing() -> None:
    stage = Stage(replicas=2)
    stage.total = 2
    stage.start()
    stage.commit()
    stage.feed(m.Stop(by="a user"))
    assert stage.core.phase is Phase.PAUSING
    stage.silent |= {0, 1}  # the last vote was over before the pause was heard of
    stage.commit()
    for i in (0, 1):
        stage.feed(wire.Finished(replica=i, applied=2, digest="d", value=None))
    assert stage.core.outcome == "finished"


def test_who_waits_for_a_vote_that_never_comes_is_freed() -> None:
    stage = Stage(replicas=2, first_step_s=20.0).start()
    for _ in range(5):
        stage.now += 0.1
        stage.commit()
    for _ in range(25):
        stage.now += 0.5
        stage.beat(0, "reduce", progress=1)
        stage.beat(1, "reduce", progress=1)
        stage.feed(m.Tick())
    assert (stage.kills, stage.generation.number) == ([], 2)


def test_a_generation_that_cannot_be_formed_is_tried_again() -> None:
    stage = Stage(replicas=2, form_timeout_s=10.0)
    stage.feed(m.Start(incarnation=1))
    stage.silent.add(1)
    for i in (0, 1):
        stage.hello(i)
    stage.silent.discard(1)
    stage.wait(10.5)
    assert (stage.generation.number, stage.core.phase) == (2, Phase.RUNNING)


def test_a_survivor_that_does_not_answer_is_given_up() -> None:
    stage = Stage(park_timeout_s=5.0).start()
    stage.commit()
    stage.silent.add(2)
    stage.feed(wire.Fault(replica=0, generation=1, error="reset"))
    stage.wait(5.5)
    assert stage.kills == [2]
    assert stage.generation.members == (0, 1)


def test_a_finished_replica_that_dies_keeps_nobody_waiting() -> None:
    stage = Stage()
    stage.total = 1
    stage.start()
    stage.commit()
    stage.feed(wire.Finished(replica=0, applied=1, digest="d", value=None))
    stage.silent |= {0, 1}
    stage.die(2)
    assert stage.core.awaited == {0, 1}
    stage.die(0)
    stage.silent.discard(1)
    stage.park(1, 1, done=True)
    assert (stage.generation.members, stage.generation.final) == ((1,), True)
