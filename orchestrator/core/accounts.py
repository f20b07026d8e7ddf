"""Where the time went: the seconds of a run by bucket, and the phases of one re-form.

Used by `machine` alone. Buckets are advanced by one clock that is always in exactly one bucket, so they sum to the
run's wall time by construction.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from everstep.orchestrator.events import Recovery

BUCKETS = ("productive", "degraded", "reform", "transfer", "lost_work", "idle")
"""productive: training at the wished size; degraded: training below it; reform: parked between two generations;
transfer: waiting for a joiner's state; lost_work: computing lost shards again; idle: too few replicas."""


@dataclass(slots=True)
class Clock:
    """Seconds by bucket."""

    bucket: str = "idle"
    since_s: float = 0.0
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(BUCKETS, 0.0))

    def switch(self, bucket: str, now_s: float) -> None:
        """From now on the time goes to another bucket."""
        self.seconds[self.bucket] += max(now_s - self.since_s, 0.0)
        self.since_s = max(now_s, self.since_s)
        self.bucket = bucket

    def read(self, now_s: float) -> dict[str, float]:
        """Seconds by bucket until now."""
        self.switch(self.bucket, now_s)
        return dict(self.seconds)


@dataclass(slots=True, kw_only=True)
class Reform:
    """One change of membership while it is under way, from the first sign to the next committed step."""

    cause: str
    planned: bool
    noticed_s: float
    generation_before: int
    world_size_before: int
    replica: int | None = None
    node: str = ""
    parked_s: float = 0.0
    decided_s: float = 0.0
    connected_s: float = 0.0
    transfer_s: float = 0.0
    num_bytes: int = 0
    generation_after: int = 0
    world_size_after: int = 0
    step: int = 0
    shards_recomputed: int = 0
    steps_lost: int = 0
    rolled_forward: bool = False

    def closed(self, now_s: float) -> Recovery:
        """The record of it; `now_s` is the moment of the next commit."""
        marks = [self.noticed_s, self.parked_s, self.decided_s, self.connected_s, now_s]
        for i in range(1, len(marks)):
            marks[i] = max(marks[i], marks[i - 1])
        transfer = min(self.transfer_s, marks[4] - marks[3])
        phases = {
            "notice": marks[1] - marks[0],
            "decide": marks[2] - marks[1],
            "connect": marks[3] - marks[2],
            "transfer": transfer,
            "redo": marks[4] - marks[3] - transfer,
        }
        return Recovery(
            generation_before=self.generation_before,
            generation_after=self.generation_after,
            cause=self.cause,
            blamed_replica=self.replica,
            blamed_node=self.node,
            phases=phases,
            total_s=marks[4] - marks[0],
            bytes_transferred=self.num_bytes,
            world_size_before=self.world_size_before,
            world_size_after=self.world_size_after,
            step=self.step,
            shards_recomputed=self.shards_recomputed,
            steps_lost=self.steps_lost,
            rolled_forward=self.rolled_forward,
        )


def counters(source: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, int]:
    """Integer fields of a foreign dict; what is missing or no integer counts as 0."""
    return {n: int(source[n]) if isinstance(source.get(n), int) else 0 for n in names}
