"""Who computes which logical shard: the only place where the number of replicas meets the batch.

Called by the controller's core (a new generation, a half-done step), by the straggler policy and by the simulator.
Pure, deterministic, O(V log N). What is dealt never changes a result, only where it is computed.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence


def deal(logical_shards: int, num_replicas: int, speeds: Sequence[float] | None = None) -> tuple[range, ...]:
    """Contiguous ranges of shards in rank order, each of at least one shard.

    Without speeds the sizes differ by at most one, larger ones first. With `speeds` (shards per second or any other
    unit, per rank) they minimize the largest size/speed; ties go to lower ranks; never slower than the equal deal.
    Handing one shard after another to the rank that would finish it first is optimal for this (each rank's time
    grows with its own size alone). Raises ValueError when there are fewer shards than replicas, or on a bad speed.
    """
    if num_replicas < 1:
        raise ValueError(f"a deal needs at least one replica, got {num_replicas}")
    if logical_shards < num_replicas:
        raise ValueError(
            f"{logical_shards} logical shards cannot be dealt to {num_replicas} replicas: each needs at least one. "
            f"Start the run with logical_shards of at least its largest number of replicas"
        )
    sizes = _sizes(logical_shards - num_replicas, num_replicas, speeds, at_least=1)
    ranges, start = [], 0
    for size in sizes:
        ranges.append(range(start, start + size))
        start += size
    return tuple(ranges)


def redeal(
    logical_shards: int, kept: Sequence[Sequence[int]], speeds: Sequence[float] | None = None
) -> tuple[tuple[int, ...], ...]:
    """For a half-done step: the shards that each rank has to compute in addition to those it keeps.

    `kept[rank]` are the shards whose gradient that rank holds or is computing now. The shards nobody keeps are spread
    so that the last of them is done earliest (by their number, divided by speed where given), in runs of neighbours.
    Afterwards each shard has exactly one owner. Raises ValueError when a shard is kept twice or does not exist.
    """
    if not kept:
        raise ValueError("a deal needs at least one replica, got none")
    owner: dict[int, int] = {}
    for rank, shards in enumerate(kept):
        for shard in shards:
            if not 0 <= shard < logical_shards:
                raise ValueError(
                    f"rank {rank} keeps shard {shard}, but the run has {logical_shards} logical shards"
                )
            if shard in owner:
                raise ValueError(f"shard {shard} is kept twice, by ranks {owner[shard]} and {rank}")
            owner[shard] = rank
    missing = [shard for shard in range(logical_shards) if shard not in owner]
    extra, start = [], 0
    for size in _sizes(len(missing), len(kept), speeds, at_least=0):
        extra.append(tuple(missing[start : start + size]))
        start += size
    return tuple(extra)


def _sizes(rest: int, num_replicas: int, speeds: Sequence[float] | None, *, at_least: int) -> list[int]:
    """Sizes per rank: `at_least` each, and `rest` more where they cost the least time."""
    if speeds is None:
        each, over = divmod(rest, num_replicas)
        return [at_least + each + (rank < over) for rank in range(num_replicas)]
    if len(speeds) != num_replicas:
        raise ValueError(f"got {len(speeds)} speeds for {num_replicas} replicas")
    for rank, speed in enumerate(speeds):
        if not (math.isfinite(speed) and speed > 0):
            raise ValueError(f"the speed of rank {rank} must be positive and finite, got {speed}")
    sizes = [at_least] * num_replicas
    heap = [((at_least + 1) / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(heap)
    for _ in range(rest):
        rank = heap[0][1]
        sizes[rank] += 1
        heapq.heapreplace(heap, ((sizes[rank] + 1) / speeds[rank], rank))
    return sizes
