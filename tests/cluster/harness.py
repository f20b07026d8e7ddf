"""A run under test: started in the background, watched through its events, hurt on purpose."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import ray

import everstep
from everstep.orchestrator import connect
from everstep.orchestrator.events import Event, parse
from tests.cluster import loops
from tests.waiting import wait_until

ray.cloudpickle.register_pickle_by_value(loops)

DEADLINE_S = 90.0


class Run:
    """Runs `everstep.run` in a thread of the test's process. Use as a context manager: it leaves nothing behind."""

    def __init__(self, loop: Any, config: everstep.RunConfig) -> None:
        self.config = config
        self.loop = loop
        self.result: everstep.Result | None = None
        self.error: BaseException | None = None
        self.seen: list[Event] = []
        self.stamps: list[float] = []
        self._after = 0
        self._before = leftovers()
        self._thread = threading.Thread(target=self._run, name=f"driver-{config.name}", daemon=True)

    def __enter__(self) -> Run:
        self._thread.start()
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if self._thread.is_alive():
            self.ask("stop", "the test", True)
            self._thread.join(30.0)
        assert not self._thread.is_alive(), "the driver did not end"
        if kind is None:
            self.assert_nothing_left()

    def _run(self) -> None:
        try:
            self.result = everstep.run(self.loop, self.config)
        except BaseException as error:
            self.error = error

    def finish(self, timeout_s: float = DEADLINE_S) -> everstep.Result:
        """Let it go on at full speed and wait for the end; the run's own error is raised."""
        if isinstance(self.loop, loops.Loop):
            loops.let_go(Path(self.loop.folder))
        self._thread.join(timeout_s)
        assert not self._thread.is_alive(), f"not finished after {timeout_s} s: {self.tail()}"
        if self.error is not None:
            raise self.error
        assert self.result is not None
        return self.result

    def controller(self) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            try:
                return connect.find_controller(self.config.name)
            except everstep.errors.RunNotFound:
                assert time.monotonic() < deadline and self._thread.is_alive(), f"no controller: {self.error}"
                time.sleep(0.02)

    def ask(self, method: str, *args: object) -> Any:
        return connect.ask(self.controller(), method, *args, timeout_s=30.0)

    def status(self) -> dict[str, Any]:
        return self.ask("status")  # type: ignore[no-any-return]

    def wait_for(self, wanted: Callable[[Event], bool], timeout_s: float = DEADLINE_S) -> Event:
        """The first event, from the beginning of the run, that is wanted and was not returned by an earlier wait."""
        deadline = time.monotonic() + timeout_s
        position = getattr(self, "_position", 0)
        while True:
            while position < len(self.seen):
                event = self.seen[position]
                position += 1
                if wanted(event):
                    self._position = position
                    return event
            assert time.monotonic() < deadline, f"not seen within {timeout_s} s; last events: {self.tail()}"
            assert self._thread.is_alive() or self.result is not None, (
                f"the run ended: {self.error}; {self.tail()}"
            )
            self._poll()

    def _poll(self) -> None:
        try:
            answer = self.ask("events", self._after, 1.0)
        except everstep.errors.ControllerUnreachable:
            return
        self._after = answer["next"]
        self.seen += [parse(line) for line in answer["events"]]

    def tail(self) -> str:
        return "\n".join(e.to_json()[:400] for e in self.seen[-12:])

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = DEADLINE_S) -> None:
        """Until something is so that no event tells."""
        wait_until(condition, timeout_s, lambda: f"last events: {self.tail()}")

    def wait_step(self, number: int) -> Event:
        return self.wait_for(lambda e: e.type == "step_committed" and e.step >= number)  # type: ignore[attr-defined]

    def wait_world(self, size: int) -> Event:
        return self.wait_for(lambda e: e.type == "step_committed" and e.world_size == size)  # type: ignore[attr-defined]

    def replicas(self) -> list[dict[str, Any]]:
        """Members in rank order."""
        members = [r for r in self.status()["replicas"] if r["rank"] is not None]
        return sorted(members, key=lambda r: r["rank"])

    def kill(self, replica: dict[str, Any], sig: signal.Signals = signal.SIGKILL) -> float:
        """Signal a replica's process; returns the wall time of it."""
        os.kill(replica["pid"], sig)
        return time.time()

    def pids(self) -> list[int]:
        return [r["pid"] for r in self.status()["replicas"] if r["pid"]]

    def assert_nothing_left(self) -> None:
        """No name of the run is taken, none of its processes is there, no shared memory, no temporary file."""
        prefix = f"everstep:{self.config.name}:"
        deadline = time.monotonic() + 20.0
        pids = {e.pid for e in self.seen if e.type == "replica_ready"}  # type: ignore[attr-defined]
        while True:
            named = [a["name"] for a in ray.util.list_named_actors(all_namespaces=True)]
            left = [n for n in named if n.startswith(prefix)]
            left += [f"pid {pid}" for pid in pids if is_running(pid)]
            left += sorted(leftovers() - self._before)
            if isinstance(self.loop, loops.Loop):
                left += [str(p) for p in loops.temporary_files(Path(self.loop.folder))]
            if not left:
                return
            assert time.monotonic() < deadline, f"left behind: {left}"
            time.sleep(0.1)


def is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def leftovers() -> set[str]:
    """Files that a run could leave on this machine. Not Ray's own, which are its session's; what `tempfile` makes in a
    replica is in the run's own folder (`loops.temporary_files`)."""
    names = {p.name for folder in (tempfile.gettempdir(), "/dev/shm") for p in Path(folder).iterdir()}
    return {n for n in names if n.startswith(("pymp-", "torch_", "sem.", "psm_", "listener-", "everstep"))}


def config(name: str, folder: Path, **changes: Any) -> everstep.RunConfig:
    """A small run's configuration; keys of `changes` go to whichever section has them."""
    sections: dict[str, dict[str, Any]] = {
        "scaling": {"min_replicas": 1, "max_replicas": 4},
        "batch": {"global_batch_size": 16, "logical_shards": 8},
        "failure": {"backoff_s": 0.1},
        "detection": {"heartbeat_s": 0.2, "heartbeat_timeout_s": 4.0, "driver_grace_s": 30.0},
        "checkpoint": {"every_s": None},  # tests of checkpoints ask for them
    }
    top: dict[str, Any] = {"name": name, "storage": str(folder / "storage"), "log_every_s": 1.0}
    classes = {
        "scaling": everstep.ScalingConfig,
        "batch": everstep.BatchConfig,
        "failure": everstep.FailureConfig,
        "detection": everstep.DetectionConfig,
        "checkpoint": everstep.CheckpointConfig,
    }
    for key, value in changes.items():
        for section, cls in classes.items():
            if key in cls.__dataclass_fields__:
                sections[section][key] = value
                break
        else:
            top[key] = value
    return everstep.RunConfig(**top, **{k: classes[k](**v) for k, v in sections.items()})


def descendants() -> set[int]:
    """Pids of all processes below this one."""
    return {p.pid for p in psutil.Process().children(recursive=True)}
