"""The reducer against plain PyTorch over the whole batch, for any number of replicas."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from everstep.actors.groups.base import GATHER_CHANNEL, SCATTER_CHANNEL
from everstep.errors import GroupBroken, InternalError, LoopError, UserError
from tests.unit.replicas import Network, Replica, all_step, same_bits, together

SAMPLES = 4
SMALL = {"bucket_bytes": 2000}
SHARES = {
    8: [
        [range(8)],
        [range(4), range(4, 8)],
        [range(3), range(3, 8)],
        [(0, 2, 4, 6), (1, 3, 5, 7)],
        [range(3), range(3, 6), range(6, 8)],
        [range(2), range(2, 4), range(4, 6), range(6, 8)],
        [(7, 0), (6, 1, 3), (2,), (5, 4)],
        [(), (3, 4), (), (0, 1, 2, 5, 6, 7)],
    ],
    6: [
        [range(6)],
        [range(3), range(3, 6)],
        [range(2), range(2, 4), range(4, 6)],
        [(5, 0), (1,), (4, 2), (3,)],
    ],
    1: [[(0,)], [(), (0,)]],
}
CASES = [(num_shards, shares) for num_shards, cases in SHARES.items() for shares in cases]


@pytest.fixture
def make() -> Iterator[Callable[..., list[Replica]]]:
    """Replicas with equal models: make(count, model_class, num_shards, **options)."""
    made: list[Replica] = []

    def make_replicas(
        count: int, model: Callable[[], nn.Module], num_shards: int, **options: Any
    ) -> list[Replica]:
        new = [Replica(seeded(model), num_shards, **{**SMALL, **options}) for _ in range(count)]
        made.extend(new)
        return new

    yield make_replicas
    for replica in made:
        replica.reducer.close()


def seeded(model: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(7)
    return model()


def mlp(dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(nn.Linear(20, 33), nn.Tanh(), nn.Linear(33, 17), nn.Tanh(), nn.Linear(17, 1)).to(
        dtype
    )


def loss_of(model: nn.Module, shard: int) -> Tensor:
    generator = torch.Generator().manual_seed(shard)
    parameter = next(model.parameters())
    x = torch.randn(SAMPLES, 20, generator=generator).to(parameter.dtype)
    return (model(x) ** 2).mean()


def plain(
    model: Callable[[], nn.Module], num_shards: int, loss: Callable[[nn.Module, int], Tensor] = loss_of
) -> dict[str, Tensor | None]:
    """Gradients of the mean loss over all shards, computed at once."""
    whole = seeded(model)
    torch.stack([loss(whole, shard) for shard in range(num_shards)]).mean().backward()
    return {name: parameter.grad for name, parameter in whole.named_parameters()}


def assert_close(got: dict[str, Tensor | None], wanted: dict[str, Tensor | None], rtol: float = 1e-5) -> None:
    assert got.keys() == wanted.keys()
    for name, gradient in wanted.items():
        mine = got[name]
        if gradient is None:
            assert mine is None, name
        else:
            assert mine is not None, name
            torch.testing.assert_close(mine, gradient, rtol=rtol, atol=rtol * float(gradient.abs().max()))


@pytest.mark.parametrize("strategy", ["ordered", "fast"])
@pytest.mark.parametrize(("num_shards", "shares"), CASES)
def test_the_gradient_is_that_of_the_whole_batch(
    make: Any, num_shards: int, shares: Sequence[Any], strategy: str
) -> None:
    replicas = make(len(shares), mlp, num_shards, strategy=strategy)
    wanted = plain(mlp, num_shards)
    for _ in range(2):  # the first step collects after backward, later ones during
        all_step(replicas, shares, loss_of)
        for replica in replicas:
            assert_close(replica.gradients(), wanted)
            replica.reducer.start_step()


def test_fast_leaves_the_sum_to_a_backend_that_has_one_order_of_launches(make: Any) -> None:
    shares = [(0, 3), (1, 2), (4, 5, 6, 7), ()]
    replicas = make(4, mlp, 8, strategy="fast")
    network = Network(4)
    for group in network.groups:
        group.ordered_launch = True
    together(*[partial(r.step, g, shares, loss_of) for r, g in zip(replicas, network.groups, strict=True)])
    for replica in replicas:
        assert_close(replica.gradients(), plain(mlp, 8))
    assert not {channel for channel, _ in network.launches[0]} & {SCATTER_CHANNEL, GATHER_CHANNEL}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_shards", [8, 6])
def test_ordered_gives_the_same_bits_whoever_computes_what(
    make: Any, num_shards: int, dtype: torch.dtype
) -> None:
    model = partial(mlp, dtype)
    results = []
    for shares in SHARES[num_shards]:
        replicas = make(len(shares), model, num_shards)
        for _ in range(3):
            all_step(replicas, shares, loss_of)
            for replica in replicas:
                replica.update()
        results += [dict(replica.model.named_parameters()) for replica in replicas]
    for result in results[1:]:
        assert all(same_bits(result[name], results[0][name]) for name in result)


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_survivors_keep_what_they_have_and_the_bits_stay(data: st.DataObject) -> None:
    """Lose a replica at any point, deal its shards to the others, several times in a row."""
    num_shards = data.draw(st.sampled_from([6, 8]))
    owners = data.draw(st.lists(st.integers(0, 3), min_size=num_shards, max_size=num_shards))
    order = data.draw(st.permutations(range(num_shards)))
    shares = [[shard for shard in order if owners[shard] == rank] for rank in range(4)]
    reference = [Replica(seeded(mlp), num_shards, **SMALL)]
    all_step(reference, [range(num_shards)], loss_of)
    replicas = [Replica(seeded(mlp), num_shards, **SMALL) for _ in range(4)]
    everybody = [*reference, *replicas]
    try:
        while len(replicas) > 1:
            lose_one(replicas, shares, data)
        all_step(replicas, shares, loss_of)
        for name, gradient in replicas[0].gradients().items():
            assert same_bits(gradient, reference[0].gradients()[name]), name
        assert sorted(replicas[0].computed) == list(range(num_shards))  # nothing was computed twice
    finally:
        for replica in everybody:
            replica.reducer.close()


def lose_one(replicas: list[Replica], shares: list[list[int]], data: st.DataObject) -> None:
    lost = data.draw(st.integers(0, len(replicas) - 1))
    whole = data.draw(st.booleans())  # whether it still computed its shards
    network = Network(len(replicas))

    def dies(replica: Replica, rank: int) -> None:
        if whole:
            replica.compute(network.groups[rank], shares, loss_of)
        network.cut()

    def survives(replica: Replica, rank: int) -> None:
        group = network.groups[rank]
        try:
            replica.compute(group, shares, loss_of)
            replica.reduce(group)
        except GroupBroken:
            pass
        group.abort()
        replica.reducer.discard()

    together(
        *[partial(dies if rank == lost else survives, replica, rank) for rank, replica in enumerate(replicas)]
    )
    replicas.pop(lost)
    orphans = shares.pop(lost)
    for rank, replica in enumerate(replicas):
        assert replica.reducer.kept() <= set(shares[rank])
    for number, shard in enumerate(orphans):
        shares[number % len(shares)].append(shard)


def test_a_failure_is_told_at_once_and_the_kept_shards_can_be_reduced_again(make: Any) -> None:
    replicas = make(2, mlp, 4)
    network = Network(2)
    shares = [range(2), range(2, 4)]
    replicas[0].compute(network.groups[0], shares, loss_of)  # the other one never answers
    network.cut()
    with pytest.raises(GroupBroken):
        replicas[0].reducer.wait()
    assert [type(failure) for failure in replicas[0].failures] == [GroupBroken]
    replicas[0].reducer.discard()
    assert replicas[0].reducer.kept() == {0, 1}
    all_step(replicas, shares, loss_of)
    assert_close(replicas[0].gradients(), plain(mlp, 4))
    assert replicas[0].computed == [0, 1]


def test_an_exception_inside_a_shard_loses_only_what_it_was_added_to(make: Any) -> None:
    class Oops(Exception):
        pass

    [replica] = make(1, mlp, 4)
    all_step([replica], [range(4)], loss_of)
    replica.reducer.start_step()
    network = Network(1)
    replica.reducer.attach(network.groups[0], [range(4)])

    def compute(shard: int, *, last: bool, fail: str = "") -> None:
        replica.reducer.begin_shard(shard, last=last)
        value = loss_of(replica.model, shard)
        if fail == "forward":
            raise Oops
        replica.reducer.backward_final()
        handle = replica.model[0].weight.register_hook(oops) if fail else None
        try:
            value.backward()
        finally:
            if handle:
                handle.remove()
        replica.reducer.end_shard()

    def oops(gradient: Tensor) -> None:
        raise Oops

    compute(0, last=False)
    compute(2, last=False)
    with pytest.raises(Oops):
        compute(1, last=False, fail="forward")  # nothing was added to shard 0 yet
    replica.reducer.discard()
    assert replica.reducer.kept() == {0, 2}
    replica.reducer.attach(Network(1).groups[0], [range(4)])
    with pytest.raises(Oops):
        compute(1, last=False, fail="backward")
    replica.reducer.discard()
    assert replica.reducer.kept() == {2}
    all_step([replica], [range(4)], loss_of)
    assert_close(replica.gradients(), plain(mlp, 4))


def test_all_ranks_launch_alike_and_send_what_a_ring_would(make: Any) -> None:
    replicas = make(4, mlp, 8)
    all_step(replicas, [range(r, r + 2) for r in (0, 2, 4, 6)], loss_of)
    for replica in replicas:
        replica.reducer.start_step()
    network = all_step(replicas, [range(r, r + 2) for r in (0, 2, 4, 6)], loss_of)
    numel = sum(p.numel() for p in replicas[0].model.parameters())
    for rank in range(4):
        channels = {channel for channel, _ in network.launches[rank]}
        assert {SCATTER_CHANNEL, GATHER_CHANNEL} <= channels
        for channel in (SCATTER_CHANNEL, GATHER_CHANNEL):
            launched = [sent for c, sent in network.launches[rank] if c == channel]
            assert len(launched) == len([sent for c, sent in network.launches[0] if c == channel]) > 1
        sent = sum(sent for channel, sent in network.launches[rank] if channel == SCATTER_CHANNEL)
        assert sent <= numel


def test_buckets_go_off_while_backward_computes(make: Any) -> None:
    replicas = make(2, mlp, 2)
    all_step(replicas, [[0], [1]], loss_of)
    seen = []
    for replica in replicas:
        replica.reducer.start_step()
    replica = replicas[0]
    network = Network(2)
    replica.model[0].weight.register_hook(lambda gradient: seen.append(replica.reducer._launched))
    together(
        *[partial(r.step, g, [[0], [1]], loss_of) for r, g in zip(replicas, network.groups, strict=True)]
    )
    assert 0 < seen[0] < replica.reducer._launched


class Odd(nn.Module):
    """One parameter that only shard 1 uses, one that nobody does, a frozen one, and a tied pair."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 20)
        self.tied = nn.Linear(20, 20)
        self.tied.weight = self.first.weight
        self.seldom = nn.Linear(20, 20)
        self.never = nn.Linear(20, 20)
        self.frozen = nn.Linear(20, 20).requires_grad_(False)
        self.channels = nn.Conv2d(2, 6, 3).to(memory_format=torch.channels_last)
        self.scalar = nn.Parameter(torch.tensor(0.5))


