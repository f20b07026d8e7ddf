"""A store of objects: the few operations that durable checkpoints need, retried within a budget.

Called by everything in this folder that reads or writes durably. `open_store` picks the kind by URL: a local folder
(`store_local`), `memory://` (`store_memory`), or an object store through fsspec (`store_remote`). This file holds what
they share: keys, retries, the preflight. It knows no checkpoint.

A store promises: an object appears whole or not at all; of several create-only puts to one key exactly one wins; a put
that returned is durable. Kinds that cannot promise it are refused.
"""

from __future__ import annotations

import random
import re
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeVar

from everstep.checkpoint.errors import (
    ObjectExists,
    ObjectTooLarge,
    PermanentStoreError,
    StoreError,
    StoreUnusable,
    TransientStoreError,
)

if TYPE_CHECKING:
    from types import TracebackType

T = TypeVar("T")

MAX_KEY_LENGTH: Final = 512
_KEY: Final = re.compile(r"[A-Za-z0-9_.\-]+(?:/[A-Za-z0-9_.\-]+)*")


def check_key(key: str) -> str:
    """`key` itself. Raises PermanentStoreError unless it is a plain relative path that stays inside the store."""
    if len(key) > MAX_KEY_LENGTH or not _KEY.fullmatch(key) or any(p.startswith(".") for p in key.split("/")):
        raise PermanentStoreError(
            f"{key[:100]!r} is not an object key; keys are relative paths of letters, digits, '_', '.' and '-'"
        )
    return key


def open_store(
    url: str, storage_options: Mapping[str, Any] | None = None, *, retry: Retry | None = None
) -> Store:
    """The store at `url`: an absolute path or `file://`, `memory://`, `s3://bucket/prefix`, `gs://`, `az://`.

    Touches nothing yet. Credentials, endpoint and region of remote stores come from the environment variables of their
    own tools (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, AWS_ENDPOINT_URL, AWS_DEFAULT_REGION, ...) or from
    `storage_options`, which go to the fsspec filesystem. Raises StoreUnusable for a URL that cannot work.
    """
    scheme, _, rest = url.partition("://")
    options = dict(storage_options or {})
    if "://" not in url or scheme in ("file", "local"):
        from everstep.checkpoint.store_local import LocalStore

        path = url if "://" not in url else rest
        if not path.startswith("/") or options:
            raise StoreUnusable(
                f"storage {url!r}: a folder is given by its absolute path, and takes no storage_options"
            )
        return LocalStore(path, retry)
    if scheme == "memory":
        from everstep.checkpoint.store_memory import MemoryStore

        return MemoryStore(url, retry)
    from everstep.checkpoint.store_remote import open_remote

    return open_remote(url, options, retry)


@dataclass(frozen=True, slots=True, kw_only=True)
class Retry:
    """How an operation is tried again after a transient error: exponential back-off with full jitter.

    Source: "Exponential Backoff And Jitter", AWS Architecture Blog, 2015: delay = random(0, min(cap, base 2^n)).
    """

    budget_s: float = 60.0
    """Seconds from the first try after which no further one begins."""
    max_tries: int = 10
    """Tries of one operation, the first included."""
    base_s: float = 0.1
    """Upper bound of the first delay, seconds."""
    cap_s: float = 5.0
    """Upper bound of any delay, seconds."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    uniform: Callable[[float, float], float] = random.uniform

    def run(self, operation: Callable[[int], T], what: str) -> T:
        """`operation(number of the try)`, again while it raises TransientStoreError and the budget lasts."""
        begin = self.clock()
        for number in range(self.max_tries):
            try:
                return operation(number)
            except TransientStoreError as error:
                delay = self.uniform(0, min(self.cap_s, self.base_s * 2**number))
                spent = self.clock() - begin
                if number + 1 >= self.max_tries or spent + delay > self.budget_s:
                    raise TransientStoreError(
                        f"{what}: gave up after {number + 1} tries in {spent:.1f} s: {error}"
                    ) from error
                self.sleep(delay)
        raise TransientStoreError(f"{what}: max_tries is {self.max_tries}")


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One object of a listing."""

    key: str
    size: int
    modified_s: float
    """When it appeared, seconds since the epoch by the store's own clock."""


@dataclass(frozen=True, slots=True)
class Unfinished:
    """An upload that was begun and neither committed nor aborted: its writer lives, or died."""

    key: str
    token: str
    """How the store names the upload."""
    modified_s: float


class Writer(ABC):
    """One object being streamed. Nothing is visible before `commit`; leaving the `with` block without it aborts."""

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    @abstractmethod
    def write(self, data: memoryview) -> None:
        """Append. The memory may change as soon as this returns."""

    @abstractmethod
    def commit(self) -> None:
        """Make the object visible, whole and durable. Raises ObjectExists if there is one of that key."""

    @abstractmethod
    def abort(self) -> None:
        """Drop what was written; does nothing after `commit`."""


