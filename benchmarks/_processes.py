"""Processes and the Ray cluster that a benchmark starts, each ended by its handle, also when the benchmark fails.

Called by the benchmarks' main programs only.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from benchmarks._common import ROOT

_GRACE_S = 10.0
_PR_SET_CHILD_SUBREAPER = 36


class Household:
    """All processes of one benchmark. Leaving the context ends whatever is left of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        """For files of this benchmark alone; logs of its processes among them."""
        self._started: list[subprocess.Popen[bytes]] = []
        self._count = 0

    def __enter__(self) -> Household:
        _leave_on_sigterm()
        _adopt_orphans()
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._started:
            self.end(process)
        end_all(psutil.Process().children(recursive=True))

    def module(
        self, name: str, *arguments: str, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts `python -m name`, its output in a log file of `folder`."""
        self._count += 1
        log = self.log_of(name, self._count)
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, "-m", name, *arguments],
                cwd=ROOT, env={**os.environ, **(env or {})}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        self._started.append(process)
        return process

    def log_of(self, name: str, number: int) -> Path:
        return self.folder / f"{name}-{number}.out"

    def last_words(self, limit: int = 5) -> str:
        """The ends of the logs of processes that failed, for an error message."""
        lines: list[str] = []
        for log in sorted(self.folder.glob("*.out"), key=lambda f: f.stat().st_mtime)[-2:]:
            lines += [
                f"  {log.name}: {line}" for line in log.read_text(errors="replace").splitlines()[-limit:]
            ]
        return "\n".join(lines)

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """SIGTERM, and SIGKILL for it and all below it if that does not help."""
        below: list[psutil.Process] = []
        if process.poll() is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                below = psutil.Process(process.pid).children(recursive=True)
            process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
        if process.poll() is None:
            process.kill()
            process.wait(_GRACE_S)
        end_all(below, grace_s=1.0)


def _leave_on_sigterm() -> None:
    """All contexts are left, and so all processes ended."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))


def _adopt_orphans() -> None:
    """From here on what a process of ours leaves behind becomes our own child, and is found and ended (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def end_all(processes: Sequence[psutil.Process], *, grace_s: float = 5.0) -> int:
    """Wait for processes to end, kill those that do not; returns how many had to be killed."""
    _, alive = psutil.wait_procs(processes, timeout=grace_s)
    for process in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(alive, timeout=_GRACE_S)
    return len(alive)


@contextlib.contextmanager
def ray_cluster(*, nodes: int, cpus_per_node: int = 1) -> Iterator[str]:
    """A local Ray cluster: a head without room for workers, and `nodes` nodes; this process is connected to it.

    Yields the address of its control store.
    """
    import logging

    import ray
    from ray.cluster_utils import Cluster

    logging.getLogger("ray").setLevel(logging.CRITICAL)  # such as of a dashboard port that is taken
    memory = 80_000_000
    cluster: Any = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": memory, "include_dashboard": False},
    )
    try:
        for _ in range(nodes):
            cluster.add_node(num_cpus=cpus_per_node, object_store_memory=memory)
        ray.init(
            address=cluster.address, namespace="everstep", log_to_driver=False, logging_level=logging.ERROR
        )
        _leave_on_sigterm()  # ray.init has put a handler of its own in its place
        yield str(cluster.address)
    finally:
        before = psutil.Process().children(recursive=True)
        ray.shutdown()
        cluster.shutdown()
        end_all(before)


def free_port() -> int:
    """A TCP port that nobody uses at this moment."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])
