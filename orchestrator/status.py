"""The picture of a run that `everstep status` shows: one plain dict made from the core's state. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from everstep.orchestrator.core import Core, ReplicaState
from everstep.orchestrator.core.model import Replica

if TYPE_CHECKING:
    from everstep.orchestrator.config import RunConfig


def status_of(core: Core, config: RunConfig, now_s: float, started_at: float) -> dict[str, Any]:
    """JSON-safe. Times in seconds; `started_at` as unix time."""
    generation = core.generation
    size = len(generation.members) if generation else 0
    # A controller that came back knows what the replicas have told so far.
    step = max((hello.status.applied for hello in core.adopting.values()), default=core.step)
    left = core.total - step if core.total else None
    rate = config.batch.global_batch_size / core.step_s if core.step_s > 0 else 0.0
    return {
        "run": config.name,
        "phase": str(core.phase),
        "outcome": core.outcome or None,
        "step": step,
        "total": core.total or None,
        "generation": core.number,
        "world_size": size,
        "target": core.target,
        "min_replicas": config.scaling.min_replicas,
        "max_replicas": config.scaling.max_replicas,
        "spares_ready": sum(r.state is ReplicaState.READY for r in core.replicas.values()),
        "samples_per_s": rate,
        "eta_s": left * core.step_s if left is not None else None,
        "metrics": dict(core.metrics),
        "started_at": started_at,
        "replicas": [_replica(core, r, now_s) for r in core.replicas.values()],
        "last_recovery": core.last_recovery.to_dict() if core.last_recovery else None,
        "draining": sorted(core.excluded),
        "buckets": core.clock.read(now_s),
        "incarnation": core.incarnation,
        "reason": core.reason,
    }


def _replica(core: Core, replica: Replica, now_s: float) -> dict[str, Any]:
    generation = core.generation
    rank = (
        generation.rank_of(replica.replica)
        if generation and replica.state is ReplicaState.MEMBER and replica.replica in generation.members
        else None
    )
    first, stop = generation.ranges[rank] if generation and rank is not None else (0, 0)
    return {
        "replica": replica.replica,
        "state": str(replica.state),
        "rank": rank,
        "node": replica.node,
        "host": replica.host,
        "pid": replica.pid,
        "shards": list(range(first, stop)),
        "phase": replica.phase,
        "step": core.step if rank is not None else None,
        "leaving": replica.leaving or None,
        "heartbeat_age_s": max(now_s - replica.heard_s, 0.0),
        "compute_s": replica.compute_s,
    }
