"""Groups of real processes on TCP: they form, break, are freed, and form again."""

from __future__ import annotations

import itertools
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from everstep.actors.groups import Rendezvous, RendezvousServer, form_group
from tests.procs.processes import Failed, Gone, Process, processes

LARGE = 1_000_000
CPU = torch.device("cpu")
prefixes = itertools.count()


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    server = RendezvousServer("127.0.0.1")
    yield server
    server.close()


def form(state: dict[str, Any], rendezvous: Rendezvous) -> float:
    started = time.perf_counter()
    group = form_group(CPU, rendezvous, state.setdefault("cancel", threading.Event()))
    elapsed = time.perf_counter() - started
    if (old := state.get("group")) is not None:
        old.close()
    state["group"] = group
    return elapsed


def sum_of_ranks(state: dict[str, Any], numel: int) -> bool:
    group = state["group"]
    tensor = torch.full((numel,), float(group.rank + 1))
    group.all_reduce(tensor)
    return bool((tensor == group.world_size * (group.world_size + 1) / 2).all())


def all_collectives(state: dict[str, Any]) -> bool:
    group = state["group"]
    rank, world = group.rank, group.world_size
    ints = torch.arange(5) + rank
    group.all_reduce(ints)
    halves = torch.full((40_000,), 0.5, dtype=torch.bfloat16)
    group.all_reduce(halves)
    gathered = torch.empty(world * 3)
    group.all_gather(gathered, torch.full((3,), float(rank)))
    given = torch.cat([torch.full((r + 1,), float(rank)) for r in range(world)])
    got = torch.empty(world * (rank + 1))
    group.all_to_all(got, given, [rank + 1] * world, [r + 1 for r in range(world)])
    return bool(
        (ints == torch.arange(5) * world + sum(range(world))).all()
        and (halves == world / 2).all()
        and (gathered == torch.arange(world).repeat_interleave(3)).all()
        and (got == torch.arange(world).repeat_interleave(rank + 1)).all()
    )


def sum_forever(state: dict[str, Any], numel: int) -> tuple[float, int]:
    """Reduce until it breaks. Returns when (monotonic clock, common to all processes) and after how many."""
    group = state["group"]
    tensor = torch.zeros(numel)
    for number in itertools.count():
        try:
            group.all_reduce(tensor)
        except Exception as error:
            assert type(error).__name__ == "GroupBroken", error
            return time.monotonic(), number
    raise AssertionError


def abort(state: dict[str, Any]) -> float:
    state["group"].abort()
    return time.monotonic()


def close(state: dict[str, Any]) -> None:
    state["group"].close()


def abort_and_close_at_once(state: dict[str, Any]) -> None:
    calls = [state["group"].abort, state["group"].close, state["group"].abort, state["group"].close]
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def count_sockets(state: dict[str, Any]) -> int:
    return sum(os.path.realpath(entry).startswith("socket:") for entry in os.scandir("/proc/self/fd"))


def everybody_forms(members: list[Process], server: RendezvousServer, timeout_s: float = 10.0) -> list[float]:
    prefix = f"g{next(prefixes)}"
    futures = [
        member.start(form, rendezvous(server, prefix, rank, len(members), timeout_s))
        for rank, member in enumerate(members)
    ]
    return [future.result(20) for future in futures]


def rendezvous(
    server: RendezvousServer, prefix: str, rank: int, world_size: int, timeout_s: float = 10.0
) -> Rendezvous:
    return Rendezvous(
        host=server.host,
        port=server.port,
        prefix=prefix,
        rank=rank,
        world_size=world_size,
        bind_ip="127.0.0.1",
        timeout_s=timeout_s,
    )


def everybody(members: list[Process], function: Any, *args: Any) -> list[Any]:
    futures = [member.start(function, *args) for member in members]
    return [future.result(20) for future in futures]


