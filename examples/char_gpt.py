"""A small GPT that learns to write Python from the text of Python's own standard library.

    ray job submit --working-dir . -- python examples/char_gpt.py --replicas 4

While it trains, kill its nodes, add others, `everstep scale char-gpt 2`: the weights at the end do not change by a bit.
Set `--replicas` and `--shards` to what your cluster has; the result depends on the seed, the batch and the shards alone.
"""

from __future__ import annotations

import argparse
import functools
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import everstep


class StandardLibrary(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    """Windows of bytes over the standard library's sources, in alphabetic order of their names."""

    def __init__(self, window: int, max_bytes: int = 4_000_000) -> None:
        folder = Path(sysconfig.get_paths()["stdlib"])
        text = bytearray()
        for file in sorted(folder.glob("*.py")):
            text += file.read_bytes()
            if len(text) >= max_bytes:
                break
        self.text = torch.frombuffer(text[:max_bytes], dtype=torch.uint8)
        self.window = window

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.window

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        piece = self.text[index * self.window : (index + 1) * self.window + 1].long()
        return piece[:-1], piece[1:]


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attend, self.project = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = self.attend(self.norm_1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        x = x + self.project(y.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm_2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    def __init__(self, width: int, depth: int, heads: int, window: int, dropout: float = 0.1) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(window, width)
        self.blocks = nn.ModuleList([Block(width, heads, dropout) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        for name, parameter in self.named_parameters():
            if name.endswith("weight") and parameter.dim() == 2:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.norm(x) @ self.bytes.weight.T  # tied with the embedding


def train(run: everstep.Session, options: argparse.Namespace) -> dict[str, float]:
    model = GPT(options.width, options.depth, heads=4, window=options.window).to(run.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.lr, weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    run.register(model=model, optimizer=optimizer, scheduler=scheduler)
    loss = float("nan")
    for step in run.steps(StandardLibrary(options.window), total=options.steps):
        for tokens, targets in step.batches():
            logits = model(tokens.to(run.device))
            step.backward(F.cross_entropy(logits.flatten(0, 1), targets.to(run.device).flatten()))
        time.sleep(options.pace)
        if step.commit(metrics={"loss": step.mean_loss}, clip_grad_norm=1.0):
            loss = step.metrics["loss"]
    return {"loss": loss}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default="char-gpt", help="name of the run")
    parser.add_argument("--replicas", type=int, default=4, help="wished number of replicas")
    parser.add_argument("--min-replicas", type=int, default=1, help="below this the run waits")
    parser.add_argument("--max-replicas", type=int, default=8, help="upper limit for `everstep scale`")
    parser.add_argument("--shards", type=int, default=8, help="logical shards of each global batch")
    parser.add_argument("--batch", type=int, default=32, help="windows per global batch")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--window", type=int, default=64, help="bytes per window")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument(
        "--pace", type=float, default=0.0, help="idle seconds per step, to have time to watch"
    )
    parser.add_argument("--log-every", type=float, default=5.0, help="seconds between progress lines")
    return parser.parse_args(arguments)


def main() -> Any:
    options = parse()
    config = everstep.RunConfig(
        name=options.name,
        scaling=everstep.ScalingConfig(
            min_replicas=options.min_replicas, max_replicas=options.max_replicas, replicas=options.replicas
        ),
        batch=everstep.BatchConfig(global_batch_size=options.batch, logical_shards=options.shards),
        log_every_s=options.log_every,
    )
    result = everstep.run(functools.partial(train, options=options), config)
    print(
        f"{result.run}: {result.steps} steps, loss {result.metrics['loss']:.4f}, {result.generations} generations"
    )
    print(f"final state {result.digest}")
    return result


if __name__ == "__main__":
    main()
