"""The hang deadline follows the measured steps, never under its floors."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.policies.hang import HangDeadline, StepDurations


def after(*durations_s: float, first_steps: int = 0) -> StepDurations:
    state = StepDurations(first_steps=first_steps)
    for duration_s in durations_s:
        state = state.added(duration_s)
    return state


def test_the_first_steps_have_minutes() -> None:
    policy = HangDeadline()
    state = StepDurations()
    for _ in range(3):
        assert policy.decide(state) == 300.0
        state = state.added(40.0)
    assert policy.decide(state) == 300.0  # nothing is measured yet
    assert policy.decide(state.added(4.0)) == 20.0  # the slow first steps are not held against the rest


def test_the_deadline_is_a_multiple_of_the_slow_steps_but_never_under_the_floor() -> None:
    policy = HangDeadline()
    assert policy.decide(after(*[0.1] * 50)) == 10.0
    assert policy.decide(after(*[0.1] * 50, 7.0)) == 35.0
    assert policy.decide(after(*[3.0] * 127, 50.0)) == 15.0  # one in 128 is above the 99th percentile
    assert policy.decide(after(*[3.0] * 126, 50.0, 60.0)) == 250.0
    assert HangDeadline(factor=2.0, floor_s=1.0).decide(after(3.0)) == 6.0


def test_a_joiner_gets_the_floor_of_the_first_steps_again() -> None:
    policy = HangDeadline()
    state = after(*[4.0] * 20, first_steps=3)
    assert policy.decide(state) == 20.0
    assert policy.decide(state.restarted()) == 300.0
    assert policy.decide(state.restarted().added(9.0).added(4.0).added(4.0)) == 20.0


@given(st.lists(st.floats(0, 1000), max_size=400))
def test_the_window_is_bounded_and_the_percentile_is_one_of_its_values(durations_s: list[float]) -> None:
    state = after(*durations_s)
    assert state.durations_s == tuple(durations_s[-128:])
    assert state.num_steps == len(durations_s)
    if not durations_s:
        assert state.p99_s is None
        return
    ordered = sorted(state.durations_s)
    assert state.p99_s == ordered[math.ceil(0.99 * len(ordered)) - 1]
    assert HangDeadline().decide(state) >= 10.0


@pytest.mark.parametrize("bad", [-1.0, math.inf, math.nan])
def test_a_duration_that_is_none_is_refused(bad: float) -> None:
    with pytest.raises(ValueError, match="duration"):
        StepDurations().added(bad)


def test_recent_is_the_median_of_the_last_twenty() -> None:
    state = StepDurations(first_steps=0)
    assert state.recent_s is None
    for duration_s in [300.0, *[1.0] * 19]:
        state = state.added(duration_s)
    assert state.recent_s == 1.0, "one long step says nothing"
    for _ in range(11):
        state = state.added(3.0)
    assert state.recent_s == 3.0
