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


def _start(world_size: int, command: list[str]) -> dict[int, subprocess.Popen[bytes]]:
    env = {**os.environ, "WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    workers = (
        subprocess.Popen([sys.executable, "-m", *command], env={**env, "RANK": str(rank)})
        for rank in range(world_size)
    )
    return {worker.pid: worker for worker in workers}


def _kill(workers: dict[int, subprocess.Popen[bytes]]) -> None:
    for worker in workers.values():
        worker.kill()
    for worker in workers.values():
        worker.wait(10.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world-size", type=int, required=True)
    parser.add_argument("command", nargs=argparse.REMAINDER, help="module and its arguments")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    workers: dict[int, subprocess.Popen[bytes]] = {}
    try:
        while True:
            workers = _start(options.world_size, options.command)
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOWAIT)  # returns as soon as one of them has ended
            pid = ended.si_pid if ended else "?"
            print(f"{time.time():.3f} process {pid} ended; all are killed and started again", flush=True)
            _kill(workers)
    finally:
        _kill(workers)


if __name__ == "__main__":
    main()
