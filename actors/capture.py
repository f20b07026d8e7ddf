"""What a checkpoint costs the training loop: a copy of this replica's part of the state, made while the next step runs.

The session calls `take` right after a step became history, and `settle` before anything changes the state again. The copy
goes into memory that is shared with the keeper of the node (`actors.keeper`), which streams it to storage from a process
of its own; one staging area, reused. While it is in use the replica is `busy`, and the vote asks for no other snapshot.

Parameters and optimizer state change only at commits, so they are copied in the background. Everything else could be
touched by the user's code at once, and is copied before `take` returns; it is small.
"""

from __future__ import annotations

import logging
import mmap
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from everstep.actors import keeper_line
from everstep.actors.keeper_line import KeeperGone, Line
from everstep.checkpoint.chunks import cut, divide, memory_shape, offset_in
from everstep.errors import InternalError

if TYPE_CHECKING:
    from everstep.actors.identity import Identity
    from everstep.checkpoint.chunks import Chunk
    from everstep.checkpoint.state import Layout, Snapshot

_log = logging.getLogger(__name__)
_COPY_S = 600.0
"""A copy that takes longer is a bug."""
_WRITTEN_S = 3600.0
"""A part that takes longer is not waited for, nor by the controller."""
_KEEPER_S, _AGAIN_S = 60.0, 0.2
"""How long a keeper may take to start, and how often it is looked for meanwhile."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Which part of which checkpoint."""

    step: int
    attempt: str
    generation: int
    rank: int
    world_size: int


