"""The reducer over real connections: the same bits for any number of processes, whoever is killed on the way."""

from __future__ import annotations

import hashlib
import itertools
import random
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from everstep.actors.groups import Rendezvous, RendezvousServer, form_group
from everstep.errors import GroupBroken
from tests.procs.processes import Process, processes
from tests.unit.replicas import Replica

SHARDS = 8
prefixes = itertools.count()


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    server = RendezvousServer("127.0.0.1")
    yield server
    server.close()


def build() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Linear(40, 300), nn.BatchNorm1d(300), nn.ReLU(), nn.Linear(300, 300), nn.Linear(300, 5)
    )


def loss_of(model: nn.Module, shard: int, step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + shard)
    x = torch.randn(6, 40, generator=generator)
    return (model(x) - x[:, :5]).square().mean()


# ---- in the processes


def start(state: dict[str, Any], options: dict[str, Any]) -> None:
    state["replica"] = Replica(build(), SHARDS, bucket_bytes=100_000, **options)
    state["applied"] = 0


def form(state: dict[str, Any], rendezvous: Rendezvous, shares: Sequence[Sequence[int]]) -> None:
    if "group" in state:
        state["group"].close()
    state["replica"].reducer.discard()
    state["group"] = form_group(torch.device("cpu"), rendezvous)
    state["shares"] = shares


def train(state: dict[str, Any], steps: int, even: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Train until `steps` are applied or the group breaks; then say where this replica stands."""
    replica, group = state["replica"], state["group"]
    state["bits"] = None
    broken = ""
    try:
        while state["applied"] < steps:
            replica.compute(group, state["shares"], partial(loss_of, step=state["applied"]))
            bits = replica.reduce(group)
            state["bits"] = bits.tolist()
            apply(state, bits.tolist())
            state["shares"] = even
    except GroupBroken as error:
        group.abort()
        broken = str(error)
    kept = sorted(replica.reducer.kept())
    return {
        "applied": state["applied"],
        "voted": replica.voted,
        "bits": state["bits"],
        "kept": kept,
        "broken": broken,
    }


def apply(state: dict[str, Any], bits: list[int]) -> None:
    state["replica"].reducer.install(torch.tensor(bits))
    state["replica"].update()
    state["applied"] += 1


def abort(state: dict[str, Any]) -> None:
    state["group"].abort()


def fingerprint(state: dict[str, Any]) -> str:
    digest = hashlib.sha256()
    for name, tensor in state["replica"].model.state_dict().items():
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


# ---- in the test


def deal(owned: Sequence[set[int]]) -> list[list[int]]:
    """What each holds, and the rest to whoever holds least."""
    shares = [sorted(held) for held in owned]
    for shard in sorted(set(range(SHARDS)).difference(*owned)):
        min(shares, key=len).append(shard)
    return shares


def form_all(members: list[Process], server: RendezvousServer, shares: Sequence[Sequence[int]]) -> None:
    prefix = f"r{next(prefixes)}"
    calls = [
        member.start(
            form,
            Rendezvous(
                host=server.host, port=server.port, prefix=prefix, rank=rank, world_size=len(members),
                bind_ip="127.0.0.1",
            ),
            shares,
        )
        for rank, member in enumerate(members)
    ]  # fmt: skip
    for call in calls:
        call.result(20)


def train_all(members: list[Process], steps: int) -> list[dict[str, Any]]:
    even = deal([set() for _ in members])
    calls = [member.start(train, steps, even) for member in members]
    return [call.result(60) for call in calls]


def assert_finished(ends: list[dict[str, Any]], steps: int) -> None:
    assert [end["applied"] for end in ends] == [steps] * len(ends), [end["broken"] for end in ends]


def run_undisturbed(server: RendezvousServer, size: int, steps: int, **options: Any) -> set[str]:
    with processes(size) as members:
        for member in members:
            member.call(start, options)
        form_all(members, server, deal([set() for _ in members]))
        assert_finished(train_all(members, steps), steps)
        return {member.call(fingerprint) for member in members}


def test_one_two_three_and_four_processes_end_with_the_same_bits(server: RendezvousServer) -> None:
    results = [run_undisturbed(server, size, 4) for size in (1, 2, 3, 4)]
    assert set().union(*results) == results[0]
    assert len(results[0]) == 1


def test_the_fast_strategy_agrees_within_a_generation(server: RendezvousServer) -> None:
    assert len(run_undisturbed(server, 3, 4, strategy="fast")) == 1


@pytest.mark.chaos
def test_kills_at_any_moment_change_no_bit(server: RendezvousServer) -> None:
    """Four kills in one run of four processes, with only the dead one's shards computed again each time."""
    steps, chance = 40, random.Random(11)
    [wanted] = run_undisturbed(server, 1, steps)
    moments = {"rolled forward": 0, "kept shards": 0}
    with processes(4) as members:
        for member in members:
            member.call(start, {})
        form_all(members, server, deal([set() for _ in members]))
        for _ in range(4):
            even = deal([set() for _ in members])
            calls = [member.start(train, steps, even) for member in members]
            time.sleep(chance.uniform(0.02, 0.15))
            victim = chance.randrange(len(members))
            members[victim].kill()
            members.pop(victim).discard()
            calls.pop(victim)
            for member in members:
                member.call(abort)
            ends = [call.result(20) for call in calls]
            newest = max(end["applied"] for end in ends)
            if newest == steps:
                break
            settle(members, ends, newest, moments)
            kept = [set(end["kept"]) if end["applied"] == newest else set() for end in ends]
            if len(members) < 3:
                members.append(joiner(members[0]))
                kept.append(set())
            form_all(members, server, deal(kept))
        assert_finished(train_all(members, steps), steps)
        assert {member.call(fingerprint) for member in members} == {wanted}
    print(moments)


def settle(members: list[Process], ends: list[dict[str, Any]], newest: int, moments: dict[str, int]) -> None:
    """What the controller decides: whoever has not applied a step that others have, applies it from what it holds."""
    for member, end in zip(members, ends, strict=True):
        moments["kept shards"] += bool(end["kept"]) and end["applied"] == newest
        if end["applied"] < newest:
            assert end["applied"] == newest - 1 and end["voted"]
            bits = next(other["bits"] for other in ends if other["applied"] == newest)
            member.call(apply, bits)
            moments["rolled forward"] += 1


def joiner(source: Process) -> Process:
    process = Process()
    process.call(start, {})
    process.call(load, *source.call(dump))
    return process


def dump(state: dict[str, Any]) -> tuple[dict[str, Any], frozenset[str], int]:
    replica = state["replica"]
    arrays = {name: tensor.numpy().copy() for name, tensor in replica.model.state_dict().items()}
    return arrays, replica.reducer.buffer_set, state["applied"]


def load(state: dict[str, Any], arrays: dict[str, Any], buffer_set: frozenset[str], applied: int) -> None:
    replica = state["replica"]
    replica.model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    replica.reducer.buffer_set = buffer_set
    replica.reducer.reload_buffers()
    state["applied"] = applied
