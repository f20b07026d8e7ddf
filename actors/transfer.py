"""Serving a state to peers, straight from the memory it lives in; and the public names of the state transfer.

`StateServer` is made once per replica and used by it (offer and withdraw at commit boundaries) and by its peers over
the network; the controller pings it to tell a dead replica from a slow one. The fetching side is
`transfer_client`, the protocol `transfer_protocol`. Serving never decides who may join: whoever knows the run's token may read what is offered.

The rule of this file: between `offer` and `withdraw` the offered memory must not change, and when `withdraw` has
returned nobody reads it. A reader in the middle hears that the state is gone. `withdraw` is called by the training
thread before it applies the next step, so it never waits for a slow reader: after a grace it cuts the connection.
"""

from __future__ import annotations

import hmac
import json
import logging
import math
import os
import socket
import threading
import time
from typing import Any, Final, Self

from everstep.actors.transfer_client import Fetch, FetchResult, ask_shape
from everstep.actors.transfer_protocol import (
    CHUNK_BYTES,
    CHUNK_PREFIX,
    CHUNK_VIEWS,
    Address,
    Connection,
    ping,
)
from everstep.checkpoint.hashing import ByteSpace, hash64
from everstep.checkpoint.state import Layout, Snapshot
from everstep.errors import InternalError, StateError

__all__ = ["Fetch", "FetchResult", "StateServer", "ask_shape", "ping"]

_log = logging.getLogger(__name__)

HELLO_S: Final = 2.0
"""A connection that has not shown the token by then is closed."""
IDLE_S: Final = 60.0
"""A connection on which nothing moves for so long is closed."""
MAX_WAIT_S: Final = 30.0
MAX_STRIPE_BYTES: Final = 1 << 30
MAX_VERSION_CHARS: Final = 256
_GONE: Final = CHUNK_PREFIX.pack(0, 0)


class _Offer:
    """One snapshot on offer. `readers` are the connections that read its memory at this moment."""

    def __init__(self, version: str, snapshot: Snapshot) -> None:
        plan = snapshot.plan()
        self.version = version
        self.fingerprint = plan.fingerprint()
        self.body = _layout_body(plan)
        self.body_hash = hash64([memoryview(self.body)])
        self.total_bytes = plan.total_bytes
        self.space = ByteSpace(snapshot.host_tensors(), plan.offsets)
        self.withdrawn = False
        self.readers: set[Connection] = set()


def _layout_body(layout: Layout) -> bytes:
    return json.dumps(layout.as_json(), separators=(",", ":"), allow_nan=False).encode("ascii")


