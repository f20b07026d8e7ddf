"""A bound on bytes per second, shared by whoever writes under it. Called by `part`."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Bandwidth:
    """A token bucket: `bytes_per_s` on average, at most `burst_bytes` at once. Thread-safe."""

    def __init__(
        self,
        bytes_per_s: float,
        burst_bytes: int = 4 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if bytes_per_s <= 0 or burst_bytes <= 0:
            raise ValueError(f"bandwidth {bytes_per_s} B/s, burst {burst_bytes} B: both must be positive")
        self._rate, self._burst, self._clock = bytes_per_s, burst_bytes, clock
        self._tokens, self._then = float(burst_bytes), clock()
        self._lock = threading.Lock()

    def delay_s(self, num_bytes: int) -> float:
        """Take `num_bytes` from the bucket; how long the caller must wait before it sends them, seconds."""
        with self._lock:
            now = self._clock()
            self._tokens = min(self._burst, self._tokens + (now - self._then) * self._rate)
            self._then = now
            self._tokens -= num_bytes
            return max(0.0, -self._tokens / self._rate)
