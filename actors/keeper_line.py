"""Between a replica and the keeper of its node: who talks where, and what is said.

Used by `actors.capture` (the replica's side) and `actors.keeper`. A Unix socket in the abstract namespace, because a file
descriptor goes over it: the memory that the replica has copied its part of the state into. JSON lines; the first one
shows that the replica belongs to the run. Knows neither Ray nor torch.
"""

from __future__ import annotations

import hmac
import json
import os
import socket
from array import array
from typing import Any, Final

from everstep.errors import PeerError

MAX_LINE_BYTES: Final = 256 << 20
"""The layout of a state travels in one line."""
_HELLO_S: Final = 5.0


class KeeperGone(PeerError):
    """The line to the keeper does not stand, or broke."""


def address(token: str, node: str) -> str:
    """Where the keeper of a node listens. Only who knows the run's secret can tell it."""
    return "\0everstep-" + hmac.digest(token.encode(), f"keeper {node}".encode(), "sha256").hex()[:40]


def proof(token: str, node: str) -> str:
    """What a replica says first."""
    return hmac.digest(token.encode(), f"replica {node}".encode(), "sha256").hex()


class Line:
    """One connection. Not thread-safe: one reader and one writer."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._buffer = bytearray()
        self._descriptors: list[int] = []

    def send(self, body: dict[str, Any], descriptor: int | None = None) -> None:
        """One message, and perhaps a file descriptor, of which the other side gets its own copy. Raises KeeperGone."""
        data = json.dumps(body, separators=(",", ":")).encode() + b"\n"
        try:
            if descriptor is not None:
                sent = socket.send_fds(self._socket, [data], [descriptor])
                data = data[sent:]
            self._socket.sendall(data)
        except OSError as error:
            raise KeeperGone(f"the line to the keeper broke: {error}") from error

    def receive(self, timeout_s: float | None = None) -> tuple[dict[str, Any], int | None]:
        """The next message and its descriptor. `timeout_s`: longest silence. Raises KeeperGone, TimeoutError."""
        self._socket.settimeout(timeout_s)
        while (end := self._buffer.find(b"\n")) < 0:
            if len(self._buffer) > MAX_LINE_BYTES:
                raise KeeperGone("a line without an end")
            self._read()
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        try:
            body = json.loads(line)
        except ValueError as error:
            raise KeeperGone(f"not a message: {line[:80]!r}") from error
        if not isinstance(body, dict):
            raise KeeperGone(f"not a message: {line[:80]!r}")
        return body, self._descriptors.pop(0) if body.get("descriptor") and self._descriptors else None

    def _read(self) -> None:
        size = array("i").itemsize
        try:
            data, ancillary, _, _ = self._socket.recvmsg(1 << 20, socket.CMSG_SPACE(4 * size))
        except TimeoutError:
            raise
        except OSError as error:
            raise KeeperGone(f"the line to the keeper broke: {error}") from error
        for level, kind, raw in ancillary:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                found = array("i")
                found.frombytes(raw[: len(raw) - len(raw) % size])
                self._descriptors += found.tolist()
        if not data:
            raise KeeperGone("the line to the keeper was closed")
        self._buffer += data

    def close(self) -> None:
        self._socket.close()
        while self._descriptors:  # that came and were never asked for
            os.close(self._descriptors.pop())


def call(token: str, node: str, replica: int) -> Line:
    """A line to the keeper of this node. Raises KeeperGone if none answers."""
    connected = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connected.settimeout(_HELLO_S)
    try:
        connected.connect(address(token, node))
        line = Line(connected)
        line.send({"proof": proof(token, node), "replica": replica})
        answer, _ = line.receive(_HELLO_S)
    except (OSError, KeeperGone) as error:
        connected.close()
        raise KeeperGone(f"no keeper answers on this node: {error}") from error
    if not answer.get("ok"):
        connected.close()
        raise KeeperGone("the keeper of this node does not know this run's secret")
    return line


def answer_call(connected: socket.socket, token: str, node: str) -> tuple[Line, int] | None:
    """The keeper's side of `call`: the line and the replica's id, or None if it is a stranger's."""
    line = Line(connected)
    try:
        hello, _ = line.receive(_HELLO_S)
        shown, replica = hello.get("proof"), hello.get("replica")
        if not isinstance(shown, str) or not isinstance(replica, int):
            raise KeeperGone("not a hello")
        if not hmac.compare_digest(shown.encode(), proof(token, node).encode()):
            raise KeeperGone("not the run's secret")
        line.send({"ok": True})
    except (OSError, KeeperGone):
        line.close()
        return None
    return line, replica
