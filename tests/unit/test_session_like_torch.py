"""A training session does what plain PyTorch does in one process over the whole batch. One replica, V logical shards."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import everstep
from everstep.actors import wire
from everstep.actors.groups import LocalGroup
from everstep.actors.order import Order
from everstep.actors.session import Session
from everstep.errors import LoopError, NonFiniteLoss
from everstep.policies.ledger import DataLedger

SHARDS, BATCH, STEPS = 4, 16, 6


class Alone:
    """Stands in for the membership of a run with one replica that nothing happens to."""

    def __init__(self, shards: int) -> None:
        self.shards = shards
        self.identity = type("Id", (), {"replica": 0, "transfer": ("", 0), "token": ""})()
        self.applied, self.kept, self.compute_s, self.pause_wanted = 0, frozenset(), 0.0, False
        self.peers: tuple[tuple[str, int], ...] = ()
        self.records: list[wire.Record] = []
        self.phases: list[str] = []

    def announce_ready(self, signature: tuple[str, ...], digest: str, total: int) -> None:
        self.signature, self.digest, self.total = signature, digest, total

    def next_order(self) -> Order:
        generation = wire.Generation(
            number=1, incarnation=1, history=0, step=0, members=(0,), ranges=((0, self.shards),), held=((),),
            todo=(tuple(range(self.shards)),), store=("", 0),
        )  # fmt: skip
        return Order(generation)

    def group_of(self, order: Order) -> LocalGroup:
        return LocalGroup()

    def begin_commit(self, vote: bytes) -> None:
        self.applied += 1
        self.kept = frozenset()

    def end_shard(self, shard: int) -> None:
        self.kept |= {shard}

    def fenced(self) -> bool:
        return False

    def committed(self, record: wire.Record, *, speak: bool) -> None:
        self.records.append(record)

    def moved(self, phase: str) -> None:
        self.phases.append(phase)

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class Silent:
    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *args, **kwargs: None


class Points(torch.utils.data.Dataset[Any]):
    def __init__(self, size: int = 64) -> None:
        generator = torch.Generator().manual_seed(5)
        self.x = torch.randn(size, 8, generator=generator)
        self.y = torch.randint(0, 3, (size,), generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


def session(**changes: Any) -> tuple[Session, Alone]:
    batch = {"last_batch": changes.pop("last_batch", "drop")}
    failure = everstep.FailureConfig(non_finite=changes.pop("non_finite", "stop"))
    shards = changes.pop("shards", SHARDS)
    config = everstep.RunConfig(
        name="alone", scaling=everstep.ScalingConfig(max_replicas=1), failure=failure,
        batch=everstep.BatchConfig(global_batch_size=BATCH, logical_shards=shards, **batch), **changes,
    )  # fmt: skip
    member = Alone(shards)
    return Session(config=config, member=member, server=Silent(), device=torch.device("cpu")), member  # type: ignore[arg-type]


def network(dropout: float = 0.0) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Dropout(dropout), nn.Linear(16, 3))


def whole_batches(
    steps: int = STEPS, size: int = 64, last_batch: str = "drop"
) -> list[tuple[Tensor, Tensor]]:
    """The global batches of a run with seed 0, each as one."""
    data = Points(size)
    ledger = DataLedger(
        dataset_size=size, global_batch_size=BATCH, logical_shards=SHARDS, seed=0, last_batch=last_batch
    )  # type: ignore[arg-type]
    batches = []
    for step in range(steps):
        rows = [i for shard in range(SHARDS) for i in ledger.indices(step, shard)]
        batches.append((data.x[rows], data.y[rows]))
    return batches


def close(model: nn.Module, plain: nn.Module) -> None:
    for (name, ours), theirs in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=2e-5, atol=2e-6, msg=lambda m, name=name: f"{name}: {m}"
        )


Update = Callable[[nn.Module], tuple[dict[str, Any], dict[str, Any], Callable[[], None]]]


def adamw(model: nn.Module) -> tuple[dict[str, Any], dict[str, Any], Callable[[], None]]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return {"optimizer": optimizer}, {}, optimizer.step


def scheduled(model: nn.Module) -> tuple[dict[str, Any], dict[str, Any], Callable[[], None]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.3)

    def update() -> None:
        optimizer.step()
        scheduler.step()

    return {"optimizer": optimizer, "scheduler": scheduler}, {}, update


def clipped(model: nn.Module) -> tuple[dict[str, Any], dict[str, Any], Callable[[], None]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def update() -> None:
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()

    return {"optimizer": optimizer}, {"clip_grad_norm": 0.05}, update


def clipped_by_value(model: nn.Module) -> tuple[dict[str, Any], dict[str, Any], Callable[[], None]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def update() -> None:
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()

    return {"optimizer": optimizer}, {"clip_grad_value": 0.01}, update


def two_optimizers(model: nn.Module) -> tuple[dict[str, Any], dict[str, Any], Callable[[], None]]:
    layers = list(model.children())
    one = torch.optim.SGD(layers[0].parameters(), lr=0.1)
    two = torch.optim.AdamW([p for layer in layers[1:] for p in layer.parameters()], lr=1e-2)

    def update() -> None:
        one.step()
        two.step()

    return {"optimizers": [one, two]}, {}, update


class Unused(nn.Module):
    """One parameter that no step uses (AdamW's decay must not touch it), one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.used, self.unused, self.frozen = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(8, 3)
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x) + self.frozen(x)  # type: ignore[no-any-return]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.up, self.down, self.head = (
            nn.Linear(8, 8, bias=False),
            nn.Linear(8, 8, bias=False),
            nn.Linear(8, 3),
        )
        self.down.weight = self.up.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.down(torch.tanh(self.up(x))))  # type: ignore[no-any-return]


