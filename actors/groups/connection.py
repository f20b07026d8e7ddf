"""One connection of a mesh group: what is sent and received on it, in which order, straight from and into tensors.

Used by the serving thread of `mesh.py` and by no other. It holds no lock, never blocks and decides nothing.

Protocol, in each direction: frames of a header (kind, channel, payload's bytes) and a payload. A large payload is sent
once the receiver has said READY for it, so that it goes straight into the tensor that waits; a small one at once. On a
channel both sides launch in the same order, so the n-th DATA belongs to the n-th READY and to the n-th receive.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Iterator

from everstep.errors import GroupBroken

HEADER = struct.Struct("<IIQ")
READY, DATA = 1, 2

EAGER_BYTES = 16 << 10
"""Up to this a payload is sent unasked, and kept by a receiver that does not wait for it yet."""

_TURN_BYTES = 256 << 10
"""After this much in one go the other connections get their turn."""

_FOREVER_S = 3600.0


class Transfer:
    """The completion of several parcels. The serving thread counts, one other thread waits."""

    __slots__ = ("_done", "_left")

    def __init__(self, parcels: int) -> None:
        self._left = parcels
        self._done = threading.Lock()
        if parcels:
            self._done.acquire()

    def parcel_done(self) -> None:
        self._left -= 1
        if not self._left:
            self._done.release()

    def give_up(self) -> None:
        """End it unfinished; once is enough, more do nothing."""
        if self._left > 0:
            self._left = -1
            self._done.release()

    def wait(self) -> bool:
        """Whether all parcels came through. Any number of times."""
        if not self._done.acquire(timeout=_FOREVER_S):
            return False
        self._done.release()
        return not self._left


Pending = deque[tuple[memoryview, Transfer]]


class Connection:
    """The connection to one peer. Its methods raise GroupBroken when the connection ends or the peer breaks the order."""

    def __init__(self, connected: socket.socket, peer: int, epoll: select.epoll) -> None:
        self._socket = connected
        self._peer = peer
        self._epoll = epoll
        self._outbox: deque[tuple[memoryview, Transfer | None]] = deque()
        self._offered: dict[int, Pending] = defaultdict(deque)  # large sends that the peer is not ready for
        self._ready: dict[int, deque[int]] = defaultdict(
            deque
        )  # sizes that the peer is ready for, we not yet
        self._expected: dict[int, Pending] = defaultdict(deque)
        self._early: dict[int, deque[memoryview]] = defaultdict(deque)
        self._header = memoryview(bytearray(HEADER.size))
        self._target = self._header  # what the next bytes go to
        self._filled = 0
        self._receiving: Transfer | None = None
        self._wants_to_write = False
        epoll.register(connected, select.EPOLLIN)

    def handle(self, event: int) -> None:
        """`event`: an epoll mask."""
        if event & select.EPOLLOUT:
            self._write()
        if event & ~select.EPOLLOUT:  # data, or the end of the connection
            self._read()

    def expect(self, target: memoryview, channel: int, transfer: Transfer) -> None:
        """Receive into `target`."""
        if early := self._early[channel]:
            payload = early.popleft()
            self._check_size(payload.nbytes, target.nbytes)
            target[:] = payload
            transfer.parcel_done()
            return
        self._expected[channel].append((target, transfer))
        if target.nbytes > EAGER_BYTES:
            self._send(HEADER.pack(READY, channel, target.nbytes))

    def offer(self, payload: memoryview, channel: int, transfer: Transfer) -> None:
        """Send `payload`, now or when the peer is ready for it."""
        header = HEADER.pack(DATA, channel, payload.nbytes)
        if payload.nbytes <= EAGER_BYTES:
            self._send(header + payload)
            transfer.parcel_done()  # it was copied
        elif ready := self._ready[channel]:
            self._check_size(ready.popleft(), payload.nbytes)
            self._send(header, payload, transfer)
        else:
            self._offered[channel].append((payload, transfer))

    def close(self) -> None:
        """Close the connection and give up everything that is not done."""
        self._socket.close()
        for transfer in self._unfinished():
            transfer.give_up()

    def _write(self) -> None:
        """Send what the socket takes now."""
        written = 0
        while self._outbox and written < _TURN_BYTES:
            view, transfer = self._outbox[0]
            try:
                sent = self._socket.send(view, socket.MSG_MORE if len(self._outbox) > 1 else 0)
            except BlockingIOError:
                break
            except OSError as error:
                raise self._lost(error) from error
            written += sent
            if sent < view.nbytes:
                self._outbox[0] = (view[sent:], transfer)
                continue
            self._outbox.popleft()
            if transfer is not None:
                transfer.parcel_done()
        if self._wants_to_write != bool(self._outbox):
            self._wants_to_write = not self._wants_to_write
            self._epoll.modify(self._socket, select.EPOLLIN | select.EPOLLOUT * self._wants_to_write)

    def _read(self) -> None:
        """Take what has arrived."""
        taken = 0
        while taken < _TURN_BYTES:
            try:
                got = self._socket.recv_into(self._target[self._filled :])
            except BlockingIOError:
                return
            except OSError as error:
                raise self._lost(error) from error
            if not got:
                raise GroupBroken(f"rank {self._peer} closed the connection")
            taken += got
            self._filled += got
            if self._filled == self._target.nbytes:
                self._filled = 0
                self._arrived()

    def _arrived(self) -> None:
        if self._target is not self._header:
            self._target = self._header
            if self._receiving is not None:
                self._receiving.parcel_done()
                self._receiving = None
            return
        kind, channel, size = HEADER.unpack(self._header)
        if kind == DATA:
            self._start_payload(channel, size)
        elif offered := self._offered[channel]:
            payload, transfer = offered.popleft()
            self._check_size(size, payload.nbytes)
            self._send(HEADER.pack(DATA, channel, size), payload, transfer)
        else:
            self._ready[channel].append(size)

    def _start_payload(self, channel: int, size: int) -> None:
        if expected := self._expected[channel]:
            target, self._receiving = expected.popleft()
            self._check_size(size, target.nbytes)
            self._target = target
        else:
            self._check_size(min(size, EAGER_BYTES), size)
            self._target = memoryview(bytearray(size))
            self._early[channel].append(self._target)

    def _send(
        self, header: bytes, payload: memoryview | None = None, transfer: Transfer | None = None
    ) -> None:
        self._outbox.append((memoryview(header), None))
        if payload is not None:
            self._outbox.append((payload, transfer))
        if not self._wants_to_write:
            self._write()

    def _check_size(self, theirs: int, ours: int) -> None:
        if theirs != ours:
            raise GroupBroken(
                f"rank {self._peer} handles {theirs} bytes where this rank handles {ours}: "
                "the ranks launched different collectives"
            )

    def _lost(self, error: OSError) -> GroupBroken:
        return GroupBroken(f"rank {self._peer}: {error}")

    def _unfinished(self) -> Iterator[Transfer]:
        for _, sending in self._outbox:
            if sending is not None:
                yield sending
        for pending in (*self._offered.values(), *self._expected.values()):
            for _, transfer in pending:
                yield transfer
        if self._receiving is not None:
            yield self._receiving
