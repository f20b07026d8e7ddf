"""A stage for scenes on the controller's core: it plays cluster and replicas, which answer as real ones do.

Used by tests/unit/test_core_cases.py. Unlike `tests.simulation` nothing happens here unless the scene says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from everstep.actors import wire
from everstep.orchestrator import events as ev
from everstep.orchestrator.core import Core, Phase, Settings
from everstep.orchestrator.core import model as m
from everstep.policies.budget import BudgetLimits, FailureClass
from tests.simulated_checks import check_books

CRASH, NODE_LOSS = FailureClass.PROCESS_CRASH, FailureClass.NODE_LOSS
MANY = BudgetLimits(process_crash=None, network=None, unknown=None, back_off_s=0.0)
"""For scenes that are not about budgets."""


class Stage:
    """A core, the time, and replicas that do as they are told."""

    def __init__(self, **settings: Any) -> None:
        self.settings = Settings(
            **{
                "max_replicas": 8,
                "replicas": 3,
                "logical_shards": 8,
                "settle_s": 2.0,
                "budget": MANY,
                **settings,
            }
        )
        self.core = Core(self.settings)
        self.core.store = ("store", 1)
        self.now = 100.0
        self.sent: list[m.Send] = []
        self.kills: list[int] = []
        self.launches: list[m.Launch] = []
        self.events: list[ev.Event] = []
        self.status: dict[int, wire.Status] = {}
        self.orders: dict[int, wire.Generation] = {}
        self.memos: dict[int, dict[str, Any]] = {}
        self.silent: set[int] = set()
        """Replicas that do not answer."""
        self.total = 100
        self.num_reforms = 0

    # ---- what happens

    def feed(self, event: m.CoreEvent) -> list[m.Command]:
        commands = self.core.handle(event, self.now)
        for command in commands:
            if isinstance(command, m.Send):
                self.sent.append(command)
                self.num_reforms += isinstance(command.message, wire.Form)
            elif isinstance(command, m.Kill):
                self.kills.append(command.replica)
            elif isinstance(command, m.Launch):
                self.launches.append(command)
            elif isinstance(command, m.Emit):
                self.events.append(command.event)
        check_books(self.core, pytest.fail)
        for command in commands:
            if isinstance(command, m.Send):
                for i in command.replicas:
                    self._receive(i, command.message)
        return commands

    def _receive(self, i: int, message: wire.Message) -> None:
        if i in self.silent or i not in self.status:
            return
        if isinstance(message, wire.Keep | wire.Form):
            self.memos[i] = message.memo
        if isinstance(message, wire.Abort):
            self.park(i, message.generation)
        elif isinstance(message, wire.Form):
            self.orders[i] = message.generation
            if i in message.generation.members:
                self.feed(wire.Formed(replica=i, generation=message.generation.number, connect_s=0.0))
                self.enter(i)

    def enter(self, i: int) -> None:
        generation = self.orders[i]
        self.status[i] = wire.Status(generation=generation.number, applied=generation.step, fresh=False,
                                     vote=self.status[i].vote)  # fmt: skip

    def enter_all(self) -> None:
        """All members enter the generation they were ordered into."""
        for i in self.generation.members:
            self.orders[i] = self.generation
            self.enter(i)

    def park(self, i: int, generation: int, **changes: Any) -> None:
        self.status[i] = replace(self.status[i], **changes)
        self.feed(wire.Parked(replica=i, generation=generation, boundary=False, status=self.status[i]))

    def wait(self, seconds: float, beating: Iterable[int] | None = None) -> None:
        """Time passes; all who are there beat, or only these."""
        until = self.now + seconds
        while self.now < until:
            self.now = min(self.now + self.settings.heartbeat_s, until)
            for i in list(self.status) if beating is None else beating:
                self.beat(i)
            self.feed(m.Tick())

    def beat(self, i: int, phase: str = "compute", progress: int | None = None) -> None:
        moved = int(self.now * 1000) if progress is None else progress
        self.feed(wire.Beat(replica=i, seq=1, generation=0, applied=0, phase=phase, progress=moved))

    def hello(self, i: int, **changes: Any) -> None:
        ready = changes.pop("ready", True)
        known = {"signature": ("w",), "digest": "d", "total": self.total} if ready else {}
        self.status.setdefault(i, wire.Status())
        self.feed(
            wire.Hello(
                **{"run": "run", "token": "t", "replica": i, "pid": i, "node": f"n{i}", "host": f"n{i}",
                   "transfer": (f"n{i}", i), "status": self.status[i], "generation": self.orders.get(i),
                   "ready": ready, "memo": self.memos.get(i, {}), **known, **changes}
            )
        )  # fmt: skip

    def start(self, num: int | None = None, **changes: Any) -> Stage:
        """A run that trains."""
        self.feed(m.Start(incarnation=1))
        for i in range(num or self.settings.replicas):
            self.hello(i, **changes)
        self.wait(0.5 if self.core.phase is Phase.RUNNING else 2.5)
        assert self.core.phase is Phase.RUNNING
        return self

    def commit(self, *, tell: bool = True, step: int | None = None) -> None:
        """All members apply a step; those asked to pause park after it."""
        generation = self.generation
        number = self.status[generation.members[0]].applied if step is None else step
        record = wire.Record(history=generation.history, generation=generation.number, step=number,
                             metrics={"loss": 1.0}, samples=8, step_s=0.1)  # fmt: skip
        for i in generation.members:
            self.status[i] = replace(self.status[i], applied=number + 1, reduced=False, kept=(), vote="v")
        if tell:
            self.feed(
                wire.Committed(replica=generation.members[0], generation=generation.number, record=record)
            )
        if self.core.phase is Phase.PAUSING:
            for i in generation.members:
                if i not in self.silent:
                    self.park(i, generation.number)

    def die(self, *replicas: int, failure: FailureClass = CRASH, cause: str = "killed") -> None:
        for i in replicas:
            self.status.pop(i, None)
        for i in replicas:
            self.feed(m.ReplicaDied(replica=i, cause=cause, failure=failure))

    # ---- what came of it

    @property
    def generation(self) -> wire.Generation:
        assert self.core.generation is not None
        return self.core.generation

    def told(self, kind: type[wire.Message]) -> list[tuple[int, ...]]:
        """Who was sent messages of a kind, in order."""
        return [s.replicas for s in self.sent if isinstance(s.message, kind)]

    def emitted(self, kind: type[Any]) -> list[Any]:
        return [e for e in self.events if isinstance(e, kind)]


def restarted(stage: Stage, *, adopt: dict[str, Any] | None = None, **settings: Any) -> Stage:
    """The same cluster with a new controller, to which nobody has spoken yet."""
    after = Stage(
        **{"replicas": stage.settings.replicas, "min_replicas": stage.settings.min_replicas, **settings}
    )
    after.now, after.status, after.orders, after.memos = (
        stage.now + 1.0,
        stage.status,
        stage.orders,
        stage.memos,
    )
    after.silent = stage.silent
    after.feed(m.Adopt(incarnation=2, replicas=tuple(sorted(stage.core.replicas)), **(adopt or {})))
    return after
