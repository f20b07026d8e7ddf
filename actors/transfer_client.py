"""Pulling a state from several peers at once, over plain sockets.

Called by a replica that has no state for the generation it is about to enter: a joiner, or one that cannot roll
forward. `transfer` is the serving side, `transfer_protocol` says what is spoken. Sockets and not a process
group, because the puller must be able to go on when a source dies halfway and the generation changes. This module
decides nothing about membership: it asks the sources it is given, and says who failed and why.
"""

from __future__ import annotations

import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from everstep.actors.transfer_protocol import (
    CHUNK_BYTES,
    CHUNK_PREFIX,
    CHUNK_VIEWS,
    MAX_LAYOUT_BYTES,
    TICK_S,
    Address,
    Connection,
    connect,
    describe,
    expect_ok,
    show,
)
from everstep.checkpoint.hashing import ByteSpace, hash64
from everstep.checkpoint.state import Layout, RegisteredState, Snapshot
from everstep.checkpoint.tree import parse_json
from everstep.errors import InternalError, StateError, StateMismatch, TransferFailed

_STRIKES: Final = 2
"""Faults of one source in one run, of whatever kind, after which it is asked no more."""


@dataclass(frozen=True, slots=True)
class FetchResult:
    """What one call of `Fetch.run` moved."""

    num_bytes: int
    seconds: float
    num_stripes: int
    by_source: dict[str, int]
    """Bytes by "host:port"; sources that gave nothing are in it with 0."""


