"""Several replicas in one process: threads, and a network in memory that can be cut."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from everstep.actors.groups.base import Group, LocalGroup, Parcel, Work
from everstep.actors.reduction import Reducer
from everstep.errors import GroupBroken

DEADLINE_S = 60.0
Loss = Callable[[nn.Module, int], Tensor]


class Network:
    """Connects the groups of one generation. `cut` breaks it for all of them."""

    def __init__(self, world_size: int) -> None:
        self.changed = threading.Condition()
        self.mail: dict[tuple[int, int, int], list[Tensor]] = defaultdict(list)
        self.is_cut = False
        self.launches: list[list[tuple[int, int]]] = [[] for _ in range(world_size)]
        """Per rank (channel, elements sent) of every exchange."""
        self.groups: list[Group] = (
            [LocalGroup()]
            if world_size == 1
            else [MemoryGroup(self, rank, world_size) for rank in range(world_size)]
        )

    def cut(self) -> None:
        with self.changed:
            self.is_cut = True
            self.changed.notify_all()


class MemoryGroup(Group):
    """What it receives into is filled with rubbish from launch to arrival, as a network is allowed to."""

    def __init__(self, network: Network, rank: int, world_size: int) -> None:
        super().__init__(rank, world_size)
        self.network = network
        self.aborted = False

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel], *, channel: int) -> Work:
        self.check()
        network = self.network
        with network.changed:
            network.launches[self.rank].append((channel, sum(tensor.numel() for tensor, _ in sends)))
            for tensor, peer in sends:
                assert peer != self.rank and tensor.is_contiguous()
                if tensor.numel():
                    network.mail[self.rank, peer, channel].append(tensor.clone())
            network.changed.notify_all()
        for tensor, _ in receives:
            tensor.fill_(torch.nan if tensor.is_floating_point() else 77)
        return _Mail(self, [(t, p) for t, p in receives if t.numel()], channel)

    def abort(self) -> None:
        with self.network.changed:
            self.aborted = True
            self.network.changed.notify_all()

    def close(self) -> None:
        self.abort()

    def check(self) -> None:
        if self.aborted or self.network.is_cut:
            raise GroupBroken("cut")


class _Mail:
    def __init__(self, group: MemoryGroup, receives: Sequence[Parcel], channel: int) -> None:
        self.group, self.receives, self.channel = group, receives, channel

    def wait(self) -> None:
        network, group = self.group.network, self.group
        for tensor, peer in self.receives:
            box = network.mail[peer, group.rank, self.channel]
            with network.changed:
                deadline = time.monotonic() + DEADLINE_S
                while not box and not network.is_cut and not group.aborted:
                    assert network.changed.wait(deadline - time.monotonic()), "a message never came"
                group.check()
                message = box.pop(0)
            assert message.shape == tensor.shape and message.dtype == tensor.dtype
            tensor.copy_(message)
        self.receives = ()
        group.check()


class Replica:
    """A model, its reducer, and how the session drives them."""

    def __init__(self, model: nn.Module, num_shards: int, **options: Any) -> None:
        self.model = model
        self.failures: list[BaseException] = []
        self.computed: list[int] = []
        self.voted = False
        """The mean of the step at hand is complete here, and others may know: they may apply the step without this one
        learning so, if someone dies between telling them and telling it."""
        self.reducer = Reducer(
            list(model.named_parameters()), list(model.named_buffers()),
            logical_shards=num_shards, **options,
        )  # fmt: skip

    def compute(self, group: Group, shares: Sequence[Sequence[int]], loss: Loss) -> None:
        self.voted = False
        self.reducer.attach(group, shares, on_failure=self.failures.append)
        todo = [shard for shard in shares[group.rank] if shard not in self.reducer.kept()]
        for position, shard in enumerate(todo):
            self.computed.append(shard)
            self.reducer.begin_shard(shard, last=position == len(todo) - 1)
            value = loss(self.model, shard)
            self.reducer.backward_final()
            value.backward()
            self.reducer.end_shard()
        self.reducer.flush()

    def reduce(self, group: Group) -> Tensor:
        self.reducer.wait()
        self.reducer.reduce_buffers()
        while True:
            self.voted = True
            bits = self.reducer.vote_bits()
            group.all_reduce(bits)
            if not self.reducer.missing_buffers(bits):
                return bits
            self.reducer.grow(bits)
            self.reducer.reduce_buffers()

    def step(self, group: Group, shares: Sequence[Sequence[int]], loss: Loss) -> None:
        self.compute(group, shares, loss)
        self.reducer.install(self.reduce(group))

    def gradients(self) -> dict[str, Tensor | None]:
        return {
            name: None if parameter.grad is None else parameter.grad.detach().clone()
            for name, parameter in self.model.named_parameters()
        }

    def update(self, rate: float = 0.1) -> None:
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.grad is not None:
                    parameter -= rate * parameter.grad
                    parameter.grad = None
        self.reducer.start_step()


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run the calls in threads at the same time; their results. Raises the first one's exception."""
    with ThreadPoolExecutor(len(calls)) as pool:
        futures = [pool.submit(call) for call in calls]
        return [future.result(2 * DEADLINE_S) for future in futures]


def all_step(replicas: Sequence[Replica], shares: Sequence[Sequence[int]], loss: Loss) -> Network:
    network = Network(len(replicas))
    together(
        *[
            lambda replica=replica, group=group: replica.step(group, shares, loss)  # type: ignore[misc]
            for replica, group in zip(replicas, network.groups, strict=True)
        ]
    )
    return network


def same_bits(one: Tensor | None, other: Tensor | None) -> bool:
    """Also the sign of zero and the payload of NaN."""
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and torch.equal(
        one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8)
    )
