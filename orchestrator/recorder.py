"""A run's events on their way out of the controller: to readers who ask, and in batches to storage.

Lives in the controller's loop. Readers keep their place by number; storage is written by one thread of its own, because
it blocks and fails as it likes.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
import time
from typing import TYPE_CHECKING, Any

from everstep.orchestrator.eventlog import EventLog

if TYPE_CHECKING:
    from everstep.orchestrator.config import RunConfig
    from everstep.orchestrator.events import Event

_log = logging.getLogger(__name__)
_FLUSH_EVERY_S = 0.5
_KEEP_EVENTS = 20_000
_MAX_ANSWER = 2000


class Recorder:
    """Keeps the newest events for readers, and all of them until they are written."""

    def __init__(self, config: RunConfig, incarnation: int, *, restarted: bool) -> None:
        self._run, self._storage = config.name, config.storage
        self._log = EventLog(
            config.storage, config.name, incarnation=incarnation, options=config.checkpoint.storage_options
        )
        self._kept: list[str] = []
        # Readers keep their place over a restart: a successor numbers on from far above.
        self._first = time.time_ns() // 1_000_000 if restarted else 0
        self._news = asyncio.Event()
        self._unwritten: list[Event] = []
        self._over = False
        self._thread = concurrent.futures.ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="everstep-events"
        )

    def add(self, event: Event) -> None:
        """`event`: with its time and run."""
        self._unwritten.append(event)
        self._kept.append(event.to_json())
        if len(self._kept) > _KEEP_EVENTS:
            surplus = len(self._kept) - _KEEP_EVENTS
            del self._kept[:surplus]
            self._first += surplus
        self._news.set()

    def close(self) -> None:
        """No event comes after this: readers are told so when they have read the last one."""
        self._over = True
        self._news.set()

    async def after(self, number: int, wait_s: float) -> dict[str, Any]:
        """Events from `number` on, as JSON lines; waits up to `wait_s` for the first of them."""
        deadline = time.monotonic() + wait_s
        while self._first + len(self._kept) <= number and not self._over:
            rest = deadline - time.monotonic()
            if rest <= 0:
                break
            self._news.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._news.wait(), rest)
        start = max(number - self._first, 0)
        batch = self._kept[start : start + _MAX_ANSWER]
        following = self._first + start + len(batch)
        ended = self._over and following >= self._first + len(self._kept)
        return {"events": batch, "next": following, "ended": ended}

    async def flush_forever(self) -> None:
        """Until cancelled."""
        while True:
            await asyncio.sleep(_FLUSH_EVERY_S)
            await self._flush()

    async def flush_until(self, patience_s: float) -> bool:
        """Write the run's last events, which nobody will write after us; False if storage did not take them in time."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                while not await self._flush():
                    await asyncio.sleep(1.0)
                return True
        return False

    async def _flush(self) -> bool:
        """Whether all events are written."""
        batch, self._unwritten = self._unwritten, []
        try:
            # Shielded: a batch that waits behind a slow one must not be forgotten when we stop waiting for it.
            loop = asyncio.get_running_loop()
            await asyncio.shield(loop.run_in_executor(self._thread, self._write, batch))
        except Exception as error:  # noqa: BLE001 - any store's error: the events are kept and tried again
            _log.warning("run %s: events could not be written to %s: %s", self._run, self._storage, error)
            return False
        return True

    def _write(self, batch: list[Event]) -> None:
        """In the thread, the only one that touches the log."""
        self._log.add(*batch)
        self._log.flush()
