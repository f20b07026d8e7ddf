"""Stores: create-only, retried with jitter by the kind of error, checked before a run, and named in what they raise."""

from __future__ import annotations

import errno
import os
import pickle
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from everstep.checkpoint import errors, store_faults
from everstep.checkpoint.bandwidth import Bandwidth
from everstep.checkpoint.errors import (
    ObjectExists,
    ObjectMissing,
    ObjectTooLarge,
    ObjectTooShort,
    PermanentStoreError,
    StoreDenied,
    StoreUnusable,
    TransientStoreError,
)
from everstep.checkpoint.store import Retry, Store, check_key, open_store
from everstep.checkpoint.upload import PARTS_IN_FLIGHT, PartWriter
from tests.unit.ck_helpers import NO_WAIT, Mortal


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "folder":
        return open_store(f"file://{tmp_path}/deep/run", retry=NO_WAIT)
    store = open_store(f"memory://{tmp_path.name}", retry=NO_WAIT)
    store.delete([info.key for info in store.listing("")])
    return store


def test_objects_come_back_whole_in_ranges_and_in_lists(store: Store) -> None:
    assert store.listing("") == [] and store.unfinished() == []
    store.check()
    assert store.listing("") == []
    store.put("a/b", b"0123456789")
    store.put("a/b", b"abcdefghij")
    store.create("a/c", b"")
    with store.writer("z", 6) as writer:
        for piece in (b"uv", b"", b"wxyz"):
            writer.write(memoryview(piece))
        writer.commit()
    into = bytearray(4)
    store.read_into("a/b", 3, memoryview(into))
    assert bytes(into) == b"defg" and store.get("a/b", 10) == b"abcdefghij" and store.get("z", 6) == b"uvwxyz"
    assert [(info.key, info.size) for info in store.listing("")] == [("a/b", 10), ("a/c", 0), ("z", 6)]
    assert [info.key for info in store.listing("a/")] == ["a/b", "a/c"] and store.size("a/b") == 10
    assert abs(store.clock_s() - store.listing("a/")[0].modified_s) < 60
    store.delete(["a/b", "nothing", "a/c"])
    assert [info.key for info in store.listing("")] == ["z"]


def test_what_is_not_there_is_named(store: Store) -> None:
    store.put("a", b"12345")
    for act in (
        lambda: store.get("b/c", 9),
        lambda: store.size("b"),
        lambda: store.read_into("b", 0, memoryview(bytearray(1))),
    ):
        with pytest.raises(ObjectMissing, match="there is no b"):
            act()
    with pytest.raises(ObjectTooLarge, match="larger than 4"):
        store.get("a", 4)
    with pytest.raises(ObjectTooShort, match="ends before byte 6"):
        store.read_into("a", 3, memoryview(bytearray(3)))


def test_an_object_that_is_there_is_never_replaced_by_create_or_a_writer(store: Store) -> None:
    store.create("a", b"first")
    with pytest.raises(ObjectExists):
        store.create("a", b"second")
    with pytest.raises(ObjectExists), store.writer("a", 2) as writer:
        writer.write(memoryview(b"xy"))
        writer.commit()
    assert store.get("a", 99) == b"first" and store.unfinished() == []


def test_of_many_creators_one_wins(store: Store) -> None:
    def one(number: int) -> bool:
        try:
            store.create("seat", str(number).encode())
            return True
        except ObjectExists:
            return False

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(one, range(32))) == 1


def test_what_was_not_committed_is_not_visible_and_leaves_nothing(store: Store) -> None:
    with pytest.raises(RuntimeError), store.writer("a", 9) as writer:
        writer.write(memoryview(b"half"))
        raise RuntimeError
    with (
        pytest.raises(PermanentStoreError, match="4 bytes were written, 9 announced"),
        store.writer("a", 9) as writer,
    ):
        writer.write(memoryview(b"half"))
        writer.commit()
    assert store.listing("") == [] and store.unfinished() == []


def test_uploads_of_dead_writers_are_found_and_dropped(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    dead = store.writer("steps/1/x", 9)
    dead.write(memoryview(b"half"))
    [upload] = store.unfinished()
    assert upload.key == "steps/1/x" and store.listing("") == []
    store.drop([upload, upload])
    assert store.unfinished() == [] and list(tmp_path.iterdir()) == []
    dead.abort()


@pytest.mark.parametrize(
    "key", ["", "/a", "a/", "a//b", "../a", "a/../b", ".a", "a/.b", "a b", "a\n", "ä", "x" * 600]
)
def test_keys_that_could_leave_the_store_are_refused(store: Store, key: str) -> None:
    for act in (
        lambda: check_key(key),
        lambda: store.put(key, b""),
        lambda: store.get(key, 1),
        lambda: store.delete([key]),
    ):
        with pytest.raises(PermanentStoreError, match="not an object key"):
            act()


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("relative/folder", "absolute path"),
        ("file://relative", "absolute path"),
        ("~/x", "absolute path"),
        ("", "absolute path"),
        ("ftp://host/x", "create-only"),
        ("http://host/x", "create-only"),
        ("github://x", "create-only"),
        ("s3://", "names no bucket"),
    ],
)
def test_a_url_that_cannot_work_is_refused_with_the_way_out(url: str, words: str) -> None:
    with pytest.raises(StoreUnusable, match=words) as caught:
        open_store(url)
    assert repr(url) in str(caught.value)


