"""The fixed binary tree over the logical shards, in whose order gradients are always added.

Used by the reducer and its strategies. Pure: numbers in, numbers out. The order of additions is a function of V alone,
so neither membership nor the order in which shards are computed can change a bit of a sum.

A node is (level, index) and covers the shards [index << level, (index + 1) << level) that are below V. V need not be a
power of two: a node whose right half lies beyond V *is* its left child, without an addition. Such a node has several
names; everywhere outside of this file it goes by the one of lowest level, its canonical name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeVar

Node = tuple[int, int]
"""(level, index), canonical."""

T = TypeVar("T")


def leaf(shard: int) -> Node:
    """The node that is one shard."""
    return (0, shard)


def root(num_shards: int) -> Node:
    """The node that covers all shards."""
    return _canonical(((num_shards - 1).bit_length(), 0), num_shards)


def shards_of(node: Node, num_shards: int) -> range:
    """The shards that `node` covers."""
    level, index = node
    return range(index << level, min((index + 1) << level, num_shards))


def children(node: Node, num_shards: int) -> tuple[Node, Node]:
    """Left and right child of a node that is no leaf."""
    level, index = node
    return (
        _canonical((level - 1, 2 * index), num_shards),
        _canonical((level - 1, 2 * index + 1), num_shards),
    )


def sibling_and_parent(node: Node, num_shards: int) -> tuple[Node, Node] | None:
    """What `node` is added to, and what comes out; None for the root."""
    level, index = node
    while shards_of((level, index), num_shards) != range(num_shards):
        other = (level, index ^ 1)
        level, index = level + 1, index >> 1
        if len(shards_of(other, num_shards)):
            return _canonical(other, num_shards), (level, index)
    return None


def cover(shards: Iterable[int], num_shards: int) -> tuple[Node, ...]:
    """The largest nodes that together are exactly `shards`, from left to right.

    Raises ValueError for a shard outside [0, num_shards).
    """
    wanted = set(shards)
    if not wanted <= set(range(num_shards)):
        raise ValueError(f"shards {sorted(wanted)} are not all within [0, {num_shards})")
    found: list[Node] = []

    def descend(node: Node) -> None:
        inside = sum(shard in wanted for shard in shards_of(node, num_shards))
        if inside == len(shards_of(node, num_shards)):
            found.append(node)
        elif inside:
            for child in children(node, num_shards):
                descend(child)

    descend(root(num_shards))
    return tuple(found)


def merges(shard: int, held: Iterable[Node], num_shards: int) -> tuple[list[Node], Node]:
    """What becomes of `shard` once it joins the nodes in `held`: the nodes it is added to, one after the other, and the
    node that comes out of it."""
    present, node = set(held), leaf(shard)
    added: list[Node] = []
    while (step := sibling_and_parent(node, num_shards)) is not None and step[0] in present:
        added.append(step[0])
        node = step[1]
    return added, node


def fold(nodes: Mapping[Node, T], num_shards: int, add: Callable[[T, T], T], top: Node | None = None) -> T:
    """The sum of `nodes`, which together must cover `top` (default: everything), in the order of the tree."""

    def value(node: Node) -> T:
        if node in nodes:
            return nodes[node]
        if node[0] == 0:
            raise ValueError(f"shard {node[1]} is in none of the nodes {sorted(nodes)}")
        left, right = children(node, num_shards)
        return add(value(left), value(right))

    return value(root(num_shards) if top is None else top)


def check_partition(shares: Sequence[Iterable[int]], num_shards: int) -> None:
    """Raises ValueError unless every shard is in exactly one of `shares`."""
    dealt = sorted(shard for share in shares for shard in share)
    if dealt != list(range(num_shards)):
        raise ValueError(
            f"shares {[sorted(share) for share in shares]} are no partition of {num_shards} shards"
        )


def _canonical(node: Node, num_shards: int) -> Node:
    level, index = node
    while level and (2 * index + 1) << (level - 1) >= num_shards:
        level, index = level - 1, 2 * index
    return (level, index)
