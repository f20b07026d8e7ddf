"""A replica's line to the controller: one TCP connection, one JSON message per line, re-made whenever it breaks.

Used by `actors.member`. A connection instead of actor calls, because its end tells the controller within a
millisecond that the process is gone, and because orders reach a replica whose training thread is busy. Reading
happens in one daemon thread (the control thread); sending is possible from any thread. It knows nothing of Ray: where
the controller is, it asks the `locate` function it was given.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

from everstep.actors import wire

_CONNECT_TIMEOUT_S = 5.0
_SEND_TIMEOUT_S = 5.0
_RETRY_S = 0.05
_RETRY_CAP_S = 1.0


class Link:
    """Keeps the line up until `close`. Messages that cannot be sent are dropped: `hello` says it all again."""

    def __init__(
        self,
        locate: Callable[[], tuple[str, int] | None],
        hello: Callable[[], wire.Message],
        receive: Callable[[wire.Message], None],
    ) -> None:
        """
        Args:
            locate: where the controller listens now; may take seconds; None if it cannot be found at the moment.
            hello: the first message of each connection.
            receive: called in the control thread with each message.
        """
        self._locate = locate
        self._hello = hello
        self._receive = receive
        self._socket: socket.socket | None = None
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="everstep-control", daemon=True)

    def start(self) -> None:
        """Begin to connect, in the background."""
        self._thread.start()

    def send(self, message: wire.Message) -> bool:
        """Send one message; False if the line is down at the moment. Blocks for 5 s at most."""
        data = wire.encode(message)
        with self._lock:
            connection = self._socket
            if connection is None:
                return False
            try:
                connection.sendall(data)
                return True
            except OSError:
                self._drop(connection)
                return False

    def close(self) -> None:
        """Give the line up for good."""
        self._closed.set()
        with self._lock:
            if self._socket is not None:
                self._drop(self._socket)

    def _drop(self, connection: socket.socket) -> None:
        """With the lock held. The reader wakes from its read and starts over."""
        if self._socket is connection:
            self._socket = None
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()

    def _run(self) -> None:
        pause = _RETRY_S
        while not self._closed.is_set():
            connection = self._connect()
            if connection is None:
                self._closed.wait(pause)
                pause = min(pause * 2, _RETRY_CAP_S)
                continue
            pause = _RETRY_S
            self._read(connection)
            with self._lock:
                self._drop(connection)

    def _connect(self) -> socket.socket | None:
        address = self._locate()
        if address is None:
            return None
        try:
            connection = socket.create_connection(address, timeout=_CONNECT_TIMEOUT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(_SEND_TIMEOUT_S)
            # Under the lock, so that nothing can be sent before the hello.
            with self._lock:
                connection.sendall(wire.encode(self._hello()))
                self._socket = connection
            return connection
        except OSError:
            return None

    def _read(self, connection: socket.socket) -> None:
        buffer = bytearray()
        while not self._closed.is_set():
            try:
                data = connection.recv(1 << 16)
            except TimeoutError:
                continue  # silence is the heartbeat's business
            except OSError:
                return
            if not data:
                return
            buffer += data
            while (end := buffer.find(b"\n")) >= 0:
                line = bytes(buffer[:end])
                del buffer[: end + 1]
                try:
                    message = wire.decode(line)
                except ValueError:
                    return  # not our controller, or not its words any more: start over
                self._receive(message)
            if len(buffer) > wire.MAX_LINE_BYTES:
                return
