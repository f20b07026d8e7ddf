"""Who holds which partial sums in one attempt to reduce a step, and what a strategy is.

Every rank derives the same plan from the shares that the controller dealt, so no rank has to ask another.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from everstep.actors.groups.base import ALIGN, Group, Work
from everstep.actors.reduction.tree import Node, check_partition, cover, shards_of


@dataclass(frozen=True, slots=True)
class Plan:
    """The nodes of the tree that each rank holds when the step is reduced."""

    num_shards: int
    rank: int
    nodes: tuple[tuple[Node, ...], ...]
    """Per rank, from left to right."""

    @property
    def world_size(self) -> int:
        return len(self.nodes)

    @property
    def mine(self) -> tuple[Node, ...]:
        return self.nodes[self.rank]

    @property
    def shards(self) -> frozenset[int]:
        """This rank's."""
        return frozenset(shard for node in self.mine for shard in shards_of(node, self.num_shards))

    @property
    def peers(self) -> list[int]:
        """The other ranks, beginning at the right neighbour, so that not everybody sends to rank 0 first."""
        return [(self.rank + i) % self.world_size for i in range(1, self.world_size)]


def make_plan(shards_by_rank: Sequence[Sequence[int]], rank: int, num_shards: int) -> Plan:
    """Raises ValueError unless the shares are a partition of the shards."""
    check_partition(shards_by_rank, num_shards)
    return Plan(num_shards, rank, tuple(cover(shards, num_shards) for shards in shards_by_rank))


class Strategy(Protocol):
    """How partial sums become the mean. One bucket at a time, the same one on all ranks."""

    def reduce(
        self, group: Group, plan: Plan, nodes: Sequence[Tensor], out: Tensor, numel: int
    ) -> Iterator[Work]:
        """Yields each collective after launching it, and goes on when it has been waited for.

        Args:
            nodes: this rank's partial sums in the order of `plan.mine`, each [numel]; they stay untouched.
            out: [room(numel, world_size)] of the same dtype; afterwards the first `numel` elements are the mean over
                the shards. What it holds meanwhile is nobody's business.
        """
        ...


def room(numel: int, world_size: int) -> int:
    """Elements that a strategy's `out` needs at least for a bucket of `numel`: a full slice per rank. Room for many
    ranks is room for fewer."""
    return numel + world_size * ALIGN
