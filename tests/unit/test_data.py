"""Map-style datasets in this process: who reads a batch, and how often the deal changes, make no difference."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset

from everstep.actors.data import MapSource, ShardSource, make_source
from everstep.errors import ConfigError, InternalError
from everstep.policies.deal import deal, redeal
from everstep.policies.ledger import DataLedger


class Noisy:
    """Samples that carry their index and augmentation noise from every generator; counts its reads."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.reads: Counter[int] = Counter()

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.reads[index] += 1
        noise = torch.rand(()) + random.random() + np.random.rand()
        return {"id": index, "noise": noise.double()}


def ledger(size: int = 50, batch: int = 12, shards: int = 6, **changes: Any) -> DataLedger:
    return DataLedger(dataset_size=size, global_batch_size=batch, logical_shards=shards, seed=3, **changes)


def flat(batch: Any) -> Any:
    return None if batch is None else {name: value.tolist() for name, value in batch.items()}


def reference(plan: DataLedger, steps: int) -> list[list[Any]]:
    source = MapSource(Noisy(plan.dataset_size), plan)
    source.deal(0, range(plan.logical_shards), range(plan.logical_shards), steps)
    return [[flat(source.get(step, v)) for v in range(plan.logical_shards)] for step in range(steps)]


def test_any_history_of_rescales_reads_every_sample_once_per_epoch() -> None:
    """4 replicas, one leaves at a boundary, one joins, two are killed in the middle of a step."""
    plan = ledger(last_batch="partial")  # 5 steps per epoch, the last with 2 samples for 6 shards
    expected = reference(plan, 10)
    sizes = [4, 4, 3, 3, 4, 4, 4, 2, 2, 2]
    killed_in = {6: 2}
    sources: dict[int, ShardSource] = {}
    committed: list[tuple[int, int]] = []
    for step, replicas in enumerate(sizes):
        sources = {rank: sources[rank] for rank in range(replicas) if rank in sources} | {
            rank: MapSource(Noisy(50), plan) for rank in range(replicas) if rank not in sources
        }
        ranges = deal(6, replicas)
        computed: dict[int, dict[int, Any]] = {}
        for rank, source in sources.items():
            source.deal(step, ranges[rank], ranges[rank], 10)
            computed[rank] = {ranges[rank][0]: flat(source.get(step, ranges[rank][0]))}
        for dead in range(replicas - killed_in.get(step, 0), replicas):
            del sources[dead], computed[dead]
        ranges = deal(6, len(sources))
        extra = redeal(6, [list(held) for held in computed.values()])
        for (rank, source), more in zip(sources.items(), extra, strict=True):
            source.deal(step, more, ranges[rank], 10)
            computed[rank] |= {v: flat(source.get(step, v)) for v in more}
            source.committed(step)
        batches = {v: batch for held in computed.values() for v, batch in held.items()}
        assert [batches[v] for v in range(6)] == expected[step]
        epoch = plan.locate(step)[0]
        committed += [(epoch, index) for batch in batches.values() if batch for index in batch["id"]]
    assert sorted(committed) == [(epoch, index) for epoch in range(2) for index in range(50)]


def test_a_resumed_run_goes_on_where_it_stopped_on_any_number_of_replicas() -> None:
    plan = ledger()
    expected = reference(plan, 8)
    for replicas in (1, 2, 5):
        for rank, owned in enumerate(deal(6, replicas)):
            source = MapSource(Noisy(50), plan)
            source.deal(6, owned, owned, 8)
            assert source.states() == {}, rank
            for step in (6, 7):
                assert [flat(source.get(step, v)) for v in owned] == [expected[step][v] for v in owned]
                source.committed(step)


def test_a_discarded_step_hands_out_the_same_batch_without_reading() -> None:
    dataset = Noisy(50)
    source = MapSource(dataset, ledger())
    source.deal(0, [0, 1], [0, 1], 9)
    batch = source.get(0, 0)
    source.deal(0, [1], [0, 1], 9)  # its gradient is held
    source.deal(0, [0, 1, 2], [0, 1, 2], 9)  # and then discarded
    assert source.get(0, 0) is batch
    source.get(0, 1)
    assert set(dataset.reads.values()) == {1}
    source.committed(0)
    with pytest.raises(InternalError, match="shard 0 of step 0 of Noisy: it was not dealt"):
        source.get(0, 0)


def test_a_batch_that_the_loop_wrote_into_is_read_again() -> None:
    expected = reference(ledger(), 1)[0][0]
    source = MapSource(Noisy(50), ledger())
    source.deal(0, [0], [0], 9)
    source.get(0, 0)["id"].mul_(2)
    batch = source.get(0, 0)
    assert flat(batch) == expected
    batch["noise"] = torch.zeros(2)
    batch = source.get(0, 0)
    assert flat(batch) == expected
    batch["id"][0] += 1  # through a view
    assert flat(source.get(0, 0)) == expected
    del source.get(0, 0)["noise"]
    assert flat(source.get(0, 0)) == expected


