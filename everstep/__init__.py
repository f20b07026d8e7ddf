"""Everstep: elastic, fault-tolerant PyTorch training on Ray.

Names are loaded on first use, so that `import everstep` (and `everstep --help`) needs neither torch nor ray.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

__version__ = "0.1.0"

if TYPE_CHECKING:
    from everstep.actors.session import Session as Session
    from everstep.actors.step import Step as Step
    from everstep.orchestrator.api import Result as Result
    from everstep.orchestrator.api import run as run
    from everstep.orchestrator.config import BatchConfig as BatchConfig
    from everstep.orchestrator.config import CheckpointConfig as CheckpointConfig
    from everstep.orchestrator.config import DetectionConfig as DetectionConfig
    from everstep.orchestrator.config import FailureConfig as FailureConfig
    from everstep.orchestrator.config import RunConfig as RunConfig
    from everstep.orchestrator.config import ScalingConfig as ScalingConfig

_HOMES = {
    "Session": "everstep.actors.session",
    "Step": "everstep.actors.step",
    "run": "everstep.orchestrator.api",
    "Result": "everstep.orchestrator.api",
    "RunConfig": "everstep.orchestrator.config",
    "ScalingConfig": "everstep.orchestrator.config",
    "BatchConfig": "everstep.orchestrator.config",
    "CheckpointConfig": "everstep.orchestrator.config",
    "FailureConfig": "everstep.orchestrator.config",
    "DetectionConfig": "everstep.orchestrator.config",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> object:
    if name in _HOMES:
        from importlib import import_module

        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'everstep' has no attribute {name!r}; it offers {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(__all__)