@pytest.mark.parametrize("reduction", ["ordered", "fast"])
@pytest.mark.parametrize(
    ("build", "update"),
    [
        (network, adamw), (network, scheduled), (network, clipped), (network, clipped_by_value),
        (network, two_optimizers), (Unused, adamw), (Tied, adamw),
    ],
    ids=["adamw", "scheduler", "clip-norm", "clip-value", "two-optimizers", "unused-and-frozen", "tied"],
)  # fmt: skip
def test_updates_are_those_of_plain_torch(
    build: Callable[[], nn.Module], update: Update, reduction: str
) -> None:
    model = build()
    plain = copy.deepcopy(model)
    objects, options, _ = update(model)
    run, _ = session(reduction=reduction)
    run.register(model=model, **objects)
    for step in run.steps(Points(), total=STEPS):
        for x, y in step.batches():
            step.backward(F.cross_entropy(model(x), y))
        assert step.commit(metrics={"loss": step.mean_loss}, **options)

    _, _, step_plain = update(plain)
    for x, y in whole_batches():
        plain.zero_grad(set_to_none=True)
        F.cross_entropy(plain(x), y).backward()
        step_plain()
    close(model, plain)
    if isinstance(model, Unused):
        assert torch.equal(model.unused.weight, Unused().unused.weight), "no weight decay without a gradient"


def test_metrics_are_means_over_the_global_batch() -> None:
    model = network()
    run, member = session()
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0))
    for step in run.steps(Points(), total=1):
        for x, y in step.batches():
            step.record(hits=(model(x).argmax(1) == y).float().mean())
            step.backward(F.cross_entropy(model(x), y))
        step.commit(metrics={"loss": step.mean_loss, "three": 3.0})
    x, y = whole_batches(1)[0]
    assert step.metrics["loss"] == pytest.approx(float(F.cross_entropy(model(x), y).detach()), rel=1e-6)
    assert step.metrics["hits"] == pytest.approx(float((model(x).argmax(1) == y).float().mean()))
    assert step.metrics["three"] == pytest.approx(3.0)
    assert member.records[0].samples == BATCH


def test_accumulation_inside_a_shard_is_the_same_gradient() -> None:
    model = network()
    plain = copy.deepcopy(model)
    run, _ = session()
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    for step in run.steps(Points(), total=STEPS):
        for x, y in step.batches():
            halves = list(zip(x.chunk(2), y.chunk(2), strict=True))
            for n, (part_x, part_y) in enumerate(halves):
                step.backward(F.cross_entropy(model(part_x), part_y) / 2, final=n == 1)
        step.commit()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for x, y in whole_batches():
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
    close(model, plain)


def test_the_last_partial_batch_weighs_every_sample_alike() -> None:
    model = network()
    plain = copy.deepcopy(model)
    run, member = session(last_batch="partial")
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.5))
    for step in run.steps(Points(34), epochs=2):
        for x, y in step.batches():
            step.backward(F.cross_entropy(model(x), y))
        step.commit()
    assert [r.samples for r in member.records] == [16, 16, 2, 16, 16, 2]
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.5)
    for x, y in whole_batches(6, 34, "partial"):
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        optimizer.step()
    close(model, plain)


