"""What is the user's fault fails fast, with the user's own traceback, and leaves nothing."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import ray
from torch import nn

import everstep
from everstep.errors import (
    BudgetExhausted,
    ConfigError,
    EverstepError,
    LoopError,
    NonFiniteLoss,
    StateMismatch,
    TrainingError,
)
from everstep.orchestrator import connect
from everstep.orchestrator.eventlog import read_history
from everstep.orchestrator.events import NonFinite
from tests.cluster.harness import Run, config
from tests.cluster.loops import Adam, Loop, Numbers

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])


def test_an_exception_at_step_0_is_tried_once_case_6(name: str, folder: Path) -> None:
    with (
        Run(Loop(folder=str(folder), raise_at=0), config(name, folder, max_replicas=2)) as run,
        pytest.raises(TrainingError, match=r"(?s)Traceback.*ValueError: the user's own mistake at step 0"),
    ):
        run.finish()
    assert len((folder / "imports.txt").read_text().split()) == 2, "no replica was started again"


@pytest.mark.soak  # on the core alone in tests/unit/test_core_cases.py
def test_the_same_exception_twice_at_one_step_ends_the_run(name: str, folder: Path) -> None:
    with (
        Run(Loop(folder=str(folder), raise_at=7), config(name, folder, max_replicas=2)) as run,
        pytest.raises(TrainingError, match="twice at step 7"),
    ):
        run.finish()


def test_one_exception_on_one_replica_is_absorbed(name: str, folder: Path) -> None:
    loop = Loop(folder=str(folder), raise_at=7, raise_once=True)
    with Run(loop, config(name, folder, max_replicas=2)) as run:
        assert run.finish().steps == 30


def test_the_crash_budget_ends_the_run_case_5(name: str, folder: Path) -> None:
    """Two crashes are absorbed, however fast the replacements come; the third is one too many."""
    loop = Loop(folder=str(folder), steps=100000, compute_s=0.02)
    with (
        Run(loop, config(name, folder, max_replicas=2, process_crashes=2)) as run,
        pytest.raises(BudgetExhausted, match="process_crash"),
    ):
        for _ in range(3):
            run.wait_world(2)
            run.kill(run.replicas()[1])
            run.wait_for(lambda e: e.type == "replica_lost")
        run.finish()


def test_waiting_after_the_last_step_is_no_fault_case_7(name: str, folder: Path) -> None:
    loop = Loop(folder=str(folder), steps=5, after_s=8.0, after_replica=1)
    settings = config(
        name, folder, max_replicas=3, hang_floor_s=2.0, first_step_s=3.0, heartbeat_timeout_s=2.0
    )
    started = time.monotonic()
    with Run(loop, settings) as run:
        result = run.finish()
    assert time.monotonic() - started > 8.0
    assert result.steps == 5 and not result.recoveries


def forgets_commit(run: Any) -> None:
    model = nn.Linear(16, 1)
    run.register(model=model, optimizer=Adam(model.parameters(), lr=0.1))
    for step in run.steps(Numbers(64, 16), total=4):
        for _, x, y in step.batches():
            step.backward((model(x) - y).square().mean())


def registers_by_replica(run: Any) -> None:
    model = nn.Linear(16, 1 + run.replica)
    run.register(model=model, optimizer=Adam(model.parameters(), lr=0.1))
    for step in run.steps(Numbers(64, 16), total=4):
        for _, x, y in step.batches():
            step.backward((model(x) - y).square().mean())
        step.commit()


def diverges(run: Any) -> None:
    model = nn.Linear(16, 1)
    run.register(model=model, optimizer=Adam(model.parameters(), lr=0.1))
    for step in run.steps(Numbers(64, 16), total=4):
        for _, x, y in step.batches():
            bad = step.number == 2 and step.shard == 3
            step.backward((model(x) - y).square().mean() * (float("nan") if bad else 1.0))
        step.commit(metrics={"loss": step.mean_loss})


def registers_a_list(run: Any) -> None:
    run.register(history={"a": 1})


@pytest.mark.parametrize(
    ("loop", "error", "words"),
    [
        (forgets_commit, LoopError, "step.commit"),
        (registers_by_replica, StateMismatch, "weight"),
        (diverges, NonFiniteLoss, "step 2"),
        (registers_a_list, EverstepError, "history"),
    ],
)
def test_a_broken_rule_is_named(
    name: str, folder: Path, loop: Any, error: type[Exception], words: str
) -> None:
    settings = config(name, folder, min_replicas=2, max_replicas=2)
    with Run(loop, settings) as run, pytest.raises(error, match=words):
        run.finish()


def test_a_non_finite_step_can_be_skipped_everywhere(name: str, folder: Path) -> None:
    with Run(diverges, config(name, folder, max_replicas=2, non_finite="skip")) as run:
        assert run.finish().steps == 4
    history = read_history(run.config.storage, name).events
    assert [e.step for e in history if isinstance(e, NonFinite)] == [2]


def test_what_no_replica_could_call_is_refused_before_anything_starts(name: str, folder: Path) -> None:
    lock = threading.Lock()
    for train, words in ((5, "must be a function"), (lambda run: lock, "picklable")):
        with pytest.raises(ConfigError, match=words):
            everstep.run(train, config(name, folder))  # type: ignore[arg-type]
    assert name not in connect.live_runs()
