"""Starts a peer, kills one of its workers halfway between two checkpoints, and reads from the record of steps what it cost.

Called by `benchmarks.recovery`. All peers write the same record (`StepLog`), so all are measured by the same code.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from benchmarks._common import CHECKPOINT_EVERY, WORLD, Done, median, pause, read_steps, step_intervals
from benchmarks._processes import Household, free_port

_QUIET_STEPS = 25
"""Before the first kill: the median step is taken from them."""
_LOOK_S = 0.05
T = TypeVar("T")


class PeerFailed(Exception):
    """A peer could not be measured; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restart:
    """What one SIGKILL cost."""

    first_step_s: float
    """From SIGKILL to the first step that anybody finished after the restart."""
    new_step_s: float
    """From SIGKILL to the first step beyond those reached before it."""
    steps_lost: int
    """Finished before the kill, and done again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerResult:
    median_step_s: float | None = None
    restarts: Sequence[Restart] = field(default_factory=tuple)
    problem: str = ""
    """Why there are no numbers."""

    @property
    def new_step_s(self) -> float | None:
        """Median over the kills."""
        return median([r.new_step_s for r in self.restarts])


def ddp_by_hand(house: Household, kills: int) -> PeerResult:
    """Plain DDP: a launcher kills all and starts all again."""
    folder = _folder(house, "ddp")
    process = house.module(
        "benchmarks.peers.by_hand", "--world-size", str(WORLD), "benchmarks.peers.ddp",
        "--folder", str(folder), "--checkpoint", str(folder / "checkpoint.pt"),
    )  # fmt: skip
    return _measured(house, [process], folder, kills, timeout_s=120.0)


def torchrun(house: Household, kills: int) -> PeerResult:
    """torchrun's elastic agents, four as on four nodes, each with one worker.

    torch 2.13 keeps one store for all attempts by default, and without a prefix: restarted gloo workers read the dead ones'
    addresses in it and hang (`elastic/rendezvous/dynamic_rendezvous.py`, `rendezvous.py`). A variable turns that off.
    """
    folder, port = _folder(house, "torchrun"), free_port()
    agents = [
        house.module(
            "torch.distributed.run", f"--nnodes=1:{WORLD}", "--nproc-per-node=1", "--max-restarts=100",
            "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=bench", "--local-addr=127.0.0.1",
            "--module", "benchmarks.peers.ddp", "--folder", str(folder), "--checkpoint", str(folder / "checkpoint.pt"),
            env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )
        for _ in range(WORLD)
    ]  # fmt: skip
    return _measured(house, agents, folder, kills, timeout_s=150.0)


def ray_train(house: Household, kills: int, address: str) -> PeerResult:
    """Ray Train with `num_workers=(1, 4)` on a running cluster with four free CPUs."""
    missing = [name for name in ("pandas", "pyarrow") if importlib.util.find_spec(name) is None]
    if missing:
        return PeerResult(
            problem=f"not measured: {' and '.join(missing)} missing (pip install 'everstep[bench]')"
        )
    folder = _folder(house, "ray_train")
    process = house.module("benchmarks.peers.ray_train", "--address", address, "--folder", str(folder))
    return _measured(house, [process], folder, kills, timeout_s=180.0)


def _folder(house: Household, name: str) -> Path:
    folder = house.folder / name
    folder.mkdir()
    return folder


def _measured(
    house: Household, processes: Sequence[subprocess.Popen[bytes]], folder: Path, kills: int, timeout_s: float
) -> PeerResult:
    watch = _Watch(processes, folder, timeout_s)
    try:
        quiet = watch.until(lambda done: done if _last(done) >= _QUIET_STEPS else None)
        restarts = [watch.kill_one(number) for number in range(kills)]
        return PeerResult(median_step_s=median(step_intervals(quiet)), restarts=restarts)
    except PeerFailed as error:
        return PeerResult(problem=f"failed: {error}\n{house.last_words()}")
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            house.end(process)


def _last(done: Sequence[Done]) -> int:
    return max((d.step for d in done), default=-1)


class _Watch:
    """Looks at the record until something is there."""

    def __init__(self, processes: Sequence[subprocess.Popen[bytes]], folder: Path, timeout_s: float) -> None:
        self._processes = processes
        self._folder = folder
        self._timeout_s = timeout_s

    def until(self, found: Callable[[list[Done]], T | None]) -> T:
        deadline = time.monotonic() + self._timeout_s
        while True:
            done = read_steps(self._folder)
            if (answer := found(done)) is not None:
                return answer
            if any(process.poll() is not None for process in self._processes):
                raise PeerFailed(f"it ended by itself after step {_last(done)}")
            if time.monotonic() > deadline:
                raise PeerFailed(f"no answer within {self._timeout_s:g} s after step {_last(done)}")
            pause(_LOOK_S)

    def kill_one(self, number: int) -> Restart:
        """Kills a worker, another rank each time, and waits until the group is beyond where it was."""
        alive = self.until(self._halfway)
        rank = (2 * number + 1) % WORLD
        victim = next(d.pid for d in alive if d.rank == rank)
        killed = time.time()
        os.kill(victim, signal.SIGKILL)
        old = {d.life for d in read_steps(self._folder)}

        def beyond(done: list[Done]) -> Restart | None:
            reached = max(d.step for d in done if d.life in old)
            after = [d for d in done if d.life not in old]
            new = [d for d in after if d.step > reached]
            if not new:
                return None
            return Restart(
                first_step_s=after[0].at - killed, new_step_s=new[0].at - killed,
                steps_lost=reached + 1 - after[0].step,
            )  # fmt: skip

        return self.until(beyond)

    def _halfway(self, done: list[Done]) -> list[Done] | None:
        """The latest record of each of the four workers at work, when the last step is halfway between checkpoints."""
        if not done or _last(done[-1:]) % CHECKPOINT_EVERY != CHECKPOINT_EVERY // 2 - 1:
            return None
        latest = {d.rank: d for d in done[-4 * WORLD :]}
        return list(latest.values()) if len(latest) == WORLD else None
