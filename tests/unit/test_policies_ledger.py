"""The order of samples: fixed for ever, a permutation, every sample exactly once."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.policies.ledger import DataLedger, Permutation


def ledger(**changes: object) -> DataLedger:
    values: dict[str, object] = {"dataset_size": 50, "global_batch_size": 12, "logical_shards": 3, "seed": 42}
    return DataLedger(**(values | changes))  # type: ignore[arg-type]


def test_the_order_is_what_it_was_in_every_earlier_version() -> None:
    assert list(Permutation(42, 1, 5)) == [0, 1, 4, 3, 2]
    assert list(Permutation(42, 1, 10)) == [5, 7, 4, 3, 2, 8, 1, 6, 9, 0]
    thousand = Permutation(42, 1, 1000)
    assert [thousand[i] for i in range(10)] == [502, 471, 811, 696, 284, 94, 488, 533, 983, 47]
    huge = Permutation(7, 3, 10**12)
    assert [huge[i] for i in (0, 1, 2, 10**12 - 1)] == [
        971835409005, 567825692275, 594157480498, 357809857346,
    ]  # fmt: skip


def test_the_ledger_is_what_it_was_in_every_earlier_version() -> None:
    partial = ledger(last_batch="partial")
    assert [partial.indices(0, v) for v in range(3)] == [[25, 4, 0, 3], [6, 2, 31, 41], [8, 40, 44, 16]]
    assert [partial.indices(4, v) for v in range(3)] == [[], [10], [27]]
    assert [partial.indices(5, v) for v in range(3)] == [[5, 39, 19, 11], [30, 33, 1, 46], [28, 24, 23, 3]]


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1), st.integers(0, 50))
@settings(max_examples=60, deadline=None)
def test_it_is_a_permutation_for_every_size(size: int, seed: int, epoch: int) -> None:
    assert sorted(Permutation(seed, epoch, size)) == list(range(size))


@pytest.mark.parametrize("size", [2, 5, 8, 33])
def test_every_value_is_equally_likely_at_every_position(size: int) -> None:
    epochs = 1000
    counts: Counter[tuple[int, int]] = Counter()
    pairs: Counter[tuple[int, int]] = Counter()
    for epoch in range(epochs):
        order = list(Permutation(9, epoch, size))
        counts.update(enumerate(order))
        pairs[order[0], order[1]] += 1
    for observed, cells in ((counts, size * size), (pairs, size * (size - 1))):
        expected = sum(observed.values()) / cells
        chi2 = sum((count - expected) ** 2 / expected for count in observed.values())
        chi2 += expected * (cells - len(observed))
        assert abs(chi2 - cells) < 6 * (2 * cells) ** 0.5 + 6


def test_epochs_and_seeds_give_different_orders() -> None:
    assert len({tuple(Permutation(seed, epoch, 100)) for seed in range(5) for epoch in range(5)}) == 25


def test_a_huge_dataset_costs_no_memory_and_ends_where_it_should() -> None:
    order = Permutation(1, 0, 2**40 + 1)
    assert len({order[i] for i in range(1000)}) == 1000
    assert len(order) == 2**40 + 1
    with pytest.raises(IndexError, match="-1"):
        order[-1]
    with pytest.raises(IndexError):
        order[2**40 + 1]


@given(
    size=st.integers(1, 300), per_shard=st.integers(1, 5), shards=st.integers(1, 9),
    seed=st.integers(0, 2**63), shuffle=st.booleans(), epoch=st.integers(0, 3),
)  # fmt: skip
@settings(max_examples=80, deadline=None)
def test_every_sample_is_in_an_epoch_exactly_once(
    size: int, per_shard: int, shards: int, seed: int, shuffle: bool, epoch: int
) -> None:
    batch = per_shard * shards
    run = DataLedger(
        dataset_size=size, global_batch_size=batch, logical_shards=shards, seed=seed, shuffle=shuffle,
        last_batch="partial",
    )  # fmt: skip
    first = epoch * run.steps_per_epoch
    steps = range(first, first + run.steps_per_epoch)
    assert all(run.locate(step) == (epoch, step - first) for step in steps)
    seen = [index for step in steps for v in range(shards) for index in run.indices(step, v)]
    assert sorted(seen) == list(range(size))
    if not shuffle:
        assert seen == list(range(size))
    for step in steps:
        sizes = [run.shard_size(step, v) for v in range(shards)]
        assert [len(run.indices(step, v)) for v in range(shards)] == sizes
        assert sum(sizes) == run.size(step) <= batch
        assert max(sizes) - min(sizes) <= 1


@given(size=st.integers(1, 200), shards=st.integers(1, 8), data=st.data())
@settings(max_examples=60, deadline=None)
def test_scaled_shard_means_make_the_mean_over_all_samples(
    size: int, shards: int, data: st.DataObject
) -> None:
    run = DataLedger(
        dataset_size=size, global_batch_size=3 * shards, logical_shards=shards, seed=1, last_batch="partial"
    )
    step = data.draw(st.integers(0, run.steps_per_epoch - 1))
    losses = {index: float(index * index % 17) for v in range(shards) for index in run.indices(step, v)}
    total = 0.0
    for v in range(shards):
        mine = [losses[index] for index in run.indices(step, v)]
        if mine:
            total += run.scale(step, v) * sum(mine) / len(mine)
        else:
            assert run.scale(step, v) == 0.0
    assert total / shards == pytest.approx(sum(losses.values()) / run.size(step))


def test_full_steps_have_weight_one_exactly_and_equal_consecutive_slices() -> None:
    run = ledger(shuffle=False)
    assert run.steps_per_epoch == 4
    assert all(run.scale(step, v) == 1.0 and run.size(step) == 12 for step in range(9) for v in range(3))
    assert run.indices(1, 2) == [20, 21, 22, 23]
    assert run.indices(4, 0) == [0, 1, 2, 3]  # the rest of two samples was dropped


def test_numbers_that_cannot_work_are_named_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"global_batch_size=13.*logical_shards=3.*12"):
        ledger(global_batch_size=13)
    with pytest.raises(ValueError, match=r"dataset_size=11.*global_batch_size=12.*partial"):
        ledger(dataset_size=11)
    assert ledger(dataset_size=11, last_batch="partial").steps_per_epoch == 1
    with pytest.raises(ValueError, match="empty"):
        ledger(dataset_size=0, last_batch="partial")
    with pytest.raises(ValueError, match="keep"):
        ledger(last_batch="keep")
    with pytest.raises(ValueError, match="-1"):
        ledger(seed=-1)
    with pytest.raises(ValueError, match=r"shard 3.*3 logical"):
        ledger().indices(0, 3)
    with pytest.raises(ValueError, match="-1"):
        ledger().locate(-1)