@pytest.fixture
def plain_user() -> Iterator[None]:
    """Somebody to whom permissions apply."""
    if os.geteuid() != 0:
        yield
        return
    os.seteuid(65534)
    yield
    os.seteuid(0)


def test_a_read_only_folder_is_refused_before_a_run(tmp_path: Path, plain_user: None) -> None:
    # A folder of root's, or one of ours without permission to write.
    folder = Path("/usr/everstep") if os.getuid() == 0 else tmp_path / "no"
    if os.getuid() != 0:
        folder.mkdir(mode=0o500)
    with pytest.raises(
        StoreUnusable, match=r"Permission denied.*Give the user of the training processes write"
    ):
        open_store(str(folder)).check()


def test_a_folder_below_a_file_or_on_a_full_disk_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreUnusable, match="folder that every node"):
        open_store(str(tmp_path / "file" / "run"), retry=NO_WAIT).check()

    def full(*arguments: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StoreUnusable, match="No space left"):
        open_store(str(tmp_path / "run"), retry=NO_WAIT).check()
    monkeypatch.undo()
    assert open_store(str(tmp_path / "run")).unfinished() == []


def test_a_filesystem_without_hard_links_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*arguments: Any) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "link", no_links)
    with pytest.raises(StoreUnusable, match="no hard links"):
        open_store(str(tmp_path), retry=NO_WAIT).check()


def test_a_link_whose_answer_was_lost_counts_as_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    link = os.link

    def lost(*arguments: Any) -> None:
        link(*arguments)
        raise FileExistsError(errno.EEXIST, "asked again")

    monkeypatch.setattr(os, "link", lost)
    store = open_store(str(tmp_path), retry=NO_WAIT)
    store.create("a", b"mine")
    with pytest.raises(ObjectExists):
        store.create("a", b"other")
    assert store.get("a", 9) == b"mine"


class Overwriting(Mortal):
    def _create(self, key: str, data: bytes) -> None:
        self.inner._put(key, data)


def test_a_store_that_overwrites_is_refused() -> None:
    inner = open_store("memory://overwriting", retry=NO_WAIT)
    with pytest.raises(StoreUnusable, match="two writers could both believe"):
        Overwriting(inner, 1 << 60).check()


class Flaky(Mortal):
    """Fails so many times first; `late`: after it took effect, as when an answer is lost."""

    def __init__(
        self, inner: Store, failures: int, error: Callable[[str], Exception], *, late: bool, retry: Retry
    ) -> None:
        super().__init__(inner, 1 << 60)
        self.retry, self.failures, self.error, self.late = retry, failures, error, late

    def tick(self, operation: Any) -> Any:
        self.count += 1
        if self.failures > 0:
            self.failures -= 1
            if self.late:
                operation()
            raise self.error("no answer")
        return operation()


def recording(delays: list[float], **options: Any) -> Retry:
    return Retry(sleep=delays.append, uniform=lambda low, high: high, **options)


def test_transient_errors_are_tried_again_with_growing_delays_within_the_budget() -> None:
    delays: list[float] = []
    store = Flaky(
        open_store("memory://flaky"), 4, TransientStoreError, late=False, retry=recording(delays, cap_s=0.5)
    )
    store.put("a", b"x")
    assert delays == [0.1, 0.2, 0.4, 0.5]
    store.failures = 99
    with pytest.raises(TransientStoreError, match="gave up after 10 tries"):
        store.get("a", 9)
    now = [0.0]
    spent: list[float] = []
    retry = Retry(
        clock=lambda: now[0],
        sleep=lambda s: (spent.append(s), now.__setitem__(0, now[0] + s))[0],
        budget_s=1,
        base_s=1,
    )
    with pytest.raises(TransientStoreError, match="gave up"):
        retry.run(lambda number: (_ for _ in ()).throw(TransientStoreError("busy")), "it")
    assert sum(spent) <= 1


def test_delays_are_spread_over_the_whole_interval() -> None:
    bounds: list[tuple[float, float]] = []
    retry = Retry(sleep=lambda s: None, uniform=lambda low, high: bounds.append((low, high)) or 0.0)  # type: ignore[func-returns-value]
    with pytest.raises(TransientStoreError):
        retry.run(lambda number: (_ for _ in ()).throw(TransientStoreError("busy")), "it")
    assert bounds[0] == (0, 0.1) and bounds[-1] == (0, 5.0) and len(bounds) == 10


@pytest.mark.parametrize(
    "error", [PermanentStoreError, StoreDenied, ObjectMissing, ObjectTooShort, ObjectExists]
)
def test_what_would_fail_again_is_not_tried_again(error: type[Exception]) -> None:
    delays: list[float] = []
    store = Flaky(open_store("memory://flaky"), 1, error, late=False, retry=recording(delays))
    with pytest.raises(error):
        store.put("a", b"x")
    assert delays == [] and store.count == 1