class Store(ABC):
    """Objects under one URL. Keys are relative. Thread-safe; holds no threads and no connections that need closing.

    Every operation raises a StoreError: transient ones only after `retry` is spent.
    """

    def __init__(self, url: str, retry: Retry | None = None) -> None:
        self.url = url
        self.retry = retry or Retry()

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def put(self, key: str, data: bytes | memoryview) -> None:
        """Write a whole object, over an older one if there is one."""
        check_key(key)
        self._run("put", key, lambda number: self._put(key, data))

    def create(self, key: str, data: bytes) -> None:
        """Write a whole object if there is none; raises ObjectExists otherwise. Of several writers one wins.

        If a try failed without an answer it may have won all the same: then the object is read back, and the same
        bytes count as ours. So `data` must tell writers apart.
        """

        def attempt(number: int) -> None:
            try:
                self._create(key, data)
            except ObjectExists:
                if number == 0 or self._get(key, len(data) + 1) != data:
                    raise

        check_key(key)
        self._run("create", key, attempt)

    def writer(self, key: str, total_bytes: int) -> Writer:
        """Stream an object of `total_bytes` bytes, with bounded memory."""
        check_key(key)
        return self._run("begin upload of", key, lambda number: self._writer(key, total_bytes))

    def read_into(self, key: str, offset: int, into: memoryview) -> None:
        """Fill `into` with the bytes from `offset`. Raises ObjectMissing, or ObjectTooShort if the object ends."""
        check_key(key)
        if len(into):
            self._run("read", key, lambda number: self._read_into(key, offset, into))

    def get(self, key: str, max_bytes: int) -> bytes:
        """A whole small object. Raises ObjectMissing, or ObjectTooLarge if it has more than `max_bytes` bytes."""
        check_key(key)
        data = self._run("get", key, lambda number: self._get(key, max_bytes + 1))
        if len(data) > max_bytes:
            raise ObjectTooLarge(f"{self.url}: {key} is larger than {max_bytes} bytes")
        return data

    def size(self, key: str) -> int:
        """Bytes of an object. Raises ObjectMissing."""
        check_key(key)
        return self._run("look at", key, lambda number: self._size(key))

    def listing(self, prefix: str) -> list[ObjectInfo]:
        """All objects below a folder (`steps/`, or `` for all), however deep, sorted by key."""
        if prefix and not prefix.endswith("/"):
            raise PermanentStoreError(f"{prefix!r} is not a folder; it must end with '/'")
        if prefix:
            check_key(prefix[:-1])
        found = self._run("list", prefix, lambda number: self._list(prefix))
        return sorted(found, key=lambda info: info.key)

    def delete(self, keys: Collection[str]) -> None:
        """Delete objects; those that are not there count as deleted. Not atomic, in the order given."""
        for key in keys:
            check_key(key)
        if keys:
            what = next(iter(keys))
            self._run("delete", what, lambda number: self._delete(list(keys)))

    def unfinished(self) -> list[Unfinished]:
        """Uploads that were begun and not ended, by living or dead writers."""
        return self._run("list uploads of", "", lambda number: self._unfinished())

    def drop(self, uploads: Sequence[Unfinished]) -> None:
        """Abort uploads that `unfinished` gave."""
        for upload in uploads:
            self._run("abort", upload.key, partial(self._drop_try, upload))

    def clock_s(self) -> float:
        """What the store's own clock says now, in the seconds of `modified_s`. Writes and deletes a small object."""
        key = f"probe/{secrets.token_hex(8)}"
        self.put(key, b"?")
        try:
            return next(info.modified_s for info in self.listing("probe/") if info.key == key)
        except StopIteration:
            raise PermanentStoreError(
                f"{self.url}: an object that was just written is not listed; such a store cannot be used"
            ) from None
        finally:
            self.delete([key])

    def check(self) -> None:
        """The preflight: write, read, list, delete, and see that create-only is enforced.

        Raises StoreUnusable, naming the URL, the cause and the way out.
        """
        key = f"probe/{secrets.token_hex(8)}"
        first, second = secrets.token_bytes(16), secrets.token_bytes(16)
        try:
            self.create(key, first)
            try:
                self.create(key, second)
            except ObjectExists:
                pass
            else:
                raise StoreUnusable(
                    f"{self.url}: the store overwrites where it was asked to create only, so two writers could "
                    "both believe that they committed. Use a store that honours If-None-Match (AWS S3, SeaweedFS, "
                    "MinIO, GCS), or a local or network folder."
                )
            if self.get(key, 64) != first or key not in {info.key for info in self.listing("probe/")}:
                raise StoreUnusable(
                    f"{self.url}: what was just written does not come back; use another store"
                )
            self.delete([key])
        except StoreError as error:
            raise StoreUnusable(f"{error} {self._way_out(error)}") from error

    def _drop_try(self, upload: Unfinished, number: int) -> None:
        self._drop(upload)

    def _way_out(self, error: StoreError) -> str:
        """One sentence for the user."""
        return "Checkpoints need a place that can be written, read, listed and deleted."

    def _run(self, verb: str, key: str, operation: Callable[[int], T]) -> T:
        return self.retry.run(operation, f"{self.url}: {verb} {key}")

    @abstractmethod
    def _put(self, key: str, data: bytes | memoryview) -> None: ...

    @abstractmethod
    def _create(self, key: str, data: bytes) -> None: ...

    @abstractmethod
    def _writer(self, key: str, total_bytes: int) -> Writer: ...

    @abstractmethod
    def _read_into(self, key: str, offset: int, into: memoryview) -> None: ...

    @abstractmethod
    def _get(self, key: str, max_bytes: int) -> bytes:
        """At most the first `max_bytes` bytes."""

    @abstractmethod
    def _size(self, key: str) -> int: ...

    @abstractmethod
    def _list(self, prefix: str) -> list[ObjectInfo]: ...

    @abstractmethod
    def _delete(self, keys: list[str]) -> None: ...

    @abstractmethod
    def _unfinished(self) -> list[Unfinished]: ...

    @abstractmethod
    def _drop(self, upload: Unfinished) -> None: ...
