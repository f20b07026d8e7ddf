"""Waiting for what no event tells. Used by tests of processes and of clusters."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(
    condition: Callable[[], T], timeout_s: float = 90.0, story: Callable[[], str] = lambda: ""
) -> T:
    """What `condition` returns as soon as it is true. `story` says what is known when the time is over."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        assert time.monotonic() < deadline, f"not so within {timeout_s} s; {story()}"
        time.sleep(0.05)
    return found
