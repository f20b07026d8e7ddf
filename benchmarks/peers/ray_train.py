"""Ray Train in its elastic mode: the driver script, as its documentation says, with the loop of `benchmarks.peers.ddp`.

    python -m benchmarks.peers.ray_train --address HOST:PORT --folder DIR

Needs pandas and pyarrow, which `import ray.train` asks for.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer, prepare_model

from benchmarks._common import WORLD, StepLog, make_model, make_optimizer
from benchmarks.peers.ddp import load_from, save_to, training_loop

_FILE = "state.pt"


def worker(config: dict[str, Any]) -> None:
    """What each of its workers runs."""
    torch.set_num_threads(1)
    context = train.get_context()
    rank, world_size = context.get_world_rank(), context.get_world_size()
    model = make_model()
    parallel = prepare_model(model)
    optimizer = make_optimizer(parallel)
    start = 0
    checkpoint = train.get_checkpoint()
    if checkpoint is not None:
        with checkpoint.as_directory() as folder:
            start = load_from(Path(folder) / _FILE, model, optimizer)

    def save(step: int) -> None:
        if rank != 0:
            train.report({"step": step})
            return
        with tempfile.TemporaryDirectory() as folder:
            save_to(Path(folder) / _FILE, model, optimizer, step)
            train.report({"step": step}, checkpoint=train.Checkpoint.from_directory(folder))

    training_loop(
        parallel, optimizer, rank=rank, world_size=world_size, start=start,
        log=StepLog(config["folder"], rank), save=save,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--address", required=True, help="of the Ray cluster")
    parser.add_argument("--folder", required=True, help="where the record of steps and the checkpoints go")
    options = parser.parse_args()
    ray.init(address=options.address)
    TorchTrainer(
        worker,
        train_loop_config={"folder": options.folder},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=train.ScalingConfig(num_workers=(1, WORLD)),  # type: ignore[arg-type]  # the stub is of the old API
        run_config=train.RunConfig(
            name="ray-train",
            storage_path=str(Path(options.folder) / "storage"),
            failure_config=train.FailureConfig(max_failures=-1),
            checkpoint_config=train.CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


if __name__ == "__main__":
    main()
