"""A run seen while it goes: from its events to one plain line now and then in a log, or a bar on a terminal.

Called by the driver and by `everstep submit` and `events --follow`, which hand over the events of each poll.
Takes all times from the events themselves. Imports neither ray nor torch, and rich only for a terminal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol, TextIO

from everstep.orchestrator import events as ev
from everstep.orchestrator.words import clock, count, describe, metrics, rate

if TYPE_CHECKING:
    from rich.progress import Progress

_AT_ONCE = (
    ev.RunStarted,
    ev.ControllerRestarted,
    ev.ScaleRequested,
    ev.StopRequested,
    ev.NodeDraining,
    ev.Waiting,
    ev.Resumed,
    ev.NonFinite,
    ev.UserError,
    ev.CheckpointCommitted,
    ev.CheckpointDropped,
    ev.CheckpointThinned,
    ev.CheckpointUsed,
    ev.CheckpointRefused,
    ev.StateLost,
)
"""Shown as they come. Launches, releases and later generations are not: the recovery tells them."""


class View(Protocol):
    """Where a run is shown."""

    def show(self, events: Sequence[ev.Event]) -> None:
        """Takes the events of one poll, also when there are none."""

    def close(self) -> None:
        """Shows what is still held back and leaves the terminal as it was."""


class Pace:
    """How fast the run goes, by the times of its commits."""

    def __init__(self, total: int | None = None) -> None:
        self.total = total
        self.last: ev.StepCommitted | None = None
        self._samples = 0
        self._marks: deque[tuple[float, int, int]] = deque(maxlen=6)  # time, step, samples so far

    def feed(self, event: ev.Event) -> None:
        """Takes any event."""
        if isinstance(event, ev.RunStarted | ev.GenerationFormed) and event.total is not None:
            self.total = event.total
        if isinstance(event, ev.StepCommitted):
            if self.last is not None and event.step <= self.last.step:  # back after lost state
                self._marks.clear()
            self.last = event
            self._samples += event.samples
            if not self._marks:
                self.mark()

    def mark(self) -> None:
        """Starts the next interval at the last commit."""
        if self.last is not None:
            self._marks.append((self.last.time, self.last.step, self._samples))

    def interval_s(self) -> float:
        """Seconds between the last mark and the last commit."""
        return self.last.time - self._marks[-1][0] if self.last and self._marks else 0.0

    def samples_per_s(self) -> float | None:
        """Over the last interval, or as many as make a second; None before there is anything to measure."""
        if self.last is None:
            return None
        now = self.last.time
        old_enough = (mark for mark in reversed(self._marks) if now - mark[0] >= 1.0)
        since, _, samples = next(old_enough, self._marks[0])
        return (self._samples - samples) / (now - since) if now > since else None

    def eta_s(self) -> float | None:
        """Seconds to the last step at the speed of the last six intervals; None when the end is not known."""
        if self.total is None or self.last is None:
            return None
        since, first, _ = self._marks[0]
        steps, spent = self.last.step - first, self.last.time - since
        left = max(self.total - self.last.step - 1, 0)
        return left * spent / steps if steps > 0 and spent > 0 else None

    def line(self, num_metrics: int = 3) -> str:
        """`step 120/2000  loss 1.2345  3.2k samples/s  4 replicas  gen 7  ETA 0:12:04`, as far as known."""
        if self.last is None:
            return ""
        speed, eta = self.samples_per_s(), self.eta_s()
        parts = [f"step {self.last.step + 1}" + (f"/{self.total}" if self.total is not None else "")]
        parts.append(metrics(self.last.metrics, num_metrics))
        parts.append(f"{rate(speed)} samples/s" if speed is not None else "")
        parts.append(count(self.last.world_size, "replica") if self.last.world_size else "")
        parts.append(f"gen {self.last.generation}")
        parts.append(f"ETA {clock(eta)}" if eta is not None else "")
        return "  ".join(part for part in parts if part)


class News:
    """The lines that a reader wants at once. A loss waits for its recovery, at most until the next poll."""

    def __init__(self) -> None:
        self._losses: list[ev.ReplicaLost] = []
        self._formed = False

    def lines(self, event: ev.Event) -> list[str]:
        """Lines to show now that `event` has come."""
        if isinstance(event, ev.ReplicaLost):
            self._losses.append(event)
            return []
        if isinstance(event, ev.Recovery):
            lost = "; ".join(self.held())
            return [f"{lost}; {describe(event)}" if lost else describe(event)]
        if isinstance(event, ev.GenerationFormed) and not self._formed:
            self._formed = True
            return [*self.held(), describe(event)]
        if isinstance(event, _AT_ONCE):
            return [*self.held(), describe(event)]
        return []

    def held(self) -> list[str]:
        """The losses whose recovery has not come; forgets them."""
        lines = [describe(loss) for loss in self._losses]
        self._losses.clear()
        return lines


class LiveLines:
    """Events to plain lines: progress each `log_every_s` seconds of the run, everything else at once."""

    def __init__(self, log_every_s: float, total: int | None = None) -> None:
        self._every_s = log_every_s
        self._pace = Pace(total)
        self._news = News()
        self._shown: ev.StepCommitted | None = None

    def lines(self, events: Sequence[ev.Event]) -> list[str]:
        """The lines to print for the events of one poll. No events: nothing came, so what was held is told."""
        if not events:
            return self._news.held()
        return [line for event in events for line in self._line(event)]

    def _line(self, event: ev.Event) -> list[str]:
        self._pace.feed(event)
        if isinstance(event, ev.StepCommitted):
            due = self._shown is None or self._pace.interval_s() >= self._every_s
            return [self._progress()] if due else []
        if isinstance(event, ev.RunEnded):
            last = [self._progress()] if self._pace.last is not self._shown else []
            return [*self._news.held(), *last, describe(event)]
        return self._news.lines(event)

    def _progress(self) -> str:
        line = self._pace.line()
        self._shown = self._pace.last
        self._pace.mark()
        return line


class LogView:
    """Plain lines to a stream that is no terminal, such as a job's log."""

    def __init__(self, stream: TextIO, log_every_s: float, total: int | None = None) -> None:
        self._stream = stream
        self._live = LiveLines(log_every_s, total)

    def show(self, events: Sequence[ev.Event]) -> None:
        """Prints and flushes, so that a follower sees each line when it is made."""
        self._print(self._live.lines(events))

    def close(self) -> None:
        """Prints what was held back."""
        self._print(self._live.lines(()))

    def _print(self, lines: Sequence[str]) -> None:
        if lines:
            self._stream.write("".join(f"{line}\n" for line in lines))
            self._stream.flush()


