"""Where a run keeps things in its storage. Imports neither ray nor torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from everstep.orchestrator.config import RunConfig


def checkpoints_url(config: RunConfig) -> str:
    """Where the checkpoints of a run are."""
    return f"{config.storage.rstrip('/')}/{config.name}/checkpoints"