def test_noise_hangs_on_seed_epoch_and_sample_alone() -> None:
    wide, narrow = ledger(batch=12, shards=6), ledger(batch=4, shards=2)
    noise: dict[tuple[int, int], set[float]] = {}
    for plan in (wide, narrow):
        for step, batches in enumerate(reference(plan, 2 * plan.steps_per_epoch)):
            for batch in batches:
                for index, value in zip(batch["id"], batch["noise"], strict=True):
                    noise.setdefault((plan.locate(step)[0], index), set()).add(value)
    assert all(len(values) == 1 for values in noise.values())
    assert len({value for values in noise.values() for value in values}) == len(noise)


def test_collate_has_a_seed_of_its_own() -> None:
    class Cached(Noisy):
        def __getitem__(self, index: int) -> Any:
            return {"id": index} if self.reads[index] else super().__getitem__(index)

    def mixup(samples: list[Any]) -> list[float]:
        return [random.random(), float(torch.rand(())), np.random.rand()]

    source = MapSource(Cached(50), ledger(), collate_fn=mixup)
    drawn = []
    for _ in range(2):  # the second time no sample draws a random number
        source.deal(0, [4], [4], 9)
        drawn.append(source.get(0, 4))
        source.committed(0)
    assert drawn[0] == drawn[1]


def test_many_at_once_is_used_only_without_seeding() -> None:
    class Bulk(Noisy):
        asked: list[list[int]] = []

        def __getitems__(self, indices: list[int]) -> list[int]:
            self.asked.append(indices)
            return indices

    for seed_samples in (True, False):
        source = MapSource(Bulk(50), ledger(), seed_samples=seed_samples, collate_fn=list)
        source.deal(0, [2], [2], 9)
        source.get(0, 2)
    assert Bulk.asked == [ledger().indices(0, 2)]


def test_partial_batches_have_empty_shards_and_weights() -> None:
    source = MapSource(Noisy(50), ledger(last_batch="partial"))
    source.deal(4, range(6), range(6), 9)
    got = [source.get(4, v) for v in range(6)]
    assert [batch is not None for batch in got] == [False, False, True, False, False, True]
    assert [source.scale(4, v) for v in range(6)] == [0, 0, 3, 0, 0, 3]
    assert source.samples(4) == 2
    assert source.samples(5) == 12
    assert source.steps_per_epoch == 5


def test_an_exception_in_the_dataset_passes_as_it_is() -> None:
    class Broken(Noisy):
        def __getitem__(self, index: int) -> Any:
            raise KeyError(f"no image {index}")

    source = MapSource(Broken(50), ledger())
    source.deal(0, [0], [0], 9)
    with pytest.raises(KeyError, match="no image"):
        source.get(0, 0)


def test_what_is_no_dataset_is_named_with_the_way_out() -> None:
    class Stream(IterableDataset[int]):
        def __iter__(self) -> Any:
            return iter(range(3))

        def __len__(self) -> int:
            return 3

    def make(dataset: Any, **options: Any) -> ShardSource:
        return make_source(
            dataset, **({"global_batch_size": 4, "logical_shards": 2, "seed": 0, **options})
        )  # fmt: skip

    with pytest.raises(ConfigError, match=r"builtins\.int has no __len__ and no __getitem__ and no shard\("):
        make(3)
    with pytest.raises(ConfigError, match=r"builtins\.set has no __getitem__.*ShardedIterable"):
        make({1, 2})
    with pytest.raises(ConfigError, match=r"Stream is an IterableDataset and no shard\("):
        make(Stream())
    with pytest.raises(ConfigError, match=r"builtins\.list: .*dataset_size=3.*global_batch_size=4"):
        make([1, 2, 3])
    with pytest.raises(ConfigError, match=r"builtins\.list: global_batch_size=5"):
        make([1] * 9, global_batch_size=5)
    with pytest.raises(ConfigError, match="has 3 samples, its ledger was made for 50"):
        MapSource([1, 2, 3], ledger())
    with pytest.raises(ConfigError, match="num_workers=-1"):
        make([1] * 9, num_workers=-1)

    class Both(Noisy):
        def shard(self, index: int, num_shards: int) -> Any:
            raise AssertionError("map-style is better")

    assert isinstance(make(Both(8)), MapSource)

    class Ordered:
        def shard(self, index: int, num_shards: int) -> Any: ...

    with pytest.raises(ConfigError, match=r"Ordered.*num_workers=2 must be 0"):
        make(Ordered(), num_workers=2)


def test_a_closed_source_gives_nothing() -> None:
    source = MapSource(Noisy(50), ledger())
    source.deal(0, [0], [0], 9)
    source.close()
    with pytest.raises(InternalError, match="closed"):
        source.get(0, 0)
