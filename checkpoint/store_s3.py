"""`s3://`: objects in an S3 bucket, by single requests of s3fs.

Opened by `store_remote.open_remote` only. The library's own retries are switched off, so that an answer that was lost
is seen here. Large objects go by multipart upload, which is invisible until it is completed.
"""

from __future__ import annotations

import asyncio
import io
from collections.abc import Coroutine, Iterator
from typing import Any, Final, TypeVar

from everstep.checkpoint.errors import (
    ObjectExists,
    ObjectMissing,
    ObjectTooShort,
    PermanentStoreError,
    StoreError,
    StoreUnusable,
    TransientStoreError,
)
from everstep.checkpoint.store import ObjectInfo, Retry, Unfinished, Writer
from everstep.checkpoint.store_faults import kind_of
from everstep.checkpoint.store_remote import RemoteStore, WholeUpload
from everstep.checkpoint.upload import PartWriter

T = TypeVar("T")

PART_BYTES: Final = 8 << 20
"""Size of one upload part; S3 wants at least 5 MiB for all but the last."""
MAX_PARTS: Final = 10_000
"""S3's own limit per object; the size of parts grows with the object to stay below it."""
CONNECT_TIMEOUT_S: Final = 5
READ_TIMEOUT_S: Final = 30
"""Longest silence of the server within one request, seconds."""

READ_BYTES: Final = 256 << 10
"""Bytes that are taken from a connection at once when reading."""
REQUEST_TIMEOUT_S: Final = 300
"""Longest time of one request, however lively its connection is, seconds."""


def s3_options(options: dict[str, Any]) -> dict[str, Any]:
    """`options` for s3fs, with deadlines, and without retries below ours."""
    config: dict[str, Any] = {
        "connect_timeout": CONNECT_TIMEOUT_S,
        "read_timeout": READ_TIMEOUT_S,
        "max_pool_connections": 32,
        "retries": {"total_max_attempts": 1, "mode": "standard"},
    }
    return {**options, "config_kwargs": {**config, **options.get("config_kwargs", {})}}


