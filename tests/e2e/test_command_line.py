"""The user's own way: `everstep submit` and `ray job submit`, then every command, against a real cluster."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from everstep.orchestrator import connect
from examples.demo import Nodes
from tests.waiting import wait_until

SCRIPT = """
import sys, torch, everstep

TOTAL, REPLICAS, FAILS = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "fail"

class Squares(torch.utils.data.Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        x = torch.full((4,), i / 64)
        return x, x.sum(0, keepdim=True) ** 2

def train(run):
    model = torch.nn.Linear(4, 1)
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01))
    for step in run.steps(Squares(), total=TOTAL):
        for x, y in step.batches():
            step.backward(torch.nn.functional.mse_loss(model(x), y))
            if FAILS:
                raise ValueError("a mistake in the script")
        step.commit(metrics={"loss": step.mean_loss})

result = everstep.run(train, everstep.RunConfig(
    scaling=everstep.ScalingConfig(max_replicas=REPLICAS),
    batch=everstep.BatchConfig(global_batch_size=16, logical_shards=4),
))
print("steps", result.steps, "digest", result.digest)
"""


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    nodes = Nodes(str(tmp_path_factory.mktemp("storage")))
    try:
        yield nodes
    finally:
        nodes.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


class Command:
    """A command in the background, whose output is read as it comes."""

    def __init__(self, *words: str) -> None:
        self.process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        self.lines.extend(self.process.stdout)

    def finish(self, timeout_s: float = 90.0) -> tuple[int, str]:
        try:
            code = self.process.wait(timeout_s)
        finally:
            self.end()
        return code, "".join(self.lines)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(10.0)
        self._reader.join(10.0)
        assert self.process.stdout is not None
        self.process.stdout.close()


def everstep(*words: str) -> tuple[str, ...]:
    return (sys.executable, "-m", "everstep", *words)


def call(*words: str) -> tuple[int, str]:
    return Command(*everstep(*words)).finish()


def test_a_run_is_submitted_watched_scaled_drained_and_stopped_by_command(nodes: Nodes, folder: Path) -> None:
    at = ("--address", nodes.cluster.address)
    script = ("--working-dir", str(folder), "--", sys.executable, "train.py", "1000000", "2", "well")
    submitted = Command(*everstep("submit", "--name", "first", "--address", nodes.dashboard, *script))

    def status() -> dict[str, Any]:
        assert submitted.process.poll() is None, "".join(submitted.lines)
        return dict(connect.ask(connect.find_controller("first"), "status")) if connect.live_runs() else {}

    try:
        wait_until(lambda: (status().get("step") or 0) > 2 and status()["world_size"] == 2)
        code, output = call("status", "first", *at, "--json")
        assert code == 0 and json.loads(output)["world_size"] == 2, output

        code, output = call("submit", "--name", "first", "--no-wait", "--address", nodes.dashboard, *script)
        assert (code, "is live" in output) == (0, True), output

        code, output = call("scale", "first", "1", *at)
        assert (code, "1 replica wished" in output) == (0, True), output
        wait_until(lambda: status()["world_size"] == 1)
        code, output = call("scale", "first", "9", *at)
        assert code != 0 and "max_replicas" in output and "Traceback" not in output

        node = next(r["node"] for r in status()["replicas"] if r["rank"] == 0)
        code, output = call("drain", "first", node[:12], *at)
        assert code == 0, output
        wait_until(lambda: node not in [r["node"] for r in status()["replicas"] if r["rank"] is not None])

        assert submitted.process.poll() is None, "the job goes on meanwhile"
        code, output = call("stop", "first", *at)
        assert code == 0, output
        code, output = submitted.finish()
        assert code == 1 and "stopped" in output, output
    finally:
        submitted.end()

    storage = ("--storage", nodes.storage)
    code, output = call("events", "first", *at, *storage, "--json")
    kinds = [json.loads(line)["type"] for line in output.splitlines()]
    assert (
        code == 0
        and kinds[-1] == "run_ended"
        and {"scale_requested", "node_draining", "recovery"} <= set(kinds)
    )
    code, output = call("status", "no-such-run", *at, *storage)
    assert code != 0 and "no-such-run" in output and "Traceback" not in output


def test_ray_job_submit_ends_with_the_result_and_with_the_users_own_error(nodes: Nodes, folder: Path) -> None:
    def submit(name: str, *arguments: str) -> tuple[int, str]:
        ray = str(Path(sys.executable).parent / "ray")
        environment = json.dumps({"env_vars": {"EVERSTEP_RUN_NAME": name}})
        return Command(
            ray, "job", "submit", "--address", nodes.dashboard, "--working-dir", str(folder),
            "--runtime-env-json", environment, "--", sys.executable, "train.py", *arguments,
        ).finish()  # fmt: skip

    code, output = submit("good", "5", "1", "well")
    assert code == 0 and "steps 5 digest" in output, output
    code, output = submit("bad", "5", "1", "fail")
    assert code != 0 and "ValueError: a mistake in the script" in output, output
    assert call("status", "--address", nodes.cluster.address)[1].strip() == "no run is live on this cluster"