class BarView:
    """A bar on a terminal, with everything else as lines above it."""

    def __init__(self, stream: TextIO, total: int | None = None) -> None:
        self._pace = Pace(total)
        self._news = News()
        self._progress = _bar(stream)
        self._task = self._progress.add_task("starting", total=total)
        self._progress.start()

    def show(self, events: Sequence[ev.Event]) -> None:
        """Moves the bar and prints what a reader wants at once."""
        for event in events:
            self._pace.feed(event)
            self._print(self._news.lines(event))
            if isinstance(event, ev.RunEnded):
                self._print([*self._news.held(), describe(event)])
        if not events:
            self._print(self._news.held())
        if self._pace.last is not None:
            done, line = self._pace.last.step + 1, self._pace.line(num_metrics=1)
            self._progress.update(self._task, completed=done, total=self._pace.total, description=line)
        if self._pace.interval_s() >= 1.0:
            self._pace.mark()

    def close(self) -> None:
        """Leaves the bar as it stands."""
        self._print(self._news.held())
        self._progress.stop()

    def _print(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._progress.console.print(line, markup=False, highlight=False)


def live_view(stream: TextIO, log_every_s: float, total: int | None = None) -> View:
    """A bar when `stream` is a terminal, else lines. `total`: steps of the run where already known."""
    return BarView(stream, total) if stream.isatty() else LogView(stream, log_every_s, total)


def _bar(stream: TextIO) -> Progress:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    # The words matter more than the bar: it takes what an 80-column terminal leaves, and longer words are cut.
    line = TextColumn(
        "{task.description}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis")
    )
    bar = BarColumn(bar_width=None, table_column=Column(min_width=4, max_width=40, ratio=1))
    return Progress(line, bar, console=Console(file=stream))
