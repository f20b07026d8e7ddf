"""The `ordered` strategy: additions in the order of the tree, whoever holds what, so the bits of a sum never change.

Each rank owns one slice of the bucket: it gets that slice of every node from its holder, adds them up as the tree says,
and sends the result to everybody. Each rank sends what a ring all-reduce would (for one node per rank), in two hops.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from everstep.actors.groups.base import GATHER_CHANNEL, SCATTER_CHANNEL, Group, Work, slice_size, slices
from everstep.actors.reduction.plan import Plan
from everstep.actors.reduction.tree import Node, fold


class Ordered:
    """Implements Strategy. Without state: every call is complete in itself."""

    def reduce(
        self, group: Group, plan: Plan, nodes: Sequence[Tensor], out: Tensor, numel: int
    ) -> Iterator[Work]:
        return reduce_in_order(group, plan, nodes, out, numel, scale=1.0 / plan.num_shards)


def reduce_in_order(
    group: Group, plan: Plan, nodes: Sequence[Tensor], out: Tensor, numel: int, *, scale: float
) -> Iterator[Work]:
    """Strategy.reduce, for the sum times `scale`."""
    bounds = slices(numel, plan.world_size)
    start, stop = bounds[plan.rank]
    places = _places(out, plan, slice_size(numel, plan.world_size))
    held = {
        node: _Value(tensor[start:stop], ours=False) for node, tensor in zip(plan.mine, nodes, strict=True)
    }
    receives = []
    for peer in reversed(plan.peers):
        for node in plan.nodes[peer]:
            place = next(places)[: stop - start]
            held[node] = _Value(place, ours=True)
            receives.append((place, peer))
    sends = [(tensor[slice(*bounds[peer])], peer) for peer in plan.peers for tensor in nodes]
    yield group.exchange(sends, receives, channel=SCATTER_CHANNEL)
    mine = out[start:stop]
    torch.mul(_sum(held, plan.num_shards), scale, out=mine)
    yield group.exchange(
        [(mine, peer) for peer in plan.peers],
        [(out[slice(*bounds[peer])], peer) for peer in reversed(plan.peers)],
        channel=GATHER_CHANNEL,
    )


class _Value:
    """A slice of a node or of a sum; `ours` if it may be written to."""

    __slots__ = ("ours", "tensor")

    def __init__(self, tensor: Tensor, *, ours: bool) -> None:
        self.tensor = tensor
        self.ours = ours


def _sum(held: Mapping[Node, _Value], num_shards: int) -> Tensor:
    return fold(held, num_shards, _add).tensor


def _add(left: _Value, right: _Value) -> _Value:
    """In place where possible; a + b has the bits of b + a."""
    target = left if left.ours else right if right.ours else None
    if target is None:
        return _Value(left.tensor + right.tensor, ours=True)
    torch.add(left.tensor, right.tensor, out=target.tensor)
    return target


def _places(out: Tensor, plan: Plan, size: int) -> Iterator[Tensor]:
    """Where nodes from other ranks may land: all of `out`, as the result is written only after they are used; with one
    node per rank that is enough."""
    for peer in (*plan.peers, plan.rank):
        yield out[peer * size : (peer + 1) * size]
    while True:
        yield out.new_empty(size)
