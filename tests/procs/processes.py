"""Real processes under a test's control: each runs functions on request, several at a time, and can be killed or frozen.

A request runs in a thread of its own, so that a second one can reach a process whose first is blocked.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from multiprocessing.connection import Connection
from typing import Any

Function = Callable[..., Any]

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch", "everstep.actors.groups.mesh"])


class Gone(Exception):
    """The process ended before it answered."""


class Failed(Exception):
    """The function raised: `kind` is the exception's class name, the message its traceback."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Process:
    """One process. Functions get its `state` dictionary as their first argument and must be importable by name."""

    def __init__(self) -> None:
        self._connection, far = _context.Pipe()
        self._process = _context.Process(target=_serve, args=(far,), daemon=True)
        self._process.start()
        far.close()
        self._ids = itertools.count()
        self._discarded = False
        self._send_lock = threading.Lock()
        self._waiting: dict[int, Future[Any]] = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    def start(self, function: Function, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        number = next(self._ids)
        self._waiting[number] = future
        with self._send_lock:
            self._connection.send((number, function, args))
        return future

    def call(self, function: Function, *args: Any, timeout: float = 30) -> Any:
        return self.start(function, *args).result(timeout)

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        self._process.join(10)

    def freeze(self) -> None:
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.pid, signal.SIGCONT)

    def end(self) -> int | None:
        """Let it exit as a program does, and return its exit code."""
        with self._send_lock, contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(20)
        return self._process.exitcode

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    def _read(self) -> None:
        while True:
            try:
                number, ok, value = self._connection.recv()
            except (EOFError, OSError):
                break
            future = self._waiting.pop(number)
            if ok:
                future.set_result(value)
            else:
                future.set_exception(Failed(*value))
        for future in list(self._waiting.values()):
            future.set_exception(Gone(f"process {self.pid} is gone"))

    def discard(self) -> None:
        """Kill it if it lives. Any number of times."""
        if self._discarded:
            return
        self._discarded = True
        if self._process.is_alive():
            self.kill()
        self._reader.join(10)
        self._connection.close()
        self._process.close()


@contextlib.contextmanager
def processes(count: int) -> Iterator[list[Process]]:
    """`count` processes. The list may be changed by the test; whoever is in it at the end must still be alive."""
    everybody = [Process() for _ in range(count)]
    started = list(everybody)
    try:
        yield everybody
        for process in everybody:
            started += [process] if process not in started else []
            assert process.exit_code is None, f"process {process.pid} ended with {process.exit_code}"
    finally:
        for process in {id(process): process for process in started + everybody}.values():
            process.discard()


def _serve(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    state: dict[str, Any] = {}
    lock = threading.Lock()
    while True:
        try:
            request = connection.recv()
        except EOFError:
            return
        if request is None:
            return
        threading.Thread(
            target=functools.partial(_answer, connection, lock, state, *request), daemon=True
        ).start()


def _answer(
    connection: Connection,
    lock: threading.Lock,
    state: dict[str, Any],
    number: int,
    function: Function,
    args: Any,
) -> None:
    try:
        reply = (number, True, function(state, *args))
    except BaseException as error:
        reply = (number, False, (type(error).__name__, traceback.format_exc()))
    with lock:
        connection.send(reply)
