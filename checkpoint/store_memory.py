"""`memory://`: objects in the memory of this process, beside fsspec's own. For tests and trials; dies with the process.

Opened by `store.open_store` only. Shares its objects with every other user of fsspec's memory filesystem.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from everstep.checkpoint.errors import ObjectExists, ObjectMissing, ObjectTooShort, PermanentStoreError
from everstep.checkpoint.store import ObjectInfo, Retry, Store, Unfinished, Writer

if TYPE_CHECKING:
    from collections.abc import Callable


class MemoryStore(Store):
    """Objects in fsspec's memory filesystem."""

    def __init__(self, url: str, retry: Retry | None = None) -> None:
        from fsspec.implementations.memory import MemoryFile, MemoryFileSystem

        super().__init__(url, retry)
        self._root = "/" + url.partition("://")[2].strip("/")
        self._files: dict[str, Any] = MemoryFileSystem.store
        self._new_file: Callable[[str, bytes], Any] = lambda path, data: MemoryFile(None, path, data)

    def _path(self, key: str) -> str:
        return f"{self._root.rstrip('/')}/{key}"

    def _data(self, key: str) -> memoryview:
        try:
            return memoryview(self._files[self._path(key)].getvalue())
        except KeyError:
            raise ObjectMissing(f"{self.url}: there is no {key}") from None

    def _put(self, key: str, data: bytes | memoryview) -> None:
        self._files[self._path(key)] = self._new_file(self._path(key), bytes(data))

    def _create(self, key: str, data: bytes) -> None:
        # One operation of the interpreter, so exactly one of many threads wins.
        new = self._new_file(self._path(key), data)
        if self._files.setdefault(self._path(key), new) is not new:
            raise ObjectExists(f"{self.url}: {key} exists already")

    def _writer(self, key: str, total_bytes: int) -> Writer:
        return _MemoryWriter(self, key, total_bytes)

    def _read_into(self, key: str, offset: int, into: memoryview) -> None:
        data = self._data(key)[offset : offset + len(into)]
        if len(data) < len(into):
            raise ObjectTooShort(f"{self.url}: {key} ends before byte {offset + len(into)}")
        into[:] = data

    def _get(self, key: str, max_bytes: int) -> bytes:
        return bytes(self._data(key)[:max_bytes])

    def _size(self, key: str) -> int:
        return len(self._data(key))

    def _list(self, prefix: str) -> list[ObjectInfo]:
        start = self._path(prefix)
        return [
            ObjectInfo(path[len(self._path("")) :], len(file.getvalue()), file.modified.timestamp())
            for path, file in list(self._files.items())
            if path.startswith(start)
        ]

    def _delete(self, keys: list[str]) -> None:
        for key in keys:
            self._files.pop(self._path(key), None)

    def _unfinished(self) -> list[Unfinished]:
        return []  # an upload is memory of its writer, and is gone with it

    def _drop(self, upload: Unfinished) -> None:
        return None


class _MemoryWriter(Writer):
    def __init__(self, store: MemoryStore, key: str, total_bytes: int) -> None:
        self._store, self._key, self._total = store, key, total_bytes
        self._data: bytearray | None = bytearray()

    def write(self, data: memoryview) -> None:
        assert self._data is not None
        self._data += data

    def commit(self) -> None:
        assert self._data is not None
        if len(self._data) != self._total:
            raise PermanentStoreError(
                f"{self._key}: {len(self._data)} bytes were written, {self._total} announced"
            )
        self._store.create(self._key, bytes(self._data))
        self._data = None

    def abort(self) -> None:
        self._data = None
