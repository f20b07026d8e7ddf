"""A modelled replica: the rules of `actors.member` and `actors.session`, without tensors, threads and sockets.

Used by `tests.simulation`. The training thread is a generator that yields seconds to sleep, or None to wait until it is
notified; the control thread is `receive`. State is a number that hangs on everything that ever went into it: two
replicas are equal if and only if they applied the same reductions, of the same gradients, in the same order.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from everstep.actors import wire
from tests.simulated_process import Process
from tests.simulated_rules import Broken, Order, Released, Thread, UserCode, mix

if TYPE_CHECKING:
    from tests.simulated_group import Group
    from tests.simulation import Node, World


class Replica(Process):
    """One replica's process. `World` kills, freezes, cuts and hangs it."""

    def __init__(self, world: World, ident: int, node: Node) -> None:
        super().__init__(world, ident, node)
        self.epoch, self.connected, self.last_up, self.last_down = 0, False, 0.0, 0.0
        self.initial = world.initial_state(ident)
        self.state: int | None = self.initial
        self.offer: tuple[str, int] | None = None
        self.applied, self.fresh, self.done, self.vote, self.current = 0, True, False, "", -1
        self.kept: dict[int, int] = {}
        self.reduced = False
        self.gradient: tuple[int, tuple[int, int]] | None = None
        self.promised, self.faulted, self.pause, self.incarnation = 0, 0, 0, 0
        self.order: Order | None = None
        self.entered: Order | None = None
        self.generation: wire.Generation | None = None
        self.group: Group | None = None
        self.todo: list[int] = []
        self.shares: list[int] = []
        self.memo: dict[str, Any] = {}
        self.records: deque[wire.Record] = deque(maxlen=4096)
        self.ready: wire.Ready | None = None
        self.finished: wire.Finished | None = None
        self.released = ""
        self.phase, self.progress, self.seq, self.compute_s = "start", 0, 0, 0.0
        self.slowness = world.rng.uniform(0.8, 1.3)
        self._thread = self._train()
        world.at(world.rng.uniform(0.05, 0.5), world.connect, self, owner=self)
        world.at(0.0, self._resume, owner=self)
        world.at(world.settings.heartbeat_s, self._beat, owner=self)
        world.at(world.lease_s, self._check_lease)

    # ---- the process

    def _beat(self) -> None:
        if self.released and not self.connected:
            return
        self.seq += 1
        self.send(
            wire.Beat(
                replica=self.id,
                seq=self.seq,
                generation=self.entered.number if self.entered else 0,
                applied=self.applied,
                phase=self.phase,
                progress=self.progress,
                compute_s=self.compute_s,
            )
        )
        self.world.at(self.world.settings.heartbeat_s, self._beat, owner=self)

    def send(self, message: wire.Message) -> None:
        self.world.send_up(self, message)

    def moved(self, phase: str) -> None:
        self.phase = phase
        self.progress += 1

    # ---- the training thread: session

    def _train(self) -> Thread:
        rng = self.world.rng
        try:
            yield rng.uniform(*self.world.warm_up_s)
            self._maybe_fail()
            self.ready = wire.Ready(
                replica=self.id, signature=("state",), digest=f"{self.initial:x}", total=self.world.total
            )
            self.send(self.ready)
            yield from self._enter_next()
            while self.applied < self.world.total:
                yield from self._step(self.applied)
                if self.applied == self.world.leave_at:
                    break
                self.moved("user")
                yield rng.uniform(0.0, 0.02)
            self.done = True
            self.world.moment("done")
            self.moved("done")
            yield rng.choice((0.0, 0.01, 1.0, self.world.after_loop_s))
            self.finished = wire.Finished(
                replica=self.id, applied=self.applied, digest=f"{self.state or 0:x}", value=self.applied
            )
            self.send(self.finished)
            self.world.moment("finished")
        except Released:
            self.world.at(rng.uniform(0.001, 0.05), self.world.die, self, "released", owner=self)
        except UserCode as error:
            self.send(
                wire.UserFailed(
                    replica=self.id,
                    step=self.applied,
                    error=str(error),
                    traceback="Traceback ...",
                    fatal=False,
                )
            )
            self.world.at(5.0, self.world.die, self, "user code raised", owner=self)

    def _maybe_fail(self) -> None:
        if self.world.user_error_due(self):
            raise UserCode(f"ValueError: at {self.applied}")

    def _step(self, step: int) -> Thread:
        while self.applied == step:
            if self.generation is not None and self.generation.final:
                self.world.violation(f"{self} goes on after the last step, {self.generation.step}")
            self.moved("data")
            while self.todo and self.applied == step:
                if self.fenced():
                    yield from self._enter_next()
                    continue
                shard = self.todo.pop(0)
                self.current = shard
                self.moved("compute")
                self.compute_s = self.world.shard_s * self.slowness
                yield self.compute_s * self.world.rng.uniform(0.7, 1.3)
                self._maybe_fail()
                assert self.state is not None
                self.current = -1
                self.kept[shard] = mix(self.state, step, shard)
                self.moved("compute")
            if self.applied == step:
                yield from self._commit(step)

    def _commit(self, step: int) -> Thread:
        try:
            self.check()
            yield from self._group_stands()
            assert self.group is not None
            self.moved("reduce")
            gradient = yield from self.group.reduce(self, step)
            self.reduction_complete(gradient)
            pause = yield from self.group.vote(self, step)
            if self.world.rules.promise_covers_commit:
                self.check()
            elif self.released:
                raise Released
        except Broken as error:
            assert self.generation is not None
            self.fault(self.generation.number, error)
            yield from self._enter_next()
            return
        self._advance(self.world.vote_of(self.group.key, step))
        yield from self._apply(step, self.group.key)
        if pause:
            self._park_at_boundary()
            yield from self._enter_next()
        elif self.applied < self.world.total:
            assert self.generation is not None
            self.todo = list(range(*self.generation.ranges[self._rank()]))
            self.shares = list(self.todo)

    def _rank(self) -> int:
        assert self.generation is not None
        return self.generation.rank_of(self.id)

    def _apply(self, step: int, key: tuple[int, int]) -> Thread:
        self.moved("apply")
        self.world.moment("applying")
        gradient, self.gradient = self.gradient, None
        self.offer = None
        if gradient is None or gradient[1] != key or self.state is None:
            self.world.violation(
                f"{self} applies step {step} of {key} but holds {gradient}, state {self.state}"
            )
        else:
            self.state = mix(self.state, step, gradient[0])
        self.world.applied(self, step, key)
        yield self.world.rng.choice((0.001, 0.005, 0.03))
        generation = self.generation
        record = wire.Record(
            history=generation.history if generation else 0,
            generation=generation.number if generation else 0,
            step=step,
            metrics={"loss": float(step)},
            samples=1,
            step_s=0.1,
        )
        self.records.append(record)
        number = self.entered.number if self.entered else 0
        speak = generation is not None and generation.members[:1] == (self.id,)
        if speak or (self.world.rules.speaks_when_fenced and number <= self.promised):
            self.send(wire.Committed(replica=self.id, generation=number, record=record))
        self.moved("user")

    # ---- entering

    def _enter_next(self) -> Thread:
        while True:
            order = yield from self._next_order()
            try:
                if (yield from self._enter(order)):
                    return
            except Broken as error:
                self.fault(order.number, error)
                yield self.world.rng.uniform(0.001, 0.05)

    def _next_order(self) -> Thread:
        self.moved("wait")
        while True:
            if self.released:
                raise Released
            order = self.order
            over = max(self.promised, self.faulted)
            if order is not None and order.number > over and order is not self.entered:
                return order
            yield None

    def _enter(self, order: Order) -> Thread:
        generation = order.generation
        self.group = None
        if self.id in generation.roll_forward:
            yield self.world.rng.choice((0.0, 0.0, 0.02, 1.5))
            yield from self._roll_forward(order)
        elif self.applied == generation.step and self.id not in generation.fetch:
            self.gradient = None
        if self.id in generation.fetch:
            yield from self._fetch(order)
        elif generation.fetch and self.state is not None:
            self.offer = (generation.version, self.state)
        if self.id not in generation.members:
            self._entering(order)
            return False
        self._entering(order)
        self.generation = generation
        if self.applied != generation.step or self.state is None:
            self.world.violation(f"{self} entered {order.number} at {self.applied}, not {generation.step}")
        if generation.final:
            return True
        rank = self._rank()
        self.shares = sorted({*generation.held[rank], *generation.todo[rank]})
        if not self.kept.keys() <= set(self.shares):
            self.kept = {}
        self.todo = [s for s in self.shares if s not in self.kept]
        return True

    def _group_stands(self) -> Thread:
        """It may still be forming while the first shards are computed."""
        order = self.entered
        assert order is not None
        while not order.formed:
            if self.released:
                raise Released
            if order.failed or order.number <= self.promised or self.order is not order:
                raise Broken("ended before it was formed")
            yield None
        self.group = order.group

    def _entering(self, order: Order) -> None:
        if order.number <= self.promised:
            raise Broken("generation is over")
        self.entered, self.fresh = order, False
        if order.generation.step == self.applied:
            self.reduced = False

    def _roll_forward(self, order: Order) -> Thread:
        if self.world.rules.promise_covers_roll_forward and order.number <= self.promised:
            raise Broken("generation is over")
        self.world.moment("roll_forward")
        vote, step = order.generation.vote, self.applied
        key = self.gradient[1] if self.gradient is not None else (-1, -1)
        if vote != self.world.vote_of(key, step):
            self.world.violation(f"{self} rolls step {step} of {key} forward with the vote {vote!r}")
        self._advance(vote)
        yield from self._apply(step, key)

    def _fetch(self, order: Order) -> Thread:
        world, version = self.world, order.generation.version
        self.moved("fetch")
        self.state = None  # received in place
        self.gradient = None
        if world.rules.fetch_is_fresh:
            self.fresh = True
        world.moment("fetching")
        missing, silent = world.rng.uniform(0.02, 1.0), 0.0
        got: int | None = None
        while missing > 0.0:
            if order.cancelled or self.released:
                raise Broken("fetch cancelled")
            sources = [world.by_transfer[a] for a in order.generation.sources if a != self.transfer]
            alive = [s for s in sources if not s.out_of_reach]
            serving = [s for s in alive if s.offer is not None and s.offer[0] == version]
            if serving and not self.node.cut:
                source = world.rng.choice(serving)
                assert source.offer is not None
                if got is not None and got != source.offer[1]:
                    world.violation(f"{self}: sources of {version} hold different states")
                got, silent = source.offer[1], 0.0
                missing -= 0.1
            elif not any(s.alive for s in sources) or silent > 4.0:
                raise Broken("all sources are lost")
            elif not alive or self.node.cut:
                silent += 0.1
            yield 0.1
        if order.number <= self.promised and world.rules.promise_covers_fetch:
            raise Broken("generation is over")
        self.state, self.applied, self.fresh, self.reduced, self.kept = (
            got,
            order.generation.step,
            False,
            False,
            {},
        )
        if world.rules.fetch_replaces_vote:
            self.vote = order.generation.vote
        world.fetched(self)
        world.moment("fetched")
        self.send(wire.Fetched(replica=self.id, generation=order.number, num_bytes=1000, seconds=0.1))

    # ---- member: promises

    def fenced(self) -> bool:
        return bool(self.released) or self.entered is None or self.entered.number <= self.promised

    def check(self) -> None:
        if self.released:
            raise Released
        if self.fenced():
            raise Broken("the controller ended this generation")

    def reduction_complete(self, gradient: tuple[int, tuple[int, int]]) -> None:
        self.check()
        self.reduced, self.gradient = True, gradient

    def _advance(self, vote: str) -> None:
        self.applied += 1
        self.reduced, self.kept, self.vote = False, {}, vote

    def _park_at_boundary(self) -> None:
        if not self.fenced():
            assert self.entered is not None
            self.promised = max(self.promised, self.entered.number)
            self.world.moment("parked")
            self.send(self._parked(self.entered.number, boundary=True))

    def fault(self, number: int, error: Exception | str) -> None:
        if number > self.promised:
            self.faulted = max(self.faulted, number)
            self.send(wire.Fault(replica=self.id, generation=number, error=str(error)))

    def status(self) -> wire.Status:
        return wire.Status(
            generation=self.entered.number if self.entered else 0,
            applied=self.applied,
            fresh=self.fresh,
            reduced=self.reduced,
            kept=tuple(sorted(self.kept)),
            current=self.current,
            done=self.done,
            vote=self.vote,
        )

    def _parked(self, number: int, *, boundary: bool) -> wire.Parked:
        return wire.Parked(
            replica=self.id,
            generation=number,
            boundary=boundary,
            status=self.status(),
            records=tuple(self.records),
        )

    def hello(self) -> wire.Hello:
        self.world.moment("hello")
        ready, newest = self.ready, self.order or self.entered
        return wire.Hello(
            run="run",
            token="token",
            replica=self.id,
            pid=self.id,
            node=self.node.name,
            host=self.node.name,
            transfer=self.transfer,
            status=self.status(),
            generation=newest.generation if newest else None,
            ready=ready is not None,
            faulted=newest is not None
            and (newest.number <= max(self.promised, self.faulted) or newest.failed),
            memo=self.memo,
            records=tuple(self.records),
            signature=ready.signature if ready else (),
            digest=ready.digest if ready else "",
            total=ready.total if ready else 0,
        )

    # ---- the control thread

    def receive(self, message: wire.Message) -> None:
        if isinstance(message, wire.Ack | wire.Welcome):
            self.lease_until = self.world.now + self.world.lease_s
        if isinstance(message, wire.Ack):
            while self.records and self.records[0].step < message.known_step:
                self.records.popleft()
        elif isinstance(message, wire.Welcome):
            self.incarnation = max(self.incarnation, message.incarnation)
            if self.finished is not None:
                self.send(self.finished)
        elif isinstance(message, wire.Abort):
            self._on_abort(message)
        elif isinstance(message, wire.Pause):
            if message.incarnation >= self.incarnation:
                self.pause = message.generation
        elif isinstance(message, wire.Form):
            self._on_form(message)
        elif isinstance(message, wire.Keep):
            self.memo = message.memo
        elif isinstance(message, wire.Release) and not self.released:
            self._on_release(message.reason)
        self.notify()

    def _on_abort(self, message: wire.Abort) -> None:
        if message.incarnation < self.incarnation:
            return
        self.promised = max(self.promised, message.generation)
        self.send(self._parked(message.generation, boundary=False))
        for order in (self.order, self.entered):
            if order is not None and order.number <= message.generation:
                order.cancelled = True
                if order.group is not None:
                    order.group.abort(self)

    def _on_form(self, message: wire.Form) -> None:
        generation = message.generation
        if self.world.rules.repeats_formed and self.order is not None and self.order.generation == generation:
            if self.order.formed and generation.number > self.promised and self.id in generation.members:
                self._say_formed(generation.number)
            return
        newest = self.order.number if self.order else 0
        if generation.number <= max(self.promised, newest) or generation.incarnation < self.incarnation:
            return
        if self.order is not None:
            self.order.cancelled = True
        order = self.order = Order(generation)
        self.memo = message.memo
        if generation.final or self.id not in generation.members:
            order.formed = True
            if self.id in generation.members:
                self._say_formed(generation.number)
        else:
            self.world.group(generation).join(self, order)

    def stands(self, order: Order, group: Group) -> None:
        """The connections of this order are there."""
        if order.number > self.promised and self.order is order and not order.cancelled:
            order.group, order.formed = group, True
            self._say_formed(order.number)
            self.notify()

    def _say_formed(self, number: int) -> None:
        self.world.moment("formed")
        self.send(wire.Formed(replica=self.id, generation=number, connect_s=0.01))

    def _on_release(self, reason: str) -> None:
        self.released = reason or "released"
        for order in (self.order, self.entered):
            if order is not None and order.group is not None:
                order.group.abort(self)
        self.world.at(self.world.rng.choice((0.01, 0.5, 5.0)), self.world.die, self, "released", owner=self)

    def leave(self) -> None:
        """SIGTERM."""
        self.send(wire.Leaving(replica=self.id, reason="SIGTERM"))
