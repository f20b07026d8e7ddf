"""Dealing shards: all of them, once, in order, as fast as can be."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.policies.deal import deal, redeal

speeds_of = st.floats(0.01, 100.0)


def slowest(sizes: list[int], speeds: list[float]) -> float:
    return max(size / speed for size, speed in zip(sizes, speeds, strict=True))


@given(st.data())
def test_a_deal_is_contiguous_complete_and_even(data: st.DataObject) -> None:
    replicas = data.draw(st.integers(1, 40))
    shards = data.draw(st.integers(replicas, 200))
    ranges = deal(shards, replicas)
    assert list(itertools.chain(*ranges)) == list(range(shards))
    sizes = [len(owned) for owned in ranges]
    assert sizes == sorted(sizes, reverse=True)
    assert max(sizes) - min(sizes) <= 1
    assert deal(shards, replicas, [2.5] * replicas) == ranges  # equal speeds change nothing


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_deal_by_speed_is_the_fastest_there_is(data: st.DataObject) -> None:
    replicas = data.draw(st.integers(1, 4))
    shards = data.draw(st.integers(replicas, 10))
    speeds = data.draw(st.lists(speeds_of, min_size=replicas, max_size=replicas))
    ranges = deal(shards, replicas, speeds)
    assert list(itertools.chain(*ranges)) == list(range(shards))
    sizes = [len(owned) for owned in ranges]
    assert min(sizes) >= 1
    all_deals = [
        list(sizes)
        for sizes in itertools.product(range(1, shards + 1), repeat=replicas)
        if sum(sizes) == shards
    ]
    assert slowest(sizes, speeds) == min(slowest(other, speeds) for other in all_deals)


@given(st.data())
def test_a_deal_by_speed_is_never_slower_than_the_equal_one(data: st.DataObject) -> None:
    speeds = data.draw(st.lists(speeds_of, min_size=1, max_size=30))
    shards = data.draw(st.integers(len(speeds), 150))
    equal = [len(owned) for owned in deal(shards, len(speeds))]
    fast = [len(owned) for owned in deal(shards, len(speeds), speeds)]
    assert slowest(fast, speeds) <= slowest(equal, speeds)


def test_ties_go_to_lower_ranks() -> None:
    assert deal(8, 3) == (range(3), range(3, 6), range(6, 8))
    assert deal(5, 4, [1.0, 1.0, 1.0, 1.0]) == (range(2), range(2, 3), range(3, 4), range(4, 5))
    assert deal(9, 3, [2.0, 1.0, 1.0]) == (range(5), range(5, 7), range(7, 9))


@given(st.data())
@settings(deadline=None)
def test_after_a_redeal_each_shard_has_one_owner_and_the_work_is_even(data: st.DataObject) -> None:
    replicas = data.draw(st.integers(1, 12))
    owners = data.draw(st.lists(st.integers(-1, replicas - 1), min_size=1, max_size=60))
    kept = [[shard for shard, owner in enumerate(owners) if owner == rank] for rank in range(replicas)]
    extra = redeal(len(owners), kept)
    owned = [shard for rank in range(replicas) for shard in (*kept[rank], *extra[rank])]
    assert sorted(owned) == list(range(len(owners)))
    counts = [len(shards) for shards in extra]
    assert max(counts) - min(counts) <= 1
    assert all(list(shards) == sorted(shards) for shards in extra)
    assert extra == redeal(len(owners), kept)


def test_a_redeal_gives_out_only_what_nobody_holds() -> None:
    # Four replicas with two shards each; the one with 4 and 5 died, the one with 6 and 7 had not begun 7.
    assert redeal(8, [[0, 1], [2, 3], [6]]) == ((4,), (5,), (7,))
    assert redeal(4, [[0, 1], [2, 3]]) == ((), ())
    assert redeal(6, [[0], [1]], [1.0, 3.0]) == ((2,), (3, 4, 5))
    assert redeal(2, [[], [0, 1], []]) == ((), (), ())


def test_what_cannot_be_dealt_is_refused() -> None:
    with pytest.raises(ValueError, match="3 logical shards cannot be dealt to 4"):
        deal(3, 4)
    with pytest.raises(ValueError, match="at least one replica"):
        deal(3, 0)
    with pytest.raises(ValueError, match="at least one replica"):
        redeal(3, [])
    with pytest.raises(ValueError, match="shard 1 is kept twice, by ranks 0 and 2"):
        redeal(3, [[0, 1], [], [1]])
    with pytest.raises(ValueError, match="rank 0 keeps shard 3"):
        redeal(3, [[3]])
    with pytest.raises(ValueError, match="2 speeds for 3"):
        deal(3, 3, [1.0, 1.0])
    for bad in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="speed of rank 1"):
            deal(3, 2, [1.0, bad])


def test_ten_thousand_replicas_are_dealt_in_no_time() -> None:
    speeds = [1.0 + rank % 7 / 10 for rank in range(10_000)]
    kept = [[6 * rank + i for i in range(5)] for rank in range(10_000)]
    begun_s = time.process_time()
    assert sum(map(len, deal(65_536, 10_000, speeds))) == 65_536
    assert sum(map(len, redeal(65_536, kept, speeds))) == 65_536 - 50_000
    assert time.process_time() - begun_s < 2.0  # 0.2 s; a quadratic one takes minutes
