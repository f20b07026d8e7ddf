"""The controller's part in checkpoints: a keeper on every node that trains, and storage, asked in a thread of its own.

Lives in the controller's loop and answers the core's commands with events. Nothing in here holds training up, except
the search for the checkpoint with which a run begins.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import ray

from everstep.actors.keeper import KeeperSpec
from everstep.actors.places import checkpoints_url
from everstep.checkpoint.errors import StoreError
from everstep.orchestrator import connect
from everstep.orchestrator.cluster import create_keeper, end_actors
from everstep.orchestrator.core import model as m

if TYPE_CHECKING:
    from everstep.orchestrator.config import RunConfig
    from everstep.orchestrator.vault import Vault

_log = logging.getLogger(__name__)
_AGAIN_S = 10.0
_LAST_WORDS_S = 30.0
"""For keepers that are being created when the run ends, and for the end of the others."""


class Keeping:
    """Checkpoints of one run, for one controller."""

    def __init__(self, config: RunConfig, token: str, feed: Callable[[m.CoreEvent], None]) -> None:
        self._config, self._token, self._feed = config, token, feed
        self._vault: Vault | None = None
        self._found = False
        self._nodes: set[str] = set()
        """That have a keeper, or are getting one, or could not have one."""
        self._starting: set[asyncio.Task[None]] = set()
        self._storage = concurrent.futures.ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="everstep-vault"
        )

    # ---- storage

    async def open(self, incarnation: int, *, first: bool) -> None:
        """Find the newest checkpoint. A first start cannot do without; a controller that came back tries for ever, as
        nobody needs it while replicas live."""

        def look() -> int:
            if self._vault is None:
                self._vault = _make_vault(self._config)
            return self._vault.open(incarnation, first)

        await self._search(look, must=first)

    async def find(self, command: m.FindCheckpoint) -> None:
        """Another one than the damaged one. Tried until storage answers: without it nobody knows where to begin."""
        assert self._vault is not None
        vault = self._vault
        await self._search(lambda: vault.find_other(command.refused, command.reason), must=False)

    async def _search(self, look: Callable[[], int], *, must: bool) -> None:
        """A supervisor: whatever a store raises, the core learns of an end. `must`: the first failure ends the run."""
        while True:
            try:
                step = await self._in_storage(look)
            except Exception as error:  # noqa: BLE001
                if must:
                    self._feed(m.Fail(reason=f"{type(error).__name__}: {error}"))
                    return
                _log.warning("run %s: %s: %s", self._config.name, type(error).__name__, error)
                await asyncio.sleep(_AGAIN_S)
            else:
                self._found = True
                self._feed(m.CheckpointFound(step=step))
                return

    async def commit(self, command: m.CommitCheckpoint) -> None:
        """A supervisor: whatever happens there is an answer, for the end of the run may wait for it."""
        vault = self._vault if self._found else None
        try:
            if vault is None:
                raise StoreError("storage has not been reached since the controller came back")
            done = await self._in_storage(lambda: vault.commit(command))
        except Exception as error:  # noqa: BLE001
            problem = f"{type(error).__name__}: {error}"
            done = m.CheckpointDone(step=command.step, attempt=command.attempt, problem=problem)
        self._feed(done)
        if vault is not None and not done.problem:
            await self._in_storage(lambda: vault.prune(command.live))

    async def _in_storage(self, work: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._storage, work)

    # ---- keepers

    def have_keepers(self, nodes: set[str]) -> None:
        """Training goes: now, and not while replicas start, each of their nodes gets its keeper. Each is told to Ray once."""
        for node in nodes - self._nodes:
            self._nodes.add(node)
            task = asyncio.get_running_loop().create_task(self._create(node))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _create(self, node: str) -> None:
        spec = KeeperSpec(
            run=self._config.name,
            name=connect.keeper_name(self._config.name, node),
            token=self._token,
            node=node,
            url=checkpoints_url(self._config),
            storage_options=self._config.checkpoint.storage_options,
            bytes_per_s=self._config.checkpoint.bytes_per_s,
            controller=connect.controller_name(self._config.name),
            namespace=connect.NAMESPACE,
            lease_s=self._config.detection.lease_s,
        )
        try:
            await asyncio.to_thread(create_keeper, spec)
        except Exception as error:  # noqa: BLE001 - a node without a keeper writes no parts; that is said, and all
            _log.warning(
                "run %s: no keeper on node %s, its replicas write no checkpoints: %s",
                self._config.name,
                node,
                error,
            )

    async def close(self) -> None:
        """The run is over: its keepers end."""
        if self._starting:
            await asyncio.wait(self._starting, timeout=_LAST_WORDS_S)
        prefix = connect.keeper_name(self._config.name, "")
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):  # then they notice that we are gone
            await asyncio.wait_for(asyncio.to_thread(end_actors, prefix), _LAST_WORDS_S)


def _make_vault(config: RunConfig) -> Vault:
    from everstep.orchestrator.vault import (
        Vault,  # needs torch, for dtypes: imported while replicas import theirs
    )

    return Vault(config)