class S3Store(RemoteStore):
    """Objects in an S3 bucket."""

    def __init__(self, url: str, filesystem: Any, retry: Retry | None = None) -> None:
        super().__init__(url, filesystem, retry)
        filesystem.retries = 1
        self._bucket, _, self._prefix = self._root.partition("/")

    def check(self) -> None:
        """See `Store`. Asks for the bucket first: some servers make a missing one at the first put."""
        try:
            self._run("look for", "the bucket", lambda number: self.request_bucket("", "head_bucket"))
        except ObjectMissing as error:
            raise StoreUnusable(
                f"{self.url}: the bucket {self._bucket!r} does not exist. Create it, or correct the URL."
            ) from error
        except StoreError as error:
            raise StoreUnusable(f"{error} {self._way_out(error)}") from error
        super().check()

    def request(self, key: str, method: str, **arguments: Any) -> Any:
        """One S3 request about `key`. Raises StoreError."""
        return self.perform(
            key, self.fs._call_s3(method, Bucket=self._bucket, Key=self._name(key), **arguments)
        )

    def request_bucket(self, key: str, method: str, **arguments: Any) -> Any:
        """One S3 request about the bucket; `key` is for messages."""
        return self.perform(key, self.fs._call_s3(method, Bucket=self._bucket, **arguments))

    def perform(self, key: str, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run it on fsspec's loop, with a deadline. Raises StoreError."""
        limited = asyncio.wait_for(coroutine, REQUEST_TIMEOUT_S)
        return self.call(key, lambda: asyncio.run_coroutine_threadsafe(limited, self.fs.loop).result())

    def _name(self, key: str) -> str:
        return f"{self._prefix}/{key}".lstrip("/")

    def _put(self, key: str, data: bytes | memoryview) -> None:
        self.request(key, "put_object", Body=bytes(data))

    def _create(self, key: str, data: bytes) -> None:
        self.request(key, "put_object", Body=data, IfNoneMatch="*")

    def _writer(self, key: str, total_bytes: int) -> Writer:
        if total_bytes <= PART_BYTES:
            return PartWriter(WholeUpload(self, key), total_bytes, self.retry)
        return PartWriter(_S3Upload(self, key, total_bytes), total_bytes, self.retry)

    def _read_into(self, key: str, offset: int, into: memoryview) -> None:
        self.perform(key, self._fetch(key, offset, into))

    async def _fetch(self, key: str, offset: int, into: memoryview) -> None:
        wanted = f"bytes={offset}-{offset + len(into) - 1}"
        answer = await self.fs._call_s3("get_object", Bucket=self._bucket, Key=self._name(key), Range=wanted)
        done = 0
        try:
            async for piece in answer["Body"].iter_chunks(READ_BYTES):
                if done + len(piece) > len(into):
                    raise PermanentStoreError(f"{self.url}: {key}: the server sends more than {wanted}")
                into[done : done + len(piece)] = piece
                done += len(piece)
        finally:
            answer["Body"].close()
        if done < len(into):
            # Servers cut a range at the end of the object, and say so; else the connection was cut.
            whole = str(answer.get("ContentRange", "")).rpartition("/")[2]
            if whole.isdigit() and int(whole) < offset + len(into):
                raise ObjectTooShort(f"{self.url}: {key} ends at byte {whole}")
            raise TransientStoreError(f"{self.url}: {key}: {done} of {len(into)} bytes came")

    def _get(self, key: str, max_bytes: int) -> bytes:
        size = min(self._size(key), max_bytes)
        data = bytearray(size)
        if size:
            self._read_into(key, 0, memoryview(data))
        return bytes(data)

    def _size(self, key: str) -> int:
        return int(self.request(key, "head_object")["ContentLength"])

    def _list(self, prefix: str) -> list[ObjectInfo]:
        skip = len(self._name(""))
        return [
            ObjectInfo(entry["Key"][skip:], int(entry["Size"]), entry["LastModified"].timestamp())
            for answer in self._pages(
                prefix, "list_objects_v2", [("NextContinuationToken", "ContinuationToken")]
            )
            for entry in answer.get("Contents") or ()
            if not entry["Key"].endswith("/")
        ]

    def _pages(self, prefix: str, method: str, marks: list[tuple[str, str]]) -> Iterator[Any]:
        more: dict[str, str] = {}
        while True:
            answer = self.request_bucket(prefix, method, Prefix=self._name(prefix), **more)
            yield answer
            if not answer.get("IsTruncated"):
                return
            before, more = more, {argument: answer[mark] for mark, argument in marks if answer.get(mark)}
            if more in ({}, before):
                raise PermanentStoreError(f"{self.url}: the listing of {prefix!r} has no end")

    def _delete(self, keys: list[str]) -> None:
        for first in range(0, len(keys), 1000):
            names = [{"Key": self._name(key)} for key in keys[first : first + 1000]]
            answer = self.request_bucket(
                keys[first], "delete_objects", Delete={"Objects": names, "Quiet": True}
            )
            for error in answer.get("Errors") or ():
                code = error.get("Code", "")
                raise kind_of(code)(
                    f"{self.url}: delete {error.get('Key')}: {code} {error.get('Message', '')}"
                )

    def _unfinished(self) -> list[Unfinished]:
        skip = len(self._name(""))
        marks = [("NextKeyMarker", "KeyMarker"), ("NextUploadIdMarker", "UploadIdMarker")]
        return [
            Unfinished(entry["Key"][skip:], entry["UploadId"], entry["Initiated"].timestamp())
            for answer in self._pages("", "list_multipart_uploads", marks)
            for entry in answer.get("Uploads") or ()
        ]

    def _drop(self, upload: Unfinished) -> None:
        try:
            self.request(upload.key, "abort_multipart_upload", UploadId=upload.token)
        except ObjectMissing:
            pass


class _S3Upload:
    """A multipart upload."""

    def __init__(self, store: S3Store, key: str, total_bytes: int) -> None:
        self.name = f"{store.url}: {key}"
        self.part_bytes: int | None = max(PART_BYTES, -(-total_bytes // (MAX_PARTS - 1)))
        self._store, self._key, self._total = store, key, total_bytes
        self._tags: dict[int, str] = {}
        self._id: str = store.request(key, "create_multipart_upload")["UploadId"]

    def put_part(self, index: int, data: memoryview) -> None:
        answer = self._store.request(
            self._key, "upload_part", UploadId=self._id, PartNumber=index + 1, Body=io.BytesIO(data)
        )
        self._tags[index] = answer["ETag"]

    def complete(self) -> None:
        parts = [{"PartNumber": index + 1, "ETag": tag} for index, tag in sorted(self._tags.items())]

        def attempt(number: int) -> None:
            try:
                self._store.request(
                    self._key,
                    "complete_multipart_upload",
                    UploadId=self._id,
                    MultipartUpload={"Parts": parts},
                    IfNoneMatch="*",
                )
            except (ObjectMissing, ObjectExists):
                # The upload is gone: an earlier try whose answer was lost has completed it.
                if number == 0 or self._store._size(self._key) != self._total:
                    raise

        self._store.retry.run(attempt, f"{self.name}: complete")

    def abort(self) -> None:
        self._store.drop([Unfinished(self._key, self._id, 0.0)])
