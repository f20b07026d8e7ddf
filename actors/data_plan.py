"""What a replica reads next: the bookkeeping of reading ahead through changes of the deal.

Used by `actors.data_map` alone. No I/O, no torch calls, no clock: the loader asks what to read (`issue`) and says what
came (`arrived`), the source says what is wanted (`deal`, `ask`, `committed`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from everstep.actors.data_common import KeptBatch, Key


class FetchPlan:
    """What to read next, what is being read, and what has arrived: the bookkeeping of `MapSource`, without any I/O.

    Invariant: a batch is wanted by at most one of to-read, in flight and ready, so nothing wanted is read twice.
    """

    def __init__(self, shard_size: Callable[[int, int], int], lookahead_steps: int) -> None:
        self._shard_size = shard_size
        self._lookahead_steps = lookahead_steps
        """Bounds the search for something to read where most shards are empty."""
        self._step, self._until = 0, 0
        self._now: tuple[int, ...] = ()
        self._later: tuple[int, ...] = ()
        self._owned: frozenset[int] = frozenset()
        self._front = 0
        """First step that is not history."""
        self._cursor: Iterator[Key] = iter(())
        self._asked: Key | None = None
        self._in_flight: dict[int, Key] = {}
        self._flying: set[Key] = set()
        self.next_serial = 0
        self.ready: dict[Key, Any] = {}
        """Arrived, not handed out."""
        self.kept: dict[Key, KeptBatch] = {}
        """Handed out, not history."""

    def deal(self, step: int, now: Sequence[int], later: Sequence[int], until: int) -> bool:
        """See `ShardSource.deal`. True when what waits in the queues should be given back in favour of other batches."""
        self._step, self._until, self._front = step, until, step
        self._now, self._later, self._owned = tuple(now), tuple(later), frozenset(later)
        self.ready = {key: batch for key, batch in self.ready.items() if self.wants(key)}
        self.kept = {key: batch for key, batch in self.kept.items() if key[0] == step or self.wants(key)}
        self._rewind()
        missing = any(self._to_read((step, shard)) for shard in self._now)
        return bool(self._flying) and (missing or not all(map(self.wants, self._flying)))

    def wants(self, key: Key) -> bool:
        """Was this batch dealt to us, and is it still to come?"""
        step, shard = key
        if not self._front <= step < self._until:
            return False
        return shard in self._now if step == self._step else step > self._step and shard in self._owned

    def ask(self, key: Key) -> None:
        """Read this one before all others."""
        self._asked = key

    def issue(self) -> tuple[int, int, int] | None:
        """(serial, step, shard) of the next batch to read, which then is in flight; None when there is none."""
        key = self._asked if self._asked is not None and self._to_read(self._asked) else None
        if key is None:
            key = next(filter(self._to_read, self._cursor), None)
        if key is None:
            return None
        serial = self.next_serial
        self.next_serial += 1
        self._in_flight[serial] = key
        self._flying.add(key)
        return (serial, *key)

    def arrived(self, serial: int, batch: Any) -> None:
        """The batch with this serial has been read."""
        key = self._landed(serial)
        if self.wants(key) or key == self._asked:
            self.ready[key] = batch

    def given_back(self, serial: int) -> None:
        """It has not been read: its turn comes again."""
        self._landed(serial)
        self._rewind()

    def lost(self) -> None:
        """Nothing that is in flight will arrive."""
        self._in_flight.clear()
        self._flying.clear()
        self._rewind()

    def hand_out(self, key: Key) -> Any:
        """Take a ready batch; it is kept until its step is history."""
        batch = self.ready.pop(key)
        self.kept[key] = KeptBatch(batch)
        self._asked = None
        return batch

    def forget(self, key: Key) -> None:
        """This batch is not usable; read it again when it is wanted."""
        self.ready.pop(key, None)
        self.kept.pop(key, None)
        self._asked = None
        self._rewind()

    def committed(self, step: int) -> None:
        """Steps up to `step` are history."""
        self._front = max(self._front, step + 1)
        self.ready = {key: batch for key, batch in self.ready.items() if key[0] > step}
        self.kept = {key: batch for key, batch in self.kept.items() if key[0] > step}
        self._rewind()  # the lookahead has moved

    def _landed(self, serial: int) -> Key:
        key = self._in_flight.pop(serial)
        self._flying.discard(key)
        return key

    def _to_read(self, key: Key) -> bool:
        if key in self.ready or key in self._flying or key in self.kept:
            return False
        return self._shard_size(*key) > 0

    def _rewind(self) -> None:
        self._cursor = self._order()

    def _order(self) -> Iterator[Key]:
        """All wanted batches within the lookahead, in the order in which the training thread will ask for them."""
        end = min(self._until, self._front + self._lookahead_steps)
        if self._front <= self._step < end:
            yield from ((self._step, shard) for shard in self._now)
        steps = range(max(self._step + 1, self._front), end)
        yield from itertools.product(steps, self._later)
