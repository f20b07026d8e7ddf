"""What the controller asks of Ray: create a replica, say why one died, tell what becomes of the nodes.

Called by `orchestrator.controller` in its thread pool: every function here may block. All use of Ray's private names
is in this file.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import ray
from ray._private import state as _ray_state

from everstep.orchestrator import connect
from everstep.policies.budget import FailureClass

if TYPE_CHECKING:
    from everstep.actors.keeper import KeeperSpec
    from everstep.orchestrator.config import RunConfig


def create_replica(
    config: RunConfig,
    replica: int,
    token: str,
    endpoint: tuple[str, int],
    train: Any,
    avoid_nodes: tuple[str, ...],
) -> tuple[Any, Any]:
    """Create the actor and start its never-finishing call.

    It waits for room on the cluster for as long as it takes, and as pending demand it is what the autoscaler sees: the
    run's wish, which ends with the actor, and which no other run on the cluster can overwrite.

    Returns: the handle, and the reference that fails when the actor dies.
    """
    from everstep.actors.replica import Replica, ReplicaSpec

    resources = dict(config.scaling.resources_per_replica)
    options: dict[str, Any] = {
        "name": connect.replica_name(config.name, replica),
        "namespace": connect.NAMESPACE,
        "lifetime": "detached",
        "max_restarts": 0,
        "max_task_retries": 0,
        "scheduling_strategy": "SPREAD",
        "num_cpus": resources.pop("CPU", 0),
        "num_gpus": resources.pop("GPU", 0),
        "resources": resources,
    }
    if avoid_nodes:
        options["label_selector"] = {"ray.io/node-id": f"!in({','.join(avoid_nodes)})"}
    if config.env_vars:
        options["runtime_env"] = {"env_vars": dict(config.env_vars)}
    spec = ReplicaSpec(
        config=config,
        replica=replica,
        token=token,
        controller=connect.controller_name(config.name),
        namespace=connect.NAMESPACE,
        endpoint=endpoint,
    )
    actor: Any = ray.remote(Replica).options(**options).remote(spec)
    return actor, actor.live.remote(train)


def create_keeper(spec: KeeperSpec) -> Any:
    """Create the keeper of a node, or find the one that a former controller made. Raises RayError, ValueError."""
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    from everstep.actors.keeper import Keeper

    options: dict[str, Any] = {
        "name": spec.name,
        "namespace": connect.NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "num_cpus": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(spec.node, soft=False),
    }
    return ray.remote(Keeper).options(**options).remote(spec)


def end_actors(prefix: str) -> None:
    """End every actor of ours whose name begins so. Raises RayError."""
    for named in ray.util.list_named_actors(all_namespaces=True):
        if named["namespace"] == connect.NAMESPACE and named["name"].startswith(prefix):
            with contextlib.suppress(ValueError, ray.exceptions.RayError):  # gone meanwhile
                ray.kill(ray.get_actor(named["name"], namespace=connect.NAMESPACE), no_restart=True)


# Ray's own words. They also mention the OOM killer for every SIGKILL, so that one proves nothing.
_NODE_DIED = (
    "node has died",
    "node died",
    "node was dead",
    "node is dead",
    "because its node",
    "node failure",
)


def cause_of_death(error: BaseException | None) -> tuple[str, FailureClass]:
    """What Ray's error on the never-finishing call means, in words and as a class of the failure budget."""
    if error is None:
        return "its process ended by itself", FailureClass.PROCESS_CRASH
    text = " ".join(str(error).split())
    if getattr(error, "preempted", False):
        return "its node was drained and preempted", FailureClass.PREEMPTION
    if isinstance(error, ray.exceptions.OutOfMemoryError):
        return "killed by Ray's memory monitor", FailureClass.OUT_OF_MEMORY
    if any(phrase in text.lower() for phrase in _NODE_DIED):
        return "its node died", FailureClass.NODE_LOSS
    if isinstance(error, ray.exceptions.RayTaskError):
        return f"it raised {text[-300:]}", FailureClass.UNKNOWN
    if "ray.kill" in text:
        return "ended by ray.kill", FailureClass.PROCESS_CRASH
    if "creation task" in text.lower():
        return f"its process could not start: {text[-300:]}", FailureClass.UNKNOWN
    return "its process was killed or crashed", FailureClass.PROCESS_CRASH


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeChange:
    """What has happened to nodes since the last look."""

    draining: tuple[tuple[str, float], ...]
    """(node id, seconds until it goes; 0 if unknown)."""
    gone: tuple[str, ...]


class ClusterView:
    """The nodes as Ray's control store knows them."""

    def __init__(self) -> None:
        self._alive: dict[str, tuple[str, str]] = {}
        self._draining: set[str] = set()

    def look(self) -> NodeChange:
        """Compare with the last look. A control store that does not answer is no news: nodes do not die of it."""
        with contextlib.suppress(ray.exceptions.RayError, RuntimeError, ConnectionError):
            nodes = {n["NodeID"]: n for n in ray.nodes()}  # type: ignore[no-untyped-call]
            notices = _ray_state.state.get_draining_nodes()
            alive = {
                i: (n["NodeManagerHostname"], n["NodeManagerAddress"]) for i, n in nodes.items() if n["Alive"]
            }
            gone = tuple(i for i in self._alive if i not in alive)
            news = tuple(
                (i, max(deadline_ms / 1000 - time.time(), 0.0) if deadline_ms else 0.0)
                for i, deadline_ms in notices.items()
                if i not in self._draining
            )
            self._alive = alive
            self._draining |= set(notices)
            return NodeChange(draining=news, gone=gone)
        return NodeChange(draining=(), gone=())

    def find(self, name: str) -> list[str]:
        """Ids of the live nodes with this id, prefix of an id (4 characters or more), host name or address."""
        if name in self._alive:
            return [name]
        return [
            i
            for i, (host, address) in self._alive.items()
            if name in (host, address) or (len(name) >= 4 and i.startswith(name))
        ]

    def names(self) -> list[str]:
        """Short id and host of each live node, for messages."""
        return [f"{i[:8]} ({host})" for i, (host, _) in sorted(self._alive.items())]