class Capture:
    """One per replica. `take` and `settle` belong to the training thread."""

    def __init__(self, identity: Identity, missing: Callable[[Ticket, str], None]) -> None:
        """`missing(ticket, why)`: called when a part will not come; from any thread, must not raise."""
        self._identity, self._missing = identity, missing
        self._staging = Staging()
        self._changed = threading.Condition()  # guards the two below
        self._copying = False
        self._busy = False
        self._line: Line | None = None
        self._closed = threading.Event()

    @property
    def busy(self) -> bool:
        """A snapshot is being copied or written; the next one has to wait."""
        return self._busy

    def take(self, ticket: Ticket, snapshot: Snapshot, steady: Sequence[Tensor]) -> None:
        """Begin to copy this replica's part. Where that is impossible, the part is missing and training goes on.

        Args:
            snapshot: the whole state, by reference.
            steady: tensors that nobody changes before `settle`: parameters, optimizer state.
        """
        if self._busy:
            raise InternalError("a snapshot was ordered while one is being taken")
        layout = snapshot.plan()
        try:
            later = self._copy_now(ticket, layout, snapshot.tensors, steady)
        except (OSError, MemoryError, RuntimeError) as error:  # no room
            self._give_up(ticket, error)
            return
        self._busy = self._copying = True
        threading.Thread(
            target=self._work, args=(ticket, layout, later), name="everstep-capture", daemon=True
        ).start()

    def _copy_now(
        self, ticket: Ticket, layout: Layout, tensors: Sequence[Tensor], steady: Sequence[Tensor]
    ) -> list[tuple[int, Tensor]]:
        """Copy what may change at once; what may be copied later, and where to."""
        chunks = divide(cut(layout), ticket.world_size)[ticket.rank]
        self._staging.make_room(sum(chunk.nbytes for chunk in chunks))
        pieces = _pieces(layout, chunks, tensors)
        calm = {tensor.untyped_storage().data_ptr() for tensor in steady}
        later = []
        for offset, source in pieces:
            if source.untyped_storage().data_ptr() in calm:
                later.append((offset, source))
            else:
                self._staging.put(offset, source)
        return later

    def _give_up(self, ticket: Ticket, error: Exception) -> None:
        # A keeper that is still at it keeps the memory, which must not change under its hands.
        self._staging.close()
        _log.warning("checkpoint of step %d: this replica's part is missing: %s", ticket.step, error)
        self._missing(ticket, f"{type(error).__name__}: {error}")

    def settle(self) -> None:
        """The state is about to change: return when nothing of it is still to be copied."""
        if not self._copying:
            return
        with self._changed:
            if not self._changed.wait_for(lambda: not self._copying, _COPY_S):
                raise InternalError(f"a copy of the state did not end within {_COPY_S:.0f} s")

    def wait(self, timeout_s: float) -> bool:
        """Until the snapshot that was taken is written, or will not be; False if neither is so after `timeout_s`."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._busy, timeout_s)

    def close(self) -> None:
        """No more snapshots. What the keeper has is its own."""
        self.settle()
        with self._changed:
            self._closed.set()
            if not self._busy:
                self._dispose()

    def _dispose(self) -> None:
        self._staging.close()
        if self._line is not None:
            self._line.close()
            self._line = None

    def _work(self, ticket: Ticket, layout: Layout, pieces: list[tuple[int, Tensor]]) -> None:
        """In a thread of its own. A supervisor: whatever fails costs this part, not the training."""
        try:
            try:
                for offset, source in pieces:
                    self._staging.put(offset, source)
                self._staging.settle()
            finally:
                with self._changed:
                    self._copying = False
                    self._changed.notify_all()
            self._hand_over(ticket, layout)
        except Exception as error:  # noqa: BLE001
            self._give_up(ticket, error)
        finally:
            with self._changed:
                self._busy = False
                if self._closed.is_set():
                    self._dispose()
                self._changed.notify_all()

    def _hand_over(self, ticket: Ticket, layout: Layout) -> None:
        """Give the part to the keeper, and wait until it needs our memory no more. Raises KeeperGone, TimeoutError."""
        request = {
            "descriptor": True, "size": self._staging.size, "step": ticket.step, "attempt": ticket.attempt,
            "generation": ticket.generation, "rank": ticket.rank, "world_size": ticket.world_size,
            "layout": layout.as_json(),
        }  # fmt: skip
        line = self._line or self._call()
        self._line = None
        try:
            line.send(request, self._staging.descriptor)
            answer, _ = line.receive(_WRITTEN_S)
        except BaseException:
            line.close()
            raise
        self._line = line
        if not answer.get("ok"):
            raise KeeperGone(f"the keeper could not write it: {answer.get('error')}")

    def _call(self) -> Line:
        """The keeper may still be starting, or be started anew; nothing tells us when. Raises KeeperGone."""
        deadline = time.monotonic() + _KEEPER_S
        while not self._closed.is_set():
            try:
                return keeper_line.call(self._identity.token, self._identity.node, self._identity.replica)
            except KeeperGone:
                if time.monotonic() > deadline:
                    raise
                self._closed.wait(_AGAIN_S)
        raise KeeperGone("this replica leaves the run")


class Staging:
    """Memory that can be handed to another process; grows, and is reused."""

    def __init__(self) -> None:
        self.descriptor = -1
        self.size = 0
        self._space: Tensor | None = None

    def make_room(self, size: int) -> None:
        """At least `size` bytes. What was in there is gone."""
        if size <= self.size and self._space is not None:
            return
        if self.descriptor >= 0:
            os.close(self.descriptor)
        self.descriptor = os.memfd_create("everstep-staging", os.MFD_CLOEXEC)
        self.size = max(size, 1)
        os.ftruncate(self.descriptor, self.size)
        memory = mmap.mmap(self.descriptor, self.size, mmap.MAP_SHARED | mmap.MAP_POPULATE)
        self._space = torch.frombuffer(memory, dtype=torch.uint8)

    def close(self) -> None:
        """Give the memory back, as soon as nobody else has it."""
        self._space = None
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor, self.size = -1, 0

    def put(self, offset: int, source: Tensor) -> None:
        """Copy the bytes of a dense piece; the interpreter's lock is free meanwhile."""
        assert self._space is not None
        self._space[offset : offset + source.numel()].copy_(source, non_blocking=True)

    def settle(self) -> None:
        """Copies from a device have arrived after this. They run on its default stream, behind what is queued there."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()


def _pieces(layout: Layout, chunks: Sequence[Chunk], tensors: Sequence[Tensor]) -> list[tuple[int, Tensor]]:
    """(offset in the staging area, bytes of a tensor): chunks in their order, one behind the other, neighbours joined."""
    pieces: list[tuple[int, Tensor]] = []
    position, begin, end, number = 0, 0, 0, -1
    flat = torch.empty(0, dtype=torch.uint8)

    def flush() -> None:
        if end > begin:
            pieces.append((position - (end - begin), flat[begin:end]))

    for chunk in chunks:
        spec = layout.tensors[chunk.tensor]
        shape = memory_shape(spec)
        first = offset_in(chunk.start, (0,) * len(shape), shape, spec.dtype.itemsize)
        if chunk.tensor != number or first != end:
            flush()
            if chunk.tensor != number:
                number = chunk.tensor
                tensor = tensors[number]
                flat = tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)
            begin = first
        end = first + chunk.nbytes
        position += chunk.nbytes
    flush()
    return pieces
