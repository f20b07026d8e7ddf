"""The serving side of the state transfer: strangers get nothing, nonsense gets an error, and withdrawn means withdrawn."""

from __future__ import annotations

import errno
import itertools
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from everstep.actors import transfer, transfer_protocol
from everstep.actors.transfer import Fetch, StateServer, ping
from everstep.actors.transfer_protocol import Connection, connect
from everstep.checkpoint.hashing import ByteSpace
from everstep.checkpoint.state import RegisteredState
from everstep.errors import InternalError, StateError, StateMismatch, TransferFailed
from tests.procs.test_transfer import SMALL, STRIPE, TOKEN, VERSION, Address, joiner, make_state


@pytest.fixture
def no_cancel() -> threading.Event:
    return threading.Event()


@pytest.fixture
def server() -> Iterator[StateServer]:
    with StateServer("127.0.0.1", TOKEN) as server:
        server.offer(VERSION, make_state(STRIPE, filled=True).capture())
        yield server
        assert ping(server.address, TOKEN, timeout_s=5) == os.getpid()


def talk(server: StateServer, request: Any) -> dict[str, Any]:
    with connect(server.address, TOKEN, silent_s=5) as connection:
        connection.send_header(request)
        return connection.receive_header()


def ask(server: StateServer, **request: Any) -> dict[str, Any]:
    layout = talk(server, {"op": "layout", "version": VERSION, "known": "", "wait_s": 0})["layout"]
    return talk(server, {"version": VERSION, "layout": layout, **request})


@pytest.mark.parametrize(
    "request_",
    [
        {"op": "stripe", "offset": -1, "length": 10},
        {"op": "stripe", "offset": 0, "length": 0},
        {"op": "stripe", "offset": 0, "length": -5},
        {"op": "stripe", "offset": 0, "length": 1 << 62},
        {"op": "stripe", "offset": 1 << 62, "length": 1},
        {"op": "stripe", "offset": STRIPE * 2, "length": 1},
        {"op": "stripe", "offset": True, "length": 1},
        {"op": "stripe", "offset": 0.0, "length": 1},
        {"op": "stripe", "offset": "0", "length": None},
        {"op": "stripe"},
        {"op": "layout", "wait_s": -1},
        {"op": "layout", "wait_s": 1e308},
        {"op": "layout", "wait_s": float("nan")},
        {"op": "layout", "wait_s": "1"},
        {"op": "layout", "version": None},
        {"op": "layout", "version": "x" * 1000},
        {"op": "eval", "code": "1"},
        {"op": None},
        {},
    ],
    ids=str,
)
def test_bad_requests_get_an_error(server: StateServer, request_: dict[str, Any]) -> None:
    reply = ask(server, **request_)
    assert reply["error"] == "bad_request" and reply["ok"] is False


def test_unknown_versions_and_other_layouts_are_not_served(server: StateServer) -> None:
    assert ask(server, op="stripe", offset=0, length=1, version="other")["error"] == "gone"
    assert ask(server, op="stripe", offset=0, length=1, layout="other")["error"] == "gone"
    assert ask(server, op="layout", wait_s=0.05, version="other")["error"] == "not_offered"


def closes(address: Address, data: bytes) -> bytes:
    """What the server says to `data` before it closes the connection."""
    with socket.create_connection(address, timeout=10) as sock:
        sock.sendall(data)
        answer = b""
        try:
            while part := sock.recv(4096):
                answer += part
        except ConnectionResetError:
            pass
        return answer


def header(value: Any) -> bytes:
    raw = value if isinstance(value, bytes) else json.dumps(value).encode()
    return struct.pack(">I", len(raw)) + raw


HELLO = header({"op": "hello", "token": TOKEN.hex()})
STRANGERS = [
    header({"op": "hello", "token": b"guess".hex()}),
    header({"op": "hello"}),
    header({"op": "hello", "token": None}),
    header({"op": "hello", "token": "\udcff"}),
    header({"op": "ping", "token": TOKEN.hex()}),
    header([]),
    header(b"[" * 4000),
    header(b"9" * 4096),
    header(b"\xff\xfe"),
    header(b""),
    b"\xff\xff\xff\xff" + b"x" * 100,
    b"GET / HTTP/1.1\r\n\r\n",
]


@pytest.mark.parametrize("data", STRANGERS, ids=lambda data: repr(data[:40]))
def test_strangers_get_nothing_but_a_closed_connection(server: StateServer, data: bytes) -> None:
    assert closes(server.address, data) == b""


