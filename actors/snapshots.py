"""Checkpoints from the training thread's side: when one is due, what is kept of it, and the way back from storage.

Made by the session, which calls it at commits and before its state changes. Copying and handing over is `actors.capture`'s
business, writing the keeper's, committing the controller's.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from everstep.actors import wire
from everstep.actors.capture import Capture, Ticket
from everstep.actors.places import checkpoints_url
from everstep.actors.restore import restore
from everstep.checkpoint.errors import CheckpointDamaged
from everstep.checkpoint.records import attempt_name
from everstep.errors import GroupBroken, StateError, StateMismatch

if TYPE_CHECKING:
    from everstep.actors.member import Member
    from everstep.actors.registry import Registry
    from everstep.checkpoint.state import Snapshot
    from everstep.orchestrator.config import RunConfig

_AT_END_S = 600.0
"""How long storage may keep a finished replica from its end."""


class Snapshots:
    """One per session. Does nothing in a run without checkpoints."""

    def __init__(self, config: RunConfig, member: Member, registry: Registry) -> None:
        self._config, self._member, self._registry = config, member, registry
        self._capture = Capture(member.identity, self._missing) if config.checkpoint.wanted else None
        self._taken_s = time.monotonic()
        self._taken_step = -1

    @property
    def busy(self) -> bool:
        """The last one is still being copied or written."""
        return self._capture is not None and self._capture.busy

    def due(self, num_steps: int, rank: int) -> bool:
        """Whether the state after so many steps should be kept: by the clock and the count, of which rank 0 speaks for all,
        or by the controller's wish, whoever has heard it. The vote makes all do it at once."""
        when = self._config.checkpoint
        if self._capture is None:
            return False
        if self._member.snapshot_wanted:
            return True
        if rank != 0:
            return False
        by_step = when.every_steps is not None and num_steps % when.every_steps == 0
        return by_step or (when.every_s is not None and time.monotonic() - self._taken_s >= when.every_s)

    @staticmethod
    def attempt(generation: wire.Generation) -> str:
        """What the generation's snapshots are named after; with the step it tells them all apart."""
        return attempt_name(generation.incarnation, generation.number)

    def take(self, num_steps: int, generation: wire.Generation, snapshot: Snapshot) -> None:
        """Keep this replica's part of the state after so many steps."""
        assert self._capture is not None
        ticket = Ticket(
            step=num_steps,
            attempt=self.attempt(generation),
            generation=generation.number,
            rank=generation.rank_of(self._member.identity.replica),
            world_size=len(generation.members),
        )
        self._capture.take(ticket, snapshot, self._registry.steady_tensors())
        self._taken_s, self._taken_step = time.monotonic(), num_steps
        self._member.snapshot_taken()

    def settle(self) -> None:
        """The state is about to change: returns when nothing of it is still to be copied."""
        if self._capture is not None:
            self._capture.settle()

    def at_end(
        self, num_steps: int, generation: wire.Generation | None, snapshot: Callable[[], Snapshot]
    ) -> None:
        """The loop is over on all replicas: keep what it came to, unless the last snapshot has it already. Returns when
        this replica's part is written, or cannot be."""
        capture = self._capture
        if capture is None or generation is None or not self._config.checkpoint.at_end:
            return
        inside = self._member.identity.replica in generation.members
        if capture.wait(_AT_END_S) and inside and self._taken_step != num_steps:
            self.take(num_steps, generation, snapshot())
            capture.wait(_AT_END_S)

    def restore(self, generation: wire.Generation) -> int:
        """Read the state with which the generation begins from its checkpoint into the live objects; returns its bytes.

        Raises GroupBroken where the checkpoint is damaged, after the controller was told so; StateMismatch, StoreError.
        """
        try:
            return restore(
                self._config, generation.step, self._registry.state, partial(self._member.moved, "fetch")
            )
        except CheckpointDamaged as error:
            self._member.refused(generation.number, generation.step, str(error))
            raise GroupBroken(f"the checkpoint of step {generation.step} is damaged") from error
        except (StateMismatch, StateError) as error:
            raise StateMismatch(
                f"the checkpoint of step {generation.step} in {checkpoints_url(self._config)} is of another state: {error}. "
                "Give this run another name or storage, or register what the checkpoint holds"
            ) from error

    def close(self) -> None:
        """No more snapshots; what was handed over is written all the same."""
        if self._capture is not None:
            self._capture.close()

    def _missing(self, ticket: Ticket, why: str) -> None:
        self._member.no_part(ticket.step, ticket.attempt, why)
