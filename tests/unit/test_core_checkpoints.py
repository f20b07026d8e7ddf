"""Scenes on the controller's core alone: checkpoints that are written, dropped and taken up again. Each is one promise."""

from __future__ import annotations

from typing import Any

from everstep.actors import wire
from everstep.orchestrator import events as ev
from everstep.orchestrator.core import Phase
from everstep.orchestrator.core import model as m
from tests.core_stage import Stage, restarted


def snapshot(stage: Stage, *, thinned: bool = False) -> int:
    """The members apply a step and keep the state after it; how many steps that is."""
    generation = stage.generation
    number = stage.status[generation.members[0]].applied
    stage.commit(tell=False)
    record = wire.Record(
        history=generation.history, generation=generation.number, step=number, metrics={"loss": 1.0}, samples=8,
        step_s=0.1, snapshot="" if thinned else "i1-1", thinned=thinned,
    )  # fmt: skip
    first = generation.members[0]
    stage.feed(wire.Committed(replica=first, generation=generation.number, record=record))
    return number + 1


def part(stage: Stage, step: int, rank: int, size: int = 3) -> list[Any]:
    """One part is written; what the controller is to commit because of it."""
    report = {"step": step, "attempt": "i1-1", "generation": 1, "rank": rank, "world_size": size}
    commands = stage.core.handle(m.PartWritten(report=report), stage.now)
    stage.events += [c.event for c in commands if isinstance(c, m.Emit)]
    return [c for c in commands if isinstance(c, m.CommitCheckpoint)]


def done(stage: Stage, step: int, problem: str = "") -> None:
    stage.feed(m.CheckpointDone(step=step, attempt="i1-1", problem=problem, written_bytes=10))


def found(stage: Stage, step: int) -> None:
    stage.feed(m.CheckpointFound(step=step))


def searching(num: int = 3, **settings: Any) -> Stage:
    """A run whose storage is being looked at, with replicas that wait."""
    stage = Stage(**settings)
    stage.feed(m.Start(incarnation=1, search=True))
    for i in range(num):
        stage.hello(i)
    stage.wait(5.0)
    return stage


def test_a_checkpoint_is_committed_when_all_its_parts_are_there() -> None:
    stage = Stage().start()
    step = snapshot(stage)
    assert part(stage, step, 0) == part(stage, step, 2) == []
    [order] = part(stage, step, 1)
    assert (order.step, order.attempt, [p["rank"] for p in order.parts]) == (step, "i1-1", [0, 1, 2])
    assert part(stage, step, 1) == []  # told twice
    assert not stage.emitted(ev.CheckpointCommitted)
    done(stage, step)
    assert [e.step for e in stage.emitted(ev.CheckpointCommitted)] == [step]
    assert stage.core.checkpoint_step == step and not stage.core.attempts
    assert part(stage, step, 0) == []  # late


def test_a_part_that_will_not_come_ends_the_attempt_once() -> None:
    stage = Stage().start()
    step = snapshot(stage)
    stage.feed(wire.NoPart(replica=1, step=step, attempt="i1-1", reason="no keeper"))
    stage.feed(wire.NoPart(replica=2, step=step, attempt="i1-1", reason="no keeper"))
    for rank in range(3):
        assert part(stage, step, rank) == []
    assert [e.reason for e in stage.emitted(ev.CheckpointDropped)] == ["replica 1: no keeper"]
    assert stage.core.phase is Phase.RUNNING and not stage.core.attempts


def test_what_storage_refuses_is_said_and_training_goes_on() -> None:
    stage = Stage().start()
    step = snapshot(stage)
    for rank in range(3):
        part(stage, step, rank)
    done(stage, step, "TransientStoreError: away")
    assert [e.reason for e in stage.emitted(ev.CheckpointDropped)] == ["TransientStoreError: away"]
    assert (stage.core.checkpoint_step, stage.core.phase) == (0, Phase.RUNNING)


def test_an_attempt_that_a_newer_one_overtakes_is_given_up() -> None:
    stage = Stage().start()
    first, second = snapshot(stage), snapshot(stage)
    part(stage, first, 0)
    orders = [order for rank in range(3) for order in part(stage, second, rank)]
    assert [order.live for order in orders] == [((first, "i1-1"),)], "nothing of it is deleted meanwhile"
    done(stage, second)
    assert [(e.step) for e in stage.emitted(ev.CheckpointDropped)] == [first]
    assert not stage.core.attempts


def test_parts_that_never_come_are_not_waited_for_for_ever() -> None:
    stage = Stage(checkpoint_timeout_s=60.0).start()
    step = snapshot(stage)
    part(stage, step, 0)
    stage.wait(61.0)
    assert [e.step for e in stage.emitted(ev.CheckpointDropped)] == [step]


def test_a_checkpoint_that_was_due_and_left_out_is_said() -> None:
    stage = Stage().start()
    step = snapshot(stage, thinned=True)
    assert [e.step for e in stage.emitted(ev.CheckpointThinned)] == [step]
    assert not stage.core.attempts


