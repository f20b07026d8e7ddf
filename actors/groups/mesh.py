"""Process groups over plain TCP, for CPU tensors: one connection per pair of ranks, one thread that serves them all.

`form_mesh` is called through `form_group`. Why not gloo: when a connection ends, gloo does not tell the operations whose
bytes are on the wire at that moment (its `Pair::signalException` leaves them out), so that a rank may stay blocked
whatever is closed; a group takes 10 ms per peer to drop; a surprise in its event thread ends the process. Here the
serving thread alone touches the tensors, never blocks, and fails everything outstanding when it leaves. It is as
fast: the work is the kernel's copying, and the interpreter's lock is free meanwhile.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from everstep.actors.groups.base import Group, Parcel, Work
from everstep.actors.groups.connection import Connection, Transfer
from everstep.actors.groups.rendezvous import Rendezvous, left, listen, meet
from everstep.errors import GroupBroken

_HELLO = struct.Struct("<16sI")  # digest of the rendezvous, rank
_HELLO_S = 2.0
"""A connection that does not introduce itself within this time is not a peer's."""

_NET_S, _PROBES = 20, 3
"""The kernel gives up a machine that is gone without a word after this long: the net under the heartbeat."""


def form_mesh(rendezvous: Rendezvous, cancel: threading.Event) -> MeshGroup:
    """Blocks for at most about `timeout_s`. Raises GroupBroken when the group does not form or `cancel` is set."""
    sockets: dict[int, socket.socket] = {}
    try:
        _connect(rendezvous, sockets)
        for connected in sockets.values():
            _set_options(connected)
        if cancel.is_set():
            raise GroupBroken("forming was cancelled")
    except (OSError, ValueError, GroupBroken) as error:
        for connected in sockets.values():
            connected.close()
        raise GroupBroken(f"{rendezvous} did not form: {error}") from error
    return MeshGroup(str(rendezvous), rendezvous.rank, rendezvous.world_size, sockets)


class MeshGroup(Group):
    """Made by `form_mesh` only. `sockets`: rank → connected and non-blocking; the group owns them."""

    def __init__(
        self, description: str, rank: int, world_size: int, sockets: dict[int, socket.socket]
    ) -> None:
        super().__init__(rank, world_size)
        self._description = description
        self._lock = threading.Lock()  # guards those below
        self._reason: str | None = None  # why the group is over, None while it lives
        self._failure: GroupBroken | None = None  # set when it broke by itself
        self._callback: Callable[[GroupBroken], None] | None = None
        self._posted: deque[_Exchange] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # open as long as `_reason` is None
        server = threading.Thread(target=self._serve, args=(sockets,), name="everstep-mesh", daemon=True)
        server.start()

    def exchange(self, sends: Sequence[Parcel], receives: Sequence[Parcel], *, channel: int) -> Work:
        exchange = _Exchange(self, _payloads(sends), _payloads(receives), channel)
        with self._lock:
            self.check()
            self._posted.append(exchange)
            os.eventfd_write(self._wake, 1)
        return exchange

    def check(self) -> None:
        if (reason := self._reason) is not None:
            raise GroupBroken(f"{self._description}: {reason}")

    def abort(self) -> None:
        self._end("aborted")

    def close(self) -> None:
        self._end("closed")

    def watch(self, callback: Callable[[GroupBroken], None]) -> None:
        with self._lock:
            self._callback = callback
            failure = self._failure
        if failure is not None:
            callback(failure)

    def _end(self, reason: str) -> bool:
        """Whether this was what ended it."""
        with self._lock:
            if self._reason is not None:
                return False
            self._reason = reason
            os.eventfd_write(self._wake, 1)
            return True

    def _tell(self, reason: str) -> None:
        with self._lock:
            self._failure = GroupBroken(f"{self._description}: {reason}")
            callback = self._callback
        if callback is not None:
            callback(self._failure)

    def _serve(self, sockets: dict[int, socket.socket]) -> None:
        """The life of the serving thread. A supervisor: whatever happens to it, nobody waits in vain."""
        failure = ""
        with select.epoll() as epoll:
            connections = {peer: Connection(connected, peer, epoll) for peer, connected in sockets.items()}
            by_descriptor = {connected.fileno(): connections[peer] for peer, connected in sockets.items()}
            try:
                epoll.register(self._wake, select.EPOLLIN)
                while self._reason is None:
                    for descriptor, event in epoll.poll():
                        if descriptor == self._wake:
                            self._start_posted(connections)
                        else:
                            by_descriptor[descriptor].handle(event)
            except GroupBroken as error:
                failure = str(error)
            except Exception as error:  # noqa: BLE001
                failure = f"a bug in serving the connections: {error!r}"
            finally:
                broke = self._end(failure)
                self._leave(connections)
        if broke:
            self._tell(failure)

    def _start_posted(self, connections: dict[int, Connection]) -> None:
        os.eventfd_read(self._wake)
        while self._posted:
            exchange = self._posted[0]  # stays there until it is started whole, for `_leave`
            exchange.start(connections)
            self._posted.popleft()

    def _leave(self, connections: dict[int, Connection]) -> None:
        for connection in connections.values():
            connection.close()
        with self._lock:
            os.close(self._wake)
            for exchange in self._posted:
                exchange.transfer.give_up()
            self._posted.clear()


