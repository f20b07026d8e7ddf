"""Training loops that the cluster tests run in replicas. Picklable by value: replicas need not import the tests."""

from __future__ import annotations

import json
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

STEPS = 80
"""Of every run whose end is compared with the undisturbed one."""
GO = "go"
TEMPORARY = "temporary"


def let_go(folder: Path) -> None:
    """From now on the run of this folder goes as fast as it can."""
    (folder / GO).touch()


class Numbers(torch.utils.data.Dataset[Any]):
    """A synthetic regression set that says which sample it gives."""

    def __init__(self, size: int, width: int) -> None:
        self.size, self.width = size, width

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[int, torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        x = torch.randn(self.width, generator=generator)
        return index, x, x.sum().sin().reshape(1)


class Adam(torch.optim.Optimizer):
    """Adam, with state that appears at the first step. Not torch's own, which imports torch's compiler: three seconds
    of CPU in every replica of every test."""

    def __init__(self, params: Any, lr: float) -> None:
        for method in vars(
            torch.optim.Optimizer
        ).values():  # they import it too, to keep it out of themselves
            inner = getattr(method, "__wrapped__", None)
            if inner is not None:
                setattr(inner, "__dynamo_disable", inner)
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if not state:
                    state.update(
                        step=torch.tensor(0.0), mean=torch.zeros_like(param), square=torch.zeros_like(param)
                    )
                state["step"] += 1
                state["mean"].lerp_(param.grad, 0.1)
                state["square"].lerp_(param.grad.square(), 0.01)
                param.addcdiv_(state["mean"], state["square"].sqrt() + 1e-8, value=-group["lr"])


@dataclass(kw_only=True)
class Loop:
    """A small MLP with dropout and BatchNorm; writes down which samples went into which shard of which step."""

    folder: str
    steps: int = 30
    size: int = 256
    width: int = 16
    hidden: int = 32
    layers: int = 1
    compute_s: float = 0.0
    """Sleep per shard, local computation without collectives, until `let_go`; ten times as long in the last ten steps,
    because a run must not end under its test."""
    import_s: float = 0.0
    """Sleep before the model is built: slow imports."""
    after_s: float = 0.0
    """Sleep after the last step, on replica `after_replica`."""
    after_replica: int = -1
    leave_at: int = 0
    """Leave the loop by `break` after so many steps; the value returned is no JSON then."""
    raise_at: int = -1
    raise_once: bool = False
    stuck_at: int = -1
    """Step at which replica `stuck_replica` holds the GIL in C for ever."""
    stuck_replica: int = -1
    slow_replica: int = -1
    slow_s: float = 0.0
    epochs: int | None = None
    num_workers: int = 0
    options: dict[str, Any] = field(default_factory=dict)

    def __call__(self, run: Any) -> Any:
        folder = Path(self.folder)
        temporary = folder / TEMPORARY
        temporary.mkdir(exist_ok=True)
        tempfile.tempdir = str(temporary)
        with (folder / "imports.txt").open("a") as file:
            file.write(f"{run.replica}\n")
        time.sleep(self.import_s)
        hidden = [m for _ in range(self.layers - 1) for m in (nn.Linear(self.hidden, self.hidden), nn.Tanh())]
        model = nn.Sequential(
            nn.Linear(self.width, self.hidden),
            nn.BatchNorm1d(self.hidden),
            nn.Tanh(),
            nn.Dropout(0.2),
            *hidden,
            nn.Linear(self.hidden, 1),
        )
        optimizer = Adam(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
        run.register(model=model, optimizer=optimizer, scheduler=scheduler)
        total = None if self.epochs else self.steps
        loop = run.steps(
            Numbers(self.size, self.width),
            total=total,
            epochs=self.epochs,
            num_workers=self.num_workers,
        )
        with (folder / f"samples-{run.replica}.jsonl").open("a", buffering=1) as samples:
            for step in loop:
                for index, x, y in step.batches():
                    samples.write(json.dumps([step.number, step.shard, index.tolist()]) + "\n")
                    self._misbehave(run, step.number, folder)
                    loss = nn.functional.mse_loss(model(x), y)
                    step.backward(loss)
                if step.commit(metrics={"loss": step.mean_loss}, clip_grad_norm=1.0):
                    assert step.metrics["loss"] > 0.0  # also on who had no batch, or was late
                    if step.number + 1 == self.leave_at:
                        return model
        if run.replica == self.after_replica:
            time.sleep(self.after_s)
        return {"weights": float(sum(p.detach().double().sum() for p in model.parameters()))}

    def _misbehave(self, run: Any, step: int, folder: Path) -> None:
        if self.compute_s and not (folder / GO).exists():
            time.sleep(self.compute_s * (10 if step >= max(self.steps - 10, 20) else 1))
        if run.replica == self.slow_replica:
            time.sleep(self.slow_s)
        if step == self.raise_at:
            flag = folder / "raised"
            if not (self.raise_once and flag.exists()):
                flag.touch()
                raise ValueError(f"the user's own mistake at step {step}")
        if step == self.stuck_at and run.replica == self.stuck_replica:
            import ctypes

            ctypes.PyDLL(None).sleep(3600)  # PyDLL keeps the GIL


def temporary_files(folder: Path) -> list[Path]:
    """What the replicas' `tempfile` has made and not removed."""
    temporary = folder / TEMPORARY
    return sorted(temporary.iterdir()) if temporary.is_dir() else []


def samples_by_step(folder: Path) -> dict[tuple[int, int], list[int]]:
    """(step, shard) → sample ids. Fails if a shard was ever computed with other samples."""
    seen: dict[tuple[int, int], list[int]] = {}
    for file in sorted(folder.glob("samples-*.jsonl")):
        for line in file.read_text().splitlines():
            try:
                step, shard, ids = json.loads(line)
            except ValueError:
                continue  # the last line of a killed replica
            assert seen.setdefault((step, shard), ids) == ids, f"step {step} shard {shard}: {ids} and {seen}"
    return seen
