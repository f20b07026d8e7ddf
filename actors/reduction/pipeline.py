"""How buckets go through their collectives while backward computes.

Used by the reducer. A bucket's first collective is launched by whoever completes the bucket. One thread, the adder, waits
for it, adds up, and launches the second, bucket by bucket; the training thread waits for that one when it has nothing
else to do. So the gather of one bucket overlaps with the scatter of the following ones, and either kind is launched in
the order of the buckets, which is why all ranks launch alike. Nothing is decided here: a failure ends the attempt.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from queue import SimpleQueue

from everstep.actors.groups.base import Group, Work
from everstep.errors import InternalError

_DRAIN_S = 60.0
"""An aborted group's works end within milliseconds; that they do not end at all is a bug."""

_Job = tuple[Iterator[Work], Work]
"""What follows, and what it waits for."""


class Attempt:
    """One try to reduce a step over one group."""

    def __init__(self, group: Group, adder: Adder, on_failure: Callable[[BaseException], None]) -> None:
        """`on_failure` is called once if the attempt fails or its group breaks, from whatever thread notices. It must
        not raise."""
        self.group = group
        self._adder = adder
        self._on_failure = on_failure
        self._changed = threading.Condition()  # guards the three below
        self._adding = 0  # jobs that the adder has
        self._added: deque[_Job] = deque()  # and those that it is done with
        self._error: BaseException | None = None
        group.watch(self.fail)

    def launch(self, steps: Iterator[Work]) -> None:
        """Start `steps`, which yields the works to wait for before it goes on. Does not block and does not raise."""
        work = self.advance(steps, None)
        if work is not None:
            with self._changed:
                self._adding += 1
            self._adder.put(self, (steps, work))

    def wait(self) -> None:
        """Until everything launched is done. Raises what ended the attempt."""
        with self._changed:
            self._changed.wait_for(lambda: not self._adding or self._error is not None)
        while self._error is None and self._added:
            steps, work = self._added.popleft()
            following = self.advance(steps, work)
            if following is not None:
                self._added.append((steps, following))
        if self._error is not None:
            raise self._error

    def fail(self, error: BaseException) -> None:
        """End the attempt; only the first call counts. From any thread."""
        if self._record(error):
            self._on_failure(error)

    def cancel(self) -> None:
        """End the attempt, and return when nothing of it is under way any more. If something is, its group is aborted:
        it has no use after that."""
        with self._changed:
            if not self._adding and not self._added:
                return
        self._record(InternalError("the attempt to reduce was cancelled, but its result was asked for"))
        with self._changed:
            if not self._changed.wait_for(lambda: not self._adding, timeout=_DRAIN_S):
                raise InternalError(f"collectives of an aborted group did not end within {_DRAIN_S:.0f} s")
        while self._added:
            self.advance(*self._added.popleft())

    def advance(self, steps: Iterator[Work], work: Work | None) -> Work | None:
        """Wait for `work`, then take the next step; the work that this has launched. A supervisor: every exception
        ends the attempt, and no thread."""
        try:
            if work is not None:
                work.wait()  # also after a failure: until then the group may write into our tensors
            return None if self._error is not None else next(steps, None)
        except Exception as error:  # noqa: BLE001
            self.fail(error)
        return None

    def job_added(self, steps: Iterator[Work], work: Work | None) -> None:
        """For the adder: it is done with a job, after which `work` is under way, if any."""
        with self._changed:
            self._adding -= 1
            if work is not None:
                self._added.append((steps, work))
            self._changed.notify_all()

    def _record(self, error: BaseException) -> bool:
        with self._changed:
            if self._error is not None:
                return False
            self._error = error
            self._changed.notify_all()
        self.group.abort()  # frees whoever waits, whatever the failure was
        return True


class Adder:
    """The thread. It serves one attempt after the other until `close`."""

    def __init__(self) -> None:
        self._jobs: SimpleQueue[tuple[Attempt, _Job] | None] = SimpleQueue()
        threading.Thread(target=self._run, name="everstep-reduce", daemon=True).start()

    def put(self, attempt: Attempt, job: _Job) -> None:
        self._jobs.put((attempt, job))

    def close(self) -> None:
        self._jobs.put(None)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            attempt, (steps, work) = item
            attempt.job_added(steps, attempt.advance(steps, work))
            del item, attempt, steps, work  # what they hold is free while nothing comes
