"""One connection of a mesh group: what is sent and received on it, in which order, straight from and into tensors.

Used by the serving thread of `mesh.py` and by no other. It holds no lock, never blocks and decides nothing.

Protocol, in each direction: frames of a header (kind, channel, number, payload's bytes) and a payload. A large payload is
sent once the receiver has said READY for it, so that it goes straight into the tensor that waits; a small one at once.
Both sides launch alike on a channel, so they number its parcels alike, and frames may overtake each other.
"""

from __future__ import annotations

import itertools
import select
import socket
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Iterator

from everstep.errors import GroupBroken

HEADER = struct.Struct("<IIQQ")
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


_Key = tuple[int, int]  # channel, number of the parcel on it
_Parcel = tuple[memoryview, Transfer]


class Connection:
    """The connection to one peer. Raises GroupBroken when it ends, or when the peer launches other collectives."""

    def __init__(self, connected: socket.socket, peer: int, epoll: select.epoll) -> None:
        self._socket = connected
        self._peer = peer
        self._epoll = epoll
        self._outbox: deque[tuple[memoryview, Transfer | None]] = deque()
        self._send_numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
        self._receive_numbers: defaultdict[int, Iterator[int]] = defaultdict(itertools.count)
        self._offered: dict[_Key, _Parcel] = {}  # large payloads that the peer is not ready for
        self._ready: dict[_Key, int] = {}  # bytes the peer is ready for and that are not offered yet
        self._expected: dict[_Key, _Parcel] = {}
        self._early: dict[_Key, memoryview] = {}  # small payloads that nobody here expects yet
        self._header = memoryview(bytearray(HEADER.size))
        self._target = self._header  # what the next bytes go to
        self._filled = 0
        self._key: _Key = (0, 0)  # of the payload that is coming in
        self._receiving: Transfer | None = None  # None also while an early one comes in
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
        key = (channel, next(self._receive_numbers[channel]))
        if (payload := self._early.pop(key, None)) is not None:
            self._check_size(payload.nbytes, target.nbytes)
            target[:] = payload
            transfer.parcel_done()
            return
        self._expected[key] = (target, transfer)
        if target.nbytes > EAGER_BYTES:
            self._send(HEADER.pack(READY, *key, target.nbytes))

    def offer(self, payload: memoryview, channel: int, transfer: Transfer) -> None:
        """Send `payload`, now or when the peer is ready for it."""
        key = (channel, next(self._send_numbers[channel]))
        if payload.nbytes <= EAGER_BYTES:
            self._send(HEADER.pack(DATA, *key, payload.nbytes) + payload)
            transfer.parcel_done()  # it was copied
        elif (size := self._ready.pop(key, None)) is not None:
            self._send_payload(key, size, payload, transfer)
        else:
            self._offered[key] = (payload, transfer)

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
                if self._target is self._header:
                    self._header_arrived(*HEADER.unpack(self._header))
                else:
                    self._payload_arrived()

    def _header_arrived(self, kind: int, channel: int, number: int, size: int) -> None:
        key = (channel, number)
        if kind == DATA:
            self._start_payload(key, size)
        elif (parcel := self._offered.pop(key, None)) is not None:
            self._send_payload(key, size, *parcel)
        else:
            self._ready[key] = size

    def _start_payload(self, key: _Key, size: int) -> None:
        self._key = key
        if (parcel := self._expected.pop(key, None)) is not None:
            self._target, self._receiving = parcel
            self._check_size(size, self._target.nbytes)
        else:
            self._check_size(size, min(size, EAGER_BYTES))
            self._target = memoryview(bytearray(size))

    def _payload_arrived(self) -> None:
        payload, transfer = self._target, self._receiving
        self._target, self._receiving = self._header, None
        if transfer is not None:
            transfer.parcel_done()
        elif (parcel := self._expected.pop(self._key, None)) is not None:
            # It is expected since it began to come in.
            target, transfer = parcel
            self._check_size(payload.nbytes, target.nbytes)
            target[:] = payload
            transfer.parcel_done()
        else:
            self._early[self._key] = payload

    def _send_payload(self, key: _Key, size: int, payload: memoryview, transfer: Transfer) -> None:
        """Send what the peer is ready to take `size` bytes of."""
        try:
            self._check_size(size, payload.nbytes)
        except GroupBroken:
            transfer.give_up()
            raise
        self._outbox.append((memoryview(HEADER.pack(DATA, *key, size)), None))
        self._outbox.append((payload, transfer))
        self._kick()

    def _send(self, frame: bytes) -> None:
        self._outbox.append((memoryview(frame), None))
        self._kick()

    def _kick(self) -> None:
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
        for _, transfer in (*self._offered.values(), *self._expected.values()):
            yield transfer
        if self._receiving is not None:
            yield self._receiving
