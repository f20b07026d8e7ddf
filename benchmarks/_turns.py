"""Turn-taking between contenders that live side by side: one of them trains, the others wait at a socket.

`Referee` is the benchmark's side, `Turns` the side of each worker. So all contenders see the same machine in the same
minute, and one that waits costs nothing but memory.
"""

from __future__ import annotations

import json
import socket
import statistics
import time
from collections.abc import Mapping
from typing import Any

_WAIT_S = 120.0


class Turns:
    """In a worker: called at the top of each step, it holds the loop between blocks and reports the step times."""

    def __init__(self, address: tuple[str, int], contender: str, rank: int, block: int) -> None:
        self._socket = socket.create_connection(address, timeout=_WAIT_S)
        self._replies = self._socket.makefile("r")
        self._block = block
        self._times: list[float] = []
        self._last: float | None = None
        self._send({"contender": contender, "rank": rank})

    def next_step(self) -> None:
        """Raises ConnectionError when the benchmark is over."""
        now = time.perf_counter()
        if self._last is not None:
            self._times.append(now - self._last)
        if self._last is None or len(self._times) == self._block:
            if self._last is not None:
                self._send({"times": self._times})
            self._times = []
            if not self._replies.readline():
                raise ConnectionError("the benchmark is over")
            now = time.perf_counter()
        self._last = now

    def _send(self, message: Mapping[str, Any]) -> None:
        self._socket.sendall(json.dumps(message).encode() + b"\n")


class Referee:
    """In the benchmark: knows all workers, and lets one contender's go at a time. Use as a context manager."""

    def __init__(self) -> None:
        self._server = socket.create_server(("127.0.0.1", 0))
        self.address: tuple[str, int] = self._server.getsockname()[:2]
        self._workers: dict[str, dict[int, tuple[socket.socket, Any]]] = {}

    def __enter__(self) -> Referee:
        return self

    def __exit__(self, *_: object) -> None:
        for workers in self._workers.values():
            for connection, lines in workers.values():
                lines.close()
                connection.close()
        self._server.close()

    def gather(self, expected: int, timeout_s: float) -> None:
        """Wait for that many workers. Raises TimeoutError."""
        deadline = time.monotonic() + timeout_s
        for _ in range(expected):
            self._server.settimeout(max(deadline - time.monotonic(), 0.01))
            try:
                connection, _ = self._server.accept()
            except TimeoutError:
                there = {name: sorted(workers) for name, workers in self._workers.items()}
                raise TimeoutError(
                    f"not all workers came within {timeout_s:g} s; there are {there}"
                ) from None
            connection.settimeout(_WAIT_S)
            lines = connection.makefile("r")
            hello = json.loads(lines.readline())
            self._workers.setdefault(hello["contender"], {})[hello["rank"]] = (connection, lines)

    def block(self, contender: str) -> list[float]:
        """One block of one contender: seconds of each of its steps, as the mean over the workers."""
        workers = self._workers[contender]
        for connection, _ in workers.values():
            connection.sendall(b"go\n")
        times = []
        for rank, (_, lines) in workers.items():
            line = lines.readline()
            if not line:
                raise ConnectionError(f"worker {rank} of {contender} ended")
            times.append(json.loads(line)["times"])
        return [statistics.fmean(of_one_step) for of_one_step in zip(*times, strict=True)]
