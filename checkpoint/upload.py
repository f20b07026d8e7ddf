"""Streams one object to a remote store as parts: several on their way at once, bounded memory.

Used by `store_remote` and `store_s3` behind `Store.writer`. An `Upload` is the store's side of it; `PartWriter` collects
what is written into parts and sends them from its own threads, which end with `commit` or `abort`.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Protocol

from everstep.checkpoint.errors import PermanentStoreError, StoreError
from everstep.checkpoint.store import Retry, Writer

PARTS_IN_FLIGHT: Final = 4
"""Parts of one object that are being sent at once: bounds a writer's memory to this many, and one being filled."""


class Upload(Protocol):
    """One object in the making. Nothing is visible before `complete`."""

    name: str
    """URL and key, for messages."""
    part_bytes: int | None
    """Size of every part but the last; None if the object goes as one part."""

    def put_part(self, index: int, data: memoryview) -> None:
        """Send a part; one try. Sending it again replaces it."""

    def complete(self) -> None:
        """Make the object of all parts, with retries."""

    def abort(self) -> None:
        """Drop all parts."""


class PartWriter(Writer):
    """Collects what is written into parts, and sends several at once. Its threads end with `commit` or `abort`."""

    def __init__(self, upload: Upload, total_bytes: int, retry: Retry) -> None:
        self._upload, self._total, self._retry = upload, total_bytes, retry
        self._part_bytes = upload.part_bytes or total_bytes
        self._part = bytearray(min(self._part_bytes, total_bytes))
        self._free: deque[bytearray] = deque()
        self._filled = self._written = self._num_parts = 0
        self._sent: deque[tuple[Future[None], bytearray]] = deque()
        self._threads: ThreadPoolExecutor | None = None
        self._done = False

    def write(self, data: memoryview) -> None:
        """See `Writer`. Waits while PARTS_IN_FLIGHT parts are on their way."""
        if self._written + len(data) > self._total:
            raise PermanentStoreError(f"{self._upload.name}: more than the announced {self._total} bytes")
        self._written += len(data)
        while len(data):
            room = min(len(self._part) - self._filled, len(data))
            self._part[self._filled : self._filled + room] = data[:room]
            self._filled += room
            data = data[room:]
            if self._filled == self._part_bytes:
                self._send()

    def commit(self) -> None:
        """See `Writer`."""
        if self._written != self._total:
            raise PermanentStoreError(
                f"{self._upload.name}: {self._written} bytes were written, {self._total} announced"
            )
        if self._filled:
            self._send()
        while self._sent:
            self._await_oldest()
        self._end_threads()
        self._upload.complete()
        self._done = True

    def abort(self) -> None:
        """See `Writer`. Best effort: what cannot be aborted now is found by `Store.unfinished` later."""
        if self._done:
            return
        self._done = True
        self._end_threads()
        try:
            self._upload.abort()
        except StoreError:
            pass

    def _send(self) -> None:
        part = memoryview(self._part)[: self._filled]
        if self._upload.part_bytes is None:
            self._upload.put_part(0, part)
            self._filled = 0
            return
        if len(self._sent) >= PARTS_IN_FLIGHT:
            self._await_oldest()
        if self._threads is None:
            self._threads = ThreadPoolExecutor(PARTS_IN_FLIGHT, thread_name_prefix="upload")
        index = self._num_parts
        what = f"{self._upload.name}: part {index + 1}"

        def attempt(number: int) -> None:
            if self._done:
                raise PermanentStoreError(f"{what}: aborted")
            self._upload.put_part(index, part)

        future = self._threads.submit(self._retry.run, attempt, what)
        self._sent.append((future, self._part))
        self._num_parts += 1
        self._part = self._free.popleft() if self._free else bytearray(self._part_bytes)
        self._filled = 0

    def _await_oldest(self) -> None:
        future, part = self._sent.popleft()
        future.result()
        self._free.append(part)

    def _end_threads(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
            self._threads = None