def test_a_create_whose_answer_was_lost_is_known_for_our_own() -> None:
    inner = open_store("memory://lost", retry=NO_WAIT)
    inner.delete(["a", "b"])
    store = Flaky(inner, 2, TransientStoreError, late=False, retry=NO_WAIT)
    store.late = True
    store.failures = 1
    store.create("a", b"mine")
    inner.create("b", b"another's")
    store.late, store.failures = False, 1
    with pytest.raises(ObjectExists):
        store.create("b", b"mine")
    with pytest.raises(ObjectExists):
        store.create("a", b"mine")  # a new call is a new writer


class FakeUpload:
    name = "memory: upload"

    def __init__(self, part_bytes: int | None, fail: int = 0) -> None:
        self.part_bytes, self.fail = part_bytes, fail
        self.parts: dict[int, bytes] = {}
        self.done = self.aborted = False
        self.sending = self.most = 0
        self.lock = threading.Lock()

    def put_part(self, index: int, data: memoryview) -> None:
        with self.lock:
            self.sending += 1
            self.most = max(self.most, self.sending)
            failing = self.fail > 0
            self.fail -= 1
        self.parts[index] = bytes(data)
        with self.lock:
            self.sending -= 1
        if failing:
            raise TransientStoreError("cut")

    def complete(self) -> None:
        self.done = True

    def abort(self) -> None:
        self.aborted = True


@pytest.mark.parametrize("total", [0, 1, 9, 10, 11, 95, 100])
@pytest.mark.parametrize("piece", [1, 7, 10, 100])
def test_whatever_the_pieces_are_parts_hold_the_object_in_order(total: int, piece: int) -> None:
    data = bytes(range(total))
    upload = FakeUpload(10, fail=2)
    with PartWriter(upload, total, NO_WAIT) as writer:
        scratch = bytearray(piece)
        for first in range(0, total, piece):
            size = len(data[first : first + piece])
            scratch[:size] = data[first : first + size]
            writer.write(memoryview(scratch)[:size])
        writer.commit()
    assert b"".join(upload.parts[index] for index in sorted(upload.parts)) == data
    assert upload.done and not upload.aborted and upload.most <= PARTS_IN_FLIGHT
    assert all(len(upload.parts[index]) == 10 for index in sorted(upload.parts)[:-1])


def test_an_upload_that_cannot_go_on_is_aborted() -> None:
    upload = FakeUpload(10, fail=10_000)
    with pytest.raises(TransientStoreError, match="part"), PartWriter(upload, 100, NO_WAIT) as writer:
        writer.write(memoryview(bytes(100)))
        writer.commit()
    assert upload.aborted and not upload.done
    with (
        pytest.raises(PermanentStoreError, match="more than the announced"),
        PartWriter(FakeUpload(10), 5, NO_WAIT) as writer,
    ):
        writer.write(memoryview(bytes(6)))


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("SlowDown", "503", TransientStoreError),
        ("", "500", TransientStoreError),
        ("", "429", TransientStoreError),
        ("ConditionalRequestConflict", "409", TransientStoreError),
        ("PreconditionFailed", "412", ObjectExists),
        ("NoSuchKey", "404", ObjectMissing),
        ("NoSuchUpload", "404", ObjectMissing),
        ("AccessDenied", "403", StoreDenied),
        ("SignatureDoesNotMatch", "403", StoreDenied),
        ("InvalidRange", "416", ObjectTooShort),
        ("", "301", PermanentStoreError),
        ("RequestTimeTooSkewed", "403", TransientStoreError),
        ("EntityTooLarge", "400", PermanentStoreError),
    ],
)
def test_answers_of_s3_are_sorted(code: str, status: str, kind: type[Exception]) -> None:
    assert store_faults.kind_of(code, status) is kind


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError("x"), ObjectMissing),
        (FileExistsError("x"), ObjectExists),
        (PermissionError("x"), StoreDenied),
        (ConnectionResetError("x"), TransientStoreError),
        (TimeoutError("x"), TransientStoreError),
        (KeyError("x"), PermanentStoreError),
    ],
)
def test_what_clients_raise_is_sorted(error: Exception, kind: type[Exception]) -> None:
    assert type(store_faults.classify("s3://b", "k", error)) is kind


def test_all_errors_survive_pickling() -> None:
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, Exception):
            again = pickle.loads(pickle.dumps(kind(f"{name} happened")))
            assert type(again) is kind and str(again) == f"{name} happened"


def test_bytes_per_second_are_bounded_on_average_and_in_a_burst() -> None:
    now = 0.0
    bandwidth = Bandwidth(1000, burst_bytes=500, clock=lambda: now)
    sent = 0
    for _ in range(100):
        now += bandwidth.delay_s(100)
        sent += 100
        assert sent <= 500 + 1000 * now + 1e-6
    assert now == pytest.approx((10_000 - 500) / 1000)
    with pytest.raises(ValueError, match="positive"):
        Bandwidth(0)