def test_batchnorm_statistics_are_the_mean_over_the_shards() -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))
    plain = copy.deepcopy(model)
    run, _ = session()
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(Points(), total=STEPS):
        for x, y in step.batches():
            step.backward(F.cross_entropy(model(x), y))
        step.commit()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in whole_batches():
        optimizer.zero_grad()
        before = copy.deepcopy(plain.state_dict())
        after = []
        for part_x, part_y in zip(
            x.chunk(SHARDS), y.chunk(SHARDS), strict=True
        ):  # ghost batches, in plain torch
            plain[1].load_state_dict({k[2:]: v.clone() for k, v in before.items() if k.startswith("1.")})
            (F.cross_entropy(plain(part_x), part_y) / SHARDS).backward()
            after.append(copy.deepcopy(plain[1].state_dict()))
        optimizer.step()
        for name in ("running_mean", "running_var"):
            getattr(plain[1], name).copy_(torch.stack([a[name] for a in after]).mean(0))
    close(model, plain)
    assert int(model[1].num_batches_tracked) == STEPS


def test_bf16_autocast_gives_plain_torchs_loss() -> None:
    model = network()
    plain = copy.deepcopy(model)
    run, _ = session()
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(Points(), total=STEPS):
        for x, y in step.batches():
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x), y)
            step.backward(loss)
        step.commit()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    for x, y in whole_batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(plain(x), y)
        loss.backward()
        optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0.05, atol=0.01)  # bf16 has 8 bits


def test_one_shard_is_plain_torch_bit_for_bit() -> None:
    model = network()
    plain = copy.deepcopy(model)
    run, _ = session(shards=1)
    run.register(model=model, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
    for step in run.steps(Points(), total=STEPS):
        for x, y in step.batches():
            step.backward(F.cross_entropy(model(x), y))
        step.commit(clip_grad_norm=1.0)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for x, y in whole_batches():
        optimizer.zero_grad()
        F.cross_entropy(plain(x), y).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("policy", ["stop", "skip", "ignore"])
def test_a_non_finite_loss_follows_the_policy(policy: str) -> None:
    model = network()
    run, member = session(non_finite=policy)
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))

    def loop() -> None:
        for step in run.steps(Points(), total=3):
            for x, y in step.batches():
                step.backward(F.cross_entropy(model(x), y) * (float("inf") if step.number == 1 else 1.0))
            step.commit()

    if policy == "stop":
        with pytest.raises(NonFiniteLoss, match="step 1"):
            loop()
        return
    loop()
    assert [r.skipped for r in member.records] == [False, policy == "skip", False]
    assert all(p.isfinite().all() for p in model.parameters()) == (policy == "skip")


def broken(rule: str) -> Callable[[Session], None]:
    def loop(run: Session) -> None:
        model = network()
        if rule == "nothing":
            next(iter(run.steps(Points(), total=2)))
        run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
        if rule == "no length":
            next(iter(run.steps(Points())))
        if rule == "other batch":
            next(iter(run.steps(Points(), total=2, global_batch_size=BATCH * 2)))
        for step in run.steps(Points(), total=2):
            if rule == "late":
                run.register(more=network())
            if rule == "early commit":
                step.commit()
            if rule == "outside":
                step.backward(torch.ones((), requires_grad=True))
            for x, y in step.batches():
                if rule != "no backward":
                    step.backward(F.cross_entropy(model(x), y))
                if rule == "twice":
                    step.backward(F.cross_entropy(model(x), y))
            if rule != "no commit":
                step.commit()

    return loop


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("nothing", "register"), ("no length", "total"), ("other batch", "global_batch_size"), ("late", "before"),
        ("early commit", "batches"), ("outside", "backward"), ("no backward", "backward"), ("twice", "backward"),
        ("no commit", "commit"),
    ],
)  # fmt: skip
def test_a_broken_rule_of_the_loop_is_named(rule: str, words: str) -> None:
    run, _ = session()
    with pytest.raises(LoopError, match=words):
        broken(rule)(run)


def test_nothing_of_the_session_is_left_after_the_loop() -> None:
    """Neither its threads nor its hooks: what the user does with the model afterwards is the user's own."""
    before = set(threading.enumerate())
    run, _ = session()
    model = network()
    run.register(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1))
    for step in run.steps(Points(), total=2):
        for x, y in step.batches():
            step.backward(nn.functional.cross_entropy(model(x), y))
        step.commit()
    digest = run.state_digest()
    nn.functional.cross_entropy(model(Points().x), Points().y).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert run.state_digest() == digest
    for thread in set(threading.enumerate()) - before:
        thread.join(10.0)
        assert not thread.is_alive(), thread.name
