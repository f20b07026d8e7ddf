"""The restart budget: what it absorbs, when it stops the run, and how long it waits."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.policies.budget import BudgetLimits, FailureClass, RestartBudget

CRASH, PREEMPTION = FailureClass.PROCESS_CRASH, FailureClass.PREEMPTION


def test_a_budget_of_two_crashes_stops_at_the_third_however_fast_replacements_join() -> None:
    budget = RestartBudget(limits=BudgetLimits(process_crash=2))
    assert budget.charge(CRASH, 100.0, 0.5).allowed
    assert budget.charge(CRASH, 101.0, 0.5).allowed
    budget.committed(5)  # joining within a second and training on gives nothing back
    verdict = budget.charge(CRASH, 102.0, 0.5)
    assert not verdict.allowed
    assert "process_crash: budget of 2 within 3600 s is used up" in verdict.reason


def test_preemptions_do_not_eat_the_crash_budget() -> None:
    budget = RestartBudget(limits=BudgetLimits(process_crash=1))
    for k in range(5):
        verdict = budget.charge(PREEMPTION, float(k), 1.0)
        assert verdict.allowed
        assert verdict.wait_s == 0.0
    assert "number 5" in verdict.reason
    assert budget.charge(CRASH, 6.0, 1.0).allowed
    assert not budget.charge(CRASH, 7.0, 1.0).allowed
    assert budget.charge(PREEMPTION, 8.0, 1.0).allowed
    assert budget.totals == {"preemption": 6, "process_crash": 1}


def test_crashes_are_forgiven_after_their_window_and_memory_is_not() -> None:
    budget = RestartBudget()
    assert [budget.charge(CRASH, 10.0 * k, 0.0).allowed for k in range(6)] == [True] * 5 + [False]
    assert budget.charge(CRASH, 3600.0, 0.0).allowed  # the one at 0 s is an hour old
    assert not budget.charge(CRASH, 3601.0, 0.0).allowed
    assert budget.charge(FailureClass.OUT_OF_MEMORY, 0.0, 0.0).allowed
    late = budget.charge(FailureClass.OUT_OF_MEMORY, 1e6, 0.0)
    assert not late.allowed
    assert "in this run" in late.reason


def test_user_exceptions_fail_fast() -> None:
    user = FailureClass.USER_EXCEPTION
    assert not RestartBudget().charge(user, 0.0, 0.5, step=7, fingerprint="ValueError@loop:3").allowed
    budget = RestartBudget(limits=BudgetLimits(user_exception=3))
    assert not budget.charge(user, 0.0, 0.5, step=0, fingerprint="a").allowed
    assert budget.charge(user, 0.0, 0.5, step=7, fingerprint="a").allowed
    again = budget.charge(user, 1.0, 0.5, step=7, fingerprint="a")
    assert not again.allowed
    assert "second time at step 7" in again.reason
    assert budget.charge(user, 2.0, 0.5, step=8, fingerprint="a").allowed
    assert budget.charge(user, 3.0, 0.5, step=8, fingerprint="b").allowed
    assert not budget.charge(user, 4.0, 0.5, step=9, fingerprint="c").allowed


def test_back_off_doubles_to_its_cap_and_starts_again_after_ten_steps() -> None:
    budget = RestartBudget(limits=BudgetLimits(process_crash=None))
    now_s, waits_s = 0.0, []
    for _ in range(11):
        waits_s.append(budget.charge(CRASH, now_s, 1.0).wait_s)
        now_s += 1000.0
    assert waits_s == [1, 2, 4, 8, 16, 32, 64, 128, 256, 300, 300]
    budget.committed(9)
    assert budget.charge(CRASH, now_s, 1.0).wait_s == 300.0  # and the count of steps begins again
    budget.committed(9)
    now_s += 1000.0
    assert budget.charge(CRASH, now_s, 1.0).wait_s == 300.0
    budget.committed(4)
    budget.committed(6)
    assert budget.charge(CRASH, now_s + 1000, 0.0).wait_s == 0.5
    assert budget.charge(CRASH, now_s + 2000, 0.5).wait_s == 1.5


def test_losing_half_of_the_replicas_at_once_doubles_the_wait_once() -> None:
    budget = RestartBudget(limits=BudgetLimits(process_crash=None))
    waits_s = [budget.charge(CRASH, 50.0 + k / 10, 1.0).wait_s for k in range(8)]
    assert waits_s == pytest.approx([1.0 - k / 10 for k in range(8)])
    assert budget.back_offs == 1
    assert budget.charge(CRASH, 51.5, 1.0).wait_s == 2.0


def test_a_run_without_progress_is_stopped() -> None:
    budget = RestartBudget()
    assert [budget.recover().allowed for _ in range(4)] == [True, True, True, False]
    assert "no progress" in budget.recover().reason
    budget.committed(0)
    assert not budget.recover().allowed
    budget.committed(1)
    assert budget.recover().allowed


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(FailureClass)), st.floats(0, 900), st.floats(0, 1), st.integers(0, 12)
        ),
        max_size=40,
    ),
    st.integers(0, 40),
)
def test_a_restarted_controller_goes_on_with_the_same_budget(
    story: list[tuple[FailureClass, float, float, int]], restart_at: int
) -> None:
    kept, restarted = RestartBudget(), RestartBudget()
    now_s = 0.0
    for event, (failure_class, gap_s, uniform, steps) in enumerate(story):
        now_s += gap_s
        if event == restart_at:
            restarted = RestartBudget.from_json(json.loads(json.dumps(restarted.to_json())))
            assert restarted == kept
        verdicts = [b.charge(failure_class, now_s, uniform, step=event // 2) for b in (kept, restarted)]
        assert verdicts[0] == verdicts[1]
        assert 0 <= verdicts[0].wait_s <= 300
        for budget in (kept, restarted):
            budget.committed(steps)
    for failure_class in FailureClass:
        limit = kept.limits.of(failure_class)
        assert limit is None or len(kept.recent_s.get(failure_class, ())) <= limit


def test_a_refused_charge_changes_nothing() -> None:
    budget = RestartBudget(limits=BudgetLimits(process_crash=0))
    before = json.dumps(budget.to_json())
    assert not budget.charge(CRASH, 5.0, 0.5).allowed
    assert json.dumps(budget.to_json()) == before


def test_new_limits_replace_the_written_ones() -> None:
    budget = RestartBudget(limits=BudgetLimits(process_crash=1))
    assert budget.charge(CRASH, 0.0, 0.0).allowed
    raised = RestartBudget.from_json(budget.to_json(), BudgetLimits(process_crash=2))
    assert raised.charge(CRASH, 1.0, 0.0).allowed
    assert not raised.charge(CRASH, 2.0, 0.0).allowed


def test_limits_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ValueError, match="network"):
        BudgetLimits(network=-1)
    with pytest.raises(ValueError, match="window_s"):
        BudgetLimits(window_s=0)
    with pytest.raises(ValueError, match="uniform"):
        RestartBudget().charge(CRASH, 0.0, 1.5)
