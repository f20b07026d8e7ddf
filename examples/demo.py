"""`make demo`: a run that loses a node, gains one, is scaled down and up by command, and ends with the same weights.

Starts a local Ray cluster of four nodes (separate raylets on this machine), submits examples/char_gpt.py to it with
`ray job submit` twice, once left alone and once hurt, and compares the hashes of the final states. Ends everything it
started. Under three minutes on two cores.
"""

from __future__ import annotations

import argparse
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from everstep.errors import EverstepError
from everstep.orchestrator import connect
from everstep.orchestrator.cli_jobs import Jobs
from everstep.orchestrator.events import Event, parse
from everstep.orchestrator.words import describe

ROOT = Path(__file__).resolve().parent.parent
SCRIPTS = Path(sys.executable).parent
_TOLD = {
    "run_started",
    "generation_formed",
    "replica_ready",
    "replica_lost",
    "replica_released",
    "recovery",
    "scale_requested",
    "node_draining",
    "waiting",
    "resumed",
    "run_ended",
}


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def say(text: str) -> None:
    print(f"\n=== {text}", flush=True)


class Job:
    """`ray job submit` of examples/char_gpt.py, its output shown as it comes."""

    def __init__(self, dashboard: str, name: str, *arguments: str) -> None:
        command = [
            str(SCRIPTS / "ray"),
            "job",
            "submit",
            "--address",
            dashboard,
            "--working-dir",
            str(ROOT),
            "--",
            sys.executable,
            "examples/char_gpt.py",
            "--name",
            name,
            *arguments,
        ]
        print(
            "$ ray job submit --working-dir . -- python examples/char_gpt.py --name",
            name,
            *arguments,
            flush=True,
        )
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        self.lines: list[str] = []
        self._reader = threading.Thread(target=self._read, args=(name,), daemon=True)
        self._reader.start()

    def _read(self, name: str) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if line.strip() and not re.match(r"\x1b|\d{4}-\d\d-\d\d |Running entrypoint|\(raylet", line):
                print(f"  {name}: {line.rstrip()}", flush=True)

    def digest(self, timeout_s: float) -> str:
        """Wait for the end; the hash of the final state."""
        code = self.process.wait(timeout_s)
        self._reader.join(10.0)
        found = re.search(r"final state (\w+)", "".join(self.lines))
        if code or not found:
            raise SystemExit(f"the job failed with exit code {code}:\n{''.join(self.lines[-40:])}")
        return found.group(1)


class Nodes:
    """A local Ray cluster: a head, and worker nodes that can be added and killed."""

    def __init__(self, storage: str) -> None:
        import ray
        from ray.cluster_utils import Cluster

        self.storage = storage
        self._count = 0
        self.cluster = Cluster()
        # Another cluster on this machine may have the default port of the agent that starts jobs.
        self.add(
            include_dashboard=True,
            dashboard_agent_listen_port=_free_port(),
            env_vars={"EVERSTEP_STORAGE": storage},
        )
        context = ray.init(address=self.cluster.address, namespace=connect.NAMESPACE, log_to_driver=False)
        self.dashboard = f"http://{context.dashboard_url}"
        self.workers = [self.add() for _ in range(3)]
        # A head that has just started may refuse a job ("no available agent"), and `ray job submit` does not try again.
        Jobs(self.dashboard).submit("true", runtime_env={})

    def add(self, **options: Any) -> Any:
        """One more node with room for one replica."""
        self._count += 1
        # Nodes on one machine share a folder by default, and the first to leave would empty it for all.
        folder = f"runtime_resources_{self._count}"
        return self.cluster.add_node(
            num_cpus=1, object_store_memory=80_000_000, runtime_env_dir_name=folder, **options
        )

    def kill(self, node: Any) -> None:
        """Raylet and workers at once, without warning."""
        self.workers.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """End everything that was started."""
        import ray

        ray.shutdown()
        self.cluster.shutdown()


class Watch:
    """The events of a run, as they come."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.events: list[Event] = []
        self._after = 0

    def until(self, wanted: Callable[[Event], bool], timeout_s: float = 90.0) -> Event:
        """The next event that is wanted."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            for event in self._poll():
                if wanted(event):
                    return event
        raise SystemExit(f"nothing of the kind happened within {timeout_s:.0f} s")

    def step(self, number: int) -> Event:
        """The commit of that step, or of the first seen after it."""
        return self.until(lambda e: e.type == "step_committed" and e.step >= number)  # type: ignore[attr-defined]

    def world(self, size: int) -> Event:
        """The first commit of a generation of that size."""
        return self.until(lambda e: e.type == "step_committed" and e.world_size == size)  # type: ignore[attr-defined]

    def rest(self) -> None:
        """All events that are still to come."""
        while not any(e.type == "run_ended" for e in self._poll()):
            pass

    def _poll(self) -> list[Event]:
        try:
            answer = connect.ask(connect.find_controller(self.name), "events", self._after, 1.0)
        except EverstepError:
            threading.Event().wait(0.2)
            return []
        self._after = answer["next"]
        batch = [parse(line) for line in answer["events"]]
        self.events += batch
        return batch


def everstep(*arguments: str) -> None:
    """One command of the command line."""
    print("$ everstep", *arguments, flush=True)
    subprocess.run([str(SCRIPTS / "everstep"), *arguments], check=True, timeout=60)


def hurt(nodes: Nodes, name: str, watch: Watch) -> None:
    """Everything that is done to the second run."""
    watch.step(15)
    busy = {r["node"] for r in _status(name)["replicas"] if r["rank"] is not None}
    victim = next(n for n in nodes.workers if n.node_id in busy)
    say(f"kill node {victim.node_id[:8]}: raylet and workers, without warning")
    nodes.kill(victim)
    watch.world(3)
    say("add a node")
    nodes.workers.append(nodes.add())
    watch.world(4)
    say("scale down, and up again")
    everstep("scale", name, "2")
    watch.world(2)
    everstep("scale", name, "4")
    watch.world(4)
    everstep("status", name)


def _status(name: str) -> dict[str, Any]:
    return connect.ask(connect.find_controller(name), "status")  # type: ignore[no-any-return]


def timeline(events: list[Event]) -> None:
    """What happened, when, in words."""
    start = events[0].time
    for event in events:
        if event.type in _TOLD:
            print(f"  {event.time - start:7.2f} s  {describe(event)}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=215, help="steps of each run")
    options = parser.parse_args()
    begun = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="everstep-demo-") as storage:
        say("a local Ray cluster of four nodes")
        nodes = Nodes(storage)
        try:
            size = ("--steps", str(options.steps), "--max-replicas", "4")
            say("the run that is left alone, on two replicas")
            alone = Job(nodes.dashboard, "demo-alone", *size, "--replicas", "2").digest(120.0)
            say("the same run on four replicas, hurt")
            job, watch = (
                Job(nodes.dashboard, "demo-hurt", *size, "--replicas", "4", "--pace", "0.1"),
                Watch("demo-hurt"),
            )
            hurt(nodes, "demo-hurt", watch)
            watch.rest()
            hurt_digest = job.digest(120.0)
        finally:
            nodes.close()
    say("what happened to the second run")
    timeline(watch.events)
    say(f"left alone {alone}")
    print(
        f"    hurt       {hurt_digest}   {'the same, bit for bit' if alone == hurt_digest else 'DIFFERENT'}"
    )
    print(f"    {time.monotonic() - begun:.0f} s in all", flush=True)
    raise SystemExit(0 if alone == hurt_digest else 1)


if __name__ == "__main__":
    main()
