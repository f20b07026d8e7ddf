"""The controller's hands on storage: the newest checkpoint at the start, the commit of each one, and what may go.

Called by the controller actor in one thread of its own, because all of it blocks. Decides nothing about training.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from everstep.actors.places import checkpoints_url
from everstep.checkpoint import commit
from everstep.checkpoint.catalog import newest_whole
from everstep.checkpoint.errors import AlreadyCommitted, StoreError, Superseded
from everstep.checkpoint.part import PartIndex
from everstep.checkpoint.records import table_of
from everstep.checkpoint.retention import LiveAttempt, Retention, prune
from everstep.checkpoint.state import Layout
from everstep.checkpoint.store import open_store
from everstep.errors import ConfigError, EverstepError
from everstep.orchestrator.core import model as m

if TYPE_CHECKING:
    from everstep.orchestrator.config import RunConfig

_log = logging.getLogger(__name__)


class Vault:
    """The checkpoints of one run, for one controller."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._store = open_store(checkpoints_url(config), config.checkpoint.storage_options)
        self._retention = Retention(
            keep_last=config.checkpoint.keep_last, keep_every=config.checkpoint.keep_every
        )
        self._incarnation = 0

    def open(self, incarnation: int, first: bool) -> int:
        """Announce this controller, so that an older one commits nothing any more. `first`: the run begins.

        Returns: steps in the newest whole checkpoint, 0 if there is none. Raises ConfigError, StoreError, Superseded.
        """
        # Clocks go back at times; the number that counts here only has to be the newest.
        newest = commit.newest_incarnation(self._store)
        self._incarnation = max(incarnation, newest + 1)
        commit.begin(self._store, self._incarnation, f"{self._config.name} {time.time_ns()}")
        choice = newest_whole(self._store)
        for refused in choice.refused:
            _log.warning("run %s: checkpoint of step %d: %s", self._config.name, refused.step, refused.reason)
            commit.retire(self._store, refused.step, refused.reason, self._incarnation)
        step = choice.manifest.step if choice.manifest is not None else 0
        if first and step and self._config.checkpoint.resume == "never":
            raise ConfigError(
                f"checkpoint.resume = 'never', but {checkpoints_url(self._config)} holds a checkpoint of step {step}; "
                "choose another name or storage, or resume = 'auto'"
            )
        return step

    def commit(self, order: m.CommitCheckpoint) -> m.CheckpointDone:
        """Make the parts a checkpoint; whatever goes wrong is in the answer."""
        try:
            layout = Layout.from_json(order.parts[0]["layout"])
            tensors = table_of(layout)
            parts = [PartIndex.from_json(part["index"], tensors) for part in order.parts]
            commit.commit(
                self._store,
                parts,
                run=self._config.name,
                step=order.step,
                generation=order.parts[0]["generation"],
                incarnation=self._incarnation,
                attempt=order.attempt,
                tensors=tensors,
                skeleton=layout.skeleton,
                world_size=len(parts),
                created_s=time.time(),
            )
        except AlreadyCommitted as error:
            return m.CheckpointDone(step=order.step, attempt=order.attempt, problem=str(error))
        except EverstepError as error:
            return m.CheckpointDone(
                step=order.step, attempt=order.attempt, problem=f"{type(error).__name__}: {error}"
            )
        return m.CheckpointDone(
            step=order.step,
            attempt=order.attempt,
            written_bytes=sum(part.written_bytes for part in parts),
            referenced_bytes=sum(part.referenced_bytes for part in parts),
        )

    def find_other(self, refused: int, reason: str) -> int:
        """Put a damaged checkpoint aside; steps in the newest whole one, 0 if there is none."""
        commit.retire(self._store, refused, reason, self._incarnation)
        choice = newest_whole(self._store)
        return choice.manifest.step if choice.manifest is not None else 0

    def prune(self, live: Sequence[tuple[int, str]]) -> None:
        """Delete what retention does not keep, but nothing of the attempts that are `live`. Failing, it is said in the log
        and tried after the next commit."""
        attempts = [LiveAttempt(step, attempt) for step, attempt in live]
        try:
            prune(self._store, self._retention, incarnation=self._incarnation, live=attempts)
        except (StoreError, Superseded) as error:
            _log.warning("run %s: old checkpoints could not be deleted: %s", self._config.name, error)
