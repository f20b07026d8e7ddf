"""A folder as a store of objects: a local disk, or a network filesystem with POSIX rename and hard links.

Opened by `store.open_store` only. An object is written under a temporary name, forced to disk, and then given its name
by `link`, which never replaces another, or by `rename` where it may; the folder is forced to disk as well. Files whose name begins
with a dot are uploads in the making, never objects.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from everstep.checkpoint.errors import (
    ObjectExists,
    ObjectMissing,
    ObjectTooShort,
    PermanentStoreError,
    StoreDenied,
    StoreError,
    TransientStoreError,
)
from everstep.checkpoint.store import ObjectInfo, Retry, Store, Unfinished, Writer

_TRANSIENT: Final = {
    *[errno.EAGAIN, errno.EINTR, errno.EBUSY, errno.EIO, errno.ETIMEDOUT, errno.ESTALE, errno.ENOLCK],
    *[errno.ENFILE, errno.EMFILE, errno.ECONNRESET, errno.ENETUNREACH, errno.EHOSTDOWN],
}
_DENIED: Final = {errno.EACCES, errno.EPERM, errno.EROFS}
_TEMPORARY: Final = ".upload-"


class LocalStore(Store):
    """Objects are the files below `root`, which is made when the first object is written."""

    def __init__(self, root: str, retry: Retry | None = None) -> None:
        super().__init__(root, retry)
        self._root = Path(root)

    def _path(self, key: str) -> Path:
        return self._root / key

    @contextmanager
    def _named(self, key: str) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError as error:
            raise ObjectMissing(f"{self.url}: there is no {key}") from error
        except OSError as error:
            raise _classify(self.url, key, error) from error

    def _put(self, key: str, data: bytes | memoryview) -> None:
        with self._named(key):
            temporary = self._write_temporary(key, data)
            try:
                temporary.replace(self._path(key))
            except OSError:
                temporary.unlink(missing_ok=True)
                raise
            _sync_folder(self._path(key).parent)

    def _create(self, key: str, data: bytes) -> None:
        with self._named(key):
            if self._path(key).exists():
                raise ObjectExists(f"{self.url}: {key} exists already")
            temporary = self._write_temporary(key, data)
            try:
                self.link(temporary, key)
            finally:
                temporary.unlink(missing_ok=True)
            _sync_folder(self._path(key).parent)

    def link(self, temporary: Path, key: str) -> None:
        """Give a finished file its name, unless that is taken."""
        try:
            os.link(temporary, self._path(key))
        except FileExistsError as error:
            # A network filesystem whose first answer was lost has linked it and says so only now.
            if not _is_same(temporary, self._path(key)):
                raise ObjectExists(f"{self.url}: {key} exists already") from error
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.ENOTSUP, errno.EMLINK):
                raise
            raise PermanentStoreError(
                f"{self.url}: this filesystem has no hard links, which create-only writes need"
            ) from error

    def _write_temporary(self, key: str, data: bytes | memoryview) -> Path:
        temporary, descriptor = self.open_temporary(key)
        try:
            _write_all(descriptor, memoryview(data))
            os.fsync(descriptor)
        except OSError:
            temporary.unlink(missing_ok=True)
            raise
        finally:
            os.close(descriptor)
        return temporary

    def open_temporary(self, key: str) -> tuple[Path, int]:
        """A new file beside where `key` will be: its path and descriptor."""
        path = self._path(key)
        temporary = path.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}-{path.name}")
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL
        for _ in range(10):
            try:
                _make_folder(path.parent)
                return temporary, os.open(temporary, flags, 0o666)
            except FileNotFoundError:
                continue  # somebody who deletes has just removed the folder because it was empty
        return temporary, os.open(temporary, flags, 0o666)

    def _writer(self, key: str, total_bytes: int) -> Writer:
        with self._named(key):
            return _LocalWriter(self, key, total_bytes)

    def _read_into(self, key: str, offset: int, into: memoryview) -> None:
        with self._named(key):
            descriptor = os.open(self._path(key), os.O_RDONLY)
            try:
                done = 0
                while done < len(into):
                    got = os.preadv(descriptor, [into[done:]], offset + done)
                    if got == 0:
                        raise ObjectTooShort(f"{self.url}: {key} ends before byte {offset + len(into)}")
                    done += got
            finally:
                os.close(descriptor)

    def _get(self, key: str, max_bytes: int) -> bytes:
        with self._named(key), self._path(key).open("rb") as file:
            return file.read(max_bytes)

    def _size(self, key: str) -> int:
        with self._named(key):
            return self._path(key).stat().st_size

    def _list(self, prefix: str) -> list[ObjectInfo]:
        return [
            ObjectInfo(path.relative_to(self._root).as_posix(), stat.st_size, stat.st_mtime)
            for path, stat in self._walk(prefix)
            if not path.name.startswith(".")
        ]

    def _walk(self, prefix: str) -> list[tuple[Path, os.stat_result]]:
        found = []

        def refuse(error: OSError) -> None:
            if not isinstance(error, FileNotFoundError):
                raise error

        with self._named(prefix):
            for folder, _, names in os.walk(self._root / prefix, onerror=refuse):
                for name in names:
                    path = Path(folder, name)
                    try:
                        found.append((path, path.stat()))
                    except FileNotFoundError:
                        continue  # deleted, or given its name, since the folder was read
        return found

    def _delete(self, keys: list[str]) -> None:
        for key in keys:
            with self._named(key):
                self._path(key).unlink(missing_ok=True)
        for folder in {self._path(key).parent for key in keys}:
            self._remove_empty(folder)

    def _remove_empty(self, folder: Path) -> None:
        while folder != self._root and self._root in folder.parents:
            try:
                folder.rmdir()
            except OSError:
                return  # not empty, or not ours to remove: a folder is no object
            folder = folder.parent

    def _unfinished(self) -> list[Unfinished]:
        return [
            Unfinished(
                path.with_name(path.name[len(_TEMPORARY) + 17 :]).relative_to(self._root).as_posix(),
                str(path),
                stat.st_mtime,
            )
            for path, stat in self._walk("")
            if path.name.startswith(_TEMPORARY)
        ]

    def _drop(self, upload: Unfinished) -> None:
        with self._named(upload.key):
            Path(upload.token).unlink(missing_ok=True)
        self._remove_empty(Path(upload.token).parent)

    def _way_out(self, error: StoreError) -> str:
        if isinstance(error, StoreDenied):
            return "Give the user of the training processes write permission there, or choose another folder."
        return "Storage must be a folder that every node of the cluster can write, or an s3:// URL."


class _LocalWriter(Writer):
    def __init__(self, store: LocalStore, key: str, total_bytes: int) -> None:
        self._store, self._key, self._total = store, key, total_bytes
        self._path = Path(store.url) / key
        self._written = 0
        temporary, descriptor = store.open_temporary(key)
        self._temporary: Path | None = temporary
        self._descriptor: int | None = descriptor

    def write(self, data: memoryview) -> None:
        assert self._descriptor is not None
        self._guarded(lambda: _write_all(self._descriptor or 0, data))
        self._written += len(data)

    def commit(self) -> None:
        assert self._descriptor is not None and self._temporary is not None
        if self._written != self._total:
            raise PermanentStoreError(
                f"{self._store.url}: {self._key}: {self._written} bytes were written, {self._total} announced"
            )
        temporary, descriptor = self._temporary, self._descriptor

        def finish() -> None:
            os.fsync(descriptor)
            self._store.link(temporary, self._key)
            temporary.unlink()
            _sync_folder(self._path.parent)

        self._guarded(finish)
        self._temporary = None
        self._guarded(self._close)

    def abort(self) -> None:
        temporary, self._temporary = self._temporary, None
        try:
            self._close()
            if temporary is not None:
                temporary.unlink(missing_ok=True)
        except OSError:
            pass  # it is found by `Store.unfinished` later; what made the caller abort says more

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)

    def _guarded(self, operation: Callable[[], None]) -> None:
        try:
            operation()
        except OSError as error:
            raise _classify(self._store.url, self._key, error) from error


def _classify(url: str, key: str, error: OSError) -> StoreError:
    message = f"{url}: {key}: {error.strerror or error}."
    if error.errno in _TRANSIENT:
        return TransientStoreError(message)
    if error.errno in _DENIED:
        return StoreDenied(message)
    return PermanentStoreError(message)


def _is_same(one: Path, other: Path) -> bool:
    try:
        return one.samefile(other)
    except FileNotFoundError:
        return False


def _write_all(descriptor: int, data: memoryview) -> None:
    while len(data):
        data = data[os.write(descriptor, data) :]


def _make_folder(folder: Path) -> None:
    """Like `mkdir -p`, and durable: a new name is only safe once its parent folder is on disk."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    try:
        folder.mkdir()
    except FileExistsError:
        if not folder.is_dir():
            raise
    _sync_folder(folder.parent)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
