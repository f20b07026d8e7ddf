"""The protocol's one entrance: `Core.handle` takes an event, lets the part of the protocol act that it belongs to,
and returns the commands.

Called by the controller actor and by tests, with one event at a time. Rules that hold in all parts:

- A generation's number is spent when it is sent out; whatever carries another number is stale and is dropped.
- Nobody is told to enter a generation before everybody of the last one has promised to commit nothing more in it
  (`wire.Parked`), or is dead, or is out of the run for good (`Kill`).
- Every phase but RUNNING and GATHERING has a deadline; in RUNNING the heartbeats and the hang deadline are it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from everstep.actors import wire
from everstep.errors import IllegalEvent
from everstep.orchestrator.core import adopting, changing, ending, failing, forming, gathering, training, watching
from everstep.orchestrator.core import model as m
from everstep.orchestrator.core.accounts import Clock
from everstep.orchestrator.core.model import Phase
from everstep.orchestrator.core.state import RunState

_HANDLERS: dict[type[Any], Callable[[RunState, Any], None]] = {
    m.Tick: watching.on_tick,
    m.LinkLost: failing.on_link_lost,
    m.ReplicaDied: failing.on_died,
    m.NodeGone: failing.on_node_gone,
    m.Scale: changing.on_scale,
    m.Drain: changing.on_drain,
    m.Stop: ending.on_stop,
    wire.Hello: gathering.on_hello,
    wire.Ready: gathering.on_ready,
    wire.Beat: training.on_beat,
    wire.Fault: failing.on_fault,
    wire.Parked: failing.on_parked,
    wire.Formed: forming.on_formed,
    wire.Fetched: forming.on_fetched,
    wire.Committed: training.on_committed,
    wire.UserFailed: failing.on_user_failed,
    wire.Finished: ending.on_finished,
    wire.Leaving: changing.on_leaving,
}
_WHILE_ADOPTING: dict[type[Any], Callable[[RunState, Any], None]] = {
    m.Tick: adopting.on_tick,
    m.ReplicaDied: adopting.on_died,
    m.Scale: changing.on_scale,
    m.Stop: ending.on_stop,
    wire.Hello: adopting.on_hello,
    wire.Beat: adopting.on_beat,
    wire.Committed: adopting.on_committed,
}
"""Nothing else is listened to: each replica says in its `Hello` all there is to say, once more when asked to park."""


class Core(RunState):
    """One run. Its invariants are checked by the property tests in tests/unit/test_core_properties.py."""

    def handle(self, event: m.CoreEvent, now_s: float) -> list[m.Command]:
        """What to do about `event` at `now_s` (seconds on a clock that never goes back within the run).

        Raises IllegalEvent, and changes nothing, when the event could only come from a bug of ours.
        """
        handler = self._handler(event)
        self.now = now_s
        self.out = []
        replica = self.replicas.get(getattr(event, "replica", -1))
        if replica is not None and isinstance(event, wire.Message):
            replica.heard_s = now_s
        if handler is not None:
            handler(self, event)
        self._advance(event)
        return self.out

    def next_deadline_s(self) -> float:
        """When the next `Tick` is due at the latest."""
        due = self.now + self.settings.heartbeat_s
        for moment in (self.deadline, self.relaunch_s if self.relaunch_s > self.now else None):
            if moment is not None:
                due = min(due, moment)
        return due

    def _handler(self, event: m.CoreEvent) -> Callable[[RunState, Any], None] | None:
        """None: legal, but nothing to do about it now."""
        kind = type(event)
        if kind in (m.Start, m.Adopt):
            if self.started:
                raise IllegalEvent(f"run {self.settings.run!r} was started twice; it is in phase {self.phase}")
            return _on_start if kind is m.Start else adopting.on_adopt
        if kind is not wire.Stacks and kind not in _HANDLERS:
            raise IllegalEvent(f"run {self.settings.run!r}: the core has no place for {event!r} in phase {self.phase}")
        if not self.started:
            raise IllegalEvent(f"run {self.settings.run!r}: {kind.__name__} came before Start or Adopt")
        return (_WHILE_ADOPTING if self.phase is Phase.ADOPTING else _HANDLERS).get(kind)

    def _advance(self, event: m.CoreEvent) -> None:
        """Whatever is due now, after every event."""
        if self.phase in (Phase.ENDED, Phase.ADOPTING):
            return
        if self.phase is Phase.ENDING:
            if not self.replicas:
                self.enter(Phase.ENDED)
                self.deadline = None
            return
        gathering.launch_missing(self)
        if self.phase is Phase.GATHERING:
            gathering.try_form(self)
        elif self.phase is Phase.RUNNING and not isinstance(event, wire.Beat):
            changing.consider_change(self)


def _on_start(run: RunState, event: m.Start) -> None:
    run.started = True
    run.incarnation = event.incarnation
    run.clock = Clock(since_s=run.now)
