"""The `fast` strategy: one partial sum per rank, whatever it holds. The least traffic, but the bits of a sum depend on
who holds what.

Where the backend has an all-reduce of its own (one stream, NCCL), that is used; else the partial sums are treated as
the nodes of a tree over the ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from everstep.actors.groups.base import Group, Work
from everstep.actors.reduction.ordered import reduce_in_order
from everstep.actors.reduction.plan import Plan
from everstep.actors.reduction.tree import leaf


class Fast:
    """Implements Strategy."""

    def reduce(
        self, group: Group, plan: Plan, nodes: Sequence[Tensor], out: Tensor, numel: int
    ) -> Iterator[Work]:
        if group.ordered_launch:
            yield from _all_reduce(group, plan, nodes, out[:numel])
            return
        holders = [rank for rank, held in enumerate(plan.nodes) if held]
        one_each = tuple((leaf(holders.index(rank)),) if held else () for rank, held in enumerate(plan.nodes))
        by_rank = Plan(len(holders), plan.rank, one_each)
        partial = [_partial_sum(nodes)] if nodes else []
        yield from reduce_in_order(group, by_rank, partial, out, numel, scale=1.0 / plan.num_shards)


def _all_reduce(group: Group, plan: Plan, nodes: Sequence[Tensor], out: Tensor) -> Iterator[Work]:
    if nodes:
        torch.mul(_partial_sum(nodes), 1.0 / plan.num_shards, out=out)
    else:
        out.zero_()
    work = group.all_reduce(out, async_op=True)
    assert work is not None
    yield work


def _partial_sum(nodes: Sequence[Tensor]) -> Tensor:
    if len(nodes) == 1:
        return nodes[0]
    total = nodes[0] + nodes[1]
    for node in nodes[2:]:
        total += node
    return total
