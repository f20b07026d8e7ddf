"""A replica's membership: what the control thread and the training thread know in common, under one lock.

`actors.replica` makes one; `actors.session` (the training thread) asks it for generations and tells it how far it
is; the control thread of `actors.link` brings the controller's orders. It promises on the replica's behalf (see
`wire.Parked`), so every promise is made and checked under the lock: after a promise nothing of that generation is
committed any more. It knows how groups are formed and aborted, but nothing of gradients, data or user code.
"""

from __future__ import annotations

import base64
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from everstep.actors import wire
from everstep.actors.groups import Group, Rendezvous, form_group
from everstep.actors.identity import Identity
from everstep.actors.link import Link
from everstep.actors.order import Order
from everstep.actors.stacks import stacks
from everstep.errors import EverstepError, Fenced, GroupBroken

_MAX_RECORDS = 4096
_MAX_UNANSWERED = 1024


class ReleasedFromRun(BaseException):
    """The run does not need this replica any more. Not an error: it unwinds the user's loop, past its excepts."""


class Member:
    """See the module. Methods of the training thread come first, then those of the control thread."""

    def __init__(
        self,
        identity: Identity,
        *,
        device: torch.device,
        locate: Callable[[], tuple[str, int] | None],
        renew_lease: Callable[[float], None],
        heartbeat_s: float,
        form_timeout_s: float,
        on_release: Callable[[str], None],
    ) -> None:
        self.identity = identity
        self.device = device
        self.released = ""
        self.phase = "start"
        self.compute_s = 0.0
        self._renew_lease = renew_lease
        self._heartbeat_s = heartbeat_s
        self._form_timeout_s = form_timeout_s
        self._on_release = on_release
        self._cond = threading.Condition()
        self._applied = 0
        self._fresh = True
        self._reduced = False
        self._kept: frozenset[int] = frozenset()
        self._current = -1
        self._done = False
        self._vote = ""
        self._promised = 0
        self._faulted = 0
        """Newest generation in which this replica cannot go on."""
        self._pause = 0
        self._snapshot = 0
        self._incarnation = 0
        self.peers: tuple[tuple[str, int], ...] = ()
        """Transfer addresses of some who trained when this replica came to the run."""
        self._order: Order | None = None
        self._entered: Order | None = None
        self._memo: dict[str, Any] = {}
        self._records: deque[wire.Record] = deque(maxlen=_MAX_RECORDS)
        self._ready: wire.Ready | None = None
        self._verdict: wire.Finished | wire.UserFailed | None = None
        """How the user's function ended."""
        self._progress = 0
        self._seq = 0
        self._asked: deque[tuple[int, float]] = deque(maxlen=_MAX_UNANSWERED)
        """Heartbeats without an answer: number, and when it was sent."""
        self._hello_s = time.monotonic()
        self._stop = threading.Event()
        self._link = Link(locate, self._hello, self._receive)
        self._beats = threading.Thread(target=self._beat_forever, name="everstep-heartbeat", daemon=True)

    def start(self) -> None:
        """Connect to the controller and begin to beat."""
        self._link.start()
        self._beats.start()

    def close(self) -> None:
        """Leave: no more beats, no group."""
        self._stop.set()
        with self._cond:
            orders = [self._order, self._entered]
        for order in orders:
            if order is not None:
                order.cancel.set()
                if order.group is not None:
                    order.group.close()
        self._link.close()

    # ---- the training thread

    def moved(self, phase: str) -> None:
        """The training thread has come to another place; also the proof that it moves at all."""
        self.phase = phase
        self._progress += 1

    @property
    def applied(self) -> int:
        """Number of steps applied to the state."""
        return self._applied

    @property
    def kept(self) -> frozenset[int]:
        """Shards of the present step whose gradients are held."""
        return self._kept

    @property
    def pause_wanted(self) -> bool:
        """The controller asked for a pause at the next boundary of this generation."""
        entered = self._entered
        return entered is not None and self._pause == entered.generation.number

    @property
    def snapshot_wanted(self) -> bool:
        """The controller asked for a checkpoint in this generation, and none was taken since."""
        entered = self._entered
        return entered is not None and self._snapshot == entered.generation.number

    def snapshot_taken(self) -> None:
        """It was."""
        self._snapshot = 0

    def announce_ready(self, signature: tuple[str, ...], digest: str, total: int) -> None:
        """The model is built, the loop begins: this replica can be taken into a generation."""
        ready = wire.Ready(replica=self.identity.replica, signature=signature, digest=digest, total=total)
        with self._cond:
            self._ready = ready
        self._link.send(ready)

    def fenced(self) -> bool:
        """True when the generation entered last is over for this replica, or it was released."""
        entered = self._entered
        return bool(self.released) or entered is None or entered.generation.number <= self._promised

    def check(self) -> None:
        """Raises GroupBroken when the generation is over, ReleasedFromRun when the run is over for this replica."""
        if self.released:
            raise ReleasedFromRun(self.released)
        if self.fenced():
            raise GroupBroken("the controller ended this generation")

    def next_order(self) -> Order:
        """Wait for a generation newer than every promise, in which we have not failed yet. Bounded by the lease: without
        a controller we end."""
        self.moved("wait")
        with self._cond:
            while True:
                if self.released:
                    raise ReleasedFromRun(self.released)
                order, over = self._order, max(self._promised, self._faulted)
                if order is not None and order.generation.number > over and order is not self._entered:
                    return order
                self._cond.wait(1.0)

    def group_of(self, order: Order) -> Group:
        """Wait until the order's group stands; from any thread. Raises Fenced if the generation is over before,
        GroupBroken if the group could not be formed."""
        with self._cond:
            while order.group is None:
                if order.failed or self.released:
                    raise GroupBroken(order.failed or self.released)
                if order.generation.number <= self._promised or self._order is not order:
                    raise Fenced(f"generation {order.generation.number} ended before it was formed")
                self._cond.wait(1.0)
            return order.group

    def enter(self, order: Order) -> None:
        """From now on this replica is in the order's generation. Raises Fenced if it is over already."""
        with self._cond:
            if order.generation.number <= self._promised:
                raise Fenced(f"generation {order.generation.number} is over")
            old, self._entered = self._entered, order
            self._fresh = False
            if order.generation.step == self._applied:
                self._reduced = False
        if old is not None and old is not order and old.group is not None:
            old.group.close()

    def begin_shard(self, shard: int) -> None:
        """A shard's computation begins. Raises GroupBroken if the generation is over: then it must not begin."""
        with self._cond:
            self.check()
            self._current = shard
        self.moved("compute")

    def end_shard(self, shard: int) -> None:
        """Its gradient is held."""
        with self._cond:
            self._current = -1
            self._kept |= {shard}
        self.moved("compute")

    def forget_shards(self) -> None:
        """No shard's gradient is held any more."""
        with self._cond:
            self._kept = frozenset()

    def reduction_complete(self) -> None:
        """All waits of the reduction are over; the vote may start. Raises GroupBroken if we promised otherwise."""
        with self._cond:
            self.check()
            self._reduced = True

    def begin_commit(self, vote: bytes) -> None:
        """The vote was good: the step becomes history here. Raises GroupBroken if a promise was made before."""
        with self._cond:
            self.check()
            self._advance(vote)

    def begin_roll_forward(self, number: int, vote: bytes) -> None:
        """Apply a step that others have applied, by the order to enter generation `number`. Raises Fenced if that is
        over: what was reported of this replica with the promise must stay true."""
        with self._cond:
            if number <= self._promised:
                raise Fenced(f"generation {number} is over")
            self._advance(vote)

    def _advance(self, vote: bytes) -> None:
        self._applied += 1
        self._reduced = False
        self._kept = frozenset()
        self._vote = base64.b64encode(vote).decode()

    def committed(self, record: wire.Record, *, speak: bool) -> None:
        """The step is applied. `speak`: this replica tells the controller at once (rank 0)."""
        with self._cond:
            self._records.append(record)
            number = self._entered.generation.number if self._entered else 0
        if speak:
            self._link.send(wire.Committed(replica=self.identity.replica, generation=number, record=record))

    def adopt_state(self, generation: wire.Generation) -> None:
        """The state with which `generation` begins was fetched. Raises Fenced if that is over: what was promised meanwhile
        of the state before must stay true, and the controller counts on nothing that was being fetched."""
        with self._cond:
            if generation.number <= self._promised:
                raise Fenced(f"generation {generation.number} is over")
            self._applied = generation.step
            self._reduced = False
            self._kept = frozenset()
            self._fresh = False
            self._vote = generation.vote

    def fetched(self, number: int, num_bytes: int, seconds: float) -> None:
        """Tell the controller so."""
        self._link.send(
            wire.Fetched(
                replica=self.identity.replica, generation=number, num_bytes=num_bytes, seconds=seconds
            )
        )

    def refused(self, number: int, step: int, reason: str) -> None:
        """The checkpoint of `step` cannot be used."""
        self._link.send(
            wire.Refused(replica=self.identity.replica, generation=number, step=step, reason=reason)
        )

    def no_part(self, step: int, attempt: str, reason: str) -> None:
        """This replica's part of a checkpoint will not come."""
        self._link.send(wire.NoPart(replica=self.identity.replica, step=step, attempt=attempt, reason=reason))

    def park_at_boundary(self) -> None:
        """All agreed in the vote to pause after this step: promise and report."""
        with self._cond:
            if self.fenced():
                return
            assert self._entered is not None
            number = self._entered.generation.number
            self._promised = max(self._promised, number)
            report = self._parked(number, boundary=True)
        self._link.send(report)

    def fault(self, number: int, error: BaseException) -> None:
        """This replica cannot go on in that generation."""
        with self._cond:
            over = number <= self._promised
            if not over:
                self._faulted = max(self._faulted, number)
        if not over:
            self._link.send(
                wire.Fault(
                    replica=self.identity.replica, generation=number, error=f"{type(error).__name__}: {error}"
                )
            )

    def loop_done(self) -> None:
        """The loop has seen the last step."""
        with self._cond:
            self._done = True
        self.moved("done")

    def finished(self, digest: str, value: Any, problem: str = "") -> None:
        """The user's function returned; `value` is JSON-safe, and `problem` says why it is not what was returned."""
        message = wire.Finished(
            replica=self.identity.replica, applied=self._applied, digest=digest, value=value, problem=problem
        )
        self._say_last(message)

    def user_failed(self, error: str, traceback: str, *, fatal: bool) -> None:
        """An exception left the user's function."""
        message = wire.UserFailed(
            replica=self.identity.replica, step=self._applied, error=error, traceback=traceback, fatal=fatal
        )
        self._say_last(message)

    def _say_last(self, message: wire.Finished | wire.UserFailed) -> None:
        with self._cond:
            self._verdict = message
        self._link.send(message)

    def leave(self, reason: str) -> None:
        """Ask to leave at the next boundary (SIGTERM)."""
        self._link.send(wire.Leaving(replica=self.identity.replica, reason=reason))

    def wait_release(self, timeout_s: float) -> bool:
        """Wait until the controller lets this replica go; False after `timeout_s`."""
        with self._cond:
            return self._cond.wait_for(lambda: bool(self.released), timeout_s)

    # ---- the control thread

    def _hello(self) -> wire.Hello:
        self._hello_s = time.monotonic()
        with self._cond:
            who, ready = self.identity, self._ready
            newest = self._order or self._entered
            return wire.Hello(
                run=who.run,
                token=who.token,
                replica=who.replica,
                pid=who.pid,
                node=who.node,
                host=who.host,
                transfer=who.transfer,
                status=self._status(),
                generation=newest.generation if newest else None,
                ready=ready is not None,
                faulted=newest is not None
                and (newest.generation.number <= max(self._promised, self._faulted) or bool(newest.failed)),
                memo=self._memo,
                records=tuple(self._records),
                signature=ready.signature if ready else (),
                digest=ready.digest if ready else "",
                total=ready.total if ready else 0,
            )

    def _status(self) -> wire.Status:
        return wire.Status(
            generation=self._entered.generation.number if self._entered else 0,
            applied=self._applied,
            fresh=self._fresh,
            reduced=self._reduced,
            kept=tuple(sorted(self._kept)),
            current=self._current,
            done=self._done,
            vote=self._vote,
        )

    def _parked(self, number: int, *, boundary: bool) -> wire.Parked:
        return wire.Parked(
            replica=self.identity.replica,
            generation=number,
            boundary=boundary,
            status=self._status(),
            records=tuple(self._records),
        )

    def _receive(self, message: wire.Message) -> None:
        if isinstance(message, wire.Ack):
            self._acknowledged(message.seq)
            self._forget_records(message.known_step)
        elif isinstance(message, wire.Welcome):
            self._welcomed(message)
        elif isinstance(message, wire.Abort):
            self._on_abort(message)
        elif isinstance(message, wire.Pause):
            if message.incarnation >= self._incarnation:
                self._pause = message.generation
        elif isinstance(message, wire.Snapshot):
            if message.incarnation >= self._incarnation:
                self._snapshot = message.generation
        elif isinstance(message, wire.Form):
            self._on_form(message)
        elif isinstance(message, wire.Keep):
            self._memo = message.memo
        elif isinstance(message, wire.Release):
            self._on_release_order(message.reason)
        elif isinstance(message, wire.DumpStacks):
            self._link.send(wire.Stacks(replica=self.identity.replica, text=stacks()))

    def _acknowledged(self, seq: int) -> None:
        """The controller heard us when this heartbeat was sent, or later; when its answer arrives says nothing."""
        while self._asked and self._asked[0][0] <= seq:
            number, sent_s = self._asked.popleft()
            if number == seq:
                self._renew_lease(sent_s)

    def _welcomed(self, message: wire.Welcome) -> None:
        self._renew_lease(self._hello_s)
        with self._cond:
            self._incarnation = max(self._incarnation, message.incarnation)
            self.peers = message.peers or self.peers
            verdict = self._verdict
        if verdict is not None:
            self._link.send(verdict)  # it may not have arrived

    def _forget_records(self, known_step: int) -> None:
        with self._cond:
            while self._records and self._records[0].step < known_step:
                self._records.popleft()

    def _on_abort(self, message: wire.Abort) -> None:
        with self._cond:
            if message.incarnation < self._incarnation:
                return
            self._promised = max(self._promised, message.generation)
            doomed = [
                o for o in (self._order, self._entered) if o and o.generation.number <= message.generation
            ]
            report = self._parked(message.generation, boundary=False)
            self._cond.notify_all()
        self._link.send(report)
        for order in doomed:
            order.cancel.set()
            if order.group is not None:
                order.group.abort()

    def _on_form(self, message: wire.Form) -> None:
        generation = message.generation
        with self._cond:
            last = self._order
            newest = last.generation.number if last else 0
            stale = generation.number <= self._promised or generation.incarnation < self._incarnation
            if not stale and generation.number > newest:
                if last is not None:
                    last.cancel.set()
                order = self._order = Order(generation)
                self._memo = message.memo
                self._cond.notify_all()
            elif stale or last is None or last.generation != generation:
                return
            else:
                order = last
        if order is last:
            if order.group is not None:
                self._say_formed(generation.number, 0.0)  # what was said about it is lost
            return
        member = self.identity.replica in generation.members
        if generation.final or not member:
            self._stands(order, None, 0.0, speak=member)
        else:
            name = f"everstep-form-{generation.number}"
            threading.Thread(target=self._form, args=(order,), name=name, daemon=True).start()

    def _form(self, order: Order) -> None:
        """In a thread of its own, because forming with a peer that dies meanwhile can block until its timeout."""
        generation, started = order.generation, time.monotonic()
        try:
            group = form_group(
                self.device,
                Rendezvous(
                    host=generation.store[0],
                    port=generation.store[1],
                    prefix=generation.prefix,
                    secret=self.identity.token.encode(),
                    rank=generation.rank_of(self.identity.replica),
                    world_size=len(generation.members),
                    bind_ip=self.identity.ip,
                    timeout_s=self._form_timeout_s,
                ),
                order.cancel,
            )
        except (EverstepError, RuntimeError, OSError, ValueError) as error:
            with self._cond:
                order.failed = f"{type(error).__name__}: {error}"
                self._cond.notify_all()
            if not order.cancel.is_set():
                self.fault(generation.number, error)
            return
        self._stands(order, group, time.monotonic() - started, speak=True)

    def _stands(self, order: Order, group: Group | None, seconds: float, *, speak: bool) -> None:
        with self._cond:
            over = order.generation.number <= self._promised or self._order is not order
            if not over:
                order.group = group
                self._cond.notify_all()
        if over:
            if group is not None:
                group.close()
        elif speak:
            self._say_formed(order.generation.number, seconds)

    def _say_formed(self, number: int, connect_s: float) -> None:
        self._link.send(wire.Formed(replica=self.identity.replica, generation=number, connect_s=connect_s))

    def _on_release_order(self, reason: str) -> None:
        with self._cond:
            self.released = reason or "released"
            orders = [self._order, self._entered]
            self._cond.notify_all()
        for order in orders:
            if order is not None:
                order.cancel.set()
                if order.group is not None:
                    order.group.abort()
        self._on_release(self.released)

    def _beat_forever(self) -> None:
        seen, since = -1, time.monotonic()
        while not self._stop.wait(self._heartbeat_s):
            now = time.monotonic()
            if self._progress != seen:
                seen, since = self._progress, now
            self._seq += 1
            self._asked.append((self._seq, now))
            self._link.send(
                wire.Beat(
                    replica=self.identity.replica,
                    seq=self._seq,
                    applied=self._applied,
                    phase=self.phase,
                    generation=self._entered.generation.number if self._entered else 0,
                    progress=self._progress,
                    compute_s=self.compute_s,
                    wait_s=now - since,
                )
            )
