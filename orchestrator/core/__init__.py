"""The controller's mind: pure, without clock, I/O, randomness, Ray or torch.

`Core.handle(event, now_s)` takes what happened and returns what to do. The controller actor performs it, the property
tests and the simulator feed it with millions of histories. Begin with `model` (words and the table of phases), then
`machine` (the protocol), then `membership` (who belongs to the next generation, and why).
"""

from everstep.orchestrator.core.machine import Core
from everstep.orchestrator.core.model import Phase, ReplicaState, Settings

__all__ = ["Core", "Phase", "ReplicaState", "Settings"]
