"""When to move logical shards from slow replicas to fast ones. Moving comes before ejecting, always.

Called by the controller's core at commit boundaries, and by the simulator. It sees compute time alone: a replica
that waits in a collective is not slow. The state (since when the other deal has been better) is put in and handed back.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from everstep.policies.deal import deal


def smoothed(previous: float | None, sample: float, weight: float = 0.2) -> float:
    """Exponentially weighted moving average: the new value after `sample`; `previous` is None at the start."""
    return sample if previous is None else previous + weight * (sample - previous)


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceObservation:
    """What is known at a commit boundary. All sequences are in rank order and of equal length."""

    step: int
    """The step just committed."""
    seconds_per_shard: Sequence[float | None]
    """Smoothed compute seconds per logical shard, waiting excluded; None while a replica has not been measured."""
    ranges: Sequence[range]
    """The present deal."""
    step_s: float | None = None
    """Seconds of a whole step of late, waiting and commit included. None: the compute time alone is looked at."""
    steps_since_change: int | None = None
    """Steps committed since the deal last changed, for whatever reason. None: the state is reset at each change."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceState:
    """Carried from one decision to the next."""

    better_since_step: int | None = None
    """The first step of the unbroken time in which another deal was good enough; None when it is not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceDecision:
    """What to do, why, and what to hand in next time."""

    ranges: tuple[range, ...] | None
    """The new deal, or None to leave it."""
    reason: str
    """One sentence with the numbers."""
    state: RebalanceState


@dataclass(frozen=True, slots=True, kw_only=True)
class Rebalance:
    """Deal anew by speed when that shortens a step by `min_gain` and has done so for `hold_steps`.

    Compute time of a step = max over replicas of (shards owned * seconds per shard). What it falls by is held against
    the time of the whole step: of a step that is mostly commit, no deal makes a faster one.
    """

    min_gain: float = 0.15
    """Fraction of the step's time: below it the change costs more than it brings."""
    hold_steps: int = 20
    """Steps for which the gain must hold, and steps that a new deal is left alone for."""

    def decide(self, observation: RebalanceObservation, state: RebalanceState) -> RebalanceDecision:
        """Raises ValueError when the sequences are of unequal length."""
        pace, ranges = observation.seconds_per_shard, observation.ranges
        if len(pace) != len(ranges):
            raise ValueError(f"got seconds per shard of {len(pace)} replicas and ranges of {len(ranges)}")
        known = [
            seconds for seconds in pace if seconds is not None and math.isfinite(seconds) and seconds > 0
        ]
        if len(known) < len(pace):
            return _leave(f"{len(pace) - len(known)} of {len(pace)} replicas have not been measured")
        new = deal(sum(map(len, ranges)), len(ranges), [1.0 / seconds for seconds in known])
        now_s = max(len(owned) * seconds for owned, seconds in zip(ranges, known, strict=True))
        then_s = max(len(owned) * seconds for owned, seconds in zip(new, known, strict=True))
        whole_s = max(now_s, observation.step_s or 0.0)
        gain = (now_s - then_s) / whole_s
        numbers = (
            f"compute time of a step {now_s:.4g} s now, {then_s:.4g} s when dealt by speed "
            f"({gain:.0%} of its {whole_s:.4g} s)"
        )
        if gain < self.min_gain:
            return _leave(f"{numbers}: not worth a change under {self.min_gain:.0%}")
        since = observation.step if state.better_since_step is None else state.better_since_step
        waiting = RebalanceState(better_since_step=since)
        held = observation.step - since + 1
        if observation.steps_since_change is not None:
            held = min(held, observation.steps_since_change)
        if held < self.hold_steps:
            return RebalanceDecision(
                ranges=None, reason=f"{numbers}: held for {held} of {self.hold_steps} steps", state=waiting
            )
        slowest = max(range(len(known)), key=known.__getitem__)
        return RebalanceDecision(
            ranges=new,
            reason=f"{numbers} for {held} steps; rank {slowest} is the slowest and goes from {len(ranges[slowest])} "
            f"to {len(new[slowest])} shards",
            state=RebalanceState(),
        )


def _leave(reason: str) -> RebalanceDecision:
    return RebalanceDecision(ranges=None, reason=reason, state=RebalanceState())
