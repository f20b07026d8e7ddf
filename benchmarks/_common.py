"""What all benchmarks share: the model, the data, the record of steps, the environment, the loopback measure, tables.

Imported by the benchmarks and, in the worker processes of every contender, by their training loops; torch is imported
where it is needed. May not know any contender.
"""

from __future__ import annotations

import itertools
import os
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

ROOT = Path(__file__).resolve().parent.parent
WORLD = 4
"""Workers of every contender."""
FEATURES, WIDTH = 256, 2176
GLOBAL_BATCH = 128
"""Samples of one step over all workers: 32 each, so that a step takes some tenths of a second on two cores."""
DATASET_SIZE = 400_000
CHECKPOINT_EVERY = 10
"""Steps between two checkpoints of the peers. Everstep makes none here: it recovers from the survivors."""
LOOPBACK_BYTES = 512 * 2**20


def prepare_environment() -> None:
    """Once, first of all, in a benchmark's own process: everything it starts inherits it."""
    lines = (ROOT / "ray.env").read_text(encoding="utf-8").splitlines()
    os.environ.update(dict(line.split("=", 1) for line in lines if line and not line.startswith("#")))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS", "EVERSTEP_RUN_NAME"):
        os.environ.pop(name, None)


# ---- the workload


def make_model(seed: int = 0) -> torch.nn.Module:
    """An MLP of three wide layers and a head; 10.0 million float32 parameters."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(FEATURES, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH),
        nn.ReLU(), nn.Linear(WIDTH, 1),
    )  # fmt: skip


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    """AdamW, fused: two moments per parameter. The unfused one would take half of the step and hide what is compared."""
    import torch

    return torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


class Numbers:
    """A map-style dataset: sample `index` is made of its index alone. Returns (float32 [FEATURES], float32 [1])."""

    def __len__(self) -> int:
        return DATASET_SIZE

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        import torch

        x = torch.randn(FEATURES, generator=torch.Generator().manual_seed(index))
        return x, x.sum().sin().reshape(1)


def state_bytes() -> int:
    """Bytes of parameters and AdamW state, which a joiner receives: made on torch's meta device, nothing is allocated."""
    import torch

    with torch.device("meta"):
        model = make_model()
    scalars = 4 * len(list(model.parameters()))  # AdamW counts its steps in one float32 per parameter
    return 3 * sum(p.numel() * p.element_size() for p in model.parameters()) + scalars


# ---- the record of steps


@dataclass(frozen=True, slots=True)
class Done:
    """One step as one worker finished it."""

    step: int
    at: float
    """Unix seconds."""
    rank: int
    pid: int
    life: str
    """Differs between two starts of a worker, also in one process."""


class StepLog:
    """A worker's own record, one line per finished step, on disk before the next step begins."""

    def __init__(self, folder: str | Path, rank: int) -> None:
        name = f"steps-{rank}-{os.getpid()}-{time.time_ns()}.log"
        self._file = (Path(folder) / name).open("a", buffering=1)

    def done(self, step: int) -> None:
        self._file.write(f"{step} {time.time():.6f}\n")


def read_steps(folder: Path) -> list[Done]:
    """All workers' finished steps, in the order of time."""
    found = []
    for file in folder.glob("steps-*.log"):
        _, rank, pid, _ = file.stem.split("-")
        for line in file.read_text().splitlines(keepends=True):
            if line.endswith("\n"):  # the last line of a killed worker may be half written
                step, at = line.split()
                found.append(Done(int(step), float(at), int(rank), int(pid), file.stem))
    return sorted(found, key=lambda d: d.at)


def step_intervals(done: Sequence[Done]) -> list[float]:
    """Seconds between consecutive steps of each life of rank 0; the first three steps of a life are left out."""
    intervals = []
    for life in {d.life for d in done if d.rank == 0}:
        times = [d.at for d in done if d.life == life][3:]
        intervals += [b - a for a, b in itertools.pairwise(times)]
    return intervals


# ---- the machine


def loopback_rates(repeats: int = 5) -> list[float]:
    """TCP bandwidth between two processes over 127.0.0.1 with plain sockets: bytes per second of some transfers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(20.0)
        code = (
            "import socket, sys\n"
            f"piece = bytearray({2**20})\n"
            "with socket.create_connection(('127.0.0.1', int(sys.argv[1])), timeout=20) as s:\n"
            f"    for _ in range({repeats}):\n"
            "        s.recv(1)\n"
            f"        for _ in range({LOOPBACK_BYTES // 2**20}): s.sendall(piece)\n"
        )
        sender = subprocess.Popen([sys.executable, "-c", code, str(server.getsockname()[1])])
        try:
            connection, _ = server.accept()
            with connection:
                connection.settimeout(20.0)
                return [_receive(connection) for _ in range(repeats)]
        finally:
            sender.kill()
            sender.wait(10.0)


def _receive(connection: socket.socket) -> float:
    piece, left = memoryview(bytearray(2**20)), LOOPBACK_BYTES
    begin = time.perf_counter()
    connection.sendall(b"g")
    while left:
        got = connection.recv_into(piece)
        if not got:
            raise ConnectionError("the sender of the loopback measurement ended early")
        left -= got
    return LOOPBACK_BYTES / (time.perf_counter() - begin)


def setting() -> str:
    """What is trained and where, in words; to be asked at the start, since every number hangs on the machine's load."""
    return (
        f"MLP of 10.0 million parameters, AdamW, global batch {GLOBAL_BATCH}, {WORLD} workers on CPU with gloo; "
        f"{machine()}"
    )


def machine() -> str:
    """Where it is measured, in words."""
    return f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f} at the start"


def pause(seconds: float) -> None:
    """Between two looks at something that cannot be waited for."""
    threading.Event().wait(seconds)


# ---- output


def table(rows: Sequence[Sequence[str]], *, indent: str = "  ") -> str:
    """Columns of equal width, the first to the left, the others to the right. The first row is the head."""
    widths = [max(len(row[i]) for row in rows if i < len(row)) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=False))
        ]
        lines.append((indent + "   ".join(cells)).rstrip())
    return "\n".join(lines)


def seconds(value: float | None) -> str:
    """Three decimals, or a dash."""
    return "–" if value is None else f"{value:.3f}"


def rounded(value: Any) -> Any:
    """The same nested lists and dicts, floats with six decimals."""
    if isinstance(value, float):
        return round(value, 6)
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(item) for item in value]
    return value


def median(values: Sequence[float]) -> float | None:
    """None of nothing."""
    return statistics.median(values) if values else None


def say(text: str = "") -> None:
    """A line for the reader, at once."""
    print(text, flush=True)
