"""What a checkpoint costs: Everstep's beside `torch.save`, torch's DCP, one memcpy, and what disk and server can take.

    python -m benchmarks.checkpoint [--json] [--mib N] [--s3-mib N] [--folder DIR]

One replica with a state of N MiB (default 1024: parameters and two AdamW moments each), one thread. In turns, in one process:

  stall       a loop that computes for about as long as five copies of the state, and updates. What the training thread loses to
              a snapshot in it: taking it, and waiting for what is not copied yet before the update. Beside it a plain copy
              into memory of the same kind, and the time that DCP's `async_save` keeps its caller.
  each step   steps that each ask for a checkpoint (those that come while one is being written are left out, as in a run): the
              median of those that took one beside a step without, and the median of all of them.
  seconds     until all is in a local folder and forced to disk: Everstep from snapshot to the keeper's report, `torch.save`,
              DCP `save`; beside a plain file written and forced to disk.
  server      bytes per second of one part into a real S3 server on this machine (SeaweedFS), beside the same client's own
              multipart upload of the same bytes. Left out where the server cannot be started.
  recovery    one of four parts lost: bytes read from storage for it alone, beside the bytes that were lost.

With --json the last line is one JSON object; seconds and bytes. Takes about three minutes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks import _common as common
from benchmarks._lone_keeper import NODE, TOKEN
from everstep.actors.capture import Capture, Staging, Ticket
from everstep.checkpoint import commit
from everstep.checkpoint.chunks import cut, divide
from everstep.checkpoint.manifest import Manifest
from everstep.checkpoint.part import PartIndex, PartSpec, views_of, write_part
from everstep.checkpoint.reader import Wanted, read
from everstep.checkpoint.records import table_of
from everstep.checkpoint.state import RegisteredState, Snapshot
from everstep.checkpoint.store import Store, open_store

MIB = 1 << 20
LIMITS = {"stall_over_memcpy": 1.1, "stall_over_dcp_async": 0.5, "step_with_checkpoint_each_step_ratio": 1.1}
_TURNS = 5


class Subject:
    """A module and its optimizer with about `mib` MiB of state, all of it touched."""

    def __init__(self, mib: int) -> None:
        side = 1024
        count = max(mib * MIB // (3 * side * side * 4), 1)
        self.model = torch.nn.ParameterList(torch.randn(side, side) for _ in range(count))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, foreach=False)
        for parameter in self.model:
            parameter.grad = torch.ones_like(parameter)
        self.optimizer.step()
        for parameter in self.model:
            parameter.grad = None
        self.state = RegisteredState({"model": self.model, "optimizer": self.optimizer})
        moments = [v for kept in self.optimizer.state.values() for v in kept.values()]
        self.steady = [
            *(p.detach() for p in self.model),
            *(v for v in moments if isinstance(v, torch.Tensor)),
        ]
        self._a, self._b = torch.randn(1024, 1024), torch.randn(1024, 1024)

    def compute(self, seconds: float) -> None:
        """Forward and backward of a step: leaves the state alone."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            torch.mm(self._a, self._b)

    def update(self) -> None:
        """A little of it changes, so that the next checkpoint has something to write."""
        with torch.no_grad():
            for parameter in self.model:
                parameter.add_(1e-3)


