"""What a forward writes to a module's buffers is reduced like a gradient, and undone when the step is."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everstep.actors.groups.base import GATHER_CHANNEL, SCATTER_CHANNEL
from everstep.errors import GroupBroken
from tests.unit.replicas import Network, Replica, all_step, same_bits, together

SHARES: list[list[Sequence[int]]] = [
    [range(6)],
    [range(3), range(3, 6)],
    [(5, 0), (1,), (4, 2), (3,)],
    [(), (1, 0), (2, 3, 4, 5)],
]


class Norm(nn.Module):
    """BatchNorm, a buffer that only shard 2 writes to, one that nobody does, and one in bfloat16."""

    written: Tensor
    constant: Tensor
    low: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(20, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("written", torch.full((3,), 2.0))
        self.register_buffer("constant", torch.ones(5))
        self.register_buffer("low", torch.ones(3, dtype=torch.bfloat16))


def inputs(shard: int) -> Tensor:
    return torch.randn(4, 20, generator=torch.Generator().manual_seed(shard))


def loss_of(model: nn.Module, shard: int) -> Tensor:
    y = model.norm(model.linear(inputs(shard)))
    with torch.no_grad():
        model.low.add_(shard)
        if shard == 2:
            model.written.mul_(4.0)
    return (y * model.constant.sum()).square().mean()


@pytest.fixture
def make() -> Iterator[Callable[[int], list[Replica]]]:
    made: list[Replica] = []

    def make_replicas(count: int, num_shards: int = 6) -> list[Replica]:
        new = []
        for _ in range(count):
            torch.manual_seed(7)
            new.append(Replica(Norm(), num_shards, bucket_bytes=300))
        made.extend(new)
        return new

    yield make_replicas
    for replica in made:
        replica.reducer.close()


def expected_after_one_step() -> dict[str, Tensor]:
    """Each shard's forward starts from the same buffers; floats are averaged, counters take the maximum."""
    ends = []
    for shard in range(6):
        torch.manual_seed(7)
        model = Norm()
        loss_of(model, shard)
        ends.append({name: buffer.double() for name, buffer in model.named_buffers()})
    means = {name: torch.stack([end[name] for end in ends]).mean(0) for name in ends[0]}
    return {**means, "norm.num_batches_tracked": torch.tensor(1.0).double()}


@pytest.mark.parametrize("shares", SHARES)
def test_running_statistics_are_the_mean_over_the_shards(make: Any, shares: list[Sequence[int]]) -> None:
    replicas = make(len(shares))
    all_step(replicas, shares, loss_of)
    wanted = expected_after_one_step()
    for replica in replicas:
        for name, buffer in replica.model.named_buffers():
            tolerance = 2e-2 if buffer.dtype == torch.bfloat16 else 1e-6
            torch.testing.assert_close(buffer.double(), wanted[name], rtol=tolerance, atol=tolerance)
        assert replica.reducer.buffer_set == {
            "norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "written", "low",
        }  # fmt: skip
        assert replica.reducer.committed_buffers()["norm.num_batches_tracked"] == 1


def test_the_same_bits_whoever_computes_what(make: Any) -> None:
    results = []
    for shares in SHARES:
        replicas = make(len(shares))
        for _ in range(3):
            all_step(replicas, shares, loss_of)
            for replica in replicas:
                replica.update()
        results += [replica.model.state_dict() for replica in replicas]
    for result in results[1:]:
        assert all(same_bits(result[name], results[0][name]) for name in result)
    assert results[0]["norm.num_batches_tracked"] == 3


def test_a_failed_step_leaves_no_trace_in_the_buffers(make: Any) -> None:
    reference, replicas = make(1), make(3)
    shares = [[0, 1], [2, 3], [4, 5]]
    all_step(reference, [range(6)], loss_of)
    before = {name: buffer.clone() for name, buffer in replicas[0].model.named_buffers()}
    network = Network(3)

    def fails(replica: Replica, rank: int) -> None:
        replica.compute(network.groups[rank], shares, loss_of)
        assert replica.model.norm.num_batches_tracked == 0
        committed = replica.reducer.committed_buffers()  # what a snapshot in mid-step must hold
        assert all(same_bits(committed[name], value) for name, value in before.items())
        network.cut()
        with pytest.raises(GroupBroken):
            replica.reduce(network.groups[rank])
        replica.reducer.discard()

    together(*[partial(fails, replica, rank) for rank, replica in enumerate(replicas)])
    for replica in replicas:
        assert all(same_bits(value, before[name]) for name, value in replica.model.named_buffers())
    survivors = replicas[:2]
    all_step(survivors, [[0, 1, 4], [2, 3, 5]], loss_of)
    for replica in survivors:
        state = replica.model.state_dict()
        assert all(same_bits(state[name], value) for name, value in reference[0].model.state_dict().items())
        assert sorted(replica.computed) in ([0, 1, 4], [2, 3, 5])


def test_a_joiner_is_given_the_agreed_set_and_the_values(make: Any) -> None:
    reference, old, joiner = make(1), make(2), make(1)
    all_step(reference, [range(6)], loss_of)
    all_step(old, [range(3), range(3, 6)], loss_of)
    for replica in (*reference, *old):
        replica.update()
    joiner[0].model.load_state_dict(old[0].model.state_dict())
    joiner[0].reducer.buffer_set = old[0].reducer.buffer_set
    joiner[0].reducer.reload_buffers()
    everybody = [*old, *joiner]
    all_step(everybody, [range(2), range(2, 4), range(4, 6)], loss_of)
    all_step(reference, [range(6)], loss_of)
    for replica in everybody:
        state = replica.model.state_dict()
        assert all(same_bits(state[name], value) for name, value in reference[0].model.state_dict().items())


def test_shards_weigh_in_with_their_scale(make: Any) -> None:
    """Two shards of 3 and 1 samples: weights 1.5 and 0.5, so that the mean is that over the samples."""
    [replica] = make(1, 2)
    reducer = replica.reducer
    group = Network(1).groups[0]
    reducer.attach(group, [range(2)])
    ends = []
    for shard, scale in ((0, 1.5), (1, 0.5)):
        reducer.begin_shard(shard, last=shard == 1, scale=scale)
        loss = loss_of(replica.model, shard) * scale
        reducer.backward_final()
        loss.backward()
        ends.append(scale * replica.model.norm.running_mean)
        reducer.end_shard()
    reducer.install(replica.reduce(group))
    torch.testing.assert_close(replica.model.norm.running_mean, (ends[0] + ends[1]) / 2)
    assert replica.model.norm.num_batches_tracked == 1


def test_without_buffers_written_to_nothing_is_sent(make: Any) -> None:
    replicas = make(2)
    for replica in replicas:
        replica.model.eval()

    def loss(model: nn.Module, shard: int) -> Tensor:
        return model.norm(model.linear(inputs(shard))).square().mean()

    network = all_step(replicas, [range(3), range(3, 6)], loss)
    assert [
        sent for channel, sent in network.launches[0] if channel not in (SCATTER_CHANNEL, GATHER_CHANNEL)
    ] == [
        replicas[0].reducer.num_bits  # the vote
    ]
    assert replicas[0].reducer.buffer_set == frozenset()
