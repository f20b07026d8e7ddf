"""Handwritten digits (scikit-learn's bundled 8×8 images) with a small convolutional network and BatchNorm.

    ray job submit --working-dir . -- python examples/digits.py --replicas 2

The running statistics of BatchNorm are the mean over the logical shards, so they too do not depend on who computes
what. The augmentation draws from torch's generator, which is seeded by (seed, epoch, index) for each sample.
"""

from __future__ import annotations

import argparse
import functools

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

import everstep


class Digits(torch.utils.data.Dataset[tuple[Tensor, int]]):
    """1,797 images of 8×8 pixels; every fifth is held out for the test."""

    def __init__(self, *, test: bool) -> None:
        data = load_digits()
        images = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
        held_out = torch.arange(len(images)) % 5 == 0
        chosen = held_out if test else ~held_out
        self.images, self.labels = images[chosen], torch.tensor(data.target)[chosen]
        self.augment = not test

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        image = self.images[index]
        if self.augment:
            shift = torch.randint(-1, 2, (2,)).tolist()
            image = torch.roll(image, shift, dims=(1, 2)) + 0.05 * torch.randn_like(image)
        return image, int(self.labels[index])


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1, bias=False),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1, bias=False),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(32 * 16, 10),
    )


@torch.no_grad()
def accuracy(model: nn.Module, device: torch.device) -> float:
    model.eval()
    test = Digits(test=True)
    hits = (model(test.images.to(device)).argmax(1).cpu() == test.labels).float().mean()
    model.train()
    return float(hits)


def train(run: everstep.Session, epochs: int) -> dict[str, float]:
    model = network().to(run.device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, nesterov=True)
    run.register(model=model, optimizer=optimizer)
    for step in run.steps(Digits(test=False), epochs=epochs):
        for images, labels in step.batches():
            logits = model(images.to(run.device))
            labels = labels.to(run.device)
            step.record(accuracy=(logits.argmax(1) == labels).float().mean())
            step.backward(F.cross_entropy(logits, labels))
        step.commit(metrics={"loss": step.mean_loss})
    return {"test_accuracy": accuracy(model, run.device)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--name", default="digits")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=10)
    options = parser.parse_args()
    config = everstep.RunConfig(
        name=options.name,
        scaling=everstep.ScalingConfig(max_replicas=8, replicas=options.replicas),
        batch=everstep.BatchConfig(global_batch_size=64, logical_shards=8, last_batch="partial"),
    )
    result = everstep.run(functools.partial(train, epochs=options.epochs), config)
    print(f"accuracy on held-out digits {result.value['test_accuracy']:.4f}, final state {result.digest}")


if __name__ == "__main__":
    main()
