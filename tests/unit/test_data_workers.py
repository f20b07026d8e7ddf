"""Map-style datasets through real loader processes: through re-deals, errors, and deaths on either side."""

from __future__ import annotations

import logging
import multiprocessing
import os
import random
import select
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from everstep.actors import data_map
from everstep.actors.data import MapSource
from everstep.errors import InfrastructureError
from everstep.policies.deal import deal, redeal
from everstep.policies.ledger import DataLedger

FORK = multiprocessing.get_context("fork")
SHARDS, STEPS = 6, 8


class Noisy:
    """Counts its reads over all processes, keeps their order, and can be held up or made to fail."""

    def __init__(self, size: int = 48) -> None:
        self.reads = torch.zeros(size, dtype=torch.int64).share_memory_()
        self.order = FORK.Queue()
        self.begun, self.gate = FORK.Event(), FORK.Event()
        self.gate.set()
        self.before: Callable[[int], None] = lambda index: None

    def __len__(self) -> int:
        return len(self.reads)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.begun.set()
        assert self.gate.wait(60)
        self.before(index)
        self.reads[index] += 1
        self.order.put(index)
        return {"id": index, "noise": torch.rand(3) + random.random() + np.random.rand(), "pid": os.getpid()}


def ledger(**changes: Any) -> DataLedger:
    values = {"dataset_size": 48, "global_batch_size": 12, "logical_shards": SHARDS, "seed": 3}
    return DataLedger(**(values | changes))


def flat(batch: Any) -> Any:
    return batch["id"].tolist(), batch["noise"].tolist()


