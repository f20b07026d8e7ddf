"""What a process group is here: form, exchange, abort, close, and the sums built on top of it.

The replica forms one group per generation with `form_group` and drops it when the generation ends. The reduction
and the session call the collectives. Nothing here decides anything: a failure only ever becomes `GroupBroken`.

Everything rests on one primitive, `exchange`: tensors to and from named peers, without a copy on the way.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from everstep.errors import GroupBroken

Parcel = tuple[Tensor, int]
"""A contiguous tensor and the rank that it goes to or comes from."""

# Calls on one channel must come in the same order on all ranks; calls on different channels may interleave freely.
SCATTER_CHANNEL, GATHER_CHANNEL = 0, 1  # the reduction's
_SUM_CHANNEL, _SUM_GATHER_CHANNEL, _ALL_TO_ALL_CHANNEL, _ALL_GATHER_CHANNEL = 2, 3, 4, 5

_SMALL_BYTES = 64 << 10  # up to this an all-reduce sends everything to everybody, in one hop instead of two
ALIGN = 64
"""Elements. Slices start where vector instructions like it."""


class Work(Protocol):
    """A collective under way. Its tensors must not be touched before `wait` has returned or raised."""

    def wait(self) -> None:
        """Returns when the data is there (on CUDA: when the current stream is ordered behind it). Once it has
        returned or raised, nothing writes into the tensors any more. Raises GroupBroken, also when the
        data arrived but `abort` had already returned."""


class Group(ABC):
    """One generation's group, as seen by one rank. Collectives may be launched from any thread."""

    ordered_launch: bool = False
    """All launches share one order (NCCL's stream): launch from one thread only, channels do not help."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size

    @abstractmethod
    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel], *, channel: int) -> Work:
        """Start sending and receiving. Several parcels between the same two ranks arrive in the order given. Empty
        tensors are skipped on both sides; a rank sends nothing to itself. Raises GroupBroken."""

    @abstractmethod
    def abort(self) -> None:
        """From any thread, any number of times: every blocked collective of this group raises GroupBroken soon, on
        this process, and none returns normally any more. Returns at once."""

    @abstractmethod
    def close(self) -> None:
        """From any thread, any number of times: abort, and drop the native group in a side thread. Returns at once."""

    @abstractmethod
    def check(self) -> None:
        """Raises GroupBroken if the group was aborted or has failed."""

    def watch(self, callback: Callable[[GroupBroken], None]) -> None:  # noqa: B027 - optional
        """Call `callback` once, from any thread, when the group notices that it is broken, also between collectives;
        not for `abort` or `close`. A later call replaces it. Groups that only notice in a collective do nothing."""

    def settle(self) -> None:
        """Hold the host until what the current stream is ordered behind has happened. Without it nothing that was
        received on CUDA is proven to have arrived. Raises GroupBroken."""
        self.check()

    def all_reduce(self, tensor: Tensor, *, async_op: bool = False) -> Work | None:
        """SUM in place, added in rank order, so all ranks get the same bits. `tensor`: contiguous, any shape and
        numeric dtype, equal on all ranks. Of an asynchronous one the later half happens in `wait`, which therefore
        all ranks must call."""
        flat = tensor.view(-1)
        small = flat.numel() * flat.element_size() <= _SMALL_BYTES
        return self._finish(self._sum_small(flat) if small else self._sum_large(flat), async_op)

    def all_to_all(
        self,
        output: Tensor,
        input: Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        *,
        async_op: bool = False,
    ) -> Work | None:
        """`input` is 1-d, `input_splits[r]` elements of it go to rank r; `output_splits[r]` come from rank r."""
        parts_in = torch.split(input, list(input_splits))
        parts_out = torch.split(output, list(output_splits))
        parts_out[self.rank].copy_(parts_in[self.rank])
        return self._finish(self._with_peers(parts_in, parts_out, channel=_ALL_TO_ALL_CHANNEL), async_op)

    def all_gather(self, output: Tensor, input: Tensor, *, async_op: bool = False) -> Work | None:
        """`input`: 1-d, equal size on all ranks; `output`: 1-d, world_size times as long, in rank order."""
        parts = output.chunk(self.world_size) if input.numel() else [output] * self.world_size
        parts[self.rank].copy_(input)
        return self._finish(
            self._with_peers([input] * self.world_size, parts, channel=_ALL_GATHER_CHANNEL), async_op
        )

    def _finish(self, work: Work, async_op: bool) -> Work | None:
        if async_op:
            return work
        work.wait()
        self.settle()
        return None

    def _with_peers(self, parts_in: Sequence[Tensor], parts_out: Sequence[Tensor], *, channel: int) -> Work:
        """Part r of the input to rank r, part r of the output from rank r; each rank starts at its right neighbour,
        so that not all of them send to rank 0 first."""
        peers = [(self.rank + i) % self.world_size for i in range(1, self.world_size)]
        sends = [(parts_in[peer], peer) for peer in peers]
        return self.exchange(sends, [(parts_out[peer], peer) for peer in reversed(peers)], channel=channel)

    def _sum_small(self, flat: Tensor) -> Work:
        rows = flat.new_empty((self.world_size, flat.numel()))
        rows[self.rank] = flat
        work = self._with_peers([rows[self.rank]] * self.world_size, rows.unbind(), channel=_SUM_CHANNEL)

        def add_up() -> None:
            flat.copy_(rows[0])
            for row in rows[1:]:
                flat.add_(row)

        return Then(work, add_up)

    def _sum_large(self, flat: Tensor) -> Work:
        """Reduce-scatter by direct exchange, then gather: the traffic of a ring, half its hops."""
        mine = slices(flat.numel(), self.world_size)
        parts = [flat[start:stop] for start, stop in mine]
        own = parts[self.rank]
        rows = flat.new_empty((self.world_size, own.numel()))
        work = self._with_peers(parts, rows.unbind(), channel=_SUM_CHANNEL)

        def add_up() -> Work:
            rows[self.rank] = own
            torch.add(rows[0], rows[1], out=own)
            for row in rows[2:]:
                own.add_(row)
            return self._with_peers([own] * self.world_size, parts, channel=_SUM_GATHER_CHANNEL)

        return Then(work, add_up)


def slices(numel: int, world_size: int) -> list[tuple[int, int]]:
    """Cut [0, numel) into one (start, stop) per rank, equal up to the last ones, which may be short or empty."""
    step = slice_size(numel, world_size)
    return [(min(r * step, numel), min((r + 1) * step, numel)) for r in range(world_size)]


def slice_size(numel: int, world_size: int) -> int:
    """Elements in a full slice of `slices`: numel / world_size, rounded up to the alignment."""
    return -(-numel // (world_size * ALIGN)) * ALIGN


class Then:
    """`work`, and when it is waited for, what follows from it: a sum, or the next exchange."""

    def __init__(self, work: Work, follow: Callable[[], Work | None]) -> None:
        self._work = work
        self._follow: Callable[[], Work | None] | None = follow

    def wait(self) -> None:
        self._work.wait()
        follow, self._follow = self._follow, None
        if follow is not None and (next_work := follow()) is not None:
            self._work = next_work
            next_work.wait()


class LocalGroup(Group):
    """The group of a run with one replica: no sockets, nothing to wait for."""

    def __init__(self) -> None:
        super().__init__(rank=0, world_size=1)
        self._aborted = False

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel], *, channel: int) -> Work:
        if sends or receives:
            raise ValueError("a group of one has no peers to exchange with")
        self.check()
        return Arrived(self)

    def _sum_large(self, flat: Tensor) -> Work:
        return self.exchange((), (), channel=_SUM_CHANNEL)

    _sum_small = _sum_large

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self.abort()

    def check(self) -> None:
        if self._aborted:
            raise GroupBroken("the group of one replica was aborted")


class Arrived:
    """A collective for which there is nothing to wait."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def wait(self) -> None:
        self._group.check()
