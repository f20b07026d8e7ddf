"""Plain DistributedDataParallel as everybody writes it: one worker, started by hand, by torchrun, or by Ray Train.

    python -m benchmarks.peers.ddp --folder DIR [--checkpoint FILE] [--turns HOST:PORT --block N]

Reads RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT. Saves a checkpoint every ten steps and starts from it.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, Sampler

from benchmarks._common import (
    CHECKPOINT_EVERY,
    GLOBAL_BATCH,
    Numbers,
    StepLog,
    make_model,
    make_optimizer,
)
from benchmarks._turns import Turns


class _From(Sampler[int]):
    """Another sampler's indices from a position on: nothing that was read before the restart is read again."""

    def __init__(self, sampler: DistributedSampler[Any], position: int) -> None:
        self._sampler, self._position = sampler, position

    def __iter__(self) -> Iterator[int]:
        return iter(list(self._sampler)[self._position :])


def batches(rank: int, world_size: int, start: int) -> Iterator[tuple[Tensor, Tensor]]:
    """This worker's part of each global batch from step `start` on: float32 [batch, features], float32 [batch, 1]."""
    dataset: Any = Numbers()
    size = GLOBAL_BATCH // world_size
    sampler: DistributedSampler[Any] = DistributedSampler(dataset, world_size, rank, seed=0)
    yield from DataLoader(dataset, batch_size=size, sampler=_From(sampler, start * size), drop_last=True)


def training_loop(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    rank: int,
    world_size: int,
    start: int,
    log: StepLog,
    save: Callable[[int], None] | None,
    turns: Turns | None = None,
) -> None:
    """Trains until it is killed. `save(step)` is called every ten steps, on all ranks, with the number of steps done."""
    data = batches(rank, world_size, start)
    step = start
    while True:
        if turns is not None:
            turns.next_step()
        x, y = next(data)
        optimizer.zero_grad(set_to_none=True)
        F.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        log.done(step)
        step += 1
        if save is not None and step % CHECKPOINT_EVERY == 0:
            save(step)


def save_to(file: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """The whole state; the file appears complete or not at all."""
    part = file.with_suffix(".part")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, part)
    part.replace(file)


def load_from(file: Path, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Returns the number of steps done."""
    state = torch.load(file, weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    return int(state["step"])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", required=True, help="where the record of steps goes")
    parser.add_argument("--checkpoint", type=Path, help="saved every ten steps, and loaded if it is there")
    parser.add_argument("--turns", help="host:port of the referee that lets this contender go block by block")
    parser.add_argument("--block", type=int, default=0, help="steps of one block")
    options = parser.parse_args()
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo")
    model = make_model()
    parallel = DistributedDataParallel(model)
    optimizer = make_optimizer(parallel)
    file: Path | None = options.checkpoint
    start = load_from(file, model, optimizer) if file is not None and file.exists() else 0

    def save(step: int) -> None:
        if rank == 0 and file is not None:
            save_to(file, model, optimizer, step)

    turns = None
    if options.turns:
        host, port = options.turns.rsplit(":", 1)
        turns = Turns((host, int(port)), "ddp", rank, options.block)
    training_loop(
        parallel, optimizer, rank=rank, world_size=world_size, start=start, log=StepLog(options.folder, rank),
        save=save if file else None, turns=turns,
    )  # fmt: skip


if __name__ == "__main__":
    main()
