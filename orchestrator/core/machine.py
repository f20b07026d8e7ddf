"""The protocol's one entrance: `Core.handle` takes an event, lets the part of the protocol act that it belongs to,
and returns the commands.

Called by the controller actor and by tests, with one event at a time. Rules that hold in all parts:

- A generation's number is spent when it is sent out; whatever carries another number is stale and is dropped.
- Nobody is told to enter a generation before everybody of the last one has promised to commit nothing more in it
  (`wire.Parked`), or is dead, or is out of the run for good (`Kill`).
- Only who is in the run is believed: words of a replica that was given up or released change nothing.
- Every phase but RUNNING, PAUSING and GATHERING has a deadline; in the first two it is the heartbeats' and the hang
  deadline, and GATHERING waits for machines.
- Handlers note what happened; what follows from it is decided in `_advance`, once, after the handler.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from everstep.actors import wire
from everstep.errors import IllegalEvent
from everstep.orchestrator import events
from everstep.orchestrator.core import (
    adopting,
    changing,
    checkpointing,
    ending,
    failing,
    forming,
    gathering,
    restoring,
    training,
    watching,
)
from everstep.orchestrator.core import model as m
from everstep.orchestrator.core.accounts import Clock
from everstep.orchestrator.core.model import Phase
from everstep.orchestrator.core.state import RunState

_Handlers = dict[type[Any], Callable[[RunState, Any], None]]
_HANDLERS: _Handlers = {
    m.Tick: watching.on_tick,
    m.LinkLost: failing.on_link_lost,
    m.ReplicaDied: failing.on_died,
    m.NodeGone: failing.on_node_gone,
    m.PartWritten: checkpointing.on_part,
    m.CheckpointDone: checkpointing.on_done,
    m.CheckpointFound: restoring.on_found,
    m.Scale: changing.on_scale,
    m.Drain: changing.on_drain,
    m.Stop: ending.on_stop,
    m.Fail: ending.on_fail,
    wire.Hello: gathering.on_hello,
    wire.Ready: gathering.on_ready,
    wire.Beat: training.on_beat,
    wire.Fault: failing.on_fault,
    wire.Parked: failing.on_parked,
    wire.Formed: forming.on_formed,
    wire.Fetched: forming.on_fetched,
    wire.Committed: training.on_committed,
    wire.Refused: restoring.on_refused,
    wire.NoPart: checkpointing.on_no_part,
    wire.UserFailed: failing.on_user_failed,
    wire.Finished: ending.on_finished,
    wire.Leaving: changing.on_leaving,
}
_WHILE_ADOPTING: _Handlers = {
    **dict.fromkeys(_HANDLERS, adopting.postpone),
    m.Tick: adopting.on_tick,
    m.ReplicaDied: adopting.on_died,
    m.Stop: adopting.on_stop,
    wire.Hello: adopting.on_hello,
    wire.Beat: adopting.on_beat,
}
"""The rest is looked at when it is known who is there."""
_WHEN_OVER: _Handlers = {
    m.Tick: watching.on_tick,
    m.LinkLost: failing.on_link_lost,
    m.ReplicaDied: failing.on_died,
    m.NodeGone: failing.on_node_gone,
    wire.Hello: gathering.on_hello,
    wire.Beat: training.on_beat,
}
"""`RunEnded` is the last event of a run; from then on it is only watched who is still there."""
_TABLES: dict[Phase, _Handlers] = {
    **dict.fromkeys(Phase, _HANDLERS),
    Phase.ADOPTING: _WHILE_ADOPTING,
    Phase.ENDING: _WHEN_OVER,
    Phase.ENDED: _WHEN_OVER,
}
_FROM_REPLICAS = frozenset(kind for kind in _HANDLERS if issubclass(kind, wire.Message))


class Core(RunState):
    """One run. Its invariants are checked by the property tests in tests/unit/test_core_properties.py."""

    def handle(self, event: m.CoreEvent, now_s: float) -> list[m.Command]:
        """What to do about `event` at `now_s` (seconds on a clock that never goes back within the run).

        Raises IllegalEvent, and changes nothing, when the event could only come from a bug of ours.
        """
        # The hot path of a mass failure, of which every line is paid for once per replica.
        kind = type(event)
        handler = _TABLES[self.phase].get(kind)
        if handler is None or not self.started or kind is m.Scale:
            handler = self._legal(event, handler)
        self.now = now_s
        self.out = []
        if kind in _FROM_REPLICAS:
            replica = self.replicas.get(event.replica)  # type: ignore[union-attr]
            if replica is not None:
                replica.heard_s = now_s
        adopting_before = self.phase is Phase.ADOPTING
        if handler is not None:
            handler(self, event)
        if adopting_before and self.phase is not Phase.ADOPTING:
            self._catch_up()
        if handler is not training.on_beat and not (self.awaited and self.phase is Phase.PARKING):
            self._advance()
        return self.out

    def next_deadline_s(self) -> float:
        """When the next `Tick` is due at the latest."""
        due = self.now + self.settings.heartbeat_s
        for moment in (self.deadline, self.relaunch_s):
            if moment is not None and moment > self.now:
                due = min(due, moment)
        return due

    def stored(self, event: events.StepCommitted) -> None:
        """This event has reached storage: its record may be forgotten by the replicas (`Settings.await_storage`)."""
        if self.durable_step is not None and event.generation >= self.first_number:
            self.durable_step = max(self.durable_step, event.step + 1)

    def _legal(
        self, event: m.CoreEvent, handler: Callable[[RunState, Any], None] | None
    ) -> Callable[[RunState, Any], None] | None:
        """The handler of an event that is special, or may be illegal. None: legal, but nothing to do about it now."""
        kind = type(event)
        if kind in (m.Start, m.Adopt):
            if self.started:
                raise IllegalEvent(
                    f"run {self.settings.run!r} was started twice; it is in phase {self.phase}"
                )
            return _on_start if kind is m.Start else adopting.on_adopt
        if kind is not wire.Stacks and kind not in _HANDLERS:
            raise IllegalEvent(
                f"run {self.settings.run!r}: the core has no place for {event!r} in phase {self.phase}"
            )
        if not self.started:
            raise IllegalEvent(f"run {self.settings.run!r}: {kind.__name__} came before Start or Adopt")
        if isinstance(event, m.Scale):
            self._check_scale(event)  # in every phase, also where it is only remembered
        return handler

    def _check_scale(self, event: m.Scale) -> None:
        low, high = self.settings.min_replicas, self.settings.max_replicas
        if not low <= event.replicas <= high:
            raise IllegalEvent(
                f"run {self.settings.run!r}: scale to {event.replicas}, outside of {low} to {high}"
            )

    def _catch_up(self) -> None:
        """What came while adopting, in the order in which it came."""
        postponed, self.postponed = self.postponed, []
        for event in postponed:
            handler = _TABLES[self.phase].get(type(event))
            if handler is not None:
                handler(self, event)
        if self.phase not in m.OVER:
            changing.shrink_pool(self)

    def _advance(self) -> None:
        """Whatever is due now, after every event but a heartbeat."""
        if self.untold and self.phase is not Phase.PARKING:
            self.tell_losses()
        if self.phase in (Phase.PARKING, Phase.PAUSING) and not self.awaited:
            failing.decide_parked(self)
        elif self.phase is Phase.FORMING and not self.awaited:
            forming.formed(self)
        if self.phase in (Phase.GATHERING, Phase.RUNNING, Phase.PAUSING):
            # Not while re-forming: it takes milliseconds, and the survivors come first.
            gathering.launch_missing(self)
        if self.phase is Phase.GATHERING:
            gathering.try_form(self)
        elif self.phase in (Phase.RUNNING, Phase.PAUSING):
            changing.consider_change(self)
        elif self.phase is Phase.ENDING and not self.replicas:
            self.enter(Phase.ENDED)
            self.deadline = None


def _on_start(run: RunState, event: m.Start) -> None:
    run.started = True
    run.incarnation = event.incarnation
    run.searching = event.search
    run.clock = Clock(since_s=run.now)
    run.began_s = run.now
