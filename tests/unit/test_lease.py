"""The lease: the kernel ends a replica that nobody vouches for, whatever its Python is doing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from everstep.actors.lease import Lease
from everstep.errors import CannotStart, ConfigError

ROOT = Path(__file__).resolve().parents[2]
MARGIN_S = 2.0
"""What a busy machine may add to a timer."""
PRELUDE = """
import ctypes, os, sys, threading, time
from everstep.actors.lease import Lease
say = lambda text: os.write(1, (text + "\\n").encode())
"""


class Child:
    """A process that runs `script`; its output is read line by line."""

    def __init__(self, script: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PRELUDE + script], cwd=ROOT, stdout=subprocess.PIPE
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().decode().strip()

    def rest(self) -> list[str]:
        assert self.process.stdout is not None
        return self.process.stdout.read().decode().split()

    def dies_by(self, within_s: float) -> int:
        return self.process.wait(within_s)


@pytest.fixture
def start() -> Iterator[type[Child]]:
    children: list[Child] = []

    class Tracked(Child):
        def __init__(self, script: str) -> None:
            super().__init__(script)
            children.append(self)

    yield Tracked
    for child in children:
        if child.process.poll() is None:
            child.process.kill()
        child.process.wait(10)
        assert child.process.stdout is not None
        child.process.stdout.close()


def test_not_renewed_is_killed_in_time(start: type[Child]) -> None:
    child = start("lease = Lease(0.3); say('armed'); threading.Event().wait(60); say('alive')")
    assert child.line() == "armed"
    armed = time.monotonic()
    assert child.dies_by(0.3 + MARGIN_S) == -signal.SIGKILL
    assert time.monotonic() - armed >= 0.2
    assert child.rest() == []


def test_renewed_lives_and_dies_once_renewing_stops(start: type[Child]) -> None:
    child = start("""
lease = Lease(1.0)
def renew():
    for _ in range(15):
        time.sleep(0.1); lease.renew()
    say("renewed")
threading.Thread(target=renew).start()
threading.Event().wait(60)
""")
    assert child.line() == "renewed"  # 1.5 s, half more than the lease
    assert child.dies_by(1.0 + MARGIN_S) == -signal.SIGKILL


def test_counts_from_the_moment_it_is_given_and_is_never_shortened(start: type[Child]) -> None:
    child = start("""
lease = Lease(1.0)
long_ago = time.monotonic() - 10
lease.renew(long_ago); lease.renew(long_ago + 9.5)
time.sleep(0.7); say("kept")
lease.renew(time.monotonic() - 0.9)
time.sleep(0.6); say("alive")
""")
    assert child.line() == "kept"
    assert child.dies_by(1.0 + MARGIN_S) == -signal.SIGKILL
    assert child.rest() == []


def test_killed_while_it_holds_the_gil_in_c(start: type[Child]) -> None:
    child = start("""
lease = Lease(1.0)
def renew():
    while True:
        time.sleep(0.05); lease.renew(); say("renewed")
threading.Thread(target=renew, daemon=True).start()
time.sleep(0.3)
say("stuck")
ctypes.PyDLL(None).sleep(60)  # PyDLL keeps the GIL: no Python thread runs
say("alive")
""")
    assert "stuck" in iter(child.line, "")
    assert child.dies_by(1.0 + MARGIN_S) == -signal.SIGKILL
    assert child.rest() == []


def test_frozen_across_the_expiry_never_runs_another_line(start: type[Child]) -> None:
    child = start("lease = Lease(0.5); say('armed')\nwhile True: say('line'); time.sleep(0.01)")
    assert child.line() == "armed"
    os.kill(child.process.pid, signal.SIGSTOP)
    assert child.dies_by(0.5 + MARGIN_S) == -signal.SIGKILL  # without being woken


def test_cancelled_lives(start: type[Child]) -> None:
    child = start(
        "lease = Lease(0.8); lease.cancel(); lease.cancel(); lease.renew(); time.sleep(1.0); say('alive')"
    )
    assert child.line() == "alive"
    assert child.dies_by(10) == 0


def test_a_forked_child_has_no_lease_and_leaves_the_parents_alone(start: type[Child]) -> None:
    child = start("""
lease = Lease(0.5)
pid = os.fork()
if pid == 0:
    try: lease.renew()
    except Exception as error: say(type(error).__name__)
    lease_over = time.monotonic() + 0.8
    while time.monotonic() < lease_over: time.sleep(0.05)
    say("child alive")
    os._exit(0)
threading.Event().wait(60)
""")
    assert child.line() == "InternalError"
    assert child.line() == "child alive"
    assert child.dies_by(MARGIN_S) == -signal.SIGKILL


@pytest.mark.parametrize("duration_s", [0, -1, float("nan"), float("inf")])
def test_impossible_durations_are_refused(duration_s: float) -> None:
    with pytest.raises(ConfigError, match="positive number"):
        Lease(duration_s)


def test_system_without_timers_gets_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Nothing:
        def __init__(self, *_: object, **__: object) -> None: ...

    monkeypatch.setattr("ctypes.CDLL", Nothing)
    with pytest.raises(CannotStart, match="Linux only"):
        Lease(1.0)


def test_lease_needs_neither_torch_nor_ray(start: type[Child]) -> None:
    child = start("say(str([name for name in ('torch', 'ray', 'numpy') if name in sys.modules]))")
    assert child.line() == "[]"