_Payloads = list[tuple[memoryview, int]]


class _Exchange:
    """Implements Work."""

    def __init__(self, group: MeshGroup, sends: _Payloads, receives: _Payloads, channel: int) -> None:
        self._group = group
        self._sends = sends
        self._receives = receives
        self._channel = channel
        self.transfer = Transfer(len(sends) + len(receives))

    def start(self, connections: dict[int, Connection]) -> None:
        for target, peer in self._receives:
            connections[peer].expect(target, self._channel, self.transfer)
        for payload, peer in self._sends:
            connections[peer].offer(payload, self._channel, self.transfer)

    def wait(self) -> None:
        if not self.transfer.wait():
            self._group._end("a collective made no progress for an hour")
            self.transfer.wait()  # until nothing is written any more
        self._group.check()


def _payloads(parcels: Sequence[Parcel]) -> _Payloads:
    return [(_bytes_of(tensor), peer) for tensor, peer in parcels if tensor.numel()]


def _bytes_of(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _connect(rendezvous: Rendezvous, sockets: dict[int, socket.socket]) -> None:
    """Fill in rank → socket: connections made to the lower ranks, and accepted from the higher ones."""
    deadline = time.monotonic() + rendezvous.timeout_s
    with listen(rendezvous.bind_ip, backlog=max(128, rendezvous.world_size)) as listener:
        addresses = meet(rendezvous, listener.getsockname()[1], deadline)
        digest = hashlib.sha256(f"{rendezvous.key} {rendezvous.world_size}".encode()).digest()[:16]
        for peer, address in enumerate(addresses[: rendezvous.rank]):
            sockets[peer] = socket.create_connection(address, timeout=left(deadline))
            sockets[peer].sendall(_HELLO.pack(digest, rendezvous.rank))
        while len(sockets) < rendezvous.world_size - 1:
            listener.settimeout(left(deadline))
            connected, _ = listener.accept()
            peer_or_none = _introduced(connected, digest)
            if peer_or_none is None or peer_or_none in sockets:
                connected.close()
            else:
                sockets[peer_or_none] = connected


def _introduced(connected: socket.socket, digest: bytes) -> int | None:
    """The rank of who connected, or None if it is not one of this rendezvous."""
    connected.settimeout(_HELLO_S)
    try:
        hello = connected.recv(_HELLO.size, socket.MSG_WAITALL)
    except OSError:
        return None
    if len(hello) != _HELLO.size:
        return None
    theirs, rank = _HELLO.unpack(hello)
    return rank if hmac.compare_digest(theirs, digest) else None


def _set_options(connected: socket.socket) -> None:
    connected.setblocking(False)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)  # notices a silent peer while waiting
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, _NET_S // (_PROBES + 1))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, _NET_S // (_PROBES + 1))
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, _PROBES)
    connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _NET_S * 1000)  # and while sending
