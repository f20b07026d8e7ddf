"""Groups in one process: ranks are threads, connections are real sockets; NCCL is played by a fake."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from everstep.actors.groups import LocalGroup, Rendezvous, RendezvousServer, form_group
from everstep.actors.groups import nccl as nccl_module
from everstep.actors.groups.base import Group, slice_size, slices
from everstep.actors.groups.connection import EAGER_BYTES
from everstep.actors.groups.mesh import MeshGroup
from everstep.actors.groups.nccl import NcclGroup, make_options, prepare_environment
from everstep.actors.groups.rendezvous import meet
from everstep.errors import GroupBroken

CPU = torch.device("cpu")
LARGE = 4 * EAGER_BYTES


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    server = RendezvousServer("127.0.0.1")
    yield server
    server.close()


def rendezvous(server: RendezvousServer, rank: int, world_size: int, **changes: Any) -> Rendezvous:
    values = {"prefix": "p", "bind_ip": "127.0.0.1", "timeout_s": 10.0, **changes}
    return Rendezvous(host=server.host, port=server.port, rank=rank, world_size=world_size, **values)


def mesh(world_size: int) -> list[Group]:
    """Groups whose connections are socket pairs."""
    sockets: list[dict[int, socket.socket]] = [{} for _ in range(world_size)]
    for low in range(world_size):
        for high in range(low + 1, world_size):
            sockets[low][high], sockets[high][low] = socket.socketpair()
    for mine in sockets:
        for connected in mine.values():
            connected.setblocking(False)
    return [MeshGroup("mesh", rank, world_size, mine) for rank, mine in enumerate(sockets)]


@pytest.fixture(params=[1, 2, 3, 4])
def groups(request: pytest.FixtureRequest) -> Iterator[list[Group]]:
    made = mesh(request.param) if request.param > 1 else [LocalGroup()]
    yield made
    for group in made:
        group.close()


@pytest.fixture
def pair() -> Iterator[list[Group]]:
    made = mesh(2)
    yield made
    for group in made:
        group.close()


def on_all(groups: list[Group], call: Callable[[Group], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(groups)) as pool:
        return [future.result(20) for future in [pool.submit(call, group) for group in groups]]


@pytest.mark.parametrize("numel", [0, 1, 5, 100_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8])
def test_all_reduce_sums_in_rank_order(groups: list[Group], numel: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inputs = [torch.randint(0, 9, (numel,)).to(dtype) for _ in groups]
    wanted = inputs[0].clone()
    for other in inputs[1:]:
        wanted += other

    def reduce(group: Group) -> torch.Tensor:
        tensor = inputs[group.rank].clone()
        assert group.all_reduce(tensor) is None
        work = group.all_reduce(again := inputs[group.rank].clone(), async_op=True)
        assert work is not None
        work.wait()
        work.wait()  # any number of times
        assert torch.equal(again, tensor)
        return tensor

    assert all(torch.equal(result, wanted) for result in on_all(groups, reduce))


def test_all_gather_and_all_to_all(groups: list[Group]) -> None:
    world = len(groups)

    def run(group: Group) -> None:
        gathered = torch.empty(world * 7)
        group.all_gather(gathered, torch.full((7,), float(group.rank)))
        assert torch.equal(gathered, torch.arange(float(world)).repeat_interleave(7))
        given = torch.cat([torch.full((r * 10_000,), 10.0 * group.rank + r) for r in range(world)])
        got = torch.empty(world * group.rank * 10_000)
        work = group.all_to_all(
            got, given, [group.rank * 10_000] * world, [r * 10_000 for r in range(world)], async_op=True
        )
        assert work is not None
        work.wait()
        wanted = torch.cat([torch.full((group.rank * 10_000,), 10.0 * r + group.rank) for r in range(world)])
        assert torch.equal(got, wanted)

    on_all(groups, run)


def test_small_and_large_parcels_on_one_channel_do_not_mix(pair: list[Group]) -> None:
    """A small one needs no permission and overtakes a large one; the receiver may come first or last."""
    sizes = [LARGE, 3, LARGE + 1, EAGER_BYTES, EAGER_BYTES + 1, 1]
    sent = [torch.full((size,), number, dtype=torch.uint8) for number, size in enumerate(sizes)]
    for receiver_first in (True, False):
        got = [torch.empty(size, dtype=torch.uint8) for size in sizes]
        works = []
        for step in ("receive", "send") if receiver_first else ("send", "receive"):
            if step == "send":
                works += [pair[0].exchange([(tensor, 1)], [], channel=2) for tensor in sent]
            else:
                works += [pair[1].exchange([], [(tensor, 0)], channel=2) for tensor in got]
            time.sleep(0.05)
        for work in works:
            work.wait()
        assert all(torch.equal(one, other) for one, other in zip(got, sent, strict=True))


def test_channels_are_independent(pair: list[Group]) -> None:
    for size in (3, LARGE):
        a, b = torch.ones(size), torch.full((size,), 2.0)
        got_a, got_b = torch.empty(size), torch.empty(size)
        works = [
            pair[0].exchange([(a, 1)], [], channel=2),
            pair[0].exchange([(b, 1)], [], channel=4),
            pair[1].exchange([], [(got_b, 0)], channel=4),
        ]
        works[2].wait()
        works.append(pair[1].exchange([], [(got_a, 0)], channel=2))
        for work in works:
            work.wait()
        assert torch.equal(got_a, a) and torch.equal(got_b, b)


@pytest.mark.parametrize(("theirs", "ours"), [(3, 4), (LARGE, LARGE + 1), (3, LARGE)])
@pytest.mark.parametrize("receiver_first", [True, False])
def test_ranks_that_launch_different_collectives_are_told(
    pair: list[Group], theirs: int, ours: int, receiver_first: bool
) -> None:
    works = []
    for step in ("receive", "send") if receiver_first else ("send", "receive"):
        try:
            if step == "send":
                works.append(pair[0].exchange([(torch.ones(theirs, dtype=torch.uint8), 1)], [], channel=2))
            else:
                works.append(pair[1].exchange([], [(torch.ones(ours, dtype=torch.uint8), 0)], channel=2))
        except GroupBroken:
            pass
        time.sleep(0.02)
    reasons = []
    for group in pair:  # whichever side saw it, both are over soon
        deadline = time.monotonic() + 10
        with pytest.raises(GroupBroken) as failure:
            while time.monotonic() < deadline:
                group.check()
        reasons.append(str(failure.value))
    assert any("launched different collectives" in reason for reason in reasons), reasons
    for work in works:
        with pytest.raises(GroupBroken):
            work.wait()


def test_abort_frees_who_waits_and_refuses_who_comes(groups: list[Group]) -> None:
    group = groups[0]
    others = [r for r in range(group.world_size) if r]
    target = torch.zeros(LARGE)
    works = [group.exchange([(torch.ones(LARGE), r)], [(target, r)], channel=2) for r in others]
    failures: list[BaseException] = []

    def wait() -> None:
        for work in works:
            try:
                work.wait()
            except GroupBroken as error:
                failures.append(error)

    waiter = threading.Thread(target=wait)
    waiter.start()
    threads = [threading.Thread(target=end) for end in (group.abort, group.close, group.abort, group.close)]
    for thread in threads:
        thread.start()
    for thread in (*threads, waiter):
        thread.join(10)
        assert not thread.is_alive()
    assert len(failures) == len(others)
    for call in (
        group.check,
        group.settle,
        lambda: group.all_reduce(torch.ones(3)),
        lambda: group.all_reduce(target),
    ):
        with pytest.raises(GroupBroken, match=r"aborted|closed"):
            call()
    for peer in groups[1:]:
        with pytest.raises(GroupBroken):
            peer.all_reduce(torch.ones(LARGE))


def test_nothing_succeeds_after_abort_even_if_the_data_had_come(pair: list[Group]) -> None:
    got = torch.zeros(3)
    sending = pair[0].exchange([(torch.ones(3), 1)], [], channel=2)
    receiving = pair[1].exchange([], [(got, 0)], channel=2)
    sending.wait()
    deadline = time.monotonic() + 10
    while not got.all() and time.monotonic() < deadline:
        pass
    pair[1].abort()
    with pytest.raises(GroupBroken, match="aborted"):
        receiving.wait()


def test_a_lost_peer_is_noticed_between_collectives_and_an_abort_is_not_reported() -> None:
    three = mesh(3)
    told: list[tuple[int, GroupBroken]] = []
    noticed = threading.Event()

    def tell(rank: int, error: GroupBroken) -> None:
        told.append((rank, error))
        if len(told) == 2:
            noticed.set()

    for group in three:
        group.watch(lambda error: told.append((-1, error)))  # replaced
        group.watch(partial(tell, group.rank))
    three[1].abort()
    assert noticed.wait(10)
    assert sorted(rank for rank, _ in told) == [0, 2]
    three[0].watch(partial(tell, 0))  # too late: told at once
    assert len(told) == 3 and "closed the connection" in str(told[-1][1])
    three[1].watch(partial(tell, 1))
    assert len(told) == 3
    for group in three:
        group.close()


def test_slices_cover_everything_once() -> None:
    for numel in (0, 1, 63, 64, 65, 1000, 12_345):
        for world in (1, 2, 3, 7, 64):
            bounds = slices(numel, world)
            assert [start for start, _ in bounds[1:]] == [stop for _, stop in bounds[:-1]]
            assert bounds[0][0] == 0 and bounds[-1][1] == numel
            assert all(stop - start <= slice_size(numel, world) for start, stop in bounds)


# ---- forming


def test_ranks_meet_whatever_else_goes_on(server: RendezvousServer) -> None:
    """Strangers, a rank that calls twice and one that hangs up do not disturb."""
    for junk in (b"GET / HTTP/1.1\n", b"[1, 2]\n", b'["p", 2, 7, "h", 1]\n', b""):
        with socket.create_connection((server.host, server.port)) as stranger:
            stranger.sendall(junk)
    early = socket.create_connection((server.host, server.port))
    early.sendall(json.dumps([rendezvous(server, 1, 2).key, 2, 1, "gone", 9]).encode() + b"\n")
    deadline = time.monotonic() + 10
    while not server._meetings and time.monotonic() < deadline:
        time.sleep(0.01)
    early.close()
    while server._meetings and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not server._meetings
    with ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(meet, rendezvous(server, rank, 2), 100 + rank, deadline) for rank in range(2)]
        assert [call.result(10) for call in calls] == [[("127.0.0.1", 100), ("127.0.0.1", 101)]] * 2
    while server._meetings and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not server._meetings


def test_forming_is_bounded_and_says_who_failed(server: RendezvousServer) -> None:
    started = time.monotonic()
    with pytest.raises(GroupBroken, match=r"group p, rank 0 of 2 did not form: (not all ranks|timed out)"):
        form_group(CPU, rendezvous(server, 0, 2, timeout_s=0.2))
    assert time.monotonic() - started < 5
    server.close()
    server.close()
    with pytest.raises(GroupBroken, match="did not form"):
        form_group(CPU, rendezvous(server, 0, 2))
    assert isinstance(form_group(CPU, rendezvous(server, 0, 1)), LocalGroup)


def test_a_stranger_on_the_listener_is_turned_away(server: RendezvousServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(form_group, CPU, rendezvous(server, 0, 2, timeout_s=1.0))
        # As rank 1, but with the hello of another rendezvous first.
        address = meet(rendezvous(server, 1, 2), 1, time.monotonic() + 10)[0]
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"x" * 20)
            assert stranger.recv(1) == b""
        with pytest.raises(GroupBroken):
            form_group(CPU, rendezvous(server, 1, 2, timeout_s=0.1))
        with pytest.raises(GroupBroken):
            forming.result(20)


def test_who_does_not_know_the_secret_meets_nobody(server: RendezvousServer) -> None:
    """Neither at the rendezvous nor at a rank's own door; and the secret is in no text."""
    inside = rendezvous(server, 0, 2, secret=b"ours", timeout_s=1.0)
    with ThreadPoolExecutor(1) as pool:
        forming = pool.submit(form_group, CPU, inside)
        for guess in (b"", b"theirs"):
            with pytest.raises(GroupBroken):
                form_group(CPU, rendezvous(server, 1, 2, secret=guess, timeout_s=0.2))
        with pytest.raises(GroupBroken) as broken:
            forming.result(20)
    assert inside.key != rendezvous(server, 0, 2, secret=b"ours", prefix="q").key
    texts = (str(inside), repr(inside), str(broken.value))
    assert not any("ours" in text or inside.key in text for text in texts)
    pair = [rendezvous(server, rank, 2, secret=b"ours") for rank in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for group in pool.map(lambda place: form_group(CPU, place), pair):
            group.close()


def test_the_controllers_part_needs_no_torch() -> None:
    code = (
        "import sys; from everstep.actors.groups import RendezvousServer; s = RendezvousServer('127.0.0.1'); s.close();"
        "print(sorted({'torch', 'ray', 'numpy'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert result.stdout.strip() == "[]"


# ---- NCCL, without a device


class FakeNccl:
    """Records calls; like the real one it reports no failure after an abort."""

    def __init__(self) -> None:
        self.calls: list[Any] = []
        self.aborted = threading.Event()
        self.fails = False

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> FakeNccl:
            if self.fails:
                raise RuntimeError("NCCL error")
            self.calls.append((name, args))
            return self

        return call

    def abort(self) -> None:
        self.aborted.set()


@pytest.fixture
def fake() -> FakeNccl:
    return FakeNccl()


@pytest.fixture
def nccl(fake: FakeNccl, monkeypatch: pytest.MonkeyPatch) -> NcclGroup:
    class Stream:
        def synchronize(self) -> None:
            if fake.fails:
                raise RuntimeError("CUDA error")

    monkeypatch.setattr(nccl_module.torch.cuda, "current_stream", lambda device: Stream())
    place = Rendezvous(host="h", port=1, prefix="p", rank=0, world_size=2, bind_ip="h")
    return NcclGroup(torch.device("cuda", 0), place, fake)


def test_nccl_environment_and_options_leave_the_process_alive() -> None:
    environ = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "OTHER": "x"}
    prepare_environment(environ)
    assert environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"
    assert environ["TORCH_NCCL_ENABLE_MONITORING"] == "0"
    assert environ["OTHER"] == "x"

    class Fake:
        class Options:
            def __init__(self) -> None:
                self.config = type("Config", (), {"blocking": 1})()

    options = make_options(Fake)
    assert options.config.blocking == 0 and options._timeout.total_seconds() >= 3600


def test_nccl_exchanges_in_one_group_call(nccl: NcclGroup, fake: FakeNccl) -> None:
    a, b = torch.ones(2), torch.ones(3)
    nccl.exchange([(a, 1), (torch.empty(0), 1)], [(b, 1)], channel=2).wait()
    assert [name for name, _ in fake.calls] == [
        "_start_coalescing",
        "recv",
        "send",
        "_end_coalescing",
        "wait",
    ]
    nccl.exchange([(torch.empty(0), 1)], [], channel=2).wait()
    assert len(fake.calls) == 5  # nothing to do, nothing launched
    nccl.all_reduce(a)
    nccl.all_gather(torch.ones(4), a)
    assert [name for name, _ in fake.calls[5:]] == ["allreduce", "wait", "_allgather_base", "wait"]


def test_nccl_success_after_an_abort_is_no_success(nccl: NcclGroup, fake: FakeNccl) -> None:
    work = nccl.all_reduce(torch.ones(2), async_op=True)
    assert work is not None
    nccl.abort()
    nccl.abort()
    nccl.close()
    assert fake.aborted.wait(10)
    for call in (work.wait, nccl.settle, nccl.check, lambda: nccl.all_reduce(torch.ones(2))):
        with pytest.raises(GroupBroken, match="group p, rank 0 of 2: aborted"):
            call()
    with pytest.raises(GroupBroken):
        nccl.exchange([(torch.ones(1), 1)], [], channel=2)


def test_nccl_errors_break_the_group(nccl: NcclGroup, fake: FakeNccl) -> None:
    fake.fails = True
    with pytest.raises(GroupBroken, match="NCCL error"):
        nccl.all_reduce(torch.ones(2))
    assert fake.aborted.wait(10)
    with pytest.raises(GroupBroken):
        nccl.settle()
