"""Datasets that are read in order: the same batches on every owner, after every loss, from every known position."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.actors.data import IterableSource, ShardedIterable, StatefulIterator, make_source
from everstep.errors import ConfigError, InternalError, StateError
from everstep.policies.deal import deal, redeal


class NumbersShard:
    def __init__(self, owner: Numbers, values: list[int], epoch: int) -> None:
        self.owner, self.values, self.epoch, self.position = owner, values, epoch, 0

    def __next__(self) -> dict[str, Any]:
        if self.position >= len(self.values):
            raise StopIteration
        value = self.values[self.position]
        self.position += 1
        self.owner.reads[self.epoch, value] += 1
        return {"id": value, "epoch": self.epoch, "noise": torch.rand(2) + random.random()}

    def state_dict(self) -> Any:
        return {"position": self.position}

    def load_state_dict(self, state: Any) -> None:
        self.position = state["position"]


class Numbers:
    """0 .. size-1, shard v the numbers that are v modulo num_shards, in another order each epoch."""

    def __init__(self, size: int) -> None:
        self.size, self.epoch = size, 0
        self.reads: Counter[tuple[int, int]] = Counter()
        self.opened: Counter[int] = Counter()

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def shard(self, index: int, num_shards: int) -> NumbersShard:
        self.opened[index] += 1
        values = list(range(index, self.size, num_shards))
        random.Random(self.epoch).shuffle(values)
        return NumbersShard(self, values, self.epoch)


def flat(batch: Any) -> Any:
    return {name: value.tolist() for name, value in batch.items()}


def reference(size: int, batch: int, shards: int, steps: int) -> list[list[Any]]:
    source = IterableSource(Numbers(size), batch, shards, seed=5)
    source.deal(0, range(shards), range(shards), steps)
    expected = []
    for step in range(steps):
        expected.append([flat(source.get(step, v)) for v in range(shards)])
        source.committed(step)
    return expected


def test_protocols_are_what_the_readme_promises() -> None:
    assert isinstance(Numbers(3), ShardedIterable)
    assert isinstance(Numbers(3).shard(0, 1), StatefulIterator)


def test_epochs_follow_each_other_without_a_gap() -> None:
    expected = reference(size=10, batch=4, shards=2, steps=10)  # 5 per shard and epoch, 2 per step
    for v in range(2):
        rows = [row for step in expected for row in zip(step[v]["epoch"], step[v]["id"], strict=True)]
        assert [epoch for epoch, _ in rows] == [0] * 5 + [1] * 5 + [2] * 5 + [3] * 5
        assert all(sorted(i for e, i in rows if e == epoch) == list(range(v, 10, 2)) for epoch in range(4))


@given(
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(1, 5), st.booleans(), st.booleans()), min_size=2, max_size=8),
)
@settings(max_examples=40, deadline=None)
def test_every_history_of_rescales_gives_the_batches_of_an_undisturbed_run(
    per_shard: int, history: list[tuple[int, bool, bool]]
) -> None:
    """Each entry: (replicas, is one of them killed in the middle of the step, are all positions handed over)."""
    shards = 5
    size, batch = 23, per_shard * shards
    expected = reference(size, batch, shards, len(history))
    pool: dict[int, IterableSource] = {}
    states: dict[int, Any] = {}
    for step, (replicas, kill, hand_over) in enumerate(history):
        pool = {r: s for r, s in pool.items() if r < replicas}
        for rank in range(replicas):
            if rank not in pool:
                pool[rank] = IterableSource(Numbers(size), batch, shards, seed=5)
                pool[rank].load_states(json.loads(json.dumps(states)))
        ranges = deal(shards, replicas)
        held: dict[int, list[int]] = {}
        for rank, source in pool.items():
            if hand_over:
                source.load_states(states)
            source.deal(step, ranges[rank], ranges[rank], len(history))
            first = ranges[rank][0]
            assert flat(source.get(step, first)) == expected[step][first]
            held[rank] = [first]
        if kill and replicas > 1:
            del pool[replicas - 1], held[replicas - 1]
        extra = redeal(shards, list(held.values()))
        for (rank, source), more in zip(pool.items(), extra, strict=True):
            source.deal(step, more, ranges[rank], len(history))
            for v in (*held[rank], *more):
                assert flat(source.get(step, v)) == expected[step][v]
            source.committed(step)
            assert source.states().keys() == {*held[rank], *more}
            states |= source.states()


def test_a_discarded_step_hands_out_the_same_batch_without_reading() -> None:
    dataset = Numbers(20)
    source = IterableSource(dataset, 4, 2)
    source.deal(0, [0], [0], 5)
    batch = source.get(0, 0)
    source.deal(0, [0, 1], [0, 1], 5)
    assert source.get(0, 0) is batch
    assert max(dataset.reads.values()) == 1
    batch["id"] += 100  # the loop wrote into it
    assert source.get(0, 0)["id"].tolist() == [value - 100 for value in batch["id"].tolist()]
    source.committed(0)
    assert source.get(1, 0)["id"].tolist() == reference(20, 4, 2, 2)[1][0]["id"]


def test_a_position_saves_reading_what_came_before_it() -> None:
    first = IterableSource(Numbers(40), 4, 2)
    first.deal(0, [0, 1], [0, 1], 9)
    for step in range(4):
        for v in range(2):
            first.get(step, v)
        first.committed(step)
    states = json.loads(json.dumps(first.states()))
    assert states == {str(v): {"step": 3, "epoch": 0, "state": {"position": 8}} for v in range(2)}
    dataset = Numbers(40)
    second = IterableSource(dataset, 4, 2)
    second.load_states(states)
    second.deal(4, [0], [0], 9)
    assert flat(second.get(4, 0))["id"] == reference(40, 4, 2, 5)[4][0]["id"]
    assert sum(dataset.reads.values()) == 2
    # Without one it is found by reading from the beginning: slower, and the same.
    dataset = Numbers(40)
    third = IterableSource(dataset, 4, 2)
    third.deal(4, [0], [0], 9)
    assert flat(third.get(4, 0))["id"] == reference(40, 4, 2, 5)[4][0]["id"]
    assert sum(dataset.reads.values()) == 10


def test_going_back_to_an_older_checkpoint_ignores_newer_positions() -> None:
    expected = reference(40, 4, 2, 6)
    source = IterableSource(Numbers(40), 4, 2, seed=5)
    source.deal(0, [0], [0], 9)
    kept: dict[int, Any] = {}
    for step in range(5):
        source.get(step, 0)
        source.committed(step)
        kept = source.states() if step == 1 else kept
    source.load_states(kept)
    source.deal(2, [0], [0], 9)
    assert flat(source.get(2, 0)) == expected[2][0]
    source.deal(1, [0], [0], 9)  # older than any position
    assert flat(source.get(1, 0)) == expected[1][0]


def test_an_iterator_is_opened_once_and_let_go_with_its_shard() -> None:
    dataset = Numbers(100)
    source = IterableSource(dataset, 4, 2)
    source.deal(0, [0, 1], [0, 1], 20)
    for step in range(10):
        source.get(step, 0)
        source.get(step, 1)
        source.committed(step)
    assert dataset.opened == {0: 1, 1: 1}
    source.deal(10, [0], [0], 20)
    source.deal(10, [0, 1], [0, 1], 20)
    source.get(10, 0)
    source.get(10, 1)
    assert dataset.opened == {0: 1, 1: 2}
    assert max(dataset.reads.values()) == 1


def test_an_exception_in_the_dataset_passes_and_the_next_try_reads_anew() -> None:
    class Flaky(NumbersShard):
        failed = False

        def __next__(self) -> dict[str, Any]:
            if self.position == 3 and not Flaky.failed:
                Flaky.failed = True
                raise OSError("disk")
            return super().__next__()

    class FlakyNumbers(Numbers):
        def shard(self, index: int, num_shards: int) -> NumbersShard:
            return Flaky(self, list(range(index, self.size, num_shards)), self.epoch)

    source = IterableSource(FlakyNumbers(20), 4, 1)
    source.deal(0, [0], [0], 5)
    with pytest.raises(OSError, match="disk"):
        source.get(0, 0)
    assert source.get(0, 0)["id"].tolist() == [0, 1, 2, 3]


def test_what_is_iterable_but_no_iterator_works_too() -> None:
    class Elsewhere:  # the shape of a Hugging Face IterableDataset
        def __init__(self, values: range) -> None:
            self.values, self.position = values, 0

        def __iter__(self) -> Any:
            while self.position < len(self.values):
                self.position += 1
                yield self.values[self.position - 1]

        def state_dict(self) -> Any:
            return {"position": self.position}

        def load_state_dict(self, state: Any) -> None:
            self.position = state["position"]

        def shard(self, num_shards: int, index: int) -> Elsewhere:
            return Elsewhere(self.values[index::num_shards])

    source = make_source(Elsewhere(range(12)), global_batch_size=4, logical_shards=2, seed=1)
    source.deal(0, [1], [1], 9)
    assert source.get(0, 1).tolist() == [1, 3]
    source.committed(0)
    other = make_source(Elsewhere(range(12)), global_batch_size=4, logical_shards=2, seed=1)
    other.load_states(source.states())
    other.deal(1, [1], [1], 9)
    assert other.get(1, 1).tolist() == [5, 7]


def test_mistakes_are_named() -> None:
    with pytest.raises(ConfigError, match=r"global_batch_size=5.*logical_shards=2"):
        IterableSource(Numbers(4), 5, 2)
    source = IterableSource(Numbers(3), 4, 4)
    source.deal(0, [3], [3], 5)
    with pytest.raises(ConfigError, match="shard 3 of 4 of Numbers is empty"):
        source.get(0, 3)
    for step, shard in ((0, 1), (1, 1), (5, 3)):
        with pytest.raises(InternalError, match=f"shard {shard} of step {step}"):
            source.get(step, shard)
    with pytest.raises(StateError, match="shard 2 of Numbers"):
        source.load_states({2: {"position": 3}})


@pytest.mark.parametrize("state", [None, {"rng": torch.zeros(2)}, {"at": b"x"}])
def test_a_position_that_cannot_be_kept_is_refused_at_once(state: Any) -> None:
    class Unsafe(NumbersShard):
        def state_dict(self) -> Any:
            return state

    class UnsafeNumbers(Numbers):
        def shard(self, index: int, num_shards: int) -> NumbersShard:
            return Unsafe(self, [1, 2, 3], 0)

    source = IterableSource(UnsafeNumbers(3), 1, 1)
    source.deal(0, [0], [0], 5)
    with pytest.raises(StateError, match=r"state_dict\(\) of shard 0 of UnsafeNumbers"):
        source.get(0, 0)
