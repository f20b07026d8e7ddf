"""Everstep as a contender: the script that a user would submit, and the benchmark's view of the run it makes.

    python -m benchmarks._everstep --address HOST:PORT --name RUN --storage DIR [--reduction fast] [--turns HOST:PORT]

`EverstepRun` starts that script as a process of its own and follows the run through its controller, as the command
line does; the process of the benchmark has to be connected to the cluster.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks._common import GLOBAL_BATCH, WORLD, Numbers, make_model, make_optimizer
from benchmarks._processes import Household
from everstep import errors
from everstep.orchestrator import connect
from everstep.orchestrator.events import Event, Recovery, StepCommitted, parse

_MANY = 100_000
_POLL_S = 1.0


def train(run: Any, turns: tuple[str, int] | None, block: int) -> None:
    """The user's function."""
    import torch.nn.functional as F

    from benchmarks._turns import Turns

    model = make_model()
    optimizer = make_optimizer(model)
    run.register(model=model, optimizer=optimizer)
    referee: Turns | None = None
    for step in run.steps(Numbers(), total=_MANY):
        if turns is not None:
            referee = referee or Turns(turns, run.name, run.rank, block)
            referee.next_step()
        for x, y in step.batches():
            step.backward(F.mse_loss(model(x), y))
        step.commit(metrics={"loss": step.mean_loss})


def main() -> None:
    import everstep

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--address", required=True, help="of the Ray cluster")
    parser.add_argument("--name", required=True, help="of the run")
    parser.add_argument("--storage", required=True, help="folder of the event log")
    parser.add_argument("--reduction", default="ordered", choices=["ordered", "fast"])
    parser.add_argument("--turns", help="host:port of the referee that lets this contender go block by block")
    parser.add_argument("--block", type=int, default=0, help="steps of one block")
    options = parser.parse_args()
    host, _, port = (options.turns or "").rpartition(":")
    turns = (host, int(port)) if options.turns else None
    config = everstep.RunConfig(
        name=options.name,
        scaling=everstep.ScalingConfig(max_replicas=WORLD),
        batch=everstep.BatchConfig(global_batch_size=GLOBAL_BATCH, logical_shards=WORLD),
        # Every kill of the benchmark counts as a crash.
        failure=everstep.FailureConfig(process_crashes=None, unknown=None, backoff_s=0.1, backoff_cap_s=0.5),
        # A contender that waits for its turn is no hang.
        detection=everstep.DetectionConfig(hang_floor_s=600.0),
        # It recovers from the survivors; what checkpoints cost is measured by benchmarks.checkpoint.
        checkpoint=everstep.CheckpointConfig(every_s=None),
        reduction=options.reduction,
        storage=options.storage,
    )  # fmt: skip
    everstep.run(functools.partial(train, turns=turns, block=options.block), config, address=options.address)


class RunFailed(Exception):
    """The run ended, or did not do in time what it was watched for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A SIGKILL and what came of it. Times in seconds."""

    progress: float
    """Share of a median step that had passed since the last commit."""
    killed_at: float
    """Unix seconds."""
    first: StepCommitted
    """The first step that the survivors committed in a generation without the killed replica."""
    recovery: Recovery
    steps_between: int
    """Steps committed after the kill with the killed replica still in the generation: it had done its part."""

    @property
    def kill_to_commit_s(self) -> float:
        return self.first.time - self.killed_at

    @property
    def phases(self) -> dict[str, float]:
        """`detect` is from SIGKILL to the first sign at the controller; the others are Everstep's own."""
        noticed = self.recovery.time - self.recovery.total_s
        return {"detect": noticed - self.killed_at, **self.recovery.phases}