class StateServer:
    """Serves at most one snapshot at a time from an ephemeral TCP port of `bind_ip`. Thread-safe."""

    def __init__(
        self, bind_ip: str, token: bytes, *, max_connections: int = 1024, grace_s: float = 0.2
    ) -> None:
        """`grace_s`: how long `withdraw` lets a reader finish the chunk it is reading."""
        if not token:
            raise InternalError("a state server without a token would serve anybody")
        self._token = token.hex()
        self._max_connections, self._grace_s = max_connections, grace_s
        family = socket.AF_INET6 if ":" in bind_ip else socket.AF_INET
        self._listener = socket.create_server((bind_ip, 0), family=family, backlog=128)
        self.address: Address = (bind_ip, self._listener.getsockname()[1])
        self._closed = threading.Event()
        self._changed = threading.Condition()
        # Both guarded by _changed.
        self._offer: _Offer | None = None
        self._shape: bytes = b""
        self._connections: dict[Connection, threading.Thread] = {}
        self._acceptor = threading.Thread(target=self._accept, name="everstep-state-server", daemon=True)
        self._acceptor.start()

    @property
    def port(self) -> int:
        return self.address[1]

    def offer(self, version: str, snapshot: Snapshot) -> None:
        """Serve `snapshot` as `version`, in place of what was offered before, until `withdraw`.

        Tensors on another device are copied to pinned host memory first.
        """
        offer = _Offer(version, snapshot)
        self.withdraw()
        with self._changed:
            self._offer = offer
            self._changed.notify_all()

    def describe(self, layout: Layout) -> None:
        """Tell who asks what a state will look like that is fetched here later, so that it can make room for it."""
        self._shape = _layout_body(layout)

    def withdraw(self) -> None:
        """End the offer. When this returns, nobody reads its memory any more; costs no time if nobody did."""
        with self._changed:
            offer, self._offer = self._offer, None
            if offer is None:
                return
            offer.withdrawn = True
            if self._changed.wait_for(lambda: not offer.readers, self._grace_s):
                return
            for connection in offer.readers:
                connection.abort()
            if not self._changed.wait_for(lambda: not offer.readers, 10.0):
                raise InternalError(f"{len(offer.readers)} connections still read the withdrawn state")

    def close(self) -> None:
        """Withdraw, stop listening, and end all connections."""
        self._closed.set()
        self.withdraw()
        try:
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the acceptor, which close() alone does not
        except OSError:
            pass
        self._acceptor.join(5.0)
        self._listener.close()
        with self._changed:
            self._changed.notify_all()
            threads = list(self._connections.values())
            for connection in self._connections:
                connection.abort()
        for thread in threads:
            thread.join(5.0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- threads

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                # Out of descriptors, most likely: those in use must come back first.
                if not self._closed.wait(0.1):
                    _log.warning("state server: accept failed: %s", error)
                continue
            if not self._start(sock):
                sock.close()

    def _start(self, sock: socket.socket) -> bool:
        hello_until = time.monotonic() + HELLO_S

        def check() -> None:
            if time.monotonic() > hello_until:
                raise TimeoutError(f"no hello within {HELLO_S:g} s")

        try:
            connection = Connection(sock, silent_s=HELLO_S, tick_s=HELLO_S / 4, check=check)
            thread = threading.Thread(
                target=self._serve, args=(connection,), name="everstep-state-reader", daemon=True
            )
            with self._changed:
                if len(self._connections) >= self._max_connections or self._closed.is_set():
                    return False
                self._connections[connection] = thread
        except OSError:
            return False  # closed by the peer meanwhile
        try:
            thread.start()
        except RuntimeError as error:
            _log.warning("state server: %s", error)
            self._drop(connection)
        return True

    def _serve(self, connection: Connection) -> None:
        try:
            if self._knows_token(connection.receive_header()):
                connection.check = lambda: None
                connection.be_patient(IDLE_S, IDLE_S)
                connection.send_header({"ok": True, "pid": os.getpid()})
                while not self._closed.is_set():
                    self._answer(connection, connection.receive_header())
        except (OSError, StateError) as error:
            # A reader that leaves is its own affair; what it had is fetched again, elsewhere.
            _log.debug("state server: connection ended: %s", error)
        finally:
            self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        with self._changed:
            self._connections.pop(connection, None)
        connection.close()

    def _knows_token(self, hello: dict[str, Any]) -> bool:
        token = hello.get("token")
        if hello.get("op") != "hello" or not isinstance(token, str):
            return False
        return hmac.compare_digest(token.encode("utf-8", "surrogatepass"), self._token.encode())

    def _answer(self, connection: Connection, request: dict[str, Any]) -> None:
        op, version = request.get("op"), request.get("version")
        if op == "ping":
            connection.send_header({"ok": True, "pid": os.getpid()})
        elif op == "shape" and self._shape:
            body = self._shape
            connection.send_header({"ok": True, "length": len(body), "hash": hash64([memoryview(body)])})
            connection.send([body])
        elif op == "shape":
            connection.send_header({"ok": False, "error": "not_offered"})
        elif not isinstance(version, str) or len(version) > MAX_VERSION_CHARS:
            _refuse(connection, "version must be a short text")
        elif op == "layout":
            self._answer_layout(connection, version, request.get("known"), request.get("wait_s"))
        elif op == "stripe":
            self._answer_stripe(connection, version, request)
        else:
            _refuse(connection, "unknown op")

    def _answer_layout(self, connection: Connection, version: str, known: object, wait_s: object) -> None:
        if not isinstance(wait_s, int | float) or not math.isfinite(wait_s) or not 0 <= wait_s <= MAX_WAIT_S:
            _refuse(connection, f"wait_s must lie in [0, {MAX_WAIT_S:g}]")
            return
        with self._changed:
            self._changed.wait_for(
                lambda: self._offered(version) is not None or self._closed.is_set(), wait_s
            )
            offer = self._offered(version)
        if offer is None:
            connection.send_header({"ok": False, "error": "not_offered"})
            return
        body = b"" if known == offer.fingerprint else offer.body
        header = {"ok": True, "layout": offer.fingerprint, "length": len(body), "hash": offer.body_hash}
        connection.send_header(header)
        connection.send([body])

    def _answer_stripe(self, connection: Connection, version: str, request: dict[str, Any]) -> None:
        offset, length = request.get("offset"), request.get("length")
        with self._changed:
            offer = self._offered(version)
        if offer is None or request.get("layout") != offer.fingerprint:
            connection.send_header({"ok": False, "error": "gone"})
            return
        if type(offset) is not int or type(length) is not int or not 0 < length <= MAX_STRIPE_BYTES:
            _refuse(connection, "offset and length must be integers, length positive and at most 1 GiB")
            return
        if not 0 <= offset <= offer.total_bytes - length:
            _refuse(connection, f"the state has {offer.total_bytes} bytes")
            return
        connection.send_header({"ok": True})
        for chunk in offer.space.chunks(offset, length, CHUNK_BYTES, CHUNK_VIEWS):
            if not self._send_chunk(connection, offer, chunk):
                connection.send([_GONE])
                return

    def _send_chunk(self, connection: Connection, offer: _Offer, chunk: list[memoryview]) -> bool:
        """False if the offer was withdrawn before. While we are in here, `withdraw` waits."""
        with self._changed:
            if offer.withdrawn:
                return False
            offer.readers.add(connection)
        try:
            connection.send([CHUNK_PREFIX.pack(sum(map(len, chunk)), hash64(chunk)), *chunk])
        finally:
            with self._changed:
                offer.readers.discard(connection)
                self._changed.notify_all()
        return True

    def _offered(self, version: str) -> _Offer | None:
        return self._offer if self._offer is not None and self._offer.version == version else None


def _refuse(connection: Connection, detail: str) -> None:
    connection.send_header({"ok": False, "error": "bad_request", "detail": detail})