def odd_loss(model: nn.Module, shard: int) -> Tensor:
    x = torch.randn(SAMPLES, 20, generator=torch.Generator().manual_seed(shard))
    y = model.frozen(model.tied(torch.tanh(model.first(x)))) * model.scalar
    if shard == 1:
        y = y + model.seldom(x)
    image = torch.cat([x, x, x, x, x], 1)[:, :98].reshape(SAMPLES, 2, 7, 7)
    return (y**2).mean() + model.channels(image).square().mean()


@pytest.mark.parametrize(
    "shares", [[range(4)], [range(2), range(2, 4)], [(0, 1, 3), (2,)], [(3,), (1,), (2, 0)]]
)
def test_unused_frozen_tied_and_strided_parameters(make: Any, shares: Sequence[Any]) -> None:
    reference = make(1, Odd, 4)
    replicas = make(len(shares), Odd, 4)
    for _ in range(2):
        all_step(reference, [range(4)], odd_loss)
        all_step(replicas, shares, odd_loss)
        for replica in replicas:
            got = replica.gradients()
            assert_close(got, plain(Odd, 4, odd_loss))
            assert got["never.weight"] is None and got["frozen.weight"] is None
            assert all(same_bits(got[name], value) for name, value in reference[0].gradients().items())
            channels = replica.model.channels.weight
            assert channels.grad.stride() == channels.stride()
            replica.reducer.start_step()
        reference[0].reducer.start_step()