@contextlib.contextmanager
def lone_keeper(url: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-m", "benchmarks._lone_keeper", url],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=common.ROOT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        if process.stdout.readline().strip() != "ready":
            raise RuntimeError("the keeper did not start")
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            process.wait(30.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10.0)


def memcpy_s(snapshot: Snapshot) -> float:
    """One copy of all tensors into shared memory that is there already."""
    staging = Staging()
    staging.make_room(sum(t.numel() * t.itemsize for t in snapshot.tensors))

    def copy() -> None:
        offset = 0
        for tensor in snapshot.tensors:
            flat = tensor.detach().reshape(-1).view(torch.uint8)
            staging.put(offset, flat)
            offset += flat.numel()

    copy()
    return statistics.median(timed(copy) for _ in range(_TURNS))


def timed(work: Callable[[], object]) -> float:
    begin = time.monotonic()
    work()
    return time.monotonic() - begin


def measure_loop(subject: Subject, url: str, compute_s: float) -> dict[str, Any]:
    """Steps without and with checkpoints, in turns."""
    identity: Any = type("Id", (), {"token": TOKEN, "node": NODE, "replica": 0})()
    problems: list[str] = []
    taken = Capture(identity, lambda ticket, why: problems.append(why))
    plain, stalls, writes = [], [], []
    number = num_taken = 0

    def step(*, snapshot: bool) -> tuple[float, float]:
        nonlocal number, num_taken
        number += 1
        begin, stall = time.monotonic(), 0.0
        if snapshot and not taken.busy:
            num_taken += 1
            ticket = Ticket(step=number, attempt=f"i1-{number}", generation=1, rank=0, world_size=1)
            stall += timed(lambda: taken.take(ticket, subject.state.capture(), subject.steady))
        subject.compute(compute_s)
        stall += timed(taken.settle)
        subject.update()
        return time.monotonic() - begin, stall

    with lone_keeper(url) as keeper:
        assert keeper.stdout is not None
        step(snapshot=True)  # makes room
        taken.wait(300.0)
        keeper.stdout.readline()
        for _ in range(_TURNS):
            plain += [step(snapshot=False)[0] for _ in range(2)]
            stalls.append(step(snapshot=True)[1])
            taken.wait(300.0)
            writes.append(json.loads(keeper.stdout.readline())["seconds"])
        with watching(keeper.pid) as private_bytes:
            each, took = [], []
            while len(took) < 2 * _TURNS:
                before = num_taken
                each.append(step(snapshot=True)[0])
                took += each[-1:] * (num_taken - before)
            taken.wait(300.0)
        taken.close()
    if problems:
        raise RuntimeError(f"a part was not written: {problems[0]}")
    return {
        "step_s": statistics.median(plain), "stall_s": statistics.median(stalls), "stalls_s": stalls,
        "step_with_checkpoint_each_step_ratio": statistics.median(took) / statistics.median(plain),
        "all_steps_ratio": statistics.median(each) / statistics.median(plain),
        "checkpoints_of_those_steps": len(took) / len(each), "write_s": statistics.median(writes),
        "keeper_extra_bytes": max(private_bytes) - private_bytes[0],
    }  # fmt: skip


@contextlib.contextmanager
def watching(pid: int) -> Iterator[list[int]]:
    """Memory of a process that is its own alone, every 20 ms; the first is that before the work."""
    over, seen = threading.Event(), [_private_bytes(pid)]

    def watch() -> None:
        while not over.wait(0.02):
            seen.append(_private_bytes(pid))

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


def _private_bytes(pid: int) -> int:
    lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))


def dcp_async_s(subject: Subject, folder: Path) -> float:
    """How long `async_save` keeps its caller; each save is waited for before the next."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        seconds = []
        for turn in range(_TURNS):
            begin = time.monotonic()
            future: Any = dcp.async_save(_plain_state(subject), checkpoint_id=str(folder / f"async-{turn}"))
            seconds.append(time.monotonic() - begin)
            future.result()
            shutil.rmtree(folder / f"async-{turn}")
        return statistics.median(seconds[1:])
    finally:
        dist.destroy_process_group()


def _plain_state(subject: Subject) -> dict[str, Any]:
    return {"model": subject.model.state_dict(), "optimizer": subject.optimizer.state_dict()}


def totals(subject: Subject, folder: Path) -> dict[str, float]:
    """Seconds of the others until everything is on disk."""
    import torch.distributed.checkpoint as dcp

    data = memoryview(torch.cat([p.detach().reshape(-1) for p in subject.model]).view(torch.uint8).numpy())
    size = sum(t.numel() * t.itemsize for t in subject.steady)

    def torch_save() -> None:
        with (folder / "torch.pt").open("wb") as file:
            torch.save(_plain_state(subject), file)
            file.flush()
            os.fsync(file.fileno())

    def raw_file() -> None:
        with (folder / "raw").open("wb", buffering=0) as file:
            written = 0
            while written < size:
                written += file.write(data[: min(len(data), size - written, 4 * MIB)])
            os.fsync(file.fileno())

    def dcp_save() -> None:
        with warnings.catch_warnings():  # it says that it was asked for one process
            warnings.simplefilter("ignore", UserWarning)
            dcp.save(_plain_state(subject), checkpoint_id=str(folder / "dcp"), no_dist=True)

    return {
        "raw_file_s": statistics.median(timed(raw_file) for _ in range(3)),
        "torch_save_s": statistics.median(timed(torch_save) for _ in range(3)),
        "dcp_save_s": timed(dcp_save),
    }


def write_whole(
    store: Store, snapshot: Snapshot, step: int, world_size: int
) -> tuple[Manifest, list[PartIndex]]:
    """All parts, one after the other, and the commit."""
    layout = snapshot.plan()
    tensors = table_of(layout)
    attempt = f"i1-{step}"
    parts = [
        write_part(
            store, PartSpec(step=step, generation=1, attempt=attempt, rank=rank, tensors=tensors),
            chunks, views_of(layout, snapshot.tensors),
        )
        for rank, chunks in enumerate(divide(cut(layout), world_size))
    ]  # fmt: skip
    manifest = commit.commit(
        store, parts, run="bench", step=step, generation=1, incarnation=1, attempt=attempt, tensors=tensors,
        skeleton=layout.skeleton, world_size=world_size, created_s=time.time(),
    )  # fmt: skip
    return manifest, parts


def recovery(folder: Path) -> dict[str, int]:
    """A quarter of a state is read back alone."""
    store = open_store(str(folder / "recovery"))
    commit.begin(store, 1, "benchmark")
    snapshot = Subject(64).state.capture()
    manifest, parts = write_whole(store, snapshot, 1, 4)
    lost = parts[2]
    wanted = [
        Wanted(chunk.tensor, chunk.start, chunk.shape, memoryview(bytearray(chunk.nbytes)))
        for chunk in lost.chunks
    ]
    report = read(store, manifest, wanted)
    return {
        "recovery_bytes_read": report.num_bytes,
        "recovery_bytes_lost": sum(chunk.nbytes for chunk in lost.chunks),
        "manifest_bytes": len(manifest.to_bytes()),
    }


def server(folder: Path, mib: int) -> dict[str, float] | None:
    """Bytes per second into a real S3 server: ours, and the raw client's; None without a server."""
    try:
        from tests.procs.s3_server import s3_server
    except ImportError:
        return None
    data_folder = folder / "weed"
    data_folder.mkdir()
    snapshot = Subject(mib).state.capture()
    layout = snapshot.plan()
    chunks = cut(layout)
    tensors = table_of(layout)
    view = views_of(layout, snapshot.tensors)
    size = sum(chunk.nbytes for chunk in chunks)
    ours, raw = [], []
    with s3_server(data_folder) as weed:
        store: Any = open_store("s3://ckpt/bench", weed.options)
        body = b"".join(view(chunk) for chunk in chunks)
        for turn in range(3):
            raw.append(size / timed(lambda turn=turn: store.fs.pipe_file(f"ckpt/raw-{turn}", body)))
            spec = PartSpec(step=turn, generation=1, attempt=f"i1-{turn}", rank=0, tensors=tensors)
            ours.append(size / timed(lambda spec=spec: write_part(store, spec, chunks, view)))
    return {"ours_bytes_per_s": statistics.median(ours), "raw_client_bytes_per_s": statistics.median(raw)}


