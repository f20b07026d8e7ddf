"""A modelled process group: connections that form, and collectives that all members must reach.

Used by `tests.simulation`. A collective completes only after every member has arrived with its part; from then on its
result is on the wire, and reaches each member after a delay of its own. A death, a freeze or a cut in between leaves
some with the result and others without: with an error if they are lucky, else blocked until the controller's word.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from everstep.actors import wire
from tests.simulated_replica import Replica
from tests.simulated_rules import Broken, Order, Thread, mix

if TYPE_CHECKING:
    from tests.simulation import Node, World


@dataclass(slots=True)
class Collective:
    """One collective of one generation."""

    arrived: dict[int, Any] = field(default_factory=dict)
    result: Any = None
    outcome: dict[int, bool] = field(default_factory=dict)
    """Per member: True when it has the result, False when it has an error."""
    lost: set[int] = field(default_factory=set)
    """Members that neither will reach."""


class Group:
    """The group of one generation."""

    def __init__(self, world: World, generation: wire.Generation) -> None:
        self.world, self.generation = world, generation
        self.key = (generation.incarnation, generation.number)
        self.joined: dict[int, Order] = {}
        self.members: dict[int, Replica] = {}
        self.collectives: dict[tuple[str, int], Collective] = {}
        self.out: set[int] = set()
        """Members that have left its collectives."""

    # ---- forming

    def join(self, replica: Replica, order: Order) -> None:
        world = self.world
        self.joined[replica.id], self.members[replica.id] = order, replica
        world.at(world.settings.form_timeout_s, self._form_timeout, replica, order, owner=replica)
        if len(self.joined) == len(self.generation.members):
            glitch = world.faulty() and world.rng.random() < world.form_glitch
            for member in self.members.values():
                if not (glitch and world.rng.random() < 0.5):
                    world.at(world.rng.uniform(0.001, 0.05), self._stands, member, owner=member)
                elif world.rng.random() < 0.7:
                    world.at(world.rng.uniform(0.001, 0.05), self._form_fails, member, owner=member)

    def _stands(self, replica: Replica) -> None:
        # A connection needs both ends; whoever connected to one that dies a moment later does not know.
        if all(m.alive and not m.frozen and not m.node.cut for m in self.members.values()) and not self.out:
            replica.stands(self.joined[replica.id], self)

    def _form_fails(self, replica: Replica) -> None:
        order = self.joined[replica.id]
        if not order.cancelled and not order.formed:
            order.failed = True
            replica.notify()
            replica.fault(order.number, "could not connect")

    def _form_timeout(self, replica: Replica, order: Order) -> None:
        if not order.formed and not order.cancelled and not replica.released:
            order.failed = True
            replica.notify()
            replica.fault(order.number, "not formed in time")

    # ---- collectives, called from the training thread

    def reduce(self, replica: Replica, step: int) -> Thread:
        """The reduced gradient, with the generation it belongs to."""
        return self._collective(
            replica, "reduce", step, (dict(replica.kept), tuple(replica.shares), replica.state)
        )

    def vote(self, replica: Replica, step: int) -> Thread:
        """True if a pause is wanted after this step."""
        wanted = replica.pause == self.generation.number
        return self._collective(replica, "vote", step, wanted)

    def _collective(self, replica: Replica, kind: str, step: int, part: Any) -> Thread:
        collective = self.collectives.setdefault((kind, step), Collective())
        self._arrive(kind, step, collective, replica, part)
        while True:
            outcome = collective.outcome.get(replica.id)
            if outcome:
                return collective.result
            if outcome is False or replica.id in self.out:
                raise Broken(f"{kind} of step {step} failed")
            yield None

    def _cut(self) -> Node | None:
        """A node that is cut off from other members."""
        nodes = {member.node.name: member.node for member in self.members.values()}
        return next((node for node in nodes.values() if node.cut), None) if len(nodes) > 1 else None

    def _arrive(self, kind: str, step: int, collective: Collective, replica: Replica, part: Any) -> None:
        if (cut := self._cut()) is not None:
            cut.deferred.append((self._arrive, (kind, step, collective, replica, part)))
        elif not self.out and replica.alive:
            collective.arrived[replica.id] = part
            if len(collective.arrived) == len(self.generation.members) and collective.result is None:
                self._complete(kind, step, collective)

    def _complete(self, kind: str, step: int, collective: Collective) -> None:
        world = self.world
        if kind == "vote":
            collective.result = any(collective.arrived.values())
            world.vote_complete(self.key, step)
            if len(self.members) > 1 and world.split_due():
                self._split(collective)
        else:
            collective.result = (self._reduced(step, collective), self.key)
            world.moment("reduced")
        for member in self.members.values():
            world.at(world.rng.choice((0.0005, 0.003, 0.02)), self._deliver, collective, member, owner=member)

    def _split(self, collective: Collective) -> None:
        """The result reaches some, and not the others; mostly because one of either dies."""
        rng, ids = self.world.rng, list(self.members)
        unlucky = rng.sample(ids, rng.randint(1, len(ids) - 1))
        collective.lost.update(unlucky)
        if rng.random() < 0.8:
            victim = self.members[rng.choice(ids)]
            self.world.at(
                rng.choice((0.0, 0.001, 0.01, 0.03)), self.world.die, victim, "killed while it voted"
            )
        for i in unlucky:
            if rng.random() < 0.6:
                self.world.at(0.005, self._error, collective, self.members[i], owner=self.members[i])

    def _reduced(self, step: int, collective: Collective) -> int:
        """The sum, after checking what no test of numbers would show: each shard once, of this very state."""
        gradients: dict[int, int] = {}
        for i, (kept, shares, state) in collective.arrived.items():
            if tuple(sorted(kept)) != tuple(sorted(shares)):
                self.world.violation(
                    f"replica {i} holds shards {sorted(kept)} of step {step}, others expect {shares}"
                )
            for shard, gradient in kept.items():
                if shard in gradients:
                    self.world.violation(f"shard {shard} contributes twice to step {step}")
                if gradient != mix(state, step, shard):
                    self.world.violation(
                        f"replica {i}: shard {shard} of step {step} was computed with another state"
                    )
                gradients[shard] = gradient
        if len(gradients) != self.world.settings.logical_shards:
            self.world.violation(f"only shards {sorted(gradients)} contribute to step {step}")
        parts = tuple(gradient for _, gradient in sorted(gradients.items()))
        # Plain all-reduce gives other bits in every generation; ordered reduction the same in all.
        return mix(*parts) if self.world.ordered else mix(*self.key, *parts)

    def _deliver(self, collective: Collective, replica: Replica) -> None:
        if replica.id in collective.lost or replica.id in collective.outcome or replica.id in self.out:
            return
        if (cut := self._cut()) is not None:
            cut.deferred.append((self._deliver, (collective, replica)))
            return
        collective.outcome[replica.id] = True
        replica.notify()

    # ---- trouble

    def _open(self) -> list[Collective]:
        latest = sorted(self.collectives, key=lambda key: (key[1], key[0]))[-2:]
        return [self.collectives[key] for key in latest]

    def trouble(self, replica: Replica, *, noticed: bool) -> None:
        """A member died (`noticed`: its sockets were reset), or froze or was cut off, which nobody notices."""
        for collective in self._open():
            if collective.result is None and not noticed:
                continue  # if it comes back soon enough nothing has happened
            for i, member in self.members.items():
                if i in collective.outcome or (i == replica.id and noticed):
                    continue
                if collective.result is None or self.world.rng.random() < 0.5:
                    collective.lost.add(i)
                    if noticed and self.world.rng.random() < 0.6:
                        delay_s = self.world.rng.uniform(0.001, 0.05)
                        self.world.at(delay_s, self._error, collective, member, owner=member)

    def glitch(self) -> None:
        """A connection breaks although both ends live: some get an error."""
        for collective in self._open():
            for i, member in self.members.items():
                if i not in collective.outcome and self.world.rng.random() < 0.5:
                    collective.lost.add(i)
                    self._error(collective, member)

    def _error(self, collective: Collective, replica: Replica) -> None:
        if replica.id not in collective.outcome:
            collective.outcome[replica.id] = False
            replica.notify()

    def abort(self, replica: Replica) -> None:
        """This member leaves all collectives, from its control thread; its sockets close."""
        if replica.id in self.out or replica.id not in self.members:
            return
        self.out.add(replica.id)
        for collective in self._open():
            collective.outcome.setdefault(replica.id, False)
        self.trouble(replica, noticed=True)
        replica.notify()
