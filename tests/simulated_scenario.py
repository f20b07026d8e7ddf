"""What kind of run `tests.simulation` plays, and what befalls it."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from everstep.orchestrator.core import Phase
from everstep.policies.budget import BudgetLimits
from tests.simulated_rules import Rules


@dataclass(slots=True, kw_only=True)
class Scenario:
    """What kind of run and what kind of trouble. `drawn` gives another one for every seed."""

    num_nodes: int = 3
    replicas: int = 3
    min_replicas: int = 1
    max_replicas: int = 4
    spares: int = 0
    logical_shards: int = 8
    total: int = 25
    leave_at: int = 0
    """Number of steps after which the users' loops end by `break`; 0: they do not."""
    fault_every_s: float = 2.0
    """Mean time between two faults while `faults_s` are not over."""
    faults_s: float = 60.0
    faults: dict[str, float] = field(default_factory=lambda: dict(FAULTS))
    """Weight of each kind of fault."""
    moments: tuple[str, ...] = ()
    """Where ambushes are laid; all `MOMENTS` if empty."""
    effects: tuple[str, ...] = ()
    """What they do; all `EFFECTS` if empty."""
    budget: BudgetLimits = field(default_factory=lambda: LARGE_BUDGET)
    ordered: bool = True
    await_storage: bool = True
    tell_stored: bool = True
    """A controller that comes back is told what the stored events say."""
    other_digests: float = 0.0
    form_glitch: float = 0.02
    shard_s: float = 0.05
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the core that differ."""
    rules: Rules = field(default_factory=Rules)


FAULTS = {
    "crash": 4.0, "crash_many": 0.5, "node_loss": 0.6, "freeze": 1.5, "cut": 0.8, "hang": 0.5, "break_lines": 1.5,
    "break_all_lines": 0.3, "controller": 0.8, "controller_twice": 0.2, "stall": 0.3, "scale": 2.0, "drain": 0.5, "sigterm": 1.5,
    "glitch": 0.5, "crash_joiner": 1.0, "crash_source": 3.0, "crash_while_forming": 3.0, "user_error": 0.1,
    "sigterm_all": 0.3, "ambush": 10.0, "split_vote": 6.0, "out_of_memory": 0.1,
}  # fmt: skip
MOMENTS = (
    "vote", "reduced", "applying", "roll_forward", "roll_forward", "fetching", "fetched", "parked", "formed", "done", "finished", "hello",
    *Phase,
)  # fmt: skip
EFFECTS = (
    "crash", "crash", "crash_many", "crash_source", "break_lines", "break_all_lines", "controller", "glitch", "freeze",
    "cut", "sigterm", "scale", "stall",
)  # fmt: skip
LARGE_BUDGET = BudgetLimits(
    process_crash=None, node_loss=None, network=None, preemption=None, out_of_memory=None, unknown=None,
    back_off_s=0.5, back_off_cap_s=4.0, recoveries_without_progress=8,
)  # fmt: skip


def drawn(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed * 7919 + 1)
    most = rng.choice((1, 2, 2, 3, 3, 4, 5, 6))
    low = rng.choice((1, 1, 1, max(most // 2, 1), most))
    faults = {kind: weight * rng.choice((0.0, 0.3, 1.0, 1.0, 3.0)) for kind, weight in FAULTS.items()}
    tight = rng.random() < 0.15
    shards, shard_s = rng.choice((most, 6, 8, 12)), rng.choice((0.02, 0.1, 0.5))
    steps = int(rng.choice((5.0, 20.0, 40.0)) * most / (shards * shard_s))
    leaving = random.Random(seed * 104_729 + 7)  # its own, so that older seeds play what they always played
    return Scenario(
        num_nodes=rng.choice((1, 2, 4, 6)), replicas=rng.randint(low, most), min_replicas=low, max_replicas=most,
        spares=rng.choice((0, 0, 0, 1)), logical_shards=shards, total=(total := rng.choice((1, 3, *[min(max(steps, 5), 400)] * 6))),
        leave_at=leaving.randint(1, total) if leaving.random() < 0.2 else 0,
        fault_every_s=rng.choice((0.3, 1.0, 2.0, 4.0)), faults_s=rng.choice((20.0, 60.0)), faults=faults,
        budget=BudgetLimits(back_off_s=0.5, back_off_cap_s=4.0) if tight else LARGE_BUDGET,
        ordered=rng.random() < 0.5, await_storage=rng.random() < 0.8, tell_stored=rng.random() < 0.7,
        other_digests=rng.choice((0.0, 0.0, 0.3)), form_glitch=rng.choice((0.0, 0.02, 0.1)),
        shard_s=shard_s,
    )  # fmt: skip
