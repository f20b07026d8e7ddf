"""The protocol of the state transfer: connections, headers, chunks, and the two simplest things said over them.

Called by `transfer` (serving) and `transfer_client` (fetching). Knows bytes, not state.

Protocol, over TCP. A header is a 4-byte length and that many bytes of JSON, at most `MAX_HEADER_BYTES`.

    hello    {op, token}                              -> {ok, pid}; with a wrong token the connection is closed
    ping     {op}                                     -> {ok, pid}
    layout   {op, version, known, wait_s}             -> {ok, layout, length, hash} and `length` bytes of JSON, none
                                                         if `known` is this layout; {error: not_offered} after wait_s
    shape    {op}                                     -> as `layout`, of the state as it was last described, whose
                                                         bytes are not on offer; {error: not_offered} if it never was
    stripe   {op, version, layout, offset, length}    -> {ok} and the bytes of the stripe in chunks; {error: gone}
    chunk    length (4 bytes), xxh3_64 (8 bytes), and that many bytes; length 0 says: gone, nothing follows

Both sides cut a stripe into the same chunks, because both cut it by the layout (`ByteSpace.chunks`). The hash comes
before the bytes and both fit into the processor's cache, so that hashing costs no second trip to memory.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from collections.abc import Callable, Iterable
from typing import Any, Final, Self

from everstep.checkpoint.tree import parse_json
from everstep.errors import StateError, TransferFailed

Address = tuple[str, int]

MAX_HEADER_BYTES: Final = 4096
MAX_LAYOUT_BYTES: Final = 256 << 20
CHUNK_BYTES: Final = 1 << 20
"""A usual second-level cache. Over loopback with two cores, both sides hashing: 1.2 GB/s with 8 MiB, 2.2 with 1 MiB or
512 KiB, where Python's part per chunk (some 40 µs a side) begins to show; 2.5 without hashes."""
CHUNK_VIEWS: Final = 256
"""Tensors in one chunk at most; the kernel takes up to 1024 pieces in one call."""
CHUNK_PREFIX: Final = struct.Struct(">IQ")
_LENGTH: Final = struct.Struct(">I")
TICK_S: Final = 0.1
"""How late an order to stop, which is an event of another thread, is seen while a source is silent."""


class Connection:
    """One TCP connection, with a bound on silence. Used by one thread; `abort` may be called by any.

    `check` is called before every wait and at least every `tick_s` seconds; what it raises ends the operation.
    """

    def __init__(
        self, sock: socket.socket, *, silent_s: float, tick_s: float, check: Callable[[], None]
    ) -> None:
        self._sock = sock
        self.check = check
        sock.settimeout(None)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.be_patient(silent_s, tick_s)

    def be_patient(self, silent_s: float, tick_s: float) -> None:
        """From now on the peer may be silent for `silent_s` seconds."""
        self._silent_s, self._tick_s = silent_s, tick_s
        # Timeouts of the kernel and not of Python: a call that waits for all bytes stays one call.
        timeval = struct.pack("@ll", int(tick_s), int(tick_s % 1 * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)

    def send(self, views: Iterable[memoryview | bytes]) -> None:
        """Send all bytes of the views. Raises OSError; TimeoutError if the peer takes nothing for too long."""
        self._move([memoryview(view) for view in views if view], self._sock.sendmsg)

    def receive_into(self, views: Iterable[memoryview]) -> None:
        """Fill all views. Raises OSError; TimeoutError if nothing comes for too long."""
        self._move([view for view in views if view], self._receive_some)

    def _receive_some(self, views: list[memoryview]) -> int:
        num_bytes = self._sock.recvmsg_into(views, 0, socket.MSG_WAITALL)[0]
        if not num_bytes:
            raise ConnectionResetError("the peer closed the connection")
        return num_bytes

    def _move(self, pending: list[memoryview], some: Callable[[list[memoryview]], int]) -> None:
        quiet_s = 0.0
        while pending:
            self.check()
            try:
                num_bytes = some(pending)
            except (BlockingIOError, InterruptedError):
                quiet_s += self._tick_s
                if quiet_s >= self._silent_s:
                    raise TimeoutError(f"silent for {self._silent_s:g} s") from None
                continue
            quiet_s = 0.0
            while pending and num_bytes >= len(pending[0]):
                num_bytes -= len(pending.pop(0))
            if num_bytes:
                pending[0] = pending[0][num_bytes:]

    def send_header(self, header: dict[str, Any]) -> None:
        raw = json.dumps(header).encode()
        self.send([_LENGTH.pack(len(raw)), raw])

    def receive_header(self) -> dict[str, Any]:
        """Raises StateError for anything but a JSON object of at most `MAX_HEADER_BYTES`."""
        header = parse_json(self._receive_bytes(_LENGTH.unpack(self._receive_bytes(_LENGTH.size))[0]))
        if not isinstance(header, dict):
            raise StateError("a header that is not a JSON object")
        return header

    def _receive_bytes(self, length: int) -> bytearray:
        if length > MAX_HEADER_BYTES:
            raise StateError(f"a header of {length} bytes")
        raw = bytearray(length)
        self.receive_into([memoryview(raw)])
        return raw

    def abort(self) -> None:
        """End whatever the owning thread is waiting for here."""
        try:
            self._sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # the peer was faster

    def close(self) -> None:
        self._sock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def connect(
    address: Address, token: bytes, *, silent_s: float, check: Callable[[], None] = lambda: None
) -> Connection:
    """A connection to a StateServer that has accepted our token. Raises OSError, StateError or TransferFailed."""
    sock = socket.create_connection(address, timeout=silent_s)
    try:
        connection = Connection(sock, silent_s=silent_s, tick_s=min(TICK_S, silent_s), check=check)
        connection.send_header({"op": "hello", "token": token.hex()})
        try:
            expect_ok(connection.receive_header())
        except ConnectionResetError as error:
            raise TransferFailed(
                "it closed the connection at hello: wrong token, or too many readers"
            ) from error
    except BaseException:
        sock.close()
        raise
    return connection


def ping(address: Address, token: bytes, *, timeout_s: float = 1.0) -> int:
    """Process id of the replica that serves at `address`: it runs, and its threads get the GIL.

    Raises TransferFailed if it does not answer within `timeout_s`, is not there, or does not know the token.
    """
    deadline = time.monotonic() + timeout_s

    def check() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"no answer within {timeout_s:g} s")

    try:
        with connect(address, token, silent_s=timeout_s, check=check) as connection:
            connection.send_header({"op": "ping"})
            return int(expect_ok(connection.receive_header())["pid"])
    except (OSError, TransferFailed, StateError, KeyError, TypeError, ValueError) as error:
        raise TransferFailed(
            f"state server {show(address)} did not answer a ping: {describe(error)}"
        ) from error


def expect_ok(reply: dict[str, Any]) -> dict[str, Any]:
    """The reply, if it says ok. Raises TransferFailed with what it says instead."""
    if reply.get("ok") is not True:
        raise TransferFailed(
            f"refused: {str(reply.get('error'))[:80]} {str(reply.get('detail', ''))[:200]}".rstrip()
        )
    return reply


def show(address: Address) -> str:
    """host:port."""
    return f"{address[0]}:{address[1]}"


def describe(error: BaseException) -> str:
    """Its message, or at least its name."""
    return str(error) or type(error).__name__
