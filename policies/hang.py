"""How long a step may take before it counts as hung.

Called by the controller after each committed step, and by the simulator. It measures nothing itself: the durations
are put in, the deadline comes out. What happens at the deadline (stack dump, suspects) is the controller's business.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepDurations:
    """The last step durations in a bounded window. Immutable: `added` returns the next one."""

    window: int = 128
    """Durations kept."""
    first_steps: int = 3
    """Steps at the start that are counted but not kept: they carry compilation and warm-up, and one of them in the
    window would keep the deadline at minutes for the next hundred steps."""
    durations_s: tuple[float, ...] = ()
    """Oldest first."""
    num_steps: int = 0
    """Steps seen, those not kept included."""

    def added(self, duration_s: float) -> StepDurations:
        """With one more committed step. Raises ValueError on a negative or not finite duration."""
        if not (math.isfinite(duration_s) and duration_s >= 0):
            raise ValueError(f"a step's duration must be finite and not negative, got {duration_s}")
        kept = self.durations_s
        if self.num_steps >= self.first_steps:
            kept = (*kept, duration_s)[-self.window :]
        return StepDurations(
            window=self.window, first_steps=self.first_steps, durations_s=kept, num_steps=self.num_steps + 1
        )

    def restarted(self) -> StepDurations:
        """The same window when some replica has its first steps before it again (a joiner)."""
        return StepDurations(window=self.window, first_steps=self.first_steps, durations_s=self.durations_s)

    @property
    def p99_s(self) -> float | None:
        """99th percentile by nearest rank (the largest of fewer than 100); None while nothing is kept."""
        if not self.durations_s:
            return None
        return sorted(self.durations_s)[math.ceil(0.99 * len(self.durations_s)) - 1]

    @property
    def recent_s(self) -> float | None:
        """Median of the last 20 that are kept: what a step takes now. None while nothing is kept."""
        return statistics.median(self.durations_s[-20:]) if self.durations_s else None


@dataclass(frozen=True, slots=True, kw_only=True)
class HangDeadline:
    """Deadline of a step: max(floor_s, factor * p99 of the last steps), at least first_step_s for the first steps."""

    floor_s: float = 10.0
    """Never less: below it, garbage collection and a slow disk look like hangs."""
    factor: float = 5.0
    """Multiple of the 99th percentile."""
    first_step_s: float = 300.0
    """Floor during the first steps of any replica: imports, compilation and autotuning happen there."""

    def decide(self, durations: StepDurations) -> float:
        """Seconds after its start at which the next step counts as hung."""
        p99_s = durations.p99_s
        measured_s = self.floor_s if p99_s is None else max(self.floor_s, self.factor * p99_s)
        if durations.num_steps < durations.first_steps or p99_s is None:
            return max(measured_s, self.first_step_s)
        return measured_s
