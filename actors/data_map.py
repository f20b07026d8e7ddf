"""Batches from map-style datasets, read ahead through torch's own DataLoader.

Made by `actors.data.make_source`, called by the training session from one thread. Loader processes are children of
that thread and die with it, also when this process is killed: they inherit its sockets, and while one lived the peers
would not see that the replica is dead.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import multiprocessing
import multiprocessing.connection
import os
import secrets
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info
from torch.utils.data._utils import signal_handling
from torch.utils.data._utils.pin_memory import pin_memory as pin

from everstep.actors.data_common import Key, seed_generators
from everstep.actors.data_plan import FetchPlan
from everstep.errors import ConfigError, InfrastructureError, InternalError
from everstep.policies.ledger import DataLedger
from everstep.policies.seeds import batch_seed, derive_seed, sample_seeds

_log = logging.getLogger(__name__)
_SLICE_S = 2.0  # between two looks at whether a loader process died
_LOSSES = 3  # loader processes lost in one step before it counts as more than bad luck
_PR_SET_PDEATHSIG = 1


class _GivenBack:
    """What a loader process sends instead of a batch that it had not begun to read."""


class _Reader(Dataset[Any]):
    """Turns (serial, step, shard) into a batch: the dataset as loader processes see it, a copy in each of them."""

    def __init__(
        self,
        dataset: Any,
        ledger: DataLedger,
        collate_fn: Callable[[list[Any]], Any],
        seed_samples: bool,
        worker_init_fn: Callable[[int], None] | None,
    ) -> None:
        self.fence = torch.zeros(2, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]
        """[0]: serials below are given back unless already begun, [1]: but not those of this step or before."""
        self._dataset = dataset
        self._ledger = ledger
        self._collate_fn = collate_fn
        self._seed_samples = seed_samples
        self._worker_init_fn = worker_init_fn
        self._start_error: ExceptionWrapper | None = None

    def start(self, worker: int) -> None:
        """In a loader process, before the first batch."""
        try:
            if self._worker_init_fn is not None:
                self._worker_init_fn(worker)
        except Exception:  # noqa: BLE001  the user's error, carried to the training thread
            self._start_error = _wrapped(f"in worker_init_fn of DataLoader worker process {worker}")

    def __getitem__(self, task: tuple[int, int, int]) -> tuple[int, Any]:
        """In a loader process. An exception is sent as the batch, so that it is raised when that batch is asked for."""
        serial, step, shard = task
        if serial < int(self.fence[0]) and step > int(self.fence[1]):
            return serial, _GivenBack()
        if self._start_error is not None:
            return serial, self._start_error
        try:
            return serial, self.read(step, shard)
        except Exception:  # noqa: BLE001  the user's error, carried to the training thread
            info = get_worker_info()
            return serial, _wrapped(f"in DataLoader worker process {info.id if info else '?'}")

    def read(self, step: int, shard: int) -> Any:
        """The collated batch. Seeds the global generators per sample; the caller's numbers do not survive it."""
        indices = self._ledger.indices(step, shard)
        if not self._seed_samples:
            many = getattr(self._dataset, "__getitems__", None)
            samples = many(indices) if many else [self._dataset[index] for index in indices]
            return self._collate_fn(samples)
        seed, epoch = self._ledger.seed, self._ledger.locate(step)[0]
        samples = []
        for index, own_seed in zip(indices, sample_seeds(seed, epoch, indices), strict=True):
            seed_generators(own_seed)
            samples.append(self._dataset[index])
        seed_generators(batch_seed(seed, step, shard))
        return self._collate_fn(samples)


def _wrapped(where: str) -> ExceptionWrapper:
    """The exception being handled, in torch's own wrapping: its type and its traceback survive the way to us."""
    return ExceptionWrapper(where=where)  # type: ignore[no-untyped-call]


class _Tasks:
    """The sampler that torch's DataLoader asks what to read: unlike its own ones it may run dry and go on later."""

    def __init__(self, plan: FetchPlan) -> None:
        self._plan = plan

    def __iter__(self) -> _Tasks:
        return self

    def __next__(self) -> tuple[int, int, int]:
        task = self._plan.issue()
        if task is None:
            raise StopIteration
        return task


def _abstract_address(family: str) -> str:
    """In place of multiprocessing's own: torch hands batches over through sockets, and their files would be left behind
    by a process that is killed. Sockets of this kind have no file."""
    return f"\0everstep-{os.getpid()}-{secrets.token_hex(8)}"


