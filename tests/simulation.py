"""A simulated cluster around the real controller core: virtual time, injected chance, every fault we know of.

`World(seed).run()` plays one run from its start to its end, replays exactly, and raises `Violation` with the story of
the run as soon as something is not as promised. Replicas (`tests.simulated_replica`) and their groups
(`tests.simulated_group`) follow the rules of the real ones. What is checked after each event is in `_check`; what a run
must have led to, in `_check_end`.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from everstep.actors import wire
from everstep.orchestrator import events as ev
from everstep.orchestrator.core import Core, Phase, ReplicaState, Settings
from everstep.orchestrator.core import model as m
from everstep.policies.budget import FailureClass
from tests.simulated_checks import Checks, Violation
from tests.simulated_faults import Faults
from tests.simulated_group import Group
from tests.simulated_replica import Replica
from tests.simulated_rules import vote_text
from tests.simulated_scenario import Scenario, drawn


@dataclass(slots=True)
class Node:
    name: str
    alive: bool = True
    cut: bool = False
    draining: bool = False
    deferred: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)


class World(Faults, Checks):
    """One simulated run."""

    def __init__(self, seed: int, scenario: Scenario | None = None) -> None:
        self.seed = seed
        self.scenario = scenario if scenario is not None else drawn(seed)
        s = self.scenario
        self.rng = random.Random(seed)
        self.rules, self.ordered, self.total, self.shard_s = s.rules, s.ordered, s.total, s.shard_s
        self.leave_at = s.leave_at or s.total
        self.form_glitch, self.warm_up_s, self.after_loop_s, self.lease_s = (
            s.form_glitch,
            (0.1, 3.0),
            20.0,
            15.0,
        )
        self.settings = Settings(
            **{
                "min_replicas": s.min_replicas,
                "max_replicas": s.max_replicas,
                "replicas": s.replicas,
                "spares": s.spares,
                "logical_shards": s.logical_shards,
                "first_step_s": 30.0,
                "start_timeout_s": 60.0,
                "adopt_timeout_s": 16.0,
                "await_storage": s.await_storage,
                "budget": s.budget,
                **s.settings,
            }
        )
        self.now = 1000.0
        self.began = self.now
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...], Replica | None]] = []
        self._order = itertools.count()
        self.core: Core | None = None
        self.incarnation = 0
        self.num_events = 0
        self.num_restarts = 0
        self.story: deque[tuple[float, str, object]] = deque(maxlen=600)
        self.nodes: dict[str, Node] = {}
        for _ in range(s.num_nodes):
            self._add_node()
        self.replicas: dict[int, Replica] = {}
        self.by_transfer: dict[tuple[str, int], Replica] = {}
        self.pending: set[int] = set()
        self.let_go: set[int] = set()
        """Replicas that were released or whose end was ordered."""
        self.watched: dict[int, Replica | None] = {}
        """Whose deaths Ray tells this controller of; None: it has not started yet."""
        self.groups: dict[tuple[int, int], Group] = {}
        self.last_vote: tuple[int, int] = (0, 0)
        self.unwritten: list[ev.Event] = []
        self.log: list[ev.Event] = []
        self.phase_since = self.now
        self.tick_at: float | None = None
        self.quiet_at = self.now + s.faults_s
        self.stalled_until = 0.0
        self.split = False
        self.ambush: dict[str, str] = {}
        self.stop_asked = False
        self.user_errors: list[int] = []
        self.ended_at: float | None = None
        self.chain: dict[tuple[int, int], int] = {}
        self.outcome = ""
        self.reason = ""
        self.seen: Counter[str] = Counter()
        """How often what was played: a simulation in which nothing happens proves nothing."""

    # ---- time

    def at(self, delay_s: float, work: Callable[..., None], *args: Any, owner: Replica | None = None) -> None:
        """Do something later. What belongs to a replica waits while it is frozen and is dropped when it is dead."""
        heapq.heappush(self._heap, (self.now + delay_s, next(self._order), work, args, owner))

    def run(self, max_events: int = 1_000_000) -> World:
        """The whole run. Raises Violation."""
        try:
            self._boot(first=True)
            self.at(self.rng.choice((0.5, 5.0)) + self._next_fault_s(), self._fault)
            while self._heap and self.num_events < max_events and not self._over():
                self._next()
            if self.num_events < max_events:
                self._check_end()
        except Violation:
            raise
        except Exception as error:
            raise Violation(self._tell(f"{type(error).__name__}: {error}")) from error
        return self

    def _next(self) -> None:
        due, _, work, args, owner = heapq.heappop(self._heap)
        self.now = max(due, self.now)
        if owner is not None:
            if not owner.alive:
                return
            if owner.frozen:
                owner.deferred.append((work, args))
                return
        work(*args)
        if self.now > self.quiet_at + 1500.0:
            self.violation("the run neither finished nor ended although the faults stopped long ago")

    def faulty(self) -> bool:
        """Faults still happen."""
        return self.now < self.quiet_at

    def _over(self) -> bool:
        return self.ended_at is not None and self.now > self.ended_at + self.lease_s + 10.0

    # ---- the controller

    def _boot(self, *, first: bool) -> None:
        if any(isinstance(event, ev.RunEnded) for event in self.log):
            # It finds in its log that the run is over: nothing to do but to clear up.
            for i in [*self.replicas, *self.pending]:
                self._kill(i)
            self.ended_at = self.now
            return
        self.incarnation += 1
        self.core = Core(self.settings)
        self.tick_at = None
        self.phase_since = self.now
        there = sorted({*self.pending, *(i for i, r in self.replicas.items() if r.alive)})
        self.watched = {i: self.replicas.get(i) for i in there}
        if first or (not there and not self.log and not self.replicas):
            self.feed(m.Start(incarnation=self.incarnation))
        else:
            history = sum(isinstance(event, ev.StateLost) for event in self.log)
            told = self._told()
            ids = [event.replica for event in self.log if isinstance(event, ev.ReplicaLaunched)]
            known = {"history": history, "step": told, "next_id": max(ids, default=-1) + 1}
            known = known if self.scenario.tell_stored else {}
            self.feed(m.Adopt(incarnation=self.incarnation, replicas=tuple(there), **known))
        incarnation = self.incarnation
        self.at(self.rng.uniform(0.0, 1.0), self._store_stands, incarnation)
        self.at(0.5, self._flush, incarnation)

    def _store_stands(self, incarnation: int) -> None:
        if self.core is not None and incarnation == self.incarnation:
            self.core.store = ("store", 1)
            self.feed(m.Tick())

    def _told(self) -> int:
        step = 0
        for event in self.log:
            if isinstance(event, ev.StepCommitted):
                step = event.step + 1
            elif isinstance(event, ev.StateLost):
                step = 0
        return step

    def _flush(self, incarnation: int) -> None:
        if self.core is None or incarnation != self.incarnation:
            return
        self._write()
        self.at(0.5, self._flush, incarnation)

    def _write(self) -> None:
        batch, self.unwritten = self.unwritten, []
        self.log += batch
        for event in batch:
            if isinstance(event, ev.StepCommitted) and self.core is not None:
                self.core.stored(event)

    def crash_controller(self, down_s: float) -> None:
        """Kill it; Ray starts a new one after `down_s`."""
        if self.core is None:
            return
        self.note("controller dies", "")
        self.core, self.unwritten, self.stalled_until = None, [], 0.0
        self.num_restarts += 1
        for replica in self.replicas.values():
            self._drop_line(replica, tell=False)
        self.at(down_s, self._restart)

    def _restart(self) -> None:
        if self.core is None:
            self._boot(first=False)

    def feed(self, event: m.CoreEvent) -> None:
        """One event for the controller, if there is one."""
        core = self.core
        if core is None or self.ended_at is not None:
            return
        if self.now < self.stalled_until:
            self.at(self.stalled_until - self.now, self._feed_for, self.incarnation, event)
            return
        self.num_events += 1
        before, believed = core.phase, self._believed(core, event)
        self.note("->", event)
        commands = core.handle(event, self.now)
        if core.phase is not before:
            self.note("phase", core.phase)
            self.seen[f"{before}-{core.phase}"] += 1
            self.moment(core.phase)
            self.phase_since = self.now
        for command in commands:
            if isinstance(command, m.Emit):
                self._emit(command.event, believed)
        for command in commands:
            self._perform(command)
        self._check(core)
        if core.phase is Phase.ENDED:
            self.ended_at = self.now
            self.outcome, self.reason = core.outcome, core.reason
            self._write()
            return
        due = max(core.next_deadline_s(), self.now + 0.005)
        if self.tick_at is None or due < self.tick_at - 1e-9:
            self.tick_at = due
            self.at(due - self.now, self._tick, due)

    def _tick(self, due: float) -> None:
        if self.tick_at == due:
            self.tick_at = None
            self.feed(m.Tick())

    @staticmethod
    def _believed(core: Core, event: m.CoreEvent) -> bool:
        """May this event lead to a committed step?"""
        if core.phase is Phase.ADOPTING or not isinstance(event, wire.Message):
            return True
        replica = core.replicas.get(getattr(event, "replica", -1))
        return replica is not None and replica.state in (ReplicaState.MEMBER, ReplicaState.PARKED)

    def _emit(self, event: ev.Event, believed: bool) -> None:
        self.note("emit", event)
        if isinstance(event, ev.StepCommitted) and not believed:
            self.violation(f"a replica that is out of the run made step {event.step} history")
        if any(isinstance(e, ev.RunEnded) for e in self.unwritten[-1:]):
            self.violation(f"{event.type} after RunEnded")
        self.unwritten.append(event)
        self.seen[event.type] += 1
        if isinstance(event, ev.Recovery):
            self.seen["rolled_forward"] += event.rolled_forward
            self.seen["shards_kept"] += event.shards_recomputed > 0
            self.seen["unplanned"] += event.blamed_replica is not None
        if isinstance(event, ev.RunEnded):
            self._write()

    def _perform(self, command: m.Command) -> None:
        if isinstance(command, m.Send):
            for i in command.replicas:
                if isinstance(command.message, wire.Release):
                    self.let_go.add(i)
                    self._check_release(i, command.message.reason)
                self._send_down(i, command.message)
            if not isinstance(command.message, wire.Ack | wire.Keep | wire.Welcome):
                self.note(f"send {command.replicas}", command.message)
        elif isinstance(command, m.Launch):
            self.note("launch", command.replica)
            old = self.replicas.get(command.replica)
            if command.replica in self.pending or (old is not None and old.alive):
                self.violation(f"replica id {command.replica} is given out twice")
            self.pending.add(command.replica)
            self.watched[command.replica] = None
            self.at(self.rng.uniform(0.05, 2.0), self._place, command.replica, command.avoid_nodes)
        elif isinstance(command, m.Kill):
            self.note("kill", f"{command.replica}: {command.reason}")
            self.at(self.rng.choice((0.005, 0.1, 0.3, 10.0)), self._kill, command.replica)

    # ---- replicas' lives

    def _add_node(self) -> None:
        name = f"n{len(self.nodes)}"
        self.nodes[name] = Node(name)

    def _place(self, ident: int, avoid: tuple[str, ...]) -> None:
        if ident not in self.pending:
            return
        nodes = [n for n in self.nodes.values() if n.alive and not n.cut and n.name not in avoid]
        if not nodes:
            self.at(1.0, self._place, ident, avoid)
            return
        self.pending.discard(ident)
        replica = self.replicas[ident] = Replica(self, ident, self.rng.choice(nodes))
        self.by_transfer[replica.transfer] = replica
        if ident in self.watched:
            self.watched[ident] = replica
        self.note("starts", f"{ident} on {replica.node.name}")

    def initial_state(self, ident: int) -> int:
        """What a replica initializes itself with; the same on all, unless the user forgot to seed."""
        return ident + 2 if self.rng.random() < self.scenario.other_digests else 1

    def _kill(self, ident: int) -> None:
        self.let_go.add(ident)
        if ident in self.pending:
            self.pending.discard(ident)
            self.at(0.1, self._died, ident, None, "ended by ray.kill", FailureClass.PROCESS_CRASH)
        replica = self.replicas.get(ident)
        if replica is not None and replica.alive and not replica.node.cut:
            self.die(replica, "ended by ray.kill")

    def die(self, replica: Replica, cause: str, failure: FailureClass = FailureClass.PROCESS_CRASH) -> None:
        """Its process ends."""
        if not replica.alive:
            return
        self.note("dies", f"{replica.id}: {cause}")
        connected = replica.connected
        replica.alive = False
        self._drop_line(replica, tell=False)
        for group in list(self.groups.values()):
            if replica.id in group.members:
                group.trouble(replica, noticed=not replica.node.cut)
        if connected and not replica.node.cut and replica.node.alive and self.rng.random() < 0.8:
            self.at(self.rng.uniform(0.001, 0.05), self._feed_for, self.incarnation,
                    m.LinkLost(replica=replica.id, refused=True))  # fmt: skip
        delay_s = self.rng.choice((0.005, 0.1, 0.3, 2.0)) if not replica.node.cut else 20.0
        self.at(delay_s, self._died, replica.id, replica, cause, failure)

    def _died(self, ident: int, replica: Replica | None, cause: str, failure: FailureClass) -> None:
        if ident in self.watched and self.watched[ident] is replica:
            del self.watched[ident]
            self.feed(m.ReplicaDied(replica=ident, cause=cause, failure=failure))

    def _feed_for(self, incarnation: int, event: m.CoreEvent) -> None:
        if incarnation == self.incarnation:
            self.feed(event)

    # ---- lines

    def connect(self, replica: Replica) -> None:
        """A replica tries to reach the controller until it does."""
        if replica.connected or self.ended_at is not None:
            return
        if self.core is None or replica.node.cut:
            self.at(self.rng.uniform(0.05, 1.0), self.connect, replica, owner=replica)
            return
        replica.connected = True
        replica.epoch += 1
        hello = replica.hello()
        self.send_up(replica, hello)
        if self.rng.random() < 0.1:
            self.at(self.rng.choice((0.001, 0.3)), self._again, replica, replica.epoch, hello)

    def _again(self, replica: Replica, epoch: int, hello: wire.Hello) -> None:
        """A hello comes twice, and late."""
        if self.core is not None and self.core.phase is not Phase.ADOPTING:
            self._arrive(replica, epoch, self.incarnation, hello)

    def send_up(self, replica: Replica, message: wire.Message) -> None:
        """From a replica to the controller; lost when the line is down, or goes down on the way."""
        if replica.connected:
            replica.last_up = max(replica.last_up, self.now + self.rng.expovariate(1 / 0.003))
            self.at(
                replica.last_up - self.now, self._arrive, replica, replica.epoch, self.incarnation, message
            )

    def _arrive(self, replica: Replica, epoch: int, incarnation: int, message: wire.Message) -> None:
        if epoch == replica.epoch and incarnation == self.incarnation:
            self.feed(message)

    def _send_down(self, ident: int, message: wire.Message) -> None:
        replica = self.replicas.get(ident)
        if replica is not None and replica.connected:
            replica.last_down = max(replica.last_down, self.now + self.rng.expovariate(1 / 0.003))
            self.at(replica.last_down - self.now, self._deliver, replica, replica.epoch, message)

    def _deliver(self, replica: Replica, epoch: int, message: wire.Message) -> None:
        if epoch != replica.epoch or not replica.alive:
            return
        if replica.frozen:  # in its socket's buffer
            replica.deferred.append((replica.receive, (message,)))
        else:
            replica.receive(message)

    def _drop_line(self, replica: Replica, *, tell: bool) -> None:
        if not replica.connected:
            return
        replica.connected = False
        replica.epoch += 1
        if tell:
            lost = m.LinkLost(replica=replica.id, refused=False)
            self.at(self.rng.uniform(0.001, 0.02), self._feed_for, self.incarnation, lost)
        if replica.alive:
            self.at(self.rng.uniform(0.05, 1.0), self.connect, replica, owner=replica)

    # ---- what replicas tell of themselves

    def group(self, generation: wire.Generation) -> Group:
        """The group of a generation."""
        key = (generation.incarnation, generation.number)
        if key not in self.groups:
            self.groups[key] = Group(self, generation)
            for old in sorted(self.groups)[:-8]:
                del self.groups[old]
        return self.groups[key]

    @staticmethod
    def vote_of(key: tuple[int, int], step: int) -> str:
        return vote_text(key, step)

    def vote_complete(self, key: tuple[int, int], step: int) -> None:
        """All members of a generation have voted: from now on somebody may apply the step."""
        self.note("vote", f"{key} step {step}")
        if key < self.last_vote:
            self.violation(
                f"generation {key} voted for step {step} after generation {self.last_vote} had voted"
            )
        self.last_vote = key
        self.moment("vote")

    def applied(self, replica: Replica, step: int, key: tuple[int, int]) -> None:
        """A replica has applied a step."""
        self.note("applied", f"{replica.id}: step {step} of {key}, now {replica.state}")
        self._equal(replica)

    def fetched(self, replica: Replica) -> None:
        self.seen["fetched"] += 1
        self.note("fetched", f"{replica.id}: step {replica.applied}, now {replica.state}")
        self._equal(replica)

    def user_error_due(self, replica: Replica) -> bool:
        """Shall the user's code raise here?"""
        if replica.applied in self.user_errors and replica.applied > 0:
            self.user_errors.remove(replica.applied)
            return True
        return False
