"""The threads that carry buckets through their collectives while backward computes.

Used by the reducer. Three lanes, each a thread with a queue: the first launches a bucket's first collective, the second
waits for it, adds up, and launches the next, the third waits for that. So the gather of one bucket overlaps with the
scatter of the following one, and within a lane the order is always that of the buckets, which is why all ranks
launch alike. A lane decides nothing: a failure is handed to the attempt, and what follows it is drained.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from everstep.actors.groups.base import Group, Work
from everstep.errors import InternalError

_LANES = 3
_DRAIN_S = 60.0
"""An aborted group's works end within milliseconds; that they do not end at all is a bug."""


class Attempt:
    """One try to reduce a step over one group. Any thread."""

    def __init__(self, group: Group, on_failure: Callable[[BaseException], None]) -> None:
        """`on_failure` must not raise."""
        self.group = group
        self._on_failure = on_failure
        self._changed = threading.Condition()
        self._running = 0
        self._error: BaseException | None = None

    @property
    def failed(self) -> bool:
        return self._error is not None

    def fail(self, error: BaseException) -> None:
        """End the attempt; only the first call counts."""
        if self._record(error):
            self._on_failure(error)

    def cancel(self) -> None:
        """End the attempt, and return when nothing of it is under way any more. If something is, its group is aborted:
        it has no use after that."""
        with self._changed:
            if not self._running:
                return
        self._record(InternalError("the attempt to reduce was cancelled, but its result was asked for"))
        with self._changed:
            if not self._changed.wait_for(lambda: not self._running, timeout=_DRAIN_S):
                raise InternalError(f"collectives of an aborted group did not end within {_DRAIN_S:.0f} s")

    def wait(self) -> None:
        """Until everything that was submitted is done. Raises what ended the attempt."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running or self._error is not None)
        if self._error is not None:
            raise self._error

    def job_started(self) -> None:
        with self._changed:
            self._running += 1

    def job_ended(self) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()

    def _record(self, error: BaseException) -> bool:
        with self._changed:
            if self._error is not None:
                return False
            self._error = error
            self._changed.notify_all()
        self.group.abort()  # frees the lanes, whatever the failure was
        return True


_Item = tuple[Attempt, Iterator[Work], Work | None]


class Pipeline:
    """The lanes. `close` ends their threads."""

    def __init__(self) -> None:
        self._queues: list[SimpleQueue[_Item | None]] = [SimpleQueue() for _ in range(_LANES)]
        for number in range(_LANES):
            name = f"everstep-reduce-{number}"
            threading.Thread(target=self._run, args=(number,), name=name, daemon=True).start()

    def submit(self, attempt: Attempt, steps: Iterator[Work]) -> None:
        """Run `steps`, which yields the works to wait for. Does not block."""
        attempt.job_started()
        self._queues[0].put((attempt, steps, None))

    def close(self) -> None:
        for queue in self._queues:
            queue.put(None)

    def _run(self, number: int) -> None:
        last = number == _LANES - 1
        while (item := self._queues[number].get()) is not None:
            attempt, steps, work = item
            item = None
            work = _advance(attempt, steps, work)
            while last and work is not None:
                work = _advance(attempt, steps, work)
            if work is None:
                steps = iter(())  # the tensors it holds are free before anybody hears of it
                attempt.job_ended()
            else:
                self._queues[number + 1].put((attempt, steps, work))


def _advance(attempt: Attempt, steps: Iterator[Work], work: Work | None) -> Work | None:
    """Wait for `work`, then take the next step. A supervisor: every exception ends the attempt, none the lane."""
    try:
        if work is not None:
            work.wait()  # also after a failure: until then the group may write into our tensors
        return None if attempt.failed else next(steps, None)
    except Exception as error:  # noqa: BLE001
        attempt.fail(error)
    return None
