"""How many failures a run may absorb, and how long it waits before it tries again.

Called by the controller's core, once per failure (`charge`), once per recovery (`recover`) and at commits
(`committed`), and by the simulator. The budget belongs to the run, not to a process: it is written down with the
controller's state (`to_json`), so neither a fast rejoin nor a restarted controller gets around it. Clock and chance
are arguments. The one mutable policy object here: its state is plain and JSON-safe, a refused charge changes nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any


class FailureClass(StrEnum):
    """What kind of failure it was, in the order of POLICIES: whose fault decides how often it is forgiven."""

    USER_EXCEPTION = "user_exception"
    OUT_OF_MEMORY = "out_of_memory"
    PROCESS_CRASH = "process_crash"
    NODE_LOSS = "node_loss"
    NETWORK = "network"
    PREEMPTION = "preemption"
    UNKNOWN = "unknown"


# Counted over the whole run: waiting an hour makes neither a bug nor a model that does not fit go away.
WHOLE_RUN = frozenset({FailureClass.USER_EXCEPTION, FailureClass.OUT_OF_MEMORY})
# The replacement comes from another machine, so there is nothing to wait for.
NO_BACK_OFF = frozenset({FailureClass.NODE_LOSS, FailureClass.PREEMPTION})


@dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLimits:
    """Failures allowed per class within `window_s`; None is without limit. A limit of 2 absorbs two, not the third."""

    user_exception: int | None = 0
    """Over the whole run. Where more than 0: still none at step 0, and never the same one twice at one step."""
    out_of_memory: int | None = 1
    """Over the whole run."""
    process_crash: int | None = 5
    """Killed by a signal, or exited without a Python exception, on a node that lives."""
    node_loss: int | None = None
    """Charged to the node, not to the run."""
    network: int | None = 10
    """Collectives or heartbeats failed though both ends live."""
    preemption: int | None = None
    """Announced by the cloud or the cluster: counted, never held against the run."""
    unknown: int | None = 3
    """Nothing else fits."""
    window_s: float = 3600.0
    """Sliding window of the classes not counted over the whole run."""
    back_off_s: float = 1.0
    """b0 of the back-off min(cap, b0 * 2^k) * U(0.5, 1)."""
    back_off_cap_s: float = 300.0
    """cap of the back-off."""
    reset_after_steps: int = 10
    """Committed steps without a failure after which k is 0 again."""
    recoveries_without_progress: int = 3
    """Recoveries without a newer committed step that are made before the run stops."""

    def __post_init__(self) -> None:
        for failure_class in FailureClass:
            limit = self.of(failure_class)
            if limit is not None and limit < 0:
                raise ValueError(f"{failure_class} must be at least 0, or None for no limit, got {limit}")
        if min(self.window_s, self.back_off_cap_s) <= 0 or self.back_off_s < 0:
            raise ValueError(
                "window_s and back_off_cap_s must be positive and back_off_s not negative, got "
                f"{self.window_s}, {self.back_off_cap_s} and {self.back_off_s}"
            )

    def of(self, failure_class: FailureClass) -> int | None:
        """The limit of one class."""
        limit: int | None = getattr(self, failure_class.value)
        return limit


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """May the run go on, after which wait, and why."""

    allowed: bool
    wait_s: float
    """Seconds before a replacement is started; the survivors do not wait."""
    reason: str


@dataclass(slots=True, kw_only=True)
class RestartBudget:
    """The run's account of failures. Invariant: of a limited class no more are ever charged than its limit."""

    limits: BudgetLimits = field(default_factory=BudgetLimits)
    totals: dict[str, int] = field(default_factory=dict)
    """Failures charged per class over the whole run, preemptions included."""
    recent_s: dict[str, list[float]] = field(default_factory=dict)
    """Times of the charges still in the window, of limited classes; never longer than the limit."""
    user_errors: list[tuple[int | None, str]] = field(default_factory=list)
    """(step, fingerprint) of the user exceptions that were forgiven."""
    back_offs: int = 0
    """k of the back-off."""
    retry_at_s: float = 0.0
    """End of the last wait."""
    steps_since_failure: int = 0
    recoveries: int = 0
    """Recoveries since the last newly committed step."""

    def charge(
        self,
        failure_class: FailureClass,
        now_s: float,
        uniform: float,
        *,
        step: int | None = None,
        fingerprint: str = "",
    ) -> Verdict:
        """Charge one failure at `now_s` (any clock that never goes back within the run, also over restarts).

        `uniform` is a number of U(0, 1). `step` and `fingerprint` (type and place of the exception) matter for user
        exceptions alone. A failure that comes before the last wait is over belongs to the same trouble: it shares
        that wait and does not double the next one, so that losing half of the replicas at once counts once.
        """
        if not 0.0 <= uniform <= 1.0:
            raise ValueError(f"uniform must be in [0, 1], got {uniform}")
        refusal = self._refusal(failure_class, now_s, step, fingerprint)
        if refusal is not None:
            return Verdict(allowed=False, wait_s=0.0, reason=refusal)
        self._count(failure_class, now_s, step, fingerprint)
        self.steps_since_failure = 0
        wait_s = 0.0 if failure_class in NO_BACK_OFF else self._back_off_s(now_s, uniform)
        used, limit = self._used(failure_class, now_s), self.limits.of(failure_class)
        share = (
            f"number {self.totals[failure_class]}, no limit" if limit is None else f"{used} of {limit} used"
        )
        return Verdict(
            allowed=True, wait_s=wait_s, reason=f"{failure_class} absorbed ({share}), wait {wait_s:.1f} s"
        )

    def recover(self) -> Verdict:
        """Count one recovery that failures forced, however many they were (no planned change, no preemption)."""
        limit = self.limits.recoveries_without_progress
        if self.recoveries >= limit:
            return Verdict(
                allowed=False,
                wait_s=0.0,
                reason=f"{self.recoveries} recoveries without a newer committed step: the run makes no progress",
            )
        self.recoveries += 1
        return Verdict(
            allowed=True,
            wait_s=0.0,
            reason=f"recovery {self.recoveries} of {limit} since the last committed step",
        )

    def committed(self, steps: int) -> None:
        """`steps` more steps are history."""
        if steps <= 0:
            return
        self.recoveries = 0
        self.steps_since_failure += steps
        if self.steps_since_failure >= self.limits.reset_after_steps:
            self.back_offs = 0

    def to_json(self) -> dict[str, Any]:
        """The whole state with its limits, JSON-safe."""
        state = asdict(self)
        state["user_errors"] = [list(pair) for pair in self.user_errors]
        return state

    @classmethod
    def from_json(cls, state: Mapping[str, Any], limits: BudgetLimits | None = None) -> RestartBudget:
        """The budget that `to_json` wrote; `limits`, where given, replace the written ones (raised by the operator)."""
        return cls(
            limits=limits if limits is not None else BudgetLimits(**state["limits"]),
            totals=dict(state["totals"]),
            recent_s={name: list(times) for name, times in state["recent_s"].items()},
            user_errors=[(step, fingerprint) for step, fingerprint in state["user_errors"]],
            back_offs=state["back_offs"],
            retry_at_s=state["retry_at_s"],
            steps_since_failure=state["steps_since_failure"],
            recoveries=state["recoveries"],
        )

    def _used(self, failure_class: FailureClass, now_s: float) -> int:
        if failure_class in WHOLE_RUN:
            return self.totals.get(failure_class, 0)
        return sum(now_s - at_s < self.limits.window_s for at_s in self.recent_s.get(failure_class, ()))

    def _refusal(
        self, failure_class: FailureClass, now_s: float, step: int | None, fingerprint: str
    ) -> str | None:
        if failure_class is FailureClass.USER_EXCEPTION:
            if step == 0:
                return "user_exception at step 0: it would only happen again"
            if (step, fingerprint) in self.user_errors:
                return (
                    f"user_exception {fingerprint or 'of the same kind'} for the second time at step {step}"
                )
        limit = self.limits.of(failure_class)
        used = self._used(failure_class, now_s)
        if limit is None or used < limit:
            return None
        period = "in this run" if failure_class in WHOLE_RUN else f"within {self.limits.window_s:.0f} s"
        if limit == 0:
            return f"{failure_class}: the budget allows none"
        return f"{failure_class}: budget of {limit} {period} is used up"

    def _count(self, failure_class: FailureClass, now_s: float, step: int | None, fingerprint: str) -> None:
        self.totals[failure_class.value] = self.totals.get(failure_class, 0) + 1
        if failure_class is FailureClass.USER_EXCEPTION:
            self.user_errors = [*self.user_errors, (step, fingerprint)][-64:]
        if failure_class not in WHOLE_RUN and self.limits.of(failure_class) is not None:
            recent = [
                at_s for at_s in self.recent_s.get(failure_class, ()) if now_s - at_s < self.limits.window_s
            ]
            self.recent_s[failure_class.value] = [*recent, now_s]

    def _back_off_s(self, now_s: float, uniform: float) -> float:
        if now_s < self.retry_at_s:
            return self.retry_at_s - now_s
        longest_s = min(self.limits.back_off_cap_s, self.limits.back_off_s * 2.0 ** min(self.back_offs, 64))
        wait_s = longest_s * (0.5 + 0.5 * uniform)
        self.back_offs += 1
        self.retry_at_s = now_s + wait_s
        return wait_s
