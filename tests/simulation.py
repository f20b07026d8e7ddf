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
from everstep.policies.budget import BudgetLimits, FailureClass
from tests.simulated_group import Group
from tests.simulated_replica import Replica, Rules, mix, vote_text

_LIMITS_S = {Phase.ADOPTING: 30.0, Phase.PARKING: 60.0, Phase.FORMING: 15.0, Phase.ENDING: 35.0}
"""No phase of these lasts longer, whatever happens."""


class Violation(AssertionError):
    """Something is not as promised. The message is the run's story."""


@dataclass(slots=True)
class Node:
    name: str
    alive: bool = True
    cut: bool = False
    draining: bool = False
    deferred: list[tuple[Callable[..., None], tuple[Any, ...]]] = field(default_factory=list)


@dataclass(slots=True, kw_only=True)
class Scenario:
    """What kind of run and what kind of trouble. `drawn` gives another one for every seed."""

    num_nodes: int = 3
    replicas: int = 3
    min_replicas: int = 1
    max_replicas: int = 4
    spares: int = 0
    logical_shards: int = 8
    total: int = 25
    fault_every_s: float = 2.0
    """Mean time between two faults while `faults_s` are not over."""
    faults_s: float = 60.0
    faults: dict[str, float] = field(default_factory=lambda: dict(FAULTS))
    """Weight of each kind of fault."""
    moments: tuple[str, ...] = ()
    """Where ambushes are laid; all `MOMENTS` if empty."""
    effects: tuple[str, ...] = ()
    """What they do; all `EFFECTS` if empty."""
    budget: BudgetLimits = field(default_factory=lambda: LARGE_BUDGET)
    ordered: bool = True
    await_storage: bool = True
    tell_stored: bool = True
    """A controller that comes back is told what the stored events say."""
    other_digests: float = 0.0
    form_glitch: float = 0.02
    shard_s: float = 0.05
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the core that differ."""
    rules: Rules = field(default_factory=Rules)


FAULTS = {
    "crash": 4.0, "crash_many": 0.5, "node_loss": 0.6, "freeze": 1.5, "cut": 0.8, "hang": 0.5, "break_lines": 1.5,
    "break_all_lines": 0.3, "controller": 0.8, "controller_twice": 0.2, "scale": 2.0, "drain": 0.5, "sigterm": 1.5,
    "glitch": 0.5, "crash_joiner": 1.0, "crash_source": 3.0, "crash_while_forming": 3.0, "user_error": 0.1,
    "sigterm_all": 0.3, "ambush": 10.0, "split_vote": 6.0, "out_of_memory": 0.1,
}  # fmt: skip
MOMENTS = (
    "vote", "reduced", "applying", "roll_forward", "roll_forward", "fetching", "fetched", "parked", "formed", "done", "finished", "hello",
    *Phase,
)  # fmt: skip
EFFECTS = (
    "crash", "crash", "crash_many", "crash_source", "break_lines", "break_all_lines", "controller", "glitch", "freeze",
    "cut", "sigterm", "scale",
)  # fmt: skip
LARGE_BUDGET = BudgetLimits(
    process_crash=None, node_loss=None, network=None, preemption=None, out_of_memory=None, unknown=None,
    back_off_s=0.5, back_off_cap_s=4.0, recoveries_without_progress=8,
)  # fmt: skip


def drawn(seed: int) -> Scenario:
    """The scenario of a seed."""
    rng = random.Random(seed * 7919 + 1)
    most = rng.choice((1, 2, 2, 3, 3, 4, 5, 6))
    low = rng.choice((1, 1, 1, max(most // 2, 1), most))
    faults = {kind: weight * rng.choice((0.0, 0.3, 1.0, 1.0, 3.0)) for kind, weight in FAULTS.items()}
    tight = rng.random() < 0.15
    shards, shard_s = rng.choice((most, 6, 8, 12)), rng.choice((0.02, 0.1, 0.5))
    steps = int(rng.choice((5.0, 20.0, 40.0)) * most / (shards * shard_s))
    return Scenario(
        num_nodes=rng.choice((1, 2, 4, 6)), replicas=rng.randint(low, most), min_replicas=low, max_replicas=most,
        spares=rng.choice((0, 0, 0, 1)), logical_shards=shards, total=rng.choice((1, 3, *[min(max(steps, 5), 400)] * 6)),
        fault_every_s=rng.choice((0.3, 1.0, 2.0, 4.0)), faults_s=rng.choice((20.0, 60.0)), faults=faults,
        budget=BudgetLimits(back_off_s=0.5, back_off_cap_s=4.0) if tight else LARGE_BUDGET,
        ordered=rng.random() < 0.5, await_storage=rng.random() < 0.8, tell_stored=rng.random() < 0.7,
        other_digests=rng.choice((0.0, 0.0, 0.3)), form_glitch=rng.choice((0.0, 0.02, 0.1)),
        shard_s=shard_s,
    )  # fmt: skip


class World:
    """One simulated run."""

    def __init__(self, seed: int, scenario: Scenario | None = None) -> None:
        self.seed = seed
        self.scenario = scenario if scenario is not None else drawn(seed)
        s = self.scenario
        self.rng = random.Random(seed)
        self.rules, self.ordered, self.total, self.shard_s = s.rules, s.ordered, s.total, s.shard_s
        self.form_glitch, self.warm_up_s, self.after_loop_s, self.lease_s = s.form_glitch, (0.1, 3.0), 20.0, 15.0
        self.settings = Settings(
            **{
                "min_replicas": s.min_replicas, "max_replicas": s.max_replicas, "replicas": s.replicas,
                "spares": s.spares, "logical_shards": s.logical_shards, "first_step_s": 30.0, "start_timeout_s": 60.0,
                "adopt_timeout_s": 16.0, "await_storage": s.await_storage, "budget": s.budget, **s.settings,
            }  # fmt: skip
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
        self.core, self.unwritten = None, []
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
            self.at(self.rng.uniform(0.005, 0.3), self._kill, command.replica)

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
        self.send_up(replica, replica.hello())

    def send_up(self, replica: Replica, message: wire.Message) -> None:
        """From a replica to the controller; lost when the line is down, or goes down on the way."""
        if replica.connected:
            replica.last_up = max(replica.last_up, self.now + self.rng.expovariate(1 / 0.003))
            self.at(replica.last_up - self.now, self._arrive, replica, replica.epoch, self.incarnation, message)

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
            self.violation(f"generation {key} voted for step {step} after generation {self.last_vote} had voted")
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

    def _equal(self, replica: Replica) -> None:
        """All who are in the run and have applied as many steps are equal; with ordered reduction, also to a run in
        which nothing ever happened."""
        if self.ordered and replica.state not in self._reference(replica.applied):
            self.violation(f"{replica} at step {replica.applied} is not what an undisturbed run would be")
        if self.core is None:
            return
        for i in self._seated(self.core):
            other = self.replicas.get(i)
            if other is None or not other.alive or other.applied != replica.applied or other.fresh:
                continue
            if replica.id in self._seated(self.core) and None not in (other.state, replica.state):
                if other.state != replica.state:
                    self.violation(f"{replica} and {other} differ at step {replica.applied}")

    @staticmethod
    def _seated(core: Core) -> set[int]:
        return {*core.index[ReplicaState.MEMBER], *core.index[ReplicaState.PARKED]}

    def _reference(self, steps: int) -> list[int]:
        """The states an undisturbed run can be in after so many steps: one per initial state."""
        initials = {r.initial for r in self.replicas.values()}
        return [self._chained(initial, steps) for initial in sorted(initials)]

    def _chained(self, initial: int, steps: int) -> int:
        if steps == 0:
            return initial
        key = (initial, steps)
        if key not in self.chain:
            before, shards = self._chained(initial, steps - 1), range(self.settings.logical_shards)
            reduced = mix(*(mix(before, steps - 1, shard) for shard in shards))
            self.chain[key] = mix(before, steps - 1, reduced)
        return self.chain[key]

    def user_error_due(self, replica: Replica) -> bool:
        """Shall the user's code raise here?"""
        if replica.applied in self.user_errors and replica.applied > 0:
            self.user_errors.remove(replica.applied)
            return True
        return False

    # ---- faults

    def _next_fault_s(self) -> float:
        return self.rng.expovariate(1.0 / self.scenario.fault_every_s)

    def _fault(self) -> None:
        if not self.faulty():
            self._calm()
            return
        kinds = list(self.scenario.faults)
        weights = [self.scenario.faults[kind] for kind in kinds]
        if sum(weights):
            kind = self.rng.choices(kinds, weights)[0]
            getattr(self, f"fault_{kind}")()
        self.at(self._next_fault_s(), self._fault)

    def _calm(self) -> None:
        """Faults stop: what is frozen wakes, what is cut heals, what hangs goes on, and there is room."""
        self.note("calm", "")
        for node in self.nodes.values():
            self.heal(node)
        for replica in self.replicas.values():
            self.wake(replica)
            replica.unhang() if replica.alive else None
        self._add_node()
        if self.core is not None and self.rng.random() < 0.1:
            self.stop_asked = True
            self.feed(m.Stop(by="a user", now=self.rng.random() < 0.3))

    def _some(self, wanted: Callable[[Replica], bool] = lambda r: True) -> Replica | None:
        alive = [r for r in self.replicas.values() if r.alive and wanted(r)]
        return self.rng.choice(alive) if alive else None

    def fault_crash(self) -> None:
        if (replica := self._some()) is not None:
            self.die(replica, "killed")

    def fault_crash_many(self) -> None:
        alive = [r for r in self.replicas.values() if r.alive]
        for replica in self.rng.sample(alive, len(alive) // 2):
            self.at(self.rng.choice((0.0, 0.0, 0.01, 0.3)), self.die, replica, "killed with others")

    def fault_crash_joiner(self) -> None:
        if (replica := self._some(lambda r: r.fresh)) is not None:
            self.die(replica, "killed while it joined")

    def fault_crash_source(self) -> None:
        if any(r.alive and r.phase == "fetch" for r in self.replicas.values()):
            if (replica := self._some(lambda r: r.offer is not None)) is not None:
                self.die(replica, "killed while it served")

    def fault_crash_while_forming(self) -> None:
        if self.core is not None and self.core.phase in (Phase.FORMING, Phase.PARKING):
            self.fault_crash()

    def fault_ambush(self) -> None:
        """The next time that something certain happens, something else happens in the same moment."""
        self.ambush[self.rng.choice(self.scenario.moments or MOMENTS)] = self._effect()

    def _effect(self) -> str:
        return self.rng.choice(self.scenario.effects or EFFECTS)

    def moment(self, what: str) -> None:
        """Something happens for which an ambush may have been laid."""
        effect = self.ambush.pop(what, None)
        if effect is not None and self.faulty():
            self.seen[f"ambush {what}"] += 1
            self.at(self.rng.choice((0.0, 0.001, 0.004, 0.02)), getattr(self, f"fault_{effect}"))
            if self.rng.random() < 0.3:
                self.at(self.rng.uniform(0.0, 0.05), getattr(self, f"fault_{self._effect()}"))

    def fault_split_vote(self) -> None:
        """The next vote's result reaches some of the members only."""
        self.split = True

    def split_due(self) -> bool:
        split, self.split = self.split and self.faulty(), False
        return split

    def fault_sigterm_all(self) -> None:
        for replica in self.replicas.values():
            if replica.alive and not replica.frozen and not replica.fresh:
                replica.leave()

    def fault_out_of_memory(self) -> None:
        if (replica := self._some()) is not None:
            self.die(replica, "killed for memory", FailureClass.OUT_OF_MEMORY)

    def fault_node_loss(self) -> None:
        nodes = [n for n in self.nodes.values() if n.alive]
        if not nodes or (len(nodes) < 2 and self.rng.random() < 0.7):
            return
        node = self.rng.choice(nodes)
        self.note("node dies", node.name)
        node.alive = False
        for replica in self.replicas.values():
            if replica.node is node:
                self.die(replica, "its node died", FailureClass.NODE_LOSS)
        self.at(self.rng.uniform(0.5, 5.0), self.feed, m.NodeGone(node=node.name))
        self.at(self.rng.uniform(3.0, 15.0), self._add_node)

    def fault_freeze(self) -> None:
        if (replica := self._some(lambda r: not r.frozen)) is not None:
            self.note("freezes", replica)
            replica.frozen = True
            for group in list(self.groups.values()):
                if replica.id in group.members:
                    group.trouble(replica, noticed=False)
            self.at(self.rng.choice((0.5, 4.0, 8.0, 20.0)), self.wake, replica)

    def wake(self, replica: Replica) -> None:
        """It goes on where it stood, with everything that came meanwhile."""
        if replica.alive and replica.frozen:
            self.note("wakes", replica)
            self.seen["woken_fenced"] += self.core is not None and replica.id not in self.core.replicas
            replica.frozen = False
            deferred, replica.deferred = replica.deferred, []
            for n, (work, args) in enumerate(deferred):
                self.at(n * 1e-5, work, *args, owner=replica)

    def fault_cut(self) -> None:
        nodes = [n for n in self.nodes.values() if n.alive and not n.cut]
        if nodes:
            node = self.rng.choice(nodes)
            self.note("is cut off", node.name)
            node.cut = True
            for replica in self.replicas.values():
                if replica.node is node and replica.alive:
                    self._drop_line(replica, tell=False)
            for group in list(self.groups.values()):
                for replica in group.members.values():
                    if replica.node is node and any(r.node is not node for r in group.members.values()):
                        group.trouble(replica, noticed=False)
            heal_s = self.rng.choice((1.0, 3.0, 7.0, 12.0, 30.0))
            self.at(heal_s, self.heal, node)
            if heal_s > 10.0 and self.rng.random() < 0.5:
                self.at(self.rng.uniform(2.0, 10.0), self._declared_dead, node)

    def _declared_dead(self, node: Node) -> None:
        """Ray says so. The processes there know nothing of it."""
        if node.cut:
            for replica in self.replicas.values():
                if replica.node is node:
                    self._died(replica.id, replica, "its node died", FailureClass.NODE_LOSS)
            self.feed(m.NodeGone(node=node.name))
            node.alive = False
            self._add_node()

    def heal(self, node: Node) -> None:
        """The link is back."""
        if node.cut:
            self.note("heals", node.name)
            node.cut = False
            deferred, node.deferred = node.deferred, []
            for work, args in deferred:
                self.at(self.rng.uniform(0.0, 0.05), work, *args)

    def fault_hang(self) -> None:
        if (replica := self._some(lambda r: not r.hung and r.phase != "done")) is not None:
            self.note("hangs", replica)
            replica.hung = True
            self.at(self.rng.choice((2.0, 30.0, 90.0)), lambda: replica.unhang() if replica.alive else None)

    def fault_break_lines(self) -> None:
        for replica in self.replicas.values():
            if self.rng.random() < 0.5:
                self._drop_line(replica, tell=True)

    def fault_break_all_lines(self) -> None:
        for replica in self.replicas.values():
            self._drop_line(replica, tell=True)

    def fault_controller(self) -> None:
        self.crash_controller(self.rng.choice((0.1, 1.0, 5.0)))

    def fault_controller_twice(self) -> None:
        self.crash_controller(0.5)
        self.at(self.rng.uniform(0.5, 3.0), self.crash_controller, 0.5)

    def fault_scale(self) -> None:
        wish = self.rng.randint(self.settings.min_replicas, self.settings.max_replicas)
        self.feed(m.Scale(replicas=wish, by="a user"))

    def fault_drain(self) -> None:
        nodes = [n for n in self.nodes.values() if n.alive and not n.draining]
        if len(nodes) > 1:
            node = self.rng.choice(nodes)
            node.draining = True
            self.feed(m.Drain(node=node.name, by="the cluster"))
            self.at(self.rng.uniform(0.0, 5.0), self._add_node)

    def fault_sigterm(self) -> None:
        if (replica := self._some(lambda r: not r.frozen)) is not None:
            replica.leave()

    def fault_glitch(self) -> None:
        if self.groups:
            self.groups[max(self.groups)].glitch()

    def fault_user_error(self) -> None:
        if (replica := self._some(lambda r: 0 < r.applied < self.total)) is not None:
            self.user_errors.append(replica.applied + 1)

    # ---- invariants

    def note(self, what: str, about: object) -> None:
        self.story.append((self.now, what, about))

    def violation(self, text: str) -> None:
        raise Violation(self._tell(text))

    def _tell(self, text: str) -> str:
        lines = [f"{at - self.began:10.4f}  {what:<12} {about}" for at, what, about in self.story
                 if not isinstance(about, m.Tick | wire.Beat)]  # fmt: skip
        return "\n".join(
            [f"seed {self.seed}, {self.scenario}", *lines[-250:], f"{self.now - self.began:10.4f}  {text}", f"(seed {self.seed})"]
        )

    def _check(self, core: Core) -> None:
        limit = _LIMITS_S.get(core.phase)
        if limit is not None and self.now - self.phase_since > limit and core.store[1]:
            self.violation(f"{core.phase} for {self.now - self.phase_since:.1f} s")
        if core.num_leaving or self.num_events % 16 == 0:
            check_books(core, self.violation)
        if core.began_s is not None:
            wall_s, booked_s = self.now - core.began_s, sum(core.clock.seconds.values()) + self.now - core.clock.since_s
            if abs(wall_s - booked_s) > 1e-6:
                self.violation(f"the time buckets sum to {booked_s} s of {wall_s} s")
        generation = core.generation
        if generation is not None and core.phase is Phase.FORMING and not generation.final:
            shards = sorted(s for part in (*generation.held, *generation.todo) for s in part)
            if shards != list(range(self.settings.logical_shards)):
                self.violation(f"the shards of generation {generation.number} are {shards}")

    def _check_release(self, ident: int, reason: str) -> None:
        """A change by wish must not let the last one go that holds the state."""
        core, replica = self.core, self.replicas.get(ident)
        wished = any(word in reason for word in ("scaled down", "drained", "SIGTERM"))
        if core is None or core.phase in m.OVER or replica is None or replica.state is None or not wished:
            return
        others = [self.replicas[i] for i in self._seated(core) if i in self.replicas]
        if replica.applied and not any(r.state is not None and not r.fresh for r in others):
            self.violation(f"{replica} was let go ({reason}), and it was the last one who held the state")

    def _check_end(self) -> None:
        if self.ended_at is None:
            self.violation("nothing happens any more, but the run has not ended")
        for i, replica in self.replicas.items():
            if replica.alive:
                self.violation(f"{replica} is left behind, phase {replica.phase}, released {replica.released!r}")
            del i
        if self.pending - self.let_go:
            self.violation(f"replicas {self.pending - self.let_go} are still being started")
        check_log(self.log, self.violation, stored=self.scenario.await_storage, told=self.scenario.tell_stored)
        ends = [event for event in self.log if isinstance(event, ev.RunEnded)]
        if not ends:
            self.violation("there is no RunEnded in the log")
        end = ends[-1]
        self.outcome, self.reason = end.outcome, end.reason
        if end.outcome == "finished" and end.step != self.total:
            self.violation(f"finished after {end.step} of {self.total} steps")
        if end.outcome == "stopped" and not self.stop_asked:
            self.violation("stopped without being asked to")
        if end.outcome == "failed" and not any(w in end.reason for w in ("BudgetExhausted", "TrainingError")):
            self.violation(f"failed: {end.reason}")
        if self.core is not None and self.core.replicas:
            self.violation(f"the core still knows {list(self.core.replicas)}")


def check_books(core: Core, violation: Callable[[str], None]) -> None:
    """The core's counts are those of its replicas."""
    for state, part in core.index.items():
        if any(r.state is not state or core.replicas.get(i) is not r for i, r in part.items()):
            violation(f"the index of {state} is wrong: {part}")
    if sum(map(len, core.index.values())) != len(core.replicas):
        violation("some replica is in no index")
    there = [r for r in core.replicas.values() if r.state is not ReplicaState.RELEASED]
    seated = [r for r in there if r.state in (ReplicaState.MEMBER, ReplicaState.PARKED)]
    counts = {
        "num_leaving": (core.num_leaving, sum(bool(r.leaving) for r in there)),
        "pool_size": (core.pool_size(), sum(not r.leaving for r in there)),
        "num_finished": (core.num_finished, sum(r.finished for r in seated)),
        "seated": (core.seated(), len(seated)),
    }
    for name, (booked, counted) in counts.items():
        if booked != counted:
            violation(f"{name} is {booked}, but it should be {counted}")


def check_log(log: list[ev.Event], violation: Callable[[str], None], *, stored: bool, told: bool) -> None:
    """Every step of every history once and in order.

    Over a restart of the controller there is no gap if replicas keep their records until they are `stored` and it was
    `told` what is, and no step twice. If it was not told, a step that was being applied may be missing.
    """
    due = 0
    restarted = False
    for event in log:
        if isinstance(event, ev.StateLost):
            due, restarted = 0, False
        elif isinstance(event, ev.ControllerRestarted):
            restarted = True
        elif isinstance(event, ev.StepCommitted):
            gap, twice = event.step > due, event.step < due
            excused = restarted and (not stored or (not told and event.step == due + 1))
            if (gap and not excused) or (twice and not (restarted and not (stored and told))):
                violation(f"the log has step {event.step} where step {due} was due")
            due, restarted = event.step + 1, False
        elif isinstance(event, ev.RunEnded) and event.step != due and event.outcome != "failed" and not restarted:
            violation(f"the run ended at step {event.step}, but {due} steps are in the log")
