"""The tree of additions depends on the number of shards alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.actors.reduction import tree

Expression = str | tuple["Expression", "Expression"]


def expression(num_shards: int) -> Expression:
    """The definition, written down a second time: halves at the largest power of two below."""

    def build(start: int, stop: int, size: int) -> Expression:
        if stop - start == 1:
            return str(start)
        half = size // 2
        if start + half >= stop:
            return build(start, stop, half)
        return (build(start, start + half, half), build(start + half, stop, half))

    size = 1
    while size < num_shards:
        size *= 2
    return build(0, num_shards, size)


def add(left: Expression, right: Expression) -> Expression:
    return (left, right)


def ordered(one: Expression, other: Expression) -> Expression:
    """An addition whose operands may come in any order, as a float's may: written smallest shard first."""
    return (one, other) if first(one) < first(other) else (other, one)


def first(expression: Expression) -> int:
    return int(expression) if isinstance(expression, str) else first(expression[0])


@given(st.data())
def test_any_partition_merged_in_any_order_is_the_same_expression(data: st.DataObject) -> None:
    num_shards = data.draw(st.integers(1, 40))
    num_replicas = data.draw(st.integers(1, 6))
    owner = data.draw(st.lists(st.integers(0, num_replicas - 1), min_size=num_shards, max_size=num_shards))
    order = data.draw(st.permutations(range(num_shards)))
    held: list[dict[tree.Node, Expression]] = [{} for _ in range(num_replicas)]
    for shard in order:
        mine = held[owner[shard]]
        added, node = tree.merges(shard, mine, num_shards)
        value: Expression = str(shard)
        for other in added:
            value = ordered(mine.pop(other), value)
        mine[node] = value
    for replica, mine in enumerate(held):
        shards = {shard for shard in range(num_shards) if owner[shard] == replica}
        assert sorted(mine) == sorted(tree.cover(shards, num_shards))
        assert {s for node in mine for s in tree.shards_of(node, num_shards)} == shards
    everything = {node: value for mine in held for node, value in mine.items()}
    assert tree.fold(everything, num_shards, add) == expression(num_shards)


@given(st.integers(1, 64))
def test_leaves_alone_and_the_root_alone_give_the_whole(num_shards: int) -> None:
    leaves = {tree.leaf(shard): str(shard) for shard in range(num_shards)}
    assert tree.fold(leaves, num_shards, add) == expression(num_shards)
    assert tree.fold({tree.root(num_shards): "all"}, num_shards, add) == "all"
    assert tree.cover(range(num_shards), num_shards) == (tree.root(num_shards),)
    assert tree.cover((), num_shards) == ()


def test_an_aligned_range_is_one_node() -> None:
    assert tree.cover(range(4, 8), 8) == ((2, 1),)
    assert tree.cover(range(3), 8) == ((1, 0), (0, 2))
    assert tree.cover(range(4, 6), 6) == ((1, 2),)


def test_what_is_no_partition_is_refused() -> None:
    tree.check_partition([[0, 2], [], [1]], 3)
    for shares in ([[0, 1]], [[0, 1, 2], [2]], [[0, 1, 2, 3]]):
        with pytest.raises(ValueError, match="no partition"):
            tree.check_partition(shares, 3)
    with pytest.raises(ValueError, match="not all within"):
        tree.cover([3], 3)
    with pytest.raises(ValueError, match="shard 1 is in none"):
        tree.fold({(0, 0): "0"}, 2, add)
