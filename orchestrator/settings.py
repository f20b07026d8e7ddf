"""From the user's configuration to what the controller's core needs of it. Called by the controller actor."""

from __future__ import annotations

from typing import TYPE_CHECKING

from everstep.orchestrator.core import Settings
from everstep.policies.budget import BudgetLimits

if TYPE_CHECKING:
    from everstep.orchestrator.config import RunConfig

GC_THRESHOLDS = (50_000, 20, 100)
"""Of Python's garbage collector in the controller. Its defaults look at all objects of thousands of replicas several
times while one mass failure is handled, which takes longer than to decide about it."""

_LEASE_MARGIN_S = 1.0
"""A lease counts from the moment when the acknowledged heartbeat was sent, so only the clocks' drift and the kernel's
delay in ending a process come on top of it."""

_CHECKPOINT_TIMEOUT_S = 3600.0
"""After which the parts of a checkpoint that have not come are not waited for. As long as the grace of orphans."""


def settings_of(config: RunConfig) -> Settings:
    """The core's view of a run's configuration."""
    scaling, detection, failure = config.scaling, config.detection, config.failure
    return Settings(
        run=config.name,
        min_replicas=scaling.min_replicas,
        max_replicas=scaling.max_replicas,
        replicas=scaling.replicas or scaling.max_replicas,
        spares=scaling.spares,
        logical_shards=config.batch.logical_shards,
        heartbeat_s=detection.heartbeat_s,
        heartbeat_timeout_s=detection.heartbeat_timeout_s,
        hang_floor_s=detection.hang_floor_s,
        first_step_s=detection.first_step_s,
        start_timeout_s=detection.start_timeout_s,
        park_timeout_s=detection.park_timeout_s,
        form_timeout_s=detection.form_timeout_s,
        settle_s=detection.settle_s,
        adopt_timeout_s=detection.lease_s + _LEASE_MARGIN_S,
        checkpoints=config.checkpoint.wanted,
        checkpoint_timeout_s=_CHECKPOINT_TIMEOUT_S,
        budget=BudgetLimits(
            process_crash=failure.process_crashes,
            node_loss=failure.node_losses,
            preemption=failure.preemptions,
            network=failure.network,
            out_of_memory=failure.out_of_memory,
            unknown=failure.unknown,
            window_s=failure.window_s,
            back_off_s=failure.backoff_s,
            back_off_cap_s=failure.backoff_cap_s,
        ),
    )