def measure(mib: int, s3_mib: int, folder: Path) -> dict[str, Any]:
    subject = Subject(mib)
    snapshot = subject.state.capture()
    copy_s = memcpy_s(snapshot)
    common.say(f"  … one copy of the state: {copy_s:.3f} s")
    url = str(folder / "ours")
    commit.begin(open_store(url), 1, "benchmark")
    found: dict[str, Any] = {"state_bytes": snapshot.plan().total_bytes, "memcpy_s": copy_s}
    found |= measure_loop(subject, url, 5 * copy_s)
    common.say(f"  … stall of a snapshot: {found['stall_s']:.3f} s")
    found["dcp_async_s"] = dcp_async_s(subject, folder)
    found |= totals(subject, folder)
    found |= recovery(folder)
    found["stall_over_memcpy"] = found["stall_s"] / copy_s
    found["stall_over_dcp_async"] = found["stall_s"] / found["dcp_async_s"]
    found["put_over_raw_file"] = found["raw_file_s"] / found["write_s"]
    rates = server(folder, s3_mib)
    found["server"] = rates
    found["put_over_raw_client"] = rates and rates["ours_bytes_per_s"] / rates["raw_client_bytes_per_s"]
    return found


def report(found: dict[str, Any]) -> None:
    rows = [["", "seconds"]]
    for name in ("memcpy_s", "stall_s", "dcp_async_s", "write_s", "raw_file_s", "torch_save_s", "dcp_save_s"):
        rows.append([name, common.seconds(found[name])])
    common.say(f"\nA state of {found['state_bytes'] / 1e6:.0f} MB")
    common.say(common.table(rows))
    common.say("\nGoals")
    for name, limit in LIMITS.items():
        verdict = "held" if found[name] <= limit else "NOT HELD"
        common.say(f"  {name}: {found[name]:.3f}, limit {limit}: {verdict}")
    put = found["put_over_raw_client"]
    if put is not None:
        common.say(
            f"  put_over_raw_client: {put:.3f}, at least 0.85: {'held' if put >= 0.85 else 'NOT HELD'}"
        )
    bound = found["recovery_bytes_lost"] + found["manifest_bytes"]
    verdict = "held" if found["recovery_bytes_read"] <= bound else "NOT HELD"
    common.say(f"  recovery_bytes_read: {found['recovery_bytes_read']}, limit {bound}: {verdict}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--mib", type=int, default=1024, help="state in MiB (default: %(default)s)")
    parser.add_argument("--s3-mib", type=int, default=192, help="part for the server (default: %(default)s)")
    parser.add_argument("--folder", type=Path, help="where to write (default: a temporary folder)")
    options = parser.parse_args()
    common.prepare_environment()
    torch.set_num_threads(1)
    setting = f"parameters and AdamW moments, {options.mib} MiB in all, on CPU; {common.machine()}"
    common.say(setting)
    with tempfile.TemporaryDirectory(prefix="everstep-bench-", dir=options.folder) as folder:
        found = measure(options.mib, options.s3_mib, Path(folder))
    report(found)
    if options.json:
        print(json.dumps(common.rounded({**found, "setting": setting})), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
