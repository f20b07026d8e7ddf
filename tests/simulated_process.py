"""A modelled process: it lives, freezes, hangs and dies, and runs one training thread. `simulated_replica` fills it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tests.simulated_rules import Thread

if TYPE_CHECKING:
    from tests.simulation import Node, World


class Process:
    """What `World` kills, freezes, cuts off and hangs."""

    _thread: Thread

    def __init__(self, world: World, ident: int, node: Node) -> None:
        self.world, self.id, self.node = world, ident, node
        self.alive, self.frozen, self.hung = True, False, False
        self.deferred: list[tuple[Any, tuple[Any, ...]]] = []
        """What came while it was frozen."""
        self.lease_until = world.now + world.lease_s
        self._waiting = self._resume_pending = False

    @property
    def transfer(self) -> tuple[str, int]:
        return (self.node.name, 10_000 + self.id)

    @property
    def out_of_reach(self) -> bool:
        return not self.alive or self.frozen or self.node.cut

    def __repr__(self) -> str:
        return f"replica {self.id}"

    def _resume(self) -> None:
        if self.hung:
            self._resume_pending = True
            return
        self._waiting = False
        try:
            pause = next(self._thread)
        except StopIteration:
            return
        if pause is None:
            self._waiting = True
        else:
            self.world.at(pause, self._resume, owner=self)

    def notify(self) -> None:
        """Something the training thread may wait for has changed."""
        if self._waiting:
            self._waiting = False
            self.world.at(self.world.rng.uniform(0.0001, 0.002), self._resume, owner=self)

    def unhang(self) -> None:
        self.hung = False
        if self._resume_pending:
            self._resume_pending = False
            self._resume()

    def _check_lease(self) -> None:
        # A kernel timer: it also ends a process that is stopped.
        if self.alive:
            if self.world.now >= self.lease_until:
                self.world.die(self, "its lease ended")
            else:
                self.world.at(self.lease_until - self.world.now + 1e-6, self._check_lease)
