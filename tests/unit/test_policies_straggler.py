"""Shards move to faster replicas when that pays, and not for a blip."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.policies.deal import deal
from everstep.policies.straggler import (
    Rebalance,
    RebalanceDecision,
    RebalanceObservation,
    RebalanceState,
    smoothed,
)


def decide(
    step: int,
    pace: list[float | None],
    ranges: tuple[range, ...] | None = None,
    since: int | None = None,
    state: RebalanceState | None = None,
    step_s: float | None = None,
) -> RebalanceDecision:
    observation = RebalanceObservation(
        step=step,
        seconds_per_shard=pace,
        ranges=deal(12, 3) if ranges is None else ranges,
        steps_since_change=since,
        step_s=step_s,
    )
    return Rebalance().decide(observation, RebalanceState() if state is None else state)


def test_a_slow_replica_gives_up_shards_after_twenty_steps() -> None:
    state = RebalanceState()
    for step in range(100, 119):
        decision = decide(step, [1.0, 1.0, 2.0], state=state)
        assert decision.ranges is None
        assert f"{step - 99} of 20" in decision.reason
        state = decision.state
    decision = decide(119, [1.0, 1.0, 2.0], state=state)
    assert decision.ranges is not None
    assert [len(owned) for owned in decision.ranges] == [5, 5, 2]
    assert "8 s now, 5 s" in decision.reason
    assert "rank 2 is the slowest and goes from 4 to 2 shards" in decision.reason
    assert decision.state == RebalanceState()


def test_a_blip_starts_the_count_again() -> None:
    state = RebalanceState(better_since_step=100)
    calm = decide(118, [1.0, 1.0, 1.0], state=state)
    assert calm.ranges is None
    assert calm.state.better_since_step is None
    again = decide(119, [1.0, 1.0, 2.0], state=calm.state)
    assert again.ranges is None
    assert again.state.better_since_step == 119


def test_a_fresh_deal_is_left_alone() -> None:
    state = RebalanceState(better_since_step=0)
    assert decide(500, [1.0, 1.0, 2.0], since=19, state=state).ranges is None
    assert decide(500, [1.0, 1.0, 2.0], since=20, state=state).ranges is not None


def test_a_small_gain_moves_nothing() -> None:
    state = RebalanceState(better_since_step=0)
    decision = decide(500, [1.0, 1.0, 1.1], state=state)
    assert decision.ranges is None
    assert "not worth a change" in decision.reason


def test_what_a_deal_saves_is_held_against_the_whole_step() -> None:
    state = RebalanceState(better_since_step=0)
    assert decide(500, [1.0, 1.0, 2.0], state=state, step_s=8.0).ranges is not None
    assert decide(500, [1.0, 1.0, 2.0], state=state, step_s=19.9).ranges is not None, (
        "3 s of 19.9 s are 15.08 %"
    )
    mostly_commit = decide(500, [1.0, 1.0, 2.0], state=state, step_s=20.1)
    assert mostly_commit.ranges is None
    assert "not worth a change" in mostly_commit.reason


def test_nothing_moves_before_everyone_is_measured() -> None:
    decision = decide(500, [1.0, None, 9.0], state=RebalanceState(better_since_step=0))
    assert decision.ranges is None
    assert decision.state.better_since_step is None
    assert "1 of 3" in decision.reason


@given(st.lists(st.floats(0.01, 10.0), min_size=2, max_size=10), st.integers(0, 40))
def test_after_a_move_the_same_speeds_ask_for_no_other(pace: list[float], spare: int) -> None:
    ranges = deal(len(pace) + spare, len(pace))
    state = RebalanceState(better_since_step=0)
    decision = decide(100, list(pace), ranges, 100, state)
    if decision.ranges is not None:
        worst = max(len(owned) * seconds for owned, seconds in zip(ranges, pace, strict=True))
        best = max(len(owned) * seconds for owned, seconds in zip(decision.ranges, pace, strict=True))
        assert best <= 0.85 * worst * (1 + 1e-9)
        assert decide(200, list(pace), decision.ranges, 100, state).ranges is None


def test_uneven_input_is_refused() -> None:
    with pytest.raises(ValueError, match="2 replicas and ranges of 3"):
        decide(1, [1.0, 1.0])


def test_smoothing_starts_at_the_first_sample() -> None:
    assert smoothed(None, 4.0) == 4.0
    assert smoothed(4.0, 9.0) == 5.0
