"""An order of the controller to enter a generation. Shared by `actors.member` and `actors.session`."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from everstep.actors import wire
from everstep.actors.groups import Group


@dataclass(slots=True)
class Order:
    """A generation to enter, and its group as soon as it is formed."""

    generation: wire.Generation
    cancel: threading.Event = field(default_factory=threading.Event)
    group: Group | None = None
    failed: str = ""
    """Why the group will never stand."""