def test_a_shard_without_a_gradient_adds_zero_wherever_it_is_computed(make: Any) -> None:
    """0.0 + -0.0 is 0.0: leaving the addition out would keep the sign on one replica and lose it on two."""

    def loss(model: nn.Module, shard: int) -> Tensor:
        return (model[0].bias * -0.0).sum() if shard == 0 else model[2].bias.sum()

    for shares in ([range(2)], [(1, 0)], [[0], [1]]):
        replicas = make(len(shares), mlp, 2)
        all_step(replicas, shares, loss)
        assert not torch.signbit(replicas[0].gradients()["0.bias"]).any()


def test_several_backward_calls_in_a_shard_add_up_before_the_tree(make: Any) -> None:
    def compute(replica: Replica, group: Any, shares: Sequence[Any]) -> None:
        replica.reducer.attach(group, shares)
        for shard in shares[group.rank]:
            replica.reducer.begin_shard(shard, last=shard == max(shares[group.rank]))
            for part in range(3):
                value = loss_of(replica.model, 10 * shard + part) / 3
                if part == 2:
                    replica.reducer.backward_final()
                value.backward()
            replica.reducer.end_shard()
        replica.reducer.flush()
        replica.reducer.install(replica.reduce(group))

    results = []
    for shares in ([range(4)], [range(2), range(2, 4)], [(0,), (1, 2, 3)]):
        replicas = make(len(shares), mlp, 4)
        for _ in range(2):
            network = Network(len(shares))
            together(*[partial(compute, r, g, shares) for r, g in zip(replicas, network.groups, strict=True)])
            results.append(replicas[0].gradients())
            for replica in replicas:
                replica.reducer.start_step()
    for result in results:
        assert all(same_bits(result[name], results[0][name]) for name in result)
    whole = seeded(mlp)
    torch.stack(
        [loss_of(whole, 10 * shard + part) for shard in range(4) for part in range(3)]
    ).mean().backward()
    assert_close(results[0], {name: parameter.grad for name, parameter in whole.named_parameters()})


