"""Kill all, restart all, reload: what teams do today when a worker of a plain DDP job dies.

    python -m benchmarks.peers.by_hand --world-size 4 MODULE ARGUMENTS...

Starts one `python -m MODULE` per rank. When any of them ends, it kills the others at once and starts all again. A human
would be slower; this is the best case of the method.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import subprocess
import sys
import time


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class _Group:
    """The workers of one life of the job."""

    def __init__(self) -> None:
        self._workers: list[subprocess.Popen[bytes]] = []

    def start(self, world_size: int, command: list[str]) -> None:
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port()), "WORLD_SIZE": str(world_size)}
        for rank in range(world_size):
            env = {**os.environ, **place, "RANK": str(rank)}
            self._workers.append(subprocess.Popen([sys.executable, "-m", *command], env=env))

    def wait_for_a_death(self) -> int:
        """Returns the pid of the first that ends, at once."""
        ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)
        return ended.si_pid if ended else 0

    def kill(self) -> None:
        for worker in self._workers:
            worker.kill()
        for worker in self._workers:
            worker.wait(10.0)
        self._workers.clear()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="module and its arguments")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    group = _Group()
    try:
        while True:
            group.start(options.world_size, options.command)
            pid = group.wait_for_a_death()
            print(f"{time.time():.3f} process {pid} ended; all are killed and started again", flush=True)
            group.kill()
    finally:
        group.kill()


if __name__ == "__main__":
    main()
