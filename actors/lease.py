"""A lease on a replica's life that the kernel enforces.

Made by the replica, renewed by its control thread whenever the controller has answered. A replica that cannot reach a
controller must stop, or two memberships could train at once; and it must stop also when its own code cannot run any
more: its Python blocked in C with the GIL held, or the whole process frozen and woken an hour later. So the end is not
a thread of ours but a POSIX timer (timer_create(2)) whose signal is SIGKILL: at expiry the kernel ends the process,
without another line of its code, wherever it hangs. Nothing is flushed or closed; committed state lives elsewhere.

Imports neither torch nor Ray.
"""

from __future__ import annotations

import ctypes
import math
import os
import signal
import threading
import time
from typing import Any, Final

from everstep.errors import CannotStart, ConfigError, InternalError

_CLOCK_MONOTONIC: Final = 1
_SIGEV_SIGNAL: Final = 0
_TIMER_ABSTIME: Final = 1


class _TimeSpec(ctypes.Structure):
    _fields_ = [("sec", ctypes.c_long), ("nsec", ctypes.c_long)]


class _TimerSpec(ctypes.Structure):
    _fields_ = [("interval", _TimeSpec), ("value", _TimeSpec)]


class _SigEvent(ctypes.Structure):
    """struct sigevent of Linux: sigev_value, sigev_signo, sigev_notify, and padding up to 64 bytes."""

    _fields_ = [
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("padding", ctypes.c_char * 48),
    ]


class Lease:
    """Ends this process by SIGKILL `duration_s` seconds after the last `renew`, unless cancelled.

    Counts from construction. Measured on the monotonic clock, which nobody can set. Children do not inherit it.
    Thread-safe; `renew` costs one system call.
    """

    def __init__(self, duration_s: float) -> None:
        """Raises ConfigError if `duration_s` is not positive, CannotStart where the kernel has no such timers."""
        if not (math.isfinite(duration_s) and duration_s > 0):
            raise ConfigError(f"lease of {duration_s} s; it must be a positive number of seconds")
        self.duration_s = duration_s
        self._library = _timer_library()
        self._lock = threading.Lock()
        self._pid = os.getpid()
        self._timer = ctypes.c_void_p()
        self._live = True
        self._until_s = -math.inf
        event = _SigEvent(signo=signal.SIGKILL, notify=_SIGEV_SIGNAL)
        self._call("timer_create", _CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer))
        self.renew()

    def renew(self, since_s: float | None = None) -> None:
        """The full duration, from `since_s` (of time.monotonic()) or from now. It is never shortened. Does nothing after
        `cancel`. Raises InternalError in a forked child."""
        until_s = (time.monotonic() if since_s is None else since_s) + self.duration_s
        seconds = int(until_s)
        spec = _TimerSpec(value=_TimeSpec(seconds, int((until_s - seconds) * 1e9)))
        with self._lock:
            if self._live and until_s > self._until_s:
                self._until_s = until_s
                self._call("timer_settime", self._timer, _TIMER_ABSTIME, ctypes.byref(spec), None)

    def cancel(self) -> None:
        """This process may live on. Idempotent."""
        with self._lock:
            if self._live:
                self._live = False
                self._call("timer_delete", self._timer)

    def _call(self, name: str, *args: Any) -> None:
        if os.getpid() != self._pid:
            raise InternalError(f"{name}: the lease belongs to process {self._pid}; a forked child has none")
        if getattr(self._library, name)(*args) != 0:
            number = ctypes.get_errno()
            raise InternalError(f"{name} failed: {os.strerror(number)} (errno {number})")


def _timer_library() -> ctypes.CDLL:
    # In the C library itself since glibc 2.34 and in musl, in librt before.
    for name in (None, "librt.so.1"):
        try:
            library = ctypes.CDLL(name, use_errno=True)
            library.timer_create  # noqa: B018  # an attribute that is missing raises
        except (OSError, AttributeError):
            continue
        return library
    raise CannotStart(
        "this system has no timer_create(2), with which the kernel ends a replica that lost its controller; "
        "replicas run on Linux only"
    )