def test_autocast(make: Any) -> None:
    def loss(model: nn.Module, shard: int) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return loss_of(model, shard).float()

    results = []
    for shares in ([range(4)], [(0, 3), (1, 2)]):
        replicas = make(len(shares), mlp, 4)
        all_step(replicas, shares, loss)
        results.append(replicas[-1].gradients())
    assert all(same_bits(results[0][name], results[1][name]) for name in results[0])
    assert_close(results[0], plain(mlp, 4, loss), rtol=3e-2)


class Checkpointed(nn.Module):
    """One layer applied twice under reentrant checkpointing: its gradient arrives in two pieces."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 20)
        self.shared = nn.Linear(20, 20)
        self.twice = True

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(2 if self.twice else 1):
            x = checkpoint(torch.nn.Sequential(self.shared, nn.Tanh()), x, use_reentrant=True)
        return x


def test_reentrant_checkpointing_turns_overlap_off(make: Any) -> None:
    for shares in ([range(4)], [range(3), range(3, 4)]):
        replicas = make(len(shares), Checkpointed, 4)
        for _ in range(2):
            all_step(replicas, shares, loss_of)
            for replica in replicas:
                assert_close(replica.gradients(), plain(Checkpointed, 4))
                replica.reducer.start_step()


def test_reentrant_checkpointing_that_begins_later_is_refused(make: Any) -> None:
    [replica] = make(1, Checkpointed, 4)
    replica.model.twice = False
    all_step([replica], [range(4)], loss_of)
    replica.reducer.start_step()
    replica.model.twice = True
    with pytest.raises(LoopError, match=r"'shared\.(weight|bias)'.*use_reentrant=False"):
        all_step([replica], [range(4)], loss_of)
    replica.reducer.discard()


def test_what_cannot_be_reduced_is_named(make: Any) -> None:
    class Sparse(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(10, 4, sparse=True)

    [replica] = make(1, Sparse, 2)
    with pytest.raises(UserError, match=r"'table\.weight' is sparse"):
        all_step([replica], [range(2)], lambda model, shard: model.table(torch.tensor([shard])).sum())
    [replica] = make(1, Odd, 4)
    replica.model.frozen.requires_grad_(True)
    with pytest.raises(LoopError, match=r"'frozen\.weight' did not require"):
        all_step([replica], [range(4)], odd_loss)


def test_misuse_is_a_bug_report(make: Any) -> None:
    [replica] = make(1, mlp, 4)
    reducer = replica.reducer
    with pytest.raises(InternalError, match="wait"):
        reducer.wait()
    reducer.attach(Network(1).groups[0], [range(4)])
    with pytest.raises(InternalError, match="to be reduced"):
        reducer.begin_shard(0, last=True)
    with pytest.raises(InternalError, match="to be reduced"):
        reducer.flush()
    reducer.begin_shard(0, last=False)
    with pytest.raises(InternalError, match="before shard 0 has ended"):
        reducer.begin_shard(1, last=False)
    reducer.end_shard()
    with pytest.raises(InternalError, match="held already"):
        reducer.begin_shard(0, last=False)
    with pytest.raises(InternalError, match="are planned"):
        reducer.attach(Network(2).groups[1], [range(2), range(2, 4)])


def test_the_signature_tells_layouts_apart(make: Any) -> None:
    variants = [
        make(1, mlp, 4),
        make(1, mlp, 8),
        make(1, mlp, 4, strategy="fast"),
        make(1, mlp, 4, bucket_bytes=1 << 20),
        make(1, partial(mlp, torch.float64), 4),
        make(1, Odd, 4),
        make(1, lambda: nn.Sequential(mlp(), nn.BatchNorm1d(1)), 4),
        make(1, lambda: nn.Sequential(mlp(), nn.BatchNorm1d(1, track_running_stats=False)), 4),
    ]
    signatures = [replicas[0].reducer.signature for replicas in variants]
    assert len(set(signatures)) == len(signatures)
    assert make(1, mlp, 4)[0].reducer.signature == signatures[0]


def test_buckets_are_filled_in_reverse_and_by_kind() -> None:
    from everstep.actors.reduction.layout import lay_out

    sizes = [(100, torch.float32), (300, torch.bfloat16), (200, torch.float32), (50, torch.float32)]
    parameters = [nn.Parameter(torch.zeros(size, dtype=dtype)) for size, dtype in sizes]
    buckets = lay_out(parameters, 500)
    assert [[slot.parameter for slot in bucket.slots] for bucket in buckets] == [[3, 2], [1], [0]]
    assert [bucket.dtype for bucket in buckets] == [torch.float32, torch.bfloat16, torch.float32]
    offsets = itertools.chain.from_iterable([slot.offset for slot in bucket.slots] for bucket in buckets)
    assert list(offsets) == [0, 50, 0, 0]
