"""The keeper: one actor per node that streams the replicas' parts of checkpoints to storage.

Created by the controller on each node that has replicas; named, detached. Replicas hand it memory over a Unix socket
(`actors.keeper_line`), so the training process spends no time on storage, and a part that was handed over is written even
if its replica dies the moment after. What it has written it tells the controller, which alone makes a checkpoint of it.
It holds no secrets of the store but those of its environment, and imports torch only for dtypes.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray

_log = logging.getLogger(__name__)
_ASK_S = 5.0
_MAX_REPLICAS = 256
_NICE = 10
"""Training comes first where cores are scarce; a checkpoint may take a little longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeeperSpec:
    """What the controller gives a keeper on its way."""

    run: str
    name: str
    """Of the keeper's own actor."""
    token: str
    node: str
    url: str
    """Of the run's checkpoints."""
    storage_options: Mapping[str, Any]
    bytes_per_s: float | None
    controller: str
    namespace: str
    lease_s: float
    """So long it lives on without a controller."""


class Keeper:
    """See the module. Made into an actor by the controller."""

    def __init__(self, spec: KeeperSpec) -> None:
        os.nice(_NICE)
        from everstep.actors import keeper_line
        from everstep.checkpoint.bandwidth import Bandwidth
        from everstep.checkpoint.manifest import Manifest
        from everstep.checkpoint.store import open_store

        self._spec = spec
        self._store = open_store(spec.url, spec.storage_options)
        self._bandwidth = (
            Bandwidth(spec.bytes_per_s, burst_bytes=max(int(spec.bytes_per_s / 10), 1))
            if spec.bytes_per_s is not None
            else None
        )
        self._base: Manifest | None = None
        self._base_lock = threading.Lock()
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(keeper_line.address(spec.token, spec.node))
        self._listener.listen(_MAX_REPLICAS)
        threading.Thread(target=self._accept, name="everstep-keeper", daemon=True).start()
        threading.Thread(target=self._live_with_the_controller, name="everstep-lease", daemon=True).start()

    def pid(self) -> int:
        """Of its process. It listens when this answers."""
        return os.getpid()

    def close(self) -> None:
        """Listen no more."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    # ---- replicas

    def _accept(self) -> None:
        from everstep.actors import keeper_line

        while True:
            try:
                connected, _ = self._listener.accept()
            except OSError:
                return  # closed
            introduced = keeper_line.answer_call(connected, self._spec.token, self._spec.node)
            if introduced is None:
                continue
            line, replica = introduced
            threading.Thread(
                target=self._serve, args=(line, replica), name=f"everstep-keep-{replica}", daemon=True
            ).start()

    def _serve(self, line: Any, replica: int) -> None:
        from everstep.actors.keeper_line import KeeperGone

        try:
            while True:
                request, descriptor = line.receive()
                if descriptor is None:
                    raise KeeperGone("a part without memory")
                line.send(self._keep(request, descriptor, replica))
        except KeeperGone:
            pass  # the replica has ended, or is told when it asks again
        finally:
            line.close()

    def _keep(self, request: dict[str, Any], descriptor: int, replica: int) -> dict[str, Any]:
        """Write one part and tell the controller. A supervisor: whatever fails costs this part alone."""
        begin = time.monotonic()
        try:
            try:
                memory = mmap.mmap(descriptor, int(request["size"]), mmap.MAP_SHARED, mmap.PROT_READ)
            finally:
                os.close(descriptor)
            index = self._write(request, memoryview(memory))
            report = {
                "step": request["step"], "attempt": request["attempt"], "generation": request["generation"],
                "rank": request["rank"], "world_size": request["world_size"], "index": index,
                # Equal on all ranks, and large: one of them brings it.
                "layout": request["layout"] if request["rank"] == 0 else None, "seconds": time.monotonic() - begin,
            }  # fmt: skip
            self._tell(report)
        except Exception as error:  # noqa: BLE001
            _log.warning(
                "run %s: part of replica %d of step %s: %s",
                self._spec.run,
                replica,
                request.get("step"),
                error,
            )
            return {"ok": False, "error": f"{type(error).__name__}: {error}"}
        return {"ok": True}

    def _write(self, request: dict[str, Any], memory: memoryview) -> dict[str, Any]:
        from everstep.checkpoint.chunks import cut, divide
        from everstep.checkpoint.part import PartSpec, views_packed, write_part
        from everstep.checkpoint.records import table_of
        from everstep.checkpoint.state import Layout

        layout = Layout.from_json(request["layout"])
        chunks = divide(cut(layout), int(request["world_size"]))[int(request["rank"])]
        spec = PartSpec(
            step=int(request["step"]),
            generation=int(request["generation"]),
            attempt=str(request["attempt"]),
            rank=int(request["rank"]),
            tensors=table_of(layout),
        )
        index = write_part(
            self._store,
            spec,
            chunks,
            views_packed(chunks, memory),
            previous=self._newest(),
            bandwidth=self._bandwidth,
        )
        return index.as_json()

    def _newest(self) -> Any:
        """The newest checkpoint, whose unchanged chunks need not be written again; None if there is none to read."""
        from everstep.checkpoint.catalog import committed_steps
        from everstep.checkpoint.commit import read_commit, read_manifest
        from everstep.checkpoint.errors import CheckpointDamaged

        with self._base_lock:
            steps = committed_steps(self._store)
            if steps and (self._base is None or self._base.step != steps[0]):
                try:
                    self._base = read_manifest(self._store, read_commit(self._store, steps[0]))
                except CheckpointDamaged:
                    self._base = None
            return self._base if steps else None

    # ---- the controller

    def _controller(self) -> Any:
        return ray.get_actor(self._spec.controller, namespace=self._spec.namespace)

    def _tell(self, report: dict[str, Any]) -> None:
        """Raises what Ray raises when the controller does not answer in time: the part is lost then."""
        ray.get(self._controller().part.remote(report), timeout=self._spec.lease_s)

    def _live_with_the_controller(self) -> None:
        """Without a controller there is no run: end, as replicas do."""
        heard = time.monotonic()
        while time.monotonic() - heard < self._spec.lease_s:
            try:
                ray.get(self._controller().endpoint.remote(), timeout=_ASK_S)
                heard = time.monotonic()
            except (ValueError, ray.exceptions.RayError):
                pass
            time.sleep(self._spec.lease_s / 4)
        with contextlib.suppress(ValueError, ray.exceptions.RayError):  # so that Ray does not start it again
            ray.kill(ray.get_actor(self._spec.name, namespace=self._spec.namespace), no_restart=True)
            time.sleep(_ASK_S)
        os._exit(0)
