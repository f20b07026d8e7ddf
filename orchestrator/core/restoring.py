"""A run that begins with a checkpoint, and what happens when that one turns out damaged.

Which replica reads it is chosen in `membership`; here an older one is looked for.
"""

from __future__ import annotations

from everstep.actors import wire
from everstep.orchestrator import events
from everstep.orchestrator.core import failing
from everstep.orchestrator.core import model as m
from everstep.orchestrator.core.model import ReplicaState
from everstep.orchestrator.core.state import RunState


def on_refused(run: RunState, event: wire.Refused) -> None:
    """The checkpoint with which the run was to begin is damaged: look for an older one, and begin again from there."""
    generation, replica = run.generation, run.replicas.get(event.replica)
    if generation is None or replica is None or event.generation != generation.number:
        return
    if replica.state is not ReplicaState.MEMBER or run.searching or run.checkpoint_step != event.step:
        return
    run.emit(events.CheckpointRefused(step=event.step, reason=event.reason))
    run.searching = run.refused = True
    run.out.append(m.FindCheckpoint(refused=event.step, reason=event.reason))
    failing.park(run, f"the checkpoint of step {event.step} is damaged", None, planned=True)


def on_found(run: RunState, event: m.CheckpointFound) -> None:
    """The newest one that is whole."""
    run.checkpoint_step = event.step
    if run.generation is None and run.adopt is None:
        run.first_step = event.step
        run.begin_at(event.step)
    elif run.refused:
        run.begin_at(min(run.step, event.step))
    run.searching = run.refused = False