def test_who_says_nothing_is_closed(server: StateServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "HELLO_S", 0.3)
    started = time.monotonic()
    assert closes(server.address, HELLO[:7]) == b""
    assert time.monotonic() - started < 5


def test_fuzzed_bytes_never_stop_the_server(server: StateServer) -> None:
    tame = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.text(max_size=5) | st.just(VERSION)
    names = st.sampled_from(["op", "version", "offset", "length", "known", "wait_s", "layout"])
    ops = st.sampled_from(["stripe", "layout", "ping", "hello", "?"])
    requests = st.dictionaries(names, tame, max_size=6) | st.fixed_dictionaries(
        {"op": ops, "version": st.just(VERSION)}
    )

    @settings(max_examples=60, deadline=None)
    @given(st.booleans(), st.lists(requests.map(header) | st.binary(max_size=40), max_size=4))
    def fuzz(knows_token: bool, parts: list[bytes]) -> None:
        with socket.create_connection(server.address, timeout=10) as sock:
            try:
                sock.sendall((HELLO if knows_token else b"") + b"".join(parts))
                sock.shutdown(socket.SHUT_WR)
                while sock.recv(1 << 16):
                    pass
            except (ConnectionError, TimeoutError) as error:
                assert not isinstance(error, TimeoutError)
            except OSError as error:
                assert error.errno == errno.ENOTCONN  # the server was faster

    fuzz()


def test_connections_are_bounded() -> None:
    with StateServer("127.0.0.1", TOKEN, max_connections=3) as server:
        held = [connect(server.address, TOKEN, silent_s=5) for _ in range(3)]
        with pytest.raises(TransferFailed, match="too many readers"):
            ping(server.address, TOKEN)
        held.pop().close()
        deadline = time.monotonic() + 10
        while True:
            try:
                assert ping(server.address, TOKEN) == os.getpid()
                break
            except TransferFailed:
                assert time.monotonic() < deadline
        for connection in held:
            connection.close()


def stuck_reader(server: StateServer) -> Connection:
    """A connection that asked for everything and takes nothing."""
    connection = connect(server.address, TOKEN, silent_s=1)
    connection.send_header({"op": "layout", "version": VERSION, "known": "", "wait_s": 0})
    reply = connection.receive_header()
    connection.receive_into([memoryview(bytearray(reply["length"]))])
    request = {
        "op": "stripe",
        "version": VERSION,
        "layout": reply["layout"],
        "offset": 0,
        "length": SMALL - STRIPE,
    }
    connection.send_header(request)
    connection.receive_header()
    return connection


def test_withdraw_does_not_wait_for_a_stuck_reader() -> None:
    with StateServer("127.0.0.1", TOKEN, grace_s=0.1) as server:
        server.offer(VERSION, make_state(SMALL, filled=True).capture())
        with stuck_reader(server) as connection:
            started = time.monotonic()
            server.withdraw()
            assert time.monotonic() - started < 5
            with pytest.raises(OSError):  # cut; or "gone" and nothing more, if the reader was not stuck yet
                connection.receive_into([memoryview(bytearray(SMALL - STRIPE))])
        assert ping(server.address, TOKEN) == os.getpid()


