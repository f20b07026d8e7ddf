"""Seeds never change, and never collide by construction."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from everstep.policies.seeds import batch_seed, derive_seed, mix64, sample_seed, sample_seeds, shard_seed

words = st.integers(min_value=0, max_value=2**64 - 1)


def test_seeds_are_what_they_were_in_every_earlier_version() -> None:
    assert derive_seed() == 8147104208329303767
    assert derive_seed(0) == 5984496987195247115
    assert derive_seed(0, 0) == 6216232668158948369
    assert derive_seed(1, 2, 3) == 4846854460383096564
    assert derive_seed(2**64 - 1) == 535895983500046620
    assert shard_seed(42, 3, 5) == 3159327715444016818
    assert sample_seed(42, 3, 5) == 7217300956348156828
    assert batch_seed(42, 3, 5) == 8031844720348966932
    assert mix64(1) == 6238072747940578789  # splitmix64's finalizer


@given(st.lists(words, max_size=6))
def test_seeds_fit_63_bits(parts: list[int]) -> None:
    assert 0 <= derive_seed(*parts) < 2**63


@given(words, words, st.lists(words, max_size=4))
def test_many_seeds_at_once_are_the_same_seeds(run_seed: int, epoch: int, indices: list[int]) -> None:
    assert sample_seeds(run_seed, epoch, indices) == [sample_seed(run_seed, epoch, i) for i in indices]


@given(words, words)
def test_order_and_number_of_parts_matter(a: int, b: int) -> None:
    assert (derive_seed(a, b) == derive_seed(b, a)) == (a == b)
    assert derive_seed(a) != derive_seed(a, 0)


def test_neighbours_share_nothing() -> None:
    seeds = {
        kind(0, i, j) for kind in (shard_seed, sample_seed, batch_seed) for i in range(30) for j in range(30)
    }
    assert len(seeds) == 3 * 30 * 30
    numbers = [shard_seed(0, step, 0) for step in range(2000)]
    ones = [sum(number >> bit & 1 for number in numbers) for bit in range(63)]
    assert all(850 < count < 1150 for count in ones)  # each bit is fair


@pytest.mark.parametrize("part", [-1, 2**64])
def test_a_part_out_of_range_is_refused(part: int) -> None:
    with pytest.raises(ValueError, match=str(part)):
        derive_seed(1, part)
