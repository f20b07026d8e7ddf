"""How the ranks of a new generation learn each other's addresses.

The controller runs one `RendezvousServer` for the whole run. While it forms its group, a rank calls `meet`: it says who
it is and gets everybody's address as soon as all have come. Nothing is kept: a meeting is over when it is complete, and
a guest that hangs up was never there. Formed groups live without the server. Neither torch nor Ray in here, so that
the controller needs neither for this.

Not torch's `TCPStore`, because each new client of it looks up the peer's *name* while it holds the interpreter's lock:
where DNS loses a packet, everything in the process stands still for five seconds.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import json
import socket
import threading
import time
from dataclasses import dataclass, field

from everstep.errors import GroupBroken

Address = tuple[str, int]

_MAX_LINE_BYTES = 4 << 20  # the addresses of some 100,000 ranks
_HELLO_S = 5.0
_GUEST_S = 600.0  # a guest whose machine froze is forgotten after this long


@dataclass(frozen=True, slots=True, kw_only=True)
class Rendezvous:
    """Where the ranks of one generation find each other. Every field but `rank` and `bind_ip` is common to all."""

    host: str
    """Address of the rendezvous server, which lives in the controller."""
    port: int
    prefix: str
    """Never used before: one per generation and attempt, so that leftovers of another cannot get in."""
    rank: int
    world_size: int
    bind_ip: str
    """Address of this machine that the peers can reach."""
    timeout_s: float = 10.0
    """Bound on forming. A formed group has none: the controller's word ends a blocked operation, not a timer."""
    secret: bytes = field(default=b"", repr=False)
    """Known to the run's replicas alone: who does not know it can neither meet them nor connect to them."""

    @property
    def key(self) -> str:
        """What the meeting goes by, and what a rank shows when it connects to another. Not for logs."""
        return hmac.digest(self.secret, self.prefix.encode(), "sha256").hex()

    def __str__(self) -> str:
        return f"group {self.prefix}, rank {self.rank} of {self.world_size}"


class RendezvousServer:
    """Serves from its construction on, in a thread of its own, at `host`:`port`."""

    def __init__(self, host: str) -> None:
        self._listener = listen(host, backlog=4096)
        self.host = host
        self.port: int = self._listener.getsockname()[1]
        self._meetings: dict[tuple[str, int], dict[int, _Guest]] = {}
        self._loop = asyncio.new_event_loop()
        self._over = asyncio.Event()
        self._thread = threading.Thread(target=self._run, name="everstep-rendezvous", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving. Any number of times."""
        with contextlib.suppress(RuntimeError):  # the loop is closed already
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(5.0)

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._welcome, sock=self._listener, limit=_MAX_LINE_BYTES)
        async with server:
            await self._over.wait()

    async def _welcome(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            guest = _read_guest(await asyncio.wait_for(reader.readline(), _HELLO_S), writer)
            meeting = self._meetings.setdefault(guest.key, {})
            meeting[guest.rank] = guest
            try:
                if len(meeting) == guest.key[1]:
                    self._dismiss(guest.key)
                await asyncio.wait_for(reader.read(1), _GUEST_S)  # until the guest leaves
            finally:
                self._forget(guest)
        except (OSError, ValueError, TimeoutError):
            pass  # no guest of ours, or one that is gone
        finally:
            writer.close()

    def _dismiss(self, key: tuple[str, int]) -> None:
        meeting = self._meetings.pop(key)
        line = json.dumps([meeting[rank].address for rank in range(key[1])]).encode() + b"\n"
        for guest in meeting.values():
            guest.writer.write(line)

    def _forget(self, guest: _Guest) -> None:
        meeting = self._meetings.get(guest.key, {})
        if meeting.get(guest.rank) is guest:
            del meeting[guest.rank]
            if not meeting:
                del self._meetings[guest.key]


@dataclass(frozen=True, slots=True)
class _Guest:
    key: tuple[str, int]
    """Of its rendezvous, and the world size."""
    rank: int
    address: Address
    writer: asyncio.StreamWriter


def _read_guest(line: bytes, writer: asyncio.StreamWriter) -> _Guest:
    """Raises ValueError for a line that is no guest's."""
    match json.loads(line):
        case [str(key), int(world_size), int(rank), str(host), int(port)] if 0 <= rank < world_size:
            return _Guest((key, world_size), rank, (host, port), writer)
    raise ValueError("not a guest's first line")


def meet(rendezvous: Rendezvous, port: int, deadline: float) -> list[Address]:
    """The addresses of all ranks, in rank order, once all have called. `port` is what this rank is reachable at, on its
    `bind_ip`; `deadline` in time.monotonic(). Raises GroupBroken or OSError."""
    hello = [rendezvous.key, rendezvous.world_size, rendezvous.rank, rendezvous.bind_ip, port]
    with socket.create_connection((rendezvous.host, rendezvous.port), timeout=left(deadline)) as server:
        server.sendall(json.dumps(hello).encode() + b"\n")
        line = b""
        while not line.endswith(b"\n"):
            server.settimeout(left(deadline))
            if not (more := server.recv(1 << 20)):
                raise GroupBroken(
                    f"the rendezvous at {rendezvous.host}:{rendezvous.port} ended before all had come"
                )
            line += more
    return [(host, number) for host, number in json.loads(line)]


def listen(host: str, *, backlog: int) -> socket.socket:
    """A listening socket at `host`, a numeric address, and any free port."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, 0), family=family, backlog=backlog)


def left(deadline: float) -> float:
    """Seconds until `deadline` (time.monotonic()). Raises TimeoutError when it is over."""
    if (seconds := deadline - time.monotonic()) <= 0:
        raise TimeoutError("not all ranks came in time")
    return seconds