@pytest.mark.parametrize("after_chunks", [1, 2, 9, 17])
def test_memory_that_changes_after_withdraw_never_reaches_a_joiner(
    after_chunks: int, no_cancel: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Withdrawn in the middle of a stripe, and scribbled over at once: what the joiner keeps is the old state."""
    snapshot = make_state(SMALL, filled=True).capture()
    offsets = snapshot.plan().offsets
    old = ByteSpace([tensor.clone() for tensor in snapshot.tensors], offsets)
    reached, count, true_hash = threading.Event(), itertools.count(1), transfer.hash64

    def hash64(chunk: list[memoryview]) -> int:
        if next(count) == after_chunks:
            reached.set()
            while server._offer is not None:  # withdraw has begun, and waits for us
                time.sleep(0.001)
        return true_hash(chunk)

    def scribble() -> None:
        reached.wait(30)
        server.withdraw()
        for tensor in snapshot.tensors:
            tensor.fill_(7)

    fetch, _ = joiner(stripe_bytes=8 << 20)
    with StateServer("127.0.0.1", TOKEN, grace_s=30) as server:
        server.offer(VERSION, snapshot)
        monkeypatch.setattr(transfer, "hash64", hash64)
        trainer = threading.Thread(target=scribble)
        trainer.start()
        with pytest.raises(TransferFailed, match=r"withdrew|not offer"):
            fetch.run([server.address], no_cancel, 30)
        trainer.join()
    held = {0, 1, 2} - set(fetch.missing)
    assert len(held) == after_chunks // 8
    for number in held:
        for ours, theirs in zip(
            fetch.space.views(*fetch.stripe(number)), old.views(*fetch.stripe(number)), strict=True
        ):
            assert ours == theirs


def test_a_new_offer_replaces_the_old_one(server: StateServer, no_cancel: threading.Event) -> None:
    other = make_state(2 * STRIPE, filled=True)
    server.offer("history:8", other.capture())
    fetch = Fetch("history:8", state := make_state(2 * STRIPE, filled=False), TOKEN)
    fetch.run([server.address], no_cancel, 10)
    fetch.load()
    assert state.digest(state.capture()) == other.digest(other.capture())
    with pytest.raises(TransferFailed, match="not complete within"):
        joiner(STRIPE)[0].run([server.address], no_cancel, 0.2)


def test_prepared_buffers_are_the_ones_that_are_filled(
    server: StateServer, no_cancel: threading.Event
) -> None:
    fetch, state = joiner(STRIPE)
    older = make_state(STRIPE, filled=True).capture().layout()
    fetch.prepare(json.loads(json.dumps(older)))
    prepared = {t.data_ptr() for t in fetch._reusable if t.numel()}
    fetch.retarget(VERSION)
    fetch.run([server.address], no_cancel, 10)
    fetch.load()
    assert {t.data_ptr() for t in state.capture().tensors if t.numel()} == prepared


def test_a_source_with_another_state_is_left_out(server: StateServer, no_cancel: threading.Event) -> None:
    other = make_state(STRIPE, filled=True)
    other.capture().tensors[0].add_(1)
    other._objects["moments"].state["lr"] = 0.2
    with StateServer("127.0.0.1", TOKEN) as odd:
        fetch, state = joiner(STRIPE)
        fetch.run([server.address], no_cancel, 10)
        fetch.missing.append(0)
        odd.offer(VERSION, other.capture())
        with pytest.raises(TransferFailed, match="another layout"):
            fetch.run([odd.address], no_cancel, 10)
        fetch.run([odd.address], no_cancel, 10)  # nobody else is left: begin anew with what there is
        fetch.load()
        assert state.digest(state.capture()) == other.digest(other.capture())


def test_another_model_is_a_user_error(server: StateServer, no_cancel: threading.Event) -> None:
    fetch, _ = joiner(2 * STRIPE)
    with pytest.raises(StateMismatch, match=r"module 'model': all\.0 is float32"):
        fetch.run([server.address], no_cancel, 10)


def test_a_malformed_layout_loses_the_source(
    server: StateServer, no_cancel: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    body = json.dumps({"tensors": [{"dtype": "float32"}], "total_bytes": 4, "skeleton": {}}).encode()
    assert server._offer is not None
    monkeypatch.setattr(server._offer, "body", body)
    monkeypatch.setattr(server._offer, "body_hash", transfer.hash64([memoryview(body)]))
    with pytest.raises(TransferFailed, match="layout, tensor 0: KeyError"):
        joiner(STRIPE)[0].run([server.address], no_cancel, 10)


def test_no_sources_and_no_listener_fail_at_once(no_cancel: threading.Event) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        address = nobody.getsockname()
    for sources in ([], [address]):
        with pytest.raises(TransferFailed, match="all sources are lost; no source has told its layout"):
            joiner(STRIPE)[0].run(sources, no_cancel, 30)


def test_an_empty_state_is_a_state(no_cancel: threading.Event) -> None:
    empty = RegisteredState({"model": nn.Identity()})
    with StateServer("127.0.0.1", TOKEN) as server:
        server.offer(VERSION, empty.capture())
        fetch = Fetch(VERSION, RegisteredState({"model": nn.Identity()}), TOKEN)
        assert fetch.run([server.address], no_cancel, 10).num_bytes == 0
        fetch.load()


def test_server_without_a_token_is_refused() -> None:
    with pytest.raises(InternalError, match="anybody"):
        StateServer("127.0.0.1", b"")


def test_header_from_a_source_is_bounded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ours = socket.create_connection(listener.getsockname())
        theirs, _ = listener.accept()
    with theirs, Connection(ours, silent_s=1, tick_s=0.1, check=lambda: None) as connection:
        theirs.sendall(struct.pack(">I", transfer_protocol.MAX_HEADER_BYTES + 1))
        with pytest.raises(StateError, match="a header of 4097 bytes"):
            connection.receive_header()
