"""The controller's side of the control connections: an asyncio server of JSON lines.

Used by `orchestrator.controller` alone. It knows bytes and connections, not what the messages mean: each goes to a
callback, which also says whether the first one is good enough to stay connected.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterable

from everstep.actors import wire

_HELLO_TIMEOUT_S = 10.0
_MAX_UNSENT_BYTES = 64 << 20


class Lines:
    """Connections by replica id. All methods belong to the controller's loop."""

    def __init__(
        self,
        receive: Callable[[int | None, wire.Message], int | None],
        lost: Callable[[int], None],
    ) -> None:
        """
        Args:
            receive: gets (replica, message); replica is None for a connection's first message. Its answer is the id
                that this connection speaks for, or None to hang up.
            lost: a replica's newest connection has ended.
        """
        self._receive = receive
        self._lost = lost
        self._writers: dict[int, asyncio.StreamWriter] = {}
        self._server: asyncio.Server | None = None
        self.address: tuple[str, int] = ("", 0)

    async def start(self, host: str) -> None:
        """Listen on a free port of `host`."""
        self._server = await asyncio.start_server(
            self._serve, host, 0, limit=wire.MAX_LINE_BYTES, backlog=4096
        )
        self.address = (host, self._server.sockets[0].getsockname()[1])

    def send(self, replicas: Iterable[int], message: wire.Message) -> None:
        """Send one message to all of them; whoever is not connected at the moment misses it."""
        data = wire.encode(message)
        for replica in replicas:
            writer = self._writers.get(replica)
            if writer is None or writer.is_closing():
                continue
            if writer.transport.get_write_buffer_size() > _MAX_UNSENT_BYTES:
                writer.transport.abort()  # it has not read for long: memory is bounded, heartbeats say the rest
                continue
            writer.write(data)

    def close(self) -> None:
        """End all connections and stop listening."""
        if self._server is not None:
            self._server.close()
        for writer in self._writers.values():
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        replica: int | None = None
        try:
            first = await asyncio.wait_for(reader.readline(), _HELLO_TIMEOUT_S)
            message = wire.decode(first)
            replica = self._receive(None, message)
            if replica is None:
                return
            old = self._writers.get(replica)
            self._writers[replica] = writer
            if old is not None:
                old.transport.abort()
            if self._receive(replica, message) is None:
                return
            while line := await reader.readline():
                if self._receive(replica, wire.decode(line)) is None:
                    return
        except (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError):
            pass  # gone, or not one of ours
        finally:
            with contextlib.suppress(OSError):
                writer.close()
            if replica is not None and self._writers.get(replica) is writer:
                del self._writers[replica]
                self._lost(replica)
