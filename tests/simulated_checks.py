"""What `tests.simulation` checks after each event, and at the end of a run: `World` is made of this."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from everstep.actors import wire
from everstep.orchestrator import events as ev
from everstep.orchestrator.core import Core, Phase, ReplicaState, Settings
from everstep.orchestrator.core import model as m
from everstep.policies.budget import FailureClass
from tests.simulated_replica import Replica
from tests.simulated_rules import mix
from tests.simulated_scenario import Scenario

_LIMITS_S = {Phase.ADOPTING: 30.0, Phase.PARKING: 60.0, Phase.FORMING: 25.0, Phase.ENDING: 35.0}
"""No phase of these lasts longer, whatever happens."""


class Violation(AssertionError):
    """Something is not as promised. The message is the run's story."""


class Checks:
    """The invariants of a world."""

    # What `World` has, as far as it is looked at here.
    now: float
    began: float
    seed: int
    core: Core | None
    scenario: Scenario
    settings: Settings
    replicas: dict[int, Replica]
    pending: set[int]
    let_go: set[int]
    log: list[ev.Event]
    story: deque[tuple[float, str, object]]
    chain: dict[tuple[int, int], int]
    ordered: bool
    stop_asked: bool
    leave_at: int
    phase_since: float
    num_events: int
    ended_at: float | None
    outcome: str
    reason: str

    def note(self, what: str, about: object) -> None:
        self.story.append((self.now, what, about))

    def violation(self, text: str) -> None:
        raise Violation(self._tell(text))

    def _tell(self, text: str) -> str:
        lines = [f"{at - self.began:10.4f}  {what:<12} {about}" for at, what, about in self.story
                 if not isinstance(about, m.Tick | wire.Beat)]  # fmt: skip
        return "\n".join(
            [
                f"seed {self.seed}, {self.scenario}",
                *lines[-250:],
                f"{self.now - self.began:10.4f}  {text}",
                f"(seed {self.seed})",
            ]
        )

    def _check(self, core: Core) -> None:
        longest_s = _LIMITS_S.get(core.phase)
        if longest_s is not None and self.now - self.phase_since > longest_s and core.store[1]:
            self.violation(f"{core.phase} for {self.now - self.phase_since:.1f} s")
        if core.num_leaving or self.num_events % 16 == 0:
            check_books(core, self.violation)
        for name, times in core.budget.recent_s.items():
            limit = self.settings.budget.of(FailureClass(name))
            if limit is not None and len(times) > limit:
                self.violation(f"{len(times)} failures of class {name} were absorbed, {limit} are allowed")
        if core.began_s is not None:
            wall_s, booked_s = (
                self.now - core.began_s,
                sum(core.clock.seconds.values()) + self.now - core.clock.since_s,
            )
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
        for replica in self.replicas.values():
            if replica.alive:
                self.violation(f"{replica} is left behind, in phase {replica.phase}")
        if self.pending - self.let_go:
            self.violation(f"replicas {self.pending - self.let_go} are still being started")
        check_log(
            self.log, self.violation, stored=self.scenario.await_storage, told=self.scenario.tell_stored
        )
        ends = [event for event in self.log if isinstance(event, ev.RunEnded)]
        if not ends:
            self.violation("there is no RunEnded in the log")
        end = ends[-1]
        self.outcome, self.reason = end.outcome, end.reason
        if end.outcome == "finished" and end.step != self.leave_at:
            self.violation(f"finished after {end.step} of {self.leave_at} steps")
        if end.outcome == "stopped" and not self.stop_asked:
            self.violation("stopped without being asked to")
        if end.outcome == "failed" and not any(w in end.reason for w in ("BudgetExhausted", "TrainingError")):
            self.violation(f"failed: {end.reason}")
        if end.outcome == "failed" and "wait for each other" in end.reason:
            self.violation(f"all of them waited, again and again: {end.reason}")
        if self.core is not None and self.core.replicas:
            self.violation(f"the core still knows {list(self.core.replicas)}")

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
            known = None not in (other.state, replica.state) and replica.id in self._seated(self.core)
            if known and other.state != replica.state:
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
        elif (
            isinstance(event, ev.RunEnded)
            and event.step != due
            and event.outcome != "failed"
            and not restarted
        ):
            violation(f"the run ended at step {event.step}, but {due} steps are in the log")