class EverstepRun:
    """A run under observation. Use as a context manager: leaving it ends the run."""

    def __init__(
        self, house: Household, address: str, name: str, *, reduction: str = "ordered",
        turns: tuple[str, int] | None = None, block: int = 0,
    ) -> None:  # fmt: skip
        self.name = name
        self._house = house
        arguments = ["--address", address, "--name", name, "--storage", str(house.folder / "storage")]
        arguments += ["--reduction", reduction]
        if turns is not None:
            arguments += ["--turns", f"{turns[0]}:{turns[1]}", "--block", str(block)]
        self._driver: subprocess.Popen[bytes] = house.module("benchmarks._everstep", *arguments)
        self.events: list[Event] = []
        self._after = 0
        self._controller: Any = None

    def __enter__(self) -> EverstepRun:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self._ask("stop", "the benchmark", True)
            self._driver.wait(20.0)
        except (errors.EverstepError, RunFailed, subprocess.TimeoutExpired):
            pass
        self._house.end(self._driver)

    # ---- watching

    def commits(self, since: int = 0) -> list[StepCommitted]:
        """Steps committed, as far as seen, from event number `since` on."""
        return [e for e in self.events[since:] if isinstance(e, StepCommitted)]

    def recoveries(self) -> list[Recovery]:
        """Changes of membership, as far as seen."""
        return [e for e in self.events if isinstance(e, Recovery)]

    def wait(self, found: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        """Take in events until `found()` gives something."""
        deadline = time.monotonic() + timeout_s
        while (answer := found()) is None:
            if self._driver.poll() is not None:
                raise RunFailed(f"the run ended\n{self._house.last_words(15)}")
            if time.monotonic() > deadline:
                tail = "\n".join(f"  {e.to_json()[:300]}" for e in self.events[-8:])
                raise RunFailed(f"run {self.name}: waited {timeout_s:g} s in vain; last events:\n{tail}")
            self._take_in()
        return answer

    def wait_steps(self, count: int, world_size: int, timeout_s: float = 60.0) -> list[StepCommitted]:
        """That many more steps in a row, in one generation of that size; without its first step."""
        since = len(self.events)

        def found() -> list[StepCommitted] | None:
            commits = [c for c in self.commits(since) if c.world_size == world_size]
            newest = [c for c in commits if c.generation == commits[-1].generation]
            return newest[-count:] if len(newest) > count else None

        return list(self.wait(found, timeout_s))

    def _take_in(self) -> None:
        try:
            answer = self._ask("events", self._after, _POLL_S)
        except errors.ControllerUnreachable:
            return
        self._after = answer["next"]
        self.events += [parse(line) for line in answer["events"]]

    def _ask(self, method: str, *arguments: object) -> Any:
        deadline = time.monotonic() + 60.0
        while self._controller is None:
            try:
                self._controller = connect.find_controller(self.name)
            except errors.RunNotFound:
                if self._driver.poll() is not None or time.monotonic() > deadline:
                    raise RunFailed(f"the run did not start\n{self._house.last_words(15)}") from None
                time.sleep(0.05)
        return connect.ask(self._controller, method, *arguments, timeout_s=30.0)

    # ---- doing

    def scale(self, replicas: int) -> None:
        self._ask("scale", replicas, "the benchmark")

    def members(self) -> list[dict[str, Any]]:
        """Replicas of the present generation in rank order, as `status` shows them."""
        replicas = self._ask("status")["replicas"]
        return sorted((r for r in replicas if r["rank"] is not None), key=lambda r: r["rank"])

    def kill(self, rank: int, progress: float, median_step_s: float) -> Kill:
        """SIGKILL the replica of this rank when this share of a step has passed since a commit; wait for a new step."""
        victim = self.members()[rank]
        self.wait_steps(1, WORLD)
        last = self.commits()[-1]
        since = len(self.events)
        time.sleep(max(last.time + progress * median_step_s - time.time(), 0.0))
        killed_at = time.time()
        os.kill(victim["pid"], signal.SIGKILL)

        def found() -> tuple[StepCommitted, Recovery, int] | None:
            recoveries = [
                e for e in self.events[since:] if isinstance(e, Recovery) and e.generation_before >= last.generation
            ]  # fmt: skip
            new = [c for c in self.commits(since) if c.generation > last.generation]
            old = [c for c in self.commits(since) if c.generation == last.generation and c.time > killed_at]
            return (new[0], recoveries[0], len(old)) if new and recoveries else None

        first, recovery, between = self.wait(found)
        progress = (killed_at - last.time) / median_step_s
        return Kill(
            progress=progress, killed_at=killed_at, first=first, recovery=recovery, steps_between=between
        )

    def join_gaps(self, commits: Sequence[StepCommitted]) -> list[float]:
        """For each join from three to four: seconds between the commits around it."""
        return [
            b.time - a.time
            for a, b in itertools.pairwise(commits)
            if (a.world_size, b.world_size) == (WORLD - 1, WORLD)
        ]


def faults_in_order(commits: Sequence[StepCommitted]) -> int:
    """Steps missing, repeated or out of order in the record; 0 when every step was committed exactly once."""
    steps = [c.step for c in commits]
    return len(set(range(len(steps))) ^ set(steps)) + len(steps) - len(set(steps)) + (steps != sorted(steps))


if __name__ == "__main__":
    main()