def test_a_run_begins_with_what_is_in_storage_and_reads_it_once() -> None:
    stage = searching()
    assert stage.core.phase is Phase.GATHERING and stage.num_reforms == 0, "not before it is known"
    found(stage, 40)
    assert stage.generation.step == 40
    assert (stage.generation.restore, stage.generation.fetch) == ((0,), (1, 2))
    assert stage.generation.sources == (("n0", 0),)
    assert stage.generation.history == 0 and not stage.emitted(ev.StateLost)
    stage.commit(step=40)
    assert [e.step for e in stage.emitted(ev.StepCommitted)] == [40]


def test_storage_that_forbids_a_start_ends_the_run_with_its_reason() -> None:
    stage = searching()
    stage.feed(m.Fail(reason="ConfigError: checkpoint.resume = 'never', but there is one"))
    [ended] = stage.emitted(ev.RunEnded)
    assert (ended.outcome, ended.step) == ("failed", 0) and "resume = 'never'" in ended.reason
    assert stage.num_reforms == 0, "no step was taken"
    found(stage, 40)  # told late
    assert stage.core.phase is not Phase.RUNNING and stage.num_reforms == 0


def test_with_nothing_in_storage_it_begins_with_step_0() -> None:
    stage = searching()
    found(stage, 0)
    assert (stage.generation.step, stage.generation.restore, stage.generation.fetch) == (0, (), ())


def test_when_all_are_lost_it_goes_back_to_the_newest_checkpoint_and_no_further() -> None:
    stage = Stage().start()
    for _ in range(3):
        stage.commit()
    step = snapshot(stage)
    for rank in range(3):
        part(stage, step, rank)
    done(stage, step)
    for _ in range(2):
        stage.commit()
    stage.die(0, 1, 2)
    for i in (3, 4, 5):
        stage.hello(i)
    stage.wait(3.0)
    assert [e.step for e in stage.emitted(ev.StateLost)] == [step]
    assert (stage.generation.step, stage.generation.history, stage.generation.restore) == (step, 1, (3,))
    stage.commit(step=step)
    assert [e.step for e in stage.emitted(ev.StepCommitted)] == [0, 1, 2, 3, 4, 5, step]
    assert stage.emitted(ev.Recovery)[-1].steps_lost == 2


def test_a_damaged_checkpoint_is_left_for_an_older_one() -> None:
    stage = searching()
    stage.silent = {0, 1, 2}  # they read, and hold nothing yet
    found(stage, 40)
    commands = stage.feed(wire.Refused(replica=0, generation=1, step=40, reason="byte 7"))
    assert [c.refused for c in commands if isinstance(c, m.FindCheckpoint)] == [40]
    assert [e.reason for e in stage.emitted(ev.CheckpointRefused)] == ["byte 7"]
    for i in (0, 1, 2):
        stage.park(i, 1)
    assert sorted(i for who in stage.told(wire.Release) for i in who) == [
        0,
        1,
        2,
    ]  # what they read into is torn
    stage.die(0, 1, 2)
    for i in (3, 4, 5):
        stage.hello(i)
    stage.wait(20.0)
    assert stage.num_reforms == 1
    found(stage, 30)
    stage.wait(3.0)
    assert (stage.generation.step, stage.generation.restore) == (30, (3,))


def test_what_was_trained_to_the_end_is_read_and_nothing_is_trained_again() -> None:
    stage = searching()
    found(stage, 100)
    assert stage.generation.final and stage.generation.step == 100
    for i in (0, 1, 2):
        stage.feed(wire.Finished(replica=i, applied=100, digest="d", value=1))
    assert (stage.core.outcome, stage.core.step) == ("finished", 100)


def test_the_end_waits_for_a_checkpoint_whose_parts_are_there() -> None:
    stage = Stage()
    stage.total = 1
    stage.start()
    step = snapshot(stage)
    for rank in range(3):
        part(stage, step, rank)
    for i in (0, 1, 2):
        stage.feed(wire.Finished(replica=i, applied=1, digest="d", value=1))
    assert stage.core.outcome == ""
    done(stage, step)
    assert stage.core.outcome == "finished"
    assert [type(e) for e in stage.events[-2:]] == [ev.CheckpointCommitted, ev.RunEnded]


def test_a_controller_that_came_back_disturbs_nobody_while_it_looks_for_checkpoints() -> None:
    stage = Stage().start()
    for _ in range(3):
        stage.commit()
    after = restarted(stage, adopt={"search": True})
    for i in (0, 1, 2):
        after.hello(i)
    assert after.core.phase is Phase.RUNNING
    found(after, 2)
    after.commit()
    assert [e.step for e in after.emitted(ev.StepCommitted)][-1] == 3
    assert (after.core.step, after.core.checkpoint_step) == (4, 2)


def test_when_all_who_hold_the_state_are_told_to_go_it_is_saved_just_in_time() -> None:
    stage = Stage(replicas=2, checkpoints=True).start()
    stage.commit()
    stage.feed(m.Drain(node="n0", by="the cluster", deadline_s=30.0))
    assert stage.told(wire.Snapshot) == []  # the other one stays
    stage = Stage(replicas=2, min_replicas=2, checkpoints=True).start()
    stage.commit()
    stage.feed(wire.Leaving(replica=1, reason="SIGTERM"))
    stage.feed(m.Drain(node="n0", by="the cluster", deadline_s=30.0))
    stage.feed(m.Drain(node="n0", by="the cluster", deadline_s=30.0))
    assert stage.told(wire.Snapshot) == [(0, 1)]
