"""One local Ray cluster for all tests: a head without room for replicas, and worker nodes of one CPU each."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

import everstep
from tests.cluster.harness import Run, config
from tests.cluster.loops import STEPS, Loop, samples_by_step

_names = itertools.count()


class Nodes:
    """The cluster's worker nodes, to be added and killed by tests."""

    def __init__(self, cluster: Any, count: int) -> None:
        self.cluster = cluster
        self.workers: list[Any] = []
        self._count = count
        self.restore()

    def restore(self) -> None:
        """As many live workers as at the start."""
        while len(self.workers) < self._count:
            self.add()
        while len(self.workers) > self._count:
            self.kill(self.workers[-1])

    def add(self) -> Any:
        # Nodes on one machine share a folder by default, and the first to leave would empty it for all.
        folder = f"runtime_resources_{next(_names)}"
        node = self.cluster.add_node(num_cpus=1, object_store_memory=80_000_000, runtime_env_dir_name=folder)
        self.workers.append(node)
        return node

    def kill(self, node: Any) -> None:
        """Without grace: raylet and workers die at once."""
        self.workers.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def of(self, node_id: str) -> Any:
        """The worker node with this id."""
        return next(n for n in self.workers if n.node_id == node_id)


@pytest.fixture(scope="session")
def nodes() -> Iterator[Nodes]:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "object_store_memory": 80_000_000, "include_dashboard": False},
    )
    ray.init(address=cluster.address, namespace="everstep", log_to_driver=False)
    try:
        yield Nodes(cluster, 4)
    finally:
        ray.shutdown()
        cluster.shutdown()


@pytest.fixture(autouse=True)
def whole_cluster(nodes: Nodes) -> None:
    """Each test finds all worker nodes alive."""
    nodes.restore()


@pytest.fixture(scope="session")
def undisturbed(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> tuple[everstep.Result, Any]:
    """One replica, nothing happens: what all others must end with. Its result, and its samples by step and shard."""
    folder = tmp_path_factory.mktemp("undisturbed")
    with Run(Loop(folder=str(folder), steps=STEPS), config("undisturbed", folder, max_replicas=1)) as run:
        return run.finish(), samples_by_step(folder)


@pytest.fixture
def name(request: pytest.FixtureRequest) -> str:
    """A run name no other test has."""
    return f"t{next(_names)}-" + request.node.name.lower().replace("_", "-")[:40].split("[")[0]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path
