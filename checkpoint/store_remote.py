"""Object stores through fsspec whose create-only put is known to be enforced.

Opened by `store.open_store` only. `s3://` has requests of its own (`store_s3`). `gs://` (gcsfs) and `az://` (adlfs) go
by what every fsspec filesystem offers: an object is sent as a whole, so a writer holds its part in memory. Other
filesystems silently overwrite where they were asked to create, and are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from typing import Any, Final, TypeVar

from everstep.checkpoint.errors import (
    ObjectMissing,
    ObjectTooShort,
    PermanentStoreError,
    StoreDenied,
    StoreError,
    StoreUnusable,
    TransientStoreError,
)
from everstep.checkpoint.store import ObjectInfo, Retry, Store, Unfinished, Writer
from everstep.checkpoint.store_faults import classify
from everstep.checkpoint.upload import PartWriter

T = TypeVar("T")

_CREATE_ONLY: Final = {"gs": "gcsfs", "gcs": "gcsfs", "az": "adlfs", "abfs": "adlfs"}


def open_remote(url: str, options: dict[str, Any], retry: Retry | None) -> Store:
    """The store at a URL with a scheme. Raises StoreUnusable."""
    scheme, _, rest = url.partition("://")
    if not rest.strip("/"):
        raise StoreUnusable(f"storage {url!r} names no bucket; write {scheme}://bucket/folder")
    if scheme in ("s3", "s3a"):
        from everstep.checkpoint.store_s3 import S3Store, s3_options

        return S3Store(url, _filesystem(url, "s3", "everstep[s3]", s3_options(options)), retry)
    if scheme in _CREATE_ONLY:
        return RemoteStore(url, _filesystem(url, scheme, _CREATE_ONLY[scheme], options), retry)
    raise StoreUnusable(
        f"storage {url!r}: fsspec's {scheme!r} does not enforce create-only writes, so two controllers could both "
        "believe that they committed a checkpoint. Use an absolute path, s3://, gs:// or az://."
    )


def _filesystem(url: str, scheme: str, package: str, options: dict[str, Any]) -> Any:
    import fsspec

    try:
        return fsspec.filesystem(scheme, **options, use_listings_cache=False)
    except ImportError as error:
        raise StoreUnusable(f"storage {url!r} needs a package: pip install '{package}'") from error
    except (TypeError, ValueError) as error:
        raise StoreUnusable(f"storage {url!r}: {error}; look at storage_options") from error


class WholeUpload:
    """An upload that is one request: its only part is the object."""

    def __init__(self, store: Store, key: str) -> None:
        self.name = f"{store.url}: {key}"
        self.part_bytes: int | None = None
        self._store, self._key = store, key
        self._data = b""

    def put_part(self, index: int, data: memoryview) -> None:
        self._data = bytes(data)

    def complete(self) -> None:
        self._store.create(self._key, self._data)

    def abort(self) -> None:
        self._data = b""


class RemoteStore(Store):
    """Objects in a bucket, by what every fsspec filesystem offers."""

    def __init__(self, url: str, filesystem: Any, retry: Retry | None = None) -> None:
        super().__init__(url, retry)
        self.fs = filesystem
        self._root = url.partition("://")[2].strip("/")

    def _path(self, key: str) -> str:
        return f"{self._root}/{key}"

    def call(self, key: str, operation: Callable[[], T]) -> T:
        """Perform one request; whatever it raises comes out as a StoreError."""
        try:
            return operation()
        except StoreError:
            raise
        except Exception as error:  # every error of a foreign client is sorted
            raise classify(self.url, key, error) from error

    def _put(self, key: str, data: bytes | memoryview) -> None:
        self.call(key, lambda: self.fs.pipe_file(self._path(key), bytes(data)))

    def _create(self, key: str, data: bytes) -> None:
        self.call(key, lambda: self.fs.pipe_file(self._path(key), data, mode="create"))

    def _writer(self, key: str, total_bytes: int) -> Writer:
        return PartWriter(WholeUpload(self, key), total_bytes, self.retry)

    def _read_into(self, key: str, offset: int, into: memoryview) -> None:
        data = self.call(key, lambda: self.fs.cat_file(self._path(key), offset, offset + len(into)))
        if len(data) != len(into):
            raise ObjectTooShort(f"{self.url}: {key} ends before byte {offset + len(into)}")
        into[:] = data

    def _get(self, key: str, max_bytes: int) -> bytes:
        size = self._size(key)
        return bytes(
            self.call(key, lambda: self.fs.cat_file(self._path(key), 0, min(size, max_bytes)))
            if size
            else b""
        )

    def _size(self, key: str) -> int:
        info = self.call(key, lambda: self.fs.info(self._path(key)))
        if info["type"] != "file":
            raise ObjectMissing(f"{self.url}: there is no {key}")
        return int(info["size"])

    def _list(self, prefix: str) -> list[ObjectInfo]:
        path = self._path(prefix).rstrip("/")
        try:
            found = self.call(prefix, lambda: self.fs.find(path, detail=True))
        except ObjectMissing:
            return []
        return [
            ObjectInfo(name[len(self._root) + 1 :], int(info["size"]), _modified_s(info))
            for name, info in found.items()
            if info["type"] == "file" and name.startswith(path + "/")
        ]

    def _delete(self, keys: list[str]) -> None:
        try:
            self.call(keys[0], lambda: self.fs.rm([self._path(key) for key in keys]))
        except ObjectMissing:
            if len(keys) > 1:  # one that is not there may have kept the others from being deleted
                for key in keys:
                    self._delete([key])

    def _unfinished(self) -> list[Unfinished]:
        return []

    def _drop(self, upload: Unfinished) -> None:
        return None

    def _way_out(self, error: StoreError) -> str:
        if isinstance(error, StoreDenied):
            return (
                "Check the credentials (for S3: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or storage_options) and "
                "that they may write, read, list and delete there, on every node."
            )
        if isinstance(error, TransientStoreError):
            return "Check the network and the endpoint (for S3: AWS_ENDPOINT_URL, or endpoint_url in storage_options)."
        return "Create the bucket, or correct the URL."


def _modified_s(info: dict[str, Any]) -> float:
    for name in ("LastModified", "mtime", "updated", "last_modified", "modified"):
        value = info.get(name)
        if isinstance(value, datetime):
            return value.timestamp()
        if isinstance(value, str):
            return datetime.fromisoformat(value).timestamp()
    raise PermanentStoreError("the store's listing has no modification times")