class Fetch:
    """Fetches one version of the state, from whoever has it, in as many calls of `run` as it takes.

    What was received whole and with the right hash is kept between calls. Module weights are received in place
    where they can be (see RegisteredState): from the first `run` to the end of `load` this replica holds no state.
    Used by one thread.
    """

    def __init__(
        self,
        version: str,
        state: RegisteredState,
        token: bytes,
        *,
        stripe_bytes: int = 8 << 20,
        silent_s: float = 2.0,
        stripe_s: float = 5.0,
    ) -> None:
        """`silent_s`: a source that sends nothing for so long loses its stripe, so that a frozen one cannot hold
        us. `stripe_s`: so does one that takes longer for a stripe while another source is idle."""
        self.version = version
        self.stripe_bytes, self.silent_s, self.stripe_s = stripe_bytes, silent_s, stripe_s
        self.token = token
        self._state = state
        self._reusable: list[torch.Tensor] = []
        self._forget()

    def _forget(self) -> None:
        self.layout: Layout | None = None
        self.fingerprint = ""
        self.missing: list[int] = []
        """Numbers of the stripes nobody has brought or is bringing; a heap."""
        self._buffers: list[torch.Tensor] = []

    def prepare(self, layout: object) -> None:
        """Allocate buffers for a layout like the one to come, and touch their pages, while there is time.

        Buffers that fit (dtype, shape, memory order) are used later, the others dropped. Raises StateMismatch or
        StateError (see RegisteredState.receive_buffers).
        """
        self._reusable = self._state.receive_buffers(layout, reuse=self._reusable)

    def retarget(self, version: str) -> None:
        """Fetch another version from now on: what was received is void, the buffers stay."""
        self.version = version
        self._reusable = self._buffers or self._reusable
        self._forget()

    def adopt(self, fingerprint: str, layout: Layout | None) -> None:
        """A source's layout: the first one decides, later ones must be equal. One thread at a time."""
        if self.layout is None and layout is not None:
            # Pages are not touched: the sources' threads do it together, when the kernel copies into them.
            self._buffers = self._state.receive_buffers(layout, reuse=self._reusable, touch_pages=False)
            self._reusable = []
            self.space = ByteSpace(self._buffers, layout.offsets)
            self.missing = list(range(-(-layout.total_bytes // self.stripe_bytes)))
            self.layout, self.fingerprint = layout, fingerprint
        if fingerprint != self.fingerprint:
            raise OtherLayout(
                "its state has another layout than the first source's: they are not replicas of one state"
            )

    def stripe(self, number: int) -> tuple[int, int]:
        """Offset and length of a stripe."""
        assert self.layout is not None
        offset = number * self.stripe_bytes
        return offset, min(self.stripe_bytes, self.layout.total_bytes - offset)

    def run(
        self,
        sources: Sequence[Address],
        cancel: threading.Event,
        deadline_s: float,
        *,
        moved: Callable[[], None] = lambda: None,
    ) -> FetchResult:
        """Pull what is missing from all sources at once; returns when everything is here. `moved` is called whenever
        more has come.

        Waits for sources that do not offer the version yet. Raises TransferFailed when all sources are lost, `cancel`
        is set or `deadline_s` seconds are over; call again with other sources to go on. Raises StateMismatch if the
        registered modules are not those of the sources.
        """
        pull = _Pull(self, list(dict.fromkeys((host, port) for host, port in sources)), cancel, deadline_s)
        result = pull.run(moved)
        if pull.complete:
            return result
        if pull.lost and all(isinstance(error, StateMismatch) for error in pull.lost.values()):
            raise next(iter(pull.lost.values()))
        if pull.lost and all(isinstance(error, OtherLayout) for error in pull.lost.values()):
            self._forget()  # what we hold came from a source that nobody here agrees with
        raise TransferFailed(pull.story(deadline_s))

    def digest(self) -> str:
        """RegisteredState.digest of what was received, to compare with what the sources say of theirs."""
        layout = self._whole()
        return RegisteredState.digest(Snapshot(layout.skeleton, tuple(self._buffers)))

    def load(self) -> None:
        """Put the fetched state into the live objects; the buffers are theirs then."""
        layout, buffers = self._whole(), self._buffers
        self._forget()
        self._state.load(layout.skeleton, buffers)

    def _whole(self) -> Layout:
        if self.layout is None or self.missing:
            raise TransferFailed(f"state {self.version!r} is not complete; call run() until it returns")
        return self.layout


class OtherLayout(TransferFailed):
    """A source's layout is not the one that this fetch began with."""


class _Gone(TransferFailed):
    """The source has withdrawn the state: its generation went on."""


class _Over(TransferFailed):
    """This run has ended; not the source's fault."""


class _Pull:
    """One call of `Fetch.run`: one thread per source, one heap of stripes."""

    def __init__(
        self, fetch: Fetch, sources: list[Address], cancel: threading.Event, deadline_s: float
    ) -> None:
        self._fetch = fetch
        self._sources = sources
        self._cancel = cancel
        self._started = time.monotonic()
        self._deadline = self._started + deadline_s
        self._changed = threading.Condition()
        # All below: guarded by _changed.
        self.lost: dict[Address, Exception] = {}
        self._ended = False
        self._num_idle = 0
        self._in_flight: set[int] = set()
        self._since: dict[Address, float] = {}
        self._connections: dict[Address, Connection] = {}
        self._by_source = dict.fromkeys(sources, 0)
        self._num_stripes = 0

    @property
    def complete(self) -> bool:
        return self._fetch.layout is not None and not self._fetch.missing and not self._in_flight

    def run(self, moved: Callable[[], None]) -> FetchResult:
        for source in self._sources if not self.complete else []:
            name = f"everstep-fetch-{show(source)}"
            threading.Thread(target=self._work, args=(source,), name=name, daemon=True).start()
        with self._changed:
            told = 0
            while not self.complete and len(self.lost) < len(self._sources) and not self._stopped():
                self._changed.wait(min(max(self._deadline - time.monotonic(), 0.0), TICK_S))
                if self._num_stripes > told:
                    told = self._num_stripes
                    moved()
            self._end()
            seconds = time.monotonic() - self._started
            by_source = {show(source): num_bytes for source, num_bytes in self._by_source.items()}
            return FetchResult(sum(by_source.values()), seconds, self._num_stripes, by_source)

    def story(self, deadline_s: float) -> str:
        """Why this run did not complete."""
        why = "all sources are lost"
        if self._cancel.is_set():
            why = "cancelled"
        elif time.monotonic() >= self._deadline:
            why = f"not complete within {deadline_s:g} s"
        layout, num_missing = self._fetch.layout, len(self._fetch.missing)
        held = f"{num_missing} stripes are missing" if layout else "no source has told its layout"
        sources = "; ".join(f"{show(source)}: {describe(error)}" for source, error in self.lost.items())
        return f"state {self._fetch.version!r}: {why}; {held}. Lost sources: {sources or 'none'}."

    def _stopped(self) -> bool:
        return self._cancel.is_set() or time.monotonic() >= self._deadline

    def _end(self) -> None:
        """No thread of this run touches a buffer after this. Holding _changed."""
        self._ended = True
        self._changed.notify_all()
        for connection in self._connections.values():
            connection.abort()
        if not self._changed.wait_for(lambda: not self._in_flight, self._fetch.silent_s + 10.0):
            raise InternalError(f"threads did not give back stripes {self._in_flight}")

    # ---- the threads of the sources

    def _work(self, source: Address) -> None:
        error: Exception = InternalError("its thread died of a bug; see the log")
        try:
            for _ in range(_STRIKES):
                try:
                    self._drain(source)
                    return
                except (_Gone, OtherLayout, StateMismatch) as hopeless:
                    error = hopeless
                    return
                except (OSError, TransferFailed, StateError) as fault:
                    error = fault
                    if isinstance(fault, _Over):
                        return
        finally:
            with self._changed:
                if not self._ended:
                    self.lost[source] = error
                self._changed.notify_all()

    def _drain(self, source: Address) -> None:
        fetch = self._fetch
        self._check(source)
        with connect(
            source, fetch.token, silent_s=fetch.silent_s, check=lambda: self._check(source)
        ) as connection:
            with self._changed:
                self._connections[source] = connection
            try:
                self._agree(connection)
                self._pull_stripes(source, connection)
            finally:
                with self._changed:
                    del self._connections[source]

    def _pull_stripes(self, source: Address, connection: Connection) -> None:
        asked: deque[int] = deque()
        try:
            while self._ask(connection, asked):
                self._since[source] = time.monotonic()
                num_bytes = self._receive(connection, asked[0])
                with self._changed:
                    self._in_flight.discard(asked.popleft())
                    self._by_source[source] += num_bytes
                    self._num_stripes += 1
                    self._changed.notify_all()
        finally:
            with self._changed:
                self._since.pop(source, None)
                self._in_flight.difference_update(asked)
                for number in asked:
                    heapq.heappush(self._fetch.missing, number)
                self._changed.notify_all()

    def _check(self, source: Address) -> None:
        if self._ended or self._stopped():
            raise _Over("the fetch ended")
        since = self._since.get(source)
        if since is not None and self._num_idle and time.monotonic() - since > self._fetch.stripe_s:
            raise TimeoutError(
                f"a stripe took more than {self._fetch.stripe_s:g} s while other sources were idle"
            )

    def _agree(self, connection: Connection) -> None:
        """Wait until the source offers our version, and take its layout or find it equal to ours."""
        fetch = self._fetch
        while True:
            # Shorter than the bound on silence: a source that has nothing to say yet must still show that it lives.
            request = {"op": "layout", "version": fetch.version, "wait_s": fetch.silent_s / 2}
            connection.send_header({**request, "known": fetch.fingerprint})
            reply = connection.receive_header()
            if reply.get("error") != "not_offered":
                break
        layout, fingerprint = _receive_layout(connection, reply), reply.get("layout")
        if not isinstance(fingerprint, str):
            raise StateError("bad reply to layout")
        with self._changed:
            if self._ended:
                raise _Over("the fetch ended")
            fetch.adopt(fingerprint, layout)
            self._changed.notify_all()

    def _ask(self, connection: Connection, asked: deque[int]) -> bool:
        """Ask for a stripe ahead of the one to receive, so that the source always has work; False if there is none."""
        fetch = self._fetch
        while len(asked) < 2 and (number := self._take(ahead=bool(asked))) is not None:
            asked.append(number)
            offset, length = fetch.stripe(number)
            request = {"op": "stripe", "version": fetch.version, "layout": fetch.fingerprint}
            connection.send_header({**request, "offset": offset, "length": length})
        return bool(asked)

    def _take(self, *, ahead: bool) -> int | None:
        """The next stripe to ask for, or None. One to receive now is worth waiting for, as others may give theirs
        back; one ahead is taken only while there are enough for everybody."""
        with self._changed:
            missing = self._fetch.missing
            if ahead and len(missing) <= len(self._sources):
                return None
            self._num_idle += 1
            try:
                while not missing and self._in_flight and not self._ended:
                    self._changed.wait(max(self._deadline - time.monotonic(), 0.0) + TICK_S)
            finally:
                self._num_idle -= 1
            if self._ended or not missing:
                return None
            number = heapq.heappop(missing)
            self._in_flight.add(number)
            return number

    def _receive(self, connection: Connection, number: int) -> int:
        """Receive one stripe that was asked for into the buffers; returns its bytes."""
        reply = connection.receive_header()
        if reply.get("error") == "gone":
            raise _Gone("it does not offer this state any more")
        expect_ok(reply)
        prefix = memoryview(bytearray(CHUNK_PREFIX.size))
        chunks = list(self._fetch.space.chunks(*self._fetch.stripe(number), CHUNK_BYTES, CHUNK_VIEWS))
        # A chunk and the prefix of the next one come in one system call.
        connection.receive_into([prefix] if chunks else [])
        for chunk, following in zip(chunks, [*chunks[1:], None], strict=True):
            stated, digest = CHUNK_PREFIX.unpack(prefix)
            expected = sum(map(len, chunk))
            if not stated:
                raise _Gone("it withdrew the state in the middle of a stripe")
            if stated != expected:
                raise TransferFailed(f"it sent a chunk of {stated} bytes where {expected} belong")
            connection.receive_into(chunk if following is None else [*chunk, prefix])
            if hash64(chunk) != digest:
                raise TransferFailed("a chunk does not match its hash")
        return sum(len(view) for chunk in chunks for view in chunk)


def ask_shape(sources: Sequence[Address], token: bytes, *, timeout_s: float = 2.0) -> Layout | None:
    """What a state fetched from one of these peers will look like; None if none of them can say, which is no fault."""
    for source in sources:
        try:
            with connect(source, token, silent_s=timeout_s) as connection:
                connection.send_header({"op": "shape"})
                return _receive_layout(connection, connection.receive_header())
        except (OSError, TransferFailed, StateError):
            continue
    return None


def _receive_layout(connection: Connection, reply: dict[str, Any]) -> Layout | None:
    """The layout that follows a reply; None if the peer left it out because we know it."""
    length = expect_ok(reply).get("length")
    if type(length) is not int or not 0 <= length <= MAX_LAYOUT_BYTES:
        raise StateError("bad reply to layout")
    body = bytearray(length)
    connection.receive_into([memoryview(body)])
    if length and reply.get("hash") != hash64([memoryview(body)]):
        raise TransferFailed("the layout does not match its hash")
    return Layout.from_json(parse_json(body)) if length else None
