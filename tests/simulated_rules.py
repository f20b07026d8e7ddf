"""What the modelled replicas, groups and scenarios of `tests.simulation` have in common."""

from __future__ import annotations

import base64
from collections.abc import Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from everstep.actors import wire

if TYPE_CHECKING:
    from tests.simulated_group import Group

Thread = Generator[float | None, None, Any]
"""A training thread: yields seconds to sleep, or None to wait until it is notified."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What a replica must do so that its promises hold. A rule switched off is a defect the simulation must notice, or
    that the controller must be able to live with."""

    promise_covers_roll_forward: bool = True
    """After a promise no step is rolled forward either."""
    promise_covers_fetch: bool = True
    """After a promise no fetched state is adopted."""
    promise_covers_commit: bool = True
    fetch_is_fresh: bool = True
    """From the first fetched byte on it says that it holds no state."""
    fetch_replaces_vote: bool = True
    """A vote's result does not outlive the state it led to."""
    speaks_when_fenced: bool = True
    """A step that was being applied while it promised is told as soon as it is applied."""
    repeats_formed: bool = True
    """An order that comes twice is answered twice."""


class Broken(Exception):
    """GroupBroken, Fenced or TransferFailed: this generation is over for this replica."""


class Released(Exception):
    """ReleasedFromRun."""


class UserCode(Exception):
    """The user's code raised."""


@dataclass(slots=True)
class Order:
    generation: wire.Generation
    cancelled: bool = False
    formed: bool = False
    failed: bool = False
    """Its connections will never stand."""
    group: Group | None = None

    @property
    def number(self) -> int:
        return self.generation.number


def mix(*parts: object) -> int:
    """A number that hangs on all of them; the same in every process, since the parts are integers."""
    return hash(parts) & 0xFFFFFFFFFFFF


def vote_text(key: tuple[int, int], step: int) -> str:
    """The result of the vote of one step in one generation."""
    return base64.b64encode(f"{key}:{step}".encode()).decode()
