"""Process groups on NCCL, for CUDA tensors.

`form_nccl` is called through `form_group`. By default torch answers a failed NCCL collective by ending the process;
`prepare_environment` turns that off, the communicator is made non-blocking, and `abort` frees it from any thread.
After an abort everything synchronizes without an error while the data is garbage: only this class's own flag tells,
which is why success is reported after `settle` alone. One communicator has one order, so channels mean nothing here.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import MutableMapping, Sequence
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from everstep.actors.groups.base import Arrived, Group, Parcel, Work
from everstep.actors.groups.rendezvous import Rendezvous, listen, meet
from everstep.errors import GroupBroken

ENVIRONMENT = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # a failure ends the collective, not the process
    "TORCH_NCCL_ENABLE_MONITORING": "0",  # no watchdog that ends a process it believes stuck
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
    "TORCH_NCCL_NONBLOCKING_TIMEOUT": "30",  # s, bound on what a non-blocking communicator may be busy with
}
_FOREVER = timedelta(hours=1)


def prepare_environment(environ: MutableMapping[str, str]) -> None:
    """Set what torch reads when it makes an NCCL group. Our protocol needs these values, so a user's are replaced."""
    environ.update(ENVIRONMENT)


def make_options(nccl: Any) -> Any:
    """Options of `nccl` (`dist.ProcessGroupNCCL`): non-blocking, and with no timeout worth the name."""
    options = nccl.Options()
    options.config.blocking = 0
    options._timeout = _FOREVER
    return options


def form_nccl(device: torch.device, rendezvous: Rendezvous, cancel: threading.Event) -> NcclGroup:
    """Blocks for about `timeout_s` at most. Raises GroupBroken when the group does not form or `cancel` is set."""
    prepare_environment(os.environ)
    group = NcclGroup(device, rendezvous)
    # Connecting has no bound of its own; aborting a half-made communicator is allowed.
    timer = threading.Timer(rendezvous.timeout_s, group.abort)
    timer.daemon = True
    timer.start()
    try:
        group.connect(PrefixStore(rendezvous.key, _make_store(rendezvous)))
        if cancel.is_set():
            raise GroupBroken("forming was cancelled")
    except (OSError, RuntimeError, ValueError, GroupBroken) as error:
        group.close()
        raise GroupBroken(f"{rendezvous} did not form: {error}") from error
    finally:
        timer.cancel()
    return group


def _make_store(rendezvous: Rendezvous) -> Store:
    """A store for this group alone, served by its rank 0: NCCL trades its ids through one."""
    deadline = time.monotonic() + rendezvous.timeout_s
    timeout = timedelta(seconds=rendezvous.timeout_s)
    with listen(rendezvous.bind_ip, backlog=max(128, rendezvous.world_size)) as listener:
        port = listener.getsockname()[1]
        host, store_port = meet(rendezvous, port, deadline)[0]
        if rendezvous.rank:
            return TCPStore(host, store_port, is_master=False, wait_for_workers=False, timeout=timeout)
        descriptor = listener.detach()
        return TCPStore(
            host,
            store_port,
            is_master=True,
            wait_for_workers=False,
            timeout=timeout,
            master_listen_fd=descriptor,
        )


class NcclGroup(Group):
    """Made by `form_nccl` only. Launch from one thread at a time."""

    ordered_launch = True

    def __init__(self, device: torch.device, rendezvous: Rendezvous, native: Any = None) -> None:
        super().__init__(rendezvous.rank, rendezvous.world_size)
        self._device = device
        self._description = str(rendezvous)
        self._native: Any = native
        self._store: Store | None = None  # rank 0's is the server, and serves as long as the group lives
        self._lock = threading.Lock()
        self._reason: str | None = None
        self._ending: threading.Thread | None = None

    def connect(self, store: Store) -> None:
        """For `form_nccl` only. Two ranks that are connected have a communicator, which a first sum proves."""
        self._store = store
        nccl = cast(Any, dist).ProcessGroupNCCL
        self._native = nccl(store, self.rank, self.world_size, make_options(nccl))
        self.all_reduce(torch.ones(1, device=self._device))

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel], *, channel: int) -> Work:
        parcels_in = [(tensor, peer) for tensor, peer in receives if tensor.numel()]
        parcels_out = [(tensor, peer) for tensor, peer in sends if tensor.numel()]
        self.check()
        if not parcels_in and not parcels_out:
            return Arrived(self)
        try:
            self._native._start_coalescing()
            for tensor, peer in parcels_in:
                self._native.recv([tensor], peer, 0)
            for tensor, peer in parcels_out:
                self._native.send([tensor], peer, 0)
            return _Launched(self, self._native._end_coalescing())
        except RuntimeError as error:
            raise self._failed(error) from error

    def all_reduce(self, tensor: Tensor, *, async_op: bool = False) -> Work | None:
        """NCCL's own: the same bits on all ranks, but its order of additions is its own."""
        self.check()
        try:
            work = _Launched(self, self._native.allreduce([tensor], dist.AllreduceOptions()))
        except RuntimeError as error:
            raise self._failed(error) from error
        return self._finish(work, async_op)

    def all_gather(self, output: Tensor, input: Tensor, *, async_op: bool = False) -> Work | None:
        self.check()
        try:
            work = _Launched(self, self._native._allgather_base(output, input))
        except RuntimeError as error:
            raise self._failed(error) from error
        return self._finish(work, async_op)

    def order(self, native_work: Any) -> None:
        """Order the current stream behind `native_work`. For `_Launched` only."""
        try:
            native_work.wait()
        except RuntimeError as error:
            raise self._failed(error) from error
        self.check()

    def check(self) -> None:
        if (reason := self._reason) is not None:
            raise GroupBroken(f"{self._description}: {reason}")

    def settle(self) -> None:
        try:
            torch.cuda.current_stream(self._device).synchronize()
        except RuntimeError as error:
            raise self._failed(error) from error
        self.check()  # after, never before: an aborted collective synchronizes without an error

    def abort(self) -> None:
        self._end("aborted")

    def close(self) -> None:
        self._end("closed")

    def _failed(self, error: RuntimeError) -> GroupBroken:
        self._end(str(error))
        return GroupBroken(f"{self._description}: {error}")

    def _end(self, reason: str) -> None:
        with self._lock:
            if self._reason is not None:
                return
            self._reason = reason
            self._ending = threading.Thread(
                target=self._abort_native, name="everstep-group-abort", daemon=True
            )
            self._ending.start()

    def _abort_native(self) -> None:
        """Ends every kernel of the communicator, and the communicator. Nothing else is left to drop afterwards."""
        if self._native is not None:
            self._native.abort()


class _Launched:
    def __init__(self, group: NcclGroup, native_work: Any) -> None:
        self._group = group
        self._native_work = native_work

    def wait(self) -> None:
        self._group.order(self._native_work)