def _start_loader_process(parent: int, worker: int) -> None:
    """First thing in a loader process: be killed when the thread that made it ends, however it ends (Linux)."""
    if sys.platform == "linux":
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0) != 0:
            raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
        if os.getppid() != parent:  # it died before the call: no signal will come
            os._exit(1)
        multiprocessing.connection.arbitrary_address = _abstract_address  # type: ignore[attr-defined]
    info = get_worker_info()
    if info is None or not isinstance(info.dataset, _Reader):
        raise InternalError("a loader process was started without its reader")
    info.dataset.start(worker)


def _as_is(batch: Any) -> Any:
    return batch


class MapSource:
    """Feeds logical shards from a map-style dataset (`__len__`, `__getitem__`), in the order of a `DataLedger`.

    With `num_workers` of 0 each batch is read when it is asked for, in this process. Otherwise torch's DataLoader reads
    up to num_workers * prefetch_factor batches ahead and its processes live until `close`, through every change of
    membership: batches already read or begun are received and kept if still wanted, the queued ones give way to those
    that are wanted first. A loader process that dies is replaced, and what it was reading is read again.

    With `seed_samples` torch, `random` and numpy are seeded around each `dataset[index]` by (seed, epoch, index) alone:
    augmentation is the same whoever reads it (generators of the dataset's own are its own business). Without it a
    dataset's `__getitems__` is used. Memory: twice the batches read ahead, and those of the step at hand.

    `get` raises what the dataset raised, as torch does; InfrastructureError when no batch came within `timeout_s` or
    loader processes keep dying; InternalError for a batch that was not dealt. ConfigError at construction.
    """

    def __init__(
        self,
        dataset: Any,
        ledger: DataLedger,
        *,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int = 2,
        seed_samples: bool = True,
        worker_init_fn: Callable[[int], None] | None = None,
        timeout_s: float = 600.0,
        start_method: Literal["fork", "spawn"] = "fork" if sys.platform == "linux" else "spawn",
    ) -> None:
        self._name = type(dataset).__name__
        if len(dataset) != ledger.dataset_size:
            raise ConfigError(
                f"{self._name} has {len(dataset)} samples, its ledger was made for {ledger.dataset_size}"
            )
        if num_workers < 0 or prefetch_factor < 1 or timeout_s <= 0:
            raise ConfigError(
                f"num_workers={num_workers} must be at least 0, prefetch_factor={prefetch_factor} at least 1 and "
                f"timeout_s={timeout_s} positive"
            )
        self.steps_per_epoch: int | None = ledger.steps_per_epoch
        self._ledger = ledger
        self._num_workers = num_workers
        self._prefetch_factor = prefetch_factor
        self._pin = pin_memory and torch.accelerator.is_available()
        self._timeout_s = timeout_s
        self._start_method = start_method
        collate = default_collate if collate_fn is None else collate_fn
        self._reader = _Reader(dataset, ledger, collate, seed_samples, worker_init_fn)
        # Batches in flight and ready are at most three times what is read ahead, at one per step or more.
        self._plan = FetchPlan(ledger.shard_size, lookahead_steps=4 * num_workers * prefetch_factor + 1)
        self._loader: DataLoader[Any] | None = None
        self._batches: Iterator[Any] | None = None
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._losses = 0
        self._closed = False

    def deal(self, step: int, now: Sequence[int], later: Sequence[int], until: int) -> None:
        """See `ShardSource.deal`. Starts reading ahead."""
        if self._plan.deal(step, now, later, until):
            self._reader.fence[1] = step
            self._reader.fence[0] = self._plan.next_serial
        if self._num_workers and self._batches is None:
            self._start()

    def get(self, step: int, shard: int) -> Any | None:
        """The batch, or None if the shard is empty in this step."""
        key, plan = (step, shard), self._plan
        if self._closed or not (plan.wants(key) or key in plan.kept):
            state = "the source is closed" if self._closed else "it was not dealt to this replica"
            raise InternalError(f"shard {shard} of step {step} of {self._name}: {state}")
        if self._ledger.shard_size(step, shard) == 0:
            return None
        kept = plan.kept.get(key)
        if kept is not None and kept.unchanged():
            return kept.batch
        if kept is not None:
            plan.forget(key)
        if not self._num_workers:
            batch = self._reader.read(step, shard)
            plan.ready[key] = pin(batch) if self._pin else batch  # type: ignore[no-untyped-call]
            return plan.hand_out(key)
        self._wait_for(key)
        if isinstance(plan.ready[key], ExceptionWrapper):
            error = plan.ready[key]
            plan.forget(key)
            error.reraise()
        return plan.hand_out(key)

    def committed(self, step: int) -> None:
        """`step` is history."""
        self._plan.committed(step)
        self._losses = 0

    def scale(self, step: int, shard: int) -> float:
        """See `DataLedger.scale`."""
        return self._ledger.scale(step, shard)

    def samples(self, step: int) -> int:
        """See `DataLedger.size`."""
        return self._ledger.size(step)

    def states(self) -> dict[int, Any]:
        """Nothing: the step number says it all."""
        return {}

    def load_states(self, states: Mapping[int, Any]) -> None:
        """Nothing to load."""

    def close(self) -> None:
        """End the loader processes and forget all batches. A process that is in a long read is killed."""
        self._closed = True
        self._stop()
        self._plan.ready.clear()
        self._plan.kept.clear()

    def _wait_for(self, key: Key) -> None:
        self._plan.ask(key)
        deadline_s = time.monotonic() + self._timeout_s
        while key not in self._plan.ready:
            self._receive()
            if key not in self._plan.ready and time.monotonic() >= deadline_s:
                raise InfrastructureError(
                    f"no batch of {self._name} for shard {key[1]} of step {key[0]} within {self._timeout_s:g} s from "
                    f"{self._num_workers} loader processes: storage hangs, or reading takes longer (then raise timeout_s)"
                )

    def _receive(self) -> None:
        """Take what comes next from the loader processes, if anything comes within a slice of time."""
        batches = self._start() if self._batches is None else self._batches
        try:
            serial, batch = next(batches)
        except StopIteration:  # it ran dry some time ago, and now there is work again
            self._resume()
        except (RuntimeError, OSError, EOFError) as error:
            if "timed out" not in str(error) or not all(process.is_alive() for process in self._processes):
                self._replace_processes(error)
        else:
            if isinstance(batch, _GivenBack):
                self._plan.given_back(serial)
            else:
                self._plan.arrived(serial, batch)

    def _resume(self) -> None:
        try:
            if self._loader is not None:
                iter(self._loader)  # torch hands out new tasks to the same processes
        except (RuntimeError, OSError, EOFError) as error:
            self._replace_processes(error)

    def _replace_processes(self, error: Exception) -> None:
        self._stop()
        self._plan.lost()
        self._losses += 1
        if self._losses > _LOSSES:
            raise InfrastructureError(
                f"loader processes of {self._name} died {self._losses} times in one step (last: {error}). Usually they "
                f"run out of memory or shared memory, or a library crashes: num_workers=0 shows the error"
            ) from error
        _log.warning("a loader process of %s died, starting new ones: %s", self._name, error)

    def _start(self) -> Iterator[Any]:
        # A generator of its own: by default torch draws from the global one, and the user's numbers would shift.
        generator = torch.Generator()
        generator.manual_seed(derive_seed(self._ledger.seed))
        self._loader = DataLoader(
            self._reader,
            sampler=_Tasks(self._plan),
            batch_size=None,
            num_workers=self._num_workers,
            collate_fn=_as_is,
            pin_memory=self._pin,
            timeout=min(_SLICE_S, self._timeout_s),
            worker_init_fn=functools.partial(_start_loader_process, os.getpid()),
            multiprocessing_context=self._start_method,
            generator=generator,
            prefetch_factor=self._prefetch_factor,
            persistent_workers=True,
        )
        before = set(multiprocessing.active_children())
        self._batches = iter(self._loader)
        self._processes = [child for child in multiprocessing.active_children() if child not in before]
        return self._batches

    def _stop(self) -> None:
        batches, self._batches, self._loader = self._batches, None, None
        if getattr(batches, "_worker_pids_set", False):  # or torch raises in the main thread that they died
            signal_handling._remove_worker_pids(id(batches))  # type: ignore[attr-defined]
            batches._worker_pids_set = False  # type: ignore[union-attr]
        # torch's pinning thread could wait for ever for the rest of a batch that was cut off
        for process in [] if self._pin else self._processes:
            process.terminate()
        if batches is not None and hasattr(batches, "_shutdown_workers"):
            batches._shutdown_workers()  # not left to the last reference: a traceback may hold one
        for process in self._processes:
            if process.is_alive():
                process.kill()
            process.join(timeout=5.0)
        self._processes = []