def gone(pid: int, timeout_s: float = 5.0) -> bool:
    """Waits until a process, child or not, has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], timeout_s)[0])
    finally:
        os.close(handle)


@pytest.fixture
def sources() -> Iterator[Callable[..., MapSource]]:
    """Makes sources, closes them, and sees to it that no loader process is left."""
    made: list[MapSource] = []

    def make(dataset: Any, plan: DataLedger | None = None, **options: Any) -> MapSource:
        made.append(MapSource(dataset, plan or ledger(), **{"num_workers": 2, "timeout_s": 60.0, **options}))
        return made[-1]

    yield make
    for source in made:
        source.close()
    assert not multiprocessing.active_children()


def reference() -> list[list[Any]]:
    source = MapSource(Noisy(), ledger())
    source.deal(0, range(SHARDS), range(SHARDS), STEPS)
    return [[flat(source.get(step, v)) for v in range(SHARDS)] for step in range(STEPS)]


def test_rescaling_4_3_4_2_gives_the_same_batches_and_every_sample_once(
    sources: Callable[..., MapSource],
) -> None:
    """Replicas with no, one and two loader processes; rank 2 and later a joiner are killed in the middle of a step."""
    expected, plan = reference(), ledger()
    live: dict[str, MapSource] = {}
    ids: list[int] = []
    story = [(4, ""), (4, "c"), (3, ""), (4, ""), (4, "e"), (2, ""), (2, ""), (2, "")]
    for step, (replicas, killed) in enumerate(story):
        names = [name for name in "abcde" if name != "c" or step < 2][:replicas]
        for name in names:
            if name not in live:
                live[name] = sources(Noisy(), plan, num_workers="abcde".index(name) % 3)
        live = {name: live[name] for name in names}
        computed: dict[str, dict[int, Any]] = {}
        for name, owned in zip(live, deal(SHARDS, replicas), strict=True):
            live[name].deal(step, owned, owned, STEPS)
            computed[name] = {owned[0]: flat(live[name].get(step, owned[0]))}
        if killed:
            live.pop(killed).close()
            del computed[killed]
        extra = redeal(SHARDS, [list(held) for held in computed.values()])
        for name, more, owned in zip(live, extra, deal(SHARDS, len(live)), strict=True):
            live[name].deal(step, more, owned, STEPS)
            computed[name] |= {v: flat(live[name].get(step, v)) for v in more}
            live[name].committed(step)
        batches = {v: batch for held in computed.values() for v, batch in held.items()}
        assert [batches[v] for v in range(SHARDS)] == expected[step]
        ids += [index for index, _ in batches.values() for index in index]
    assert sorted(ids[:48]) == sorted(ids[48:]) == list(range(48))


def test_a_redeal_reads_nothing_twice_and_keeps_the_processes(sources: Callable[..., MapSource]) -> None:
    dataset = Noisy()
    source = sources(dataset)
    expected = reference()
    source.deal(0, [0, 1], [0, 1], 4)
    pids = set()
    for step in range(4):
        batch = source.get(step, 0)
        assert flat(batch) == expected[step][0]
        if step == 1:  # a peer died: all the shards of this step and of those to come are ours
            source.deal(step, [1, 2, 3, 4, 5], range(SHARDS), 4)
        for v in [1] if step == 0 else range(1, SHARDS):
            batch = source.get(step, v)
            assert flat(batch) == expected[step][v]
            pids |= set(batch["pid"].tolist())
        source.committed(step)
    assert int(dataset.reads.max()) == 1
    assert int(dataset.reads.sum()) == 4 + 3 * 12
    assert len(pids) == 2
    assert os.getpid() not in pids


def test_missing_shards_overtake_what_was_queued(sources: Callable[..., MapSource]) -> None:
    dataset = Noisy()
    dataset.gate.clear()
    source = sources(dataset, num_workers=1, prefetch_factor=6)
    source.deal(0, [0], [0], 4)
    assert dataset.begun.wait(30)  # 0/0 is being read, 1/0 to 3/0 are queued
    source.deal(0, [0, 5], [0, 1], 4)
    dataset.gate.set()
    first, urgent = ledger().indices(0, 0), ledger().indices(0, 5)
    assert [flat(source.get(0, v))[0] for v in (0, 5)] == [first, urgent]
    assert [dataset.order.get(timeout=30) for _ in range(4)] == [*first, *urgent]
    assert flat(source.get(1, 0)) == reference()[1][0]  # it had given way, and was not lost
    assert int(dataset.reads.max()) == 1


def test_a_source_that_ran_dry_goes_on_with_a_new_deal(sources: Callable[..., MapSource]) -> None:
    source, expected = sources(Noisy()), reference()
    source.deal(0, [0], [0], 1)
    assert flat(source.get(0, 0)) == expected[0][0]
    source.deal(0, [3, 4, 5], [0], 1)  # the peers' shards of the last step
    assert [flat(source.get(0, v)) for v in (3, 4, 5)] == expected[0][3:]
    source.deal(1, [0], [0], 3)
    assert [flat(source.get(1, 0)), flat(source.get(2, 0))] == [expected[1][0], expected[2][0]]


def test_loader_processes_leave_the_loops_random_numbers_alone(sources: Callable[..., MapSource]) -> None:
    torch.manual_seed(1)
    random.seed(1)
    before = torch.get_rng_state().tolist(), random.getstate()
    source = sources(Noisy())
    source.deal(0, [0], [0], 4)
    source.get(0, 0)
    assert (torch.get_rng_state().tolist(), random.getstate()) == before


def test_an_exception_comes_with_type_and_traceback_when_its_batch_is_asked_for(
    sources: Callable[..., MapSource],
) -> None:
    def before(index: int) -> None:
        if index in ledger().indices(1, 0):
            raise FileNotFoundError(f"no image {index}")

    dataset = Noisy()
    dataset.before = before
    source = sources(dataset)
    source.deal(0, [0, 1], [0, 1], 4)
    assert source.get(0, 0) is not None
    assert source.get(0, 1) is not None
    source.committed(0)
    for _ in range(2):  # the same again at each try
        with pytest.raises(FileNotFoundError, match=r"(?s)in DataLoader worker process.*in before.*no image"):
            source.get(1, 0)
    assert source.get(1, 1) is not None


def test_the_users_worker_init_fn_is_called_and_its_errors_are_the_users(
    sources: Callable[..., MapSource],
) -> None:
    started = FORK.Queue()
    source = sources(Noisy(), worker_init_fn=started.put)
    source.deal(0, [0], [0], 4)
    assert source.get(0, 0) is not None
    assert sorted(started.get(timeout=30) for _ in range(2)) == [0, 1]

    def broken(worker: int) -> None:
        raise RuntimeError("no licence")

    source = sources(Noisy(), worker_init_fn=broken)
    source.deal(0, [0], [0], 4)
    with pytest.raises(RuntimeError, match=r"(?s)in worker_init_fn of DataLoader worker process.*no licence"):
        source.get(0, 0)


def test_a_read_that_hangs_ends_with_an_error_that_names_it(sources: Callable[..., MapSource]) -> None:
    dataset = Noisy()
    dataset.gate.clear()
    source = sources(dataset, timeout_s=0.2)
    source.deal(0, [2], [2], 4)
    with pytest.raises(InfrastructureError, match=r"no batch of Noisy for shard 2 of step 0 within 0\.2 s"):
        source.get(0, 2)


def test_closing_ends_the_processes_also_in_the_middle_of_a_read(sources: Callable[..., MapSource]) -> None:
    dataset = Noisy()
    dataset.gate.clear()
    source = sources(dataset)
    source.deal(0, [0], [0], 4)
    pids = {child.pid for child in multiprocessing.active_children()}
    assert len(pids) == 2
    assert dataset.begun.wait(30)
    begun_s = time.monotonic()
    source.close()
    assert time.monotonic() - begun_s < 4.0  # torch alone waits 5 s for each
    source.close()
    assert all(gone(pid, 0.0) for pid in pids if pid)


def test_closing_says_nothing_of_processes_that_die_before_torchs_handler_is_in_them(
    sources: Callable[..., MapSource], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the first milliseconds of their lives; torch would raise in the main thread that they were killed."""

    def die_unprepared(process: multiprocessing.process.BaseProcess) -> None:
        process.kill()
        assert gone(process.pid or 0)

    source = sources(Noisy())
    source.deal(0, [0], [0], 4)
    source.get(0, 0)
    monkeypatch.setattr(multiprocessing.process.BaseProcess, "terminate", die_unprepared)
    source.close()


