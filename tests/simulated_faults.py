"""Every fault that `tests.simulation` can play: `World` is made of this. Each method `fault_NAME` does one, now."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from everstep.orchestrator.core import Phase
from everstep.orchestrator.core import model as m
from everstep.policies.budget import FailureClass
from tests.simulated_scenario import EFFECTS, MOMENTS

if TYPE_CHECKING:
    from tests.simulated_replica import Replica
    from tests.simulation import Node


class Faults:
    """The faults of a world, and what ends them."""

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
        fetching = any(r.alive and r.phase == "fetch" for r in self.replicas.values())
        replica = self._some(lambda r: r.offer is not None)
        if fetching and replica is not None:
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

    def fault_stall(self) -> None:
        """The controller's process stands still; what comes meanwhile waits."""
        if self.core is None:
            return
        self.note("controller stalls", "")
        self.stalled_until = self.now + self.rng.choice((1.0, 3.0, 8.0))

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