def test_thirty_generations_of_changing_size_in_one_set_of_processes(server: RendezvousServer) -> None:
    with processes(4) as members:
        times = []
        for generation in range(30):
            size = (4, 3, 1, 2, 4, 4)[generation % 6]
            chosen = members[generation % 2 :][:size]
            times += everybody_forms(chosen, server)
            assert all(everybody(chosen, sum_of_ranks, 100))
            assert all(everybody(chosen, sum_of_ranks, 100_001))
            if generation < 6:
                assert all(everybody(chosen, all_collectives))
        everybody(members, close)
        deadline = time.monotonic() + 10
        while (left := everybody(members, count_sockets)) and max(left) > 4 and time.monotonic() < deadline:
            pass
        assert max(left) <= 4  # the store's clients and the test's own pipe: every group's sockets are gone
        print(f"form: {median_ms(times)}")


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["kill", "freeze"])
@pytest.mark.parametrize("numel", [16, LARGE])
def test_survivors_are_freed_and_go_on_ten_times_in_a_row(
    server: RendezvousServer, how: str, numel: int
) -> None:
    freed_s, formed_s, frozen = [], [], []
    with processes(4) as members:
        for number in range(10):
            everybody_forms(members, server)
            running = [member.start(sum_forever, numel) for member in members]
            time.sleep(0.05 + 0.01 * number)
            victim = members.pop(number % 4)
            lost = running.pop(number % 4)
            getattr(victim, how)()
            aborted = [member.start(abort) for member in members]
            for survivor, call in zip(running, aborted, strict=True):
                freed_s.append(survivor.result(10)[0] - call.result(10))
            formed_s += everybody_forms(members, server)
            assert all(everybody(members, sum_of_ranks, numel))
            if how == "kill":
                with pytest.raises(Gone):
                    lost.result(10)
                victim.discard()
            else:
                frozen.append((victim, lost))
            members.append(Process())
        for victim, lost in frozen:
            victim.thaw()  # and then it must find out by itself, without a word from anybody
            assert lost.result(20)[1] >= 0
            victim.discard()
        print(f"{how} {numel}: freed after abort {median_ms(freed_s)}; formed {median_ms(formed_s)}")


def median_ms(times: list[float]) -> str:
    ordered = sorted(time * 1e3 for time in times)
    return f"median {ordered[len(ordered) // 2]:.1f} ms, max {ordered[-1]:.1f} ms, n={len(ordered)}"


@pytest.mark.chaos
def test_a_peer_that_dies_while_forming_costs_one_bounded_attempt(server: RendezvousServer) -> None:
    with processes(4) as members:
        everybody_forms(members, server)
        for number in range(3):
            prefix = f"g{next(prefixes)}"
            victim = members.pop(number)
            started = time.monotonic()
            futures = [
                member.start(form, rendezvous(server, prefix, rank, 4, 1.0))
                for rank, member in enumerate(members)
            ]
            time.sleep(0.02 * number)
            victim.kill()
            # The next generation forms at once, beside the attempt that is abandoned.
            everybody_forms(members, server)
            assert all(everybody(members, sum_of_ranks, LARGE))
            for future in futures:
                with pytest.raises(Failed) as failure:
                    future.result(10)
                assert failure.value.kind == "GroupBroken"
            assert time.monotonic() - started < 10
            members.append(Process())


def test_a_group_that_forms_after_it_was_cancelled_closes_itself(server: RendezvousServer) -> None:
    with processes(2) as members:
        prefix = f"g{next(prefixes)}"
        first = members[0].start(form, rendezvous(server, prefix, 0, 2))
        while not server._meetings:
            time.sleep(0.01)  # until it waits for the other
        members[0].call(cancel_forming)
        second = members[1].start(form, rendezvous(server, prefix, 1, 2))
        with pytest.raises(Failed, match="cancelled"):
            first.result(10)
        second.result(10)  # it had formed; the first use tells
        with pytest.raises(Failed) as failure:
            members[1].call(sum_of_ranks, 10)
        assert failure.value.kind == "GroupBroken"


def cancel_forming(state: dict[str, Any]) -> None:
    state.setdefault("cancel", threading.Event()).set()


@pytest.mark.parametrize("numel", [16, LARGE])
def test_abort_twice_and_close_at_any_moment_never_end_a_process(
    server: RendezvousServer, numel: int
) -> None:
    with processes(3) as members:
        for number in range(6):
            everybody_forms(members, server)
            if number % 3 == 0:  # before any operation
                everybody(members, abort_and_close_at_once)
                with pytest.raises(Failed) as failure:
                    members[0].call(sum_of_ranks, numel)
                assert failure.value.kind == "GroupBroken"
            elif number % 3 == 1:  # during
                running = [member.start(sum_forever, numel) for member in members]
                time.sleep(0.05)
                members[number % 3].call(abort_and_close_at_once)
                assert all(future.result(10) for future in running)
                everybody(members, abort_and_close_at_once)
            else:  # after
                assert all(everybody(members, sum_of_ranks, numel))
                everybody(members, abort_and_close_at_once)
                everybody(members, abort)
        everybody_forms(members, server)
        assert all(everybody(members, sum_of_ranks, numel))
        assert [member.end() for member in members] == [0, 0, 0]
        members.clear()