def in_a_process_of_its_own(body: Callable[[Any], None]) -> tuple[Any, Any]:
    def run() -> None:
        os.setpgid(0, 0)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # torch's handler raises in the main thread at any time
        body(sender)

    receiver, sender = FORK.Pipe(duplex=False)
    process = FORK.Process(target=run)
    process.start()
    sender.close()
    return process, receiver


def test_loader_processes_die_at_once_with_a_killed_parent() -> None:
    def body(sender: Any) -> None:
        dataset = Noisy()
        source = MapSource(dataset, ledger(), num_workers=2)
        source.deal(0, [0], [0], 4)
        source.get(0, 0)
        dataset.begun.clear()
        dataset.gate.clear()  # torch's own watchdog only looks between two batches
        source.deal(1, [1, 2, 3], [1, 2, 3], 4)
        source.committed(0)
        threading.Thread(target=source.get, args=(1, 1), daemon=True).start()
        assert dataset.begun.wait(30)
        sender.send([child.pid for child in multiprocessing.active_children()])
        signal.pause()

    process, receiver = in_a_process_of_its_own(body)
    assert receiver.poll(60)
    pids = receiver.recv()
    assert len(pids) == 2
    process.kill()
    assert all(gone(pid, 2.0) for pid in pids)
    process.join(10)


def test_a_loader_process_that_dies_is_replaced_and_nothing_is_lost() -> None:
    def body(sender: Any) -> None:
        def train() -> None:
            messages: list[str] = []
            handler = logging.Handler()
            handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
            logging.getLogger("everstep.actors.data_map").addHandler(handler)
            source = MapSource(Noisy(), ledger(), num_workers=2, timeout_s=60.0)
            source.deal(0, range(SHARDS), range(SHARDS), STEPS)
            rows = []
            for step in range(3):
                batches = [source.get(step, v) for v in range(SHARDS)]
                rows.append([flat(batch) for batch in batches])
                source.committed(step)
                if step == 0:
                    victims = {int(batch["pid"][0]) for batch in batches if batch}
                    for victim in victims:
                        os.kill(victim, signal.SIGKILL)
            source.close()
            sender.send((rows, messages, len(multiprocessing.active_children())))

        thread = threading.Thread(target=train)
        thread.start()
        thread.join()

    process, receiver = in_a_process_of_its_own(body)
    assert receiver.poll(60)
    rows, messages, left = receiver.recv()
    assert rows == reference()[:3]
    assert len(messages) == 1
    assert "a loader process of Noisy died" in messages[0]
    assert left == 0
    process.join(10)


def test_loader_processes_that_keep_dying_stop_the_run_with_a_hint() -> None:
    def body(sender: Any) -> None:
        def train() -> None:
            dataset = Noisy()
            dataset.before = lambda index: os._exit(7)
            data_map._SLICE_S = 0.2  # look often: each of the four deaths is waited for
            source = MapSource(dataset, ledger(), num_workers=1, timeout_s=60.0)
            source.deal(0, [0], [0], STEPS)
            try:
                source.get(0, 0)
            except InfrastructureError as error:
                sender.send(str(error))

        thread = threading.Thread(target=train)
        thread.start()
        thread.join()

    process, receiver = in_a_process_of_its_own(body)
    assert receiver.poll(60)
    assert "loader processes of Noisy died 4 times in one step" in receiver.recv()
    process.join(10)


def test_loader_processes_that_are_killed_leave_no_temporary_files(tmp_path: Path) -> None:
    def body(sender: Any) -> None:
        tempfile.tempdir = str(tmp_path)
        multiprocessing.current_process()._config.pop("tempdir", None)  # type: ignore[attr-defined]
        source = MapSource(Noisy(), ledger(), num_workers=2)
        source.deal(0, [0, 1], [0, 1], 4)
        assert source.get(0, 0)["noise"].numel() and source.get(0, 1)["noise"].numel()
        sender.send([child.pid for child in multiprocessing.active_children()])
        signal.pause()

    process, receiver = in_a_process_of_its_own(body)
    assert receiver.poll(60)
    pids = receiver.recv()
    process.kill()
    assert all(gone(pid, 2.0) for pid in pids)
    process.join(10)
    assert list(tmp_path.glob("pymp-*")) == []
