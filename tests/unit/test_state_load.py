"""Loading: a twin that received the bytes is the same replica, down to the last bit of every later step."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn

from everstep.checkpoint import hashing
from everstep.checkpoint.state import RegisteredState, Snapshot
from everstep.errors import StateError, StateMismatch

Objects = dict[str, Any]


def move(
    source: RegisteredState, target: RegisteredState, reuse: list[torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """What a transfer does, without the network: layout as JSON, bytes, load."""
    snapshot = source.capture()
    layout = json.loads(json.dumps(snapshot.layout(), allow_nan=False))
    buffers = target.receive_buffers(layout, reuse=reuse or [])
    for tensor, buffer in zip(snapshot.host_tensors(), buffers, strict=True):
        hashing.byte_view(buffer)[:] = hashing.byte_view(tensor)
    target.load(layout["skeleton"], buffers)
    return buffers


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.register_buffer("nothing", torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.embed(x)) * self.scale)


def train(objects: Objects, steps: int, seed: int) -> None:
    torch.manual_seed(seed)
    model = objects["model"]
    for _ in range(steps):
        x = torch.randint(0, 7, (6,))
        loss = nn.functional.cross_entropy(model(x).float(), x.roll(1))
        loss.backward()
        for thing in objects.values():
            if isinstance(thing, torch.optim.Optimizer):
                if isinstance(thing, torch.optim.LBFGS):
                    thing.step(lambda loss=loss: loss)
                else:
                    thing.step()
        for name, thing in objects.items():
            if name.startswith("sched"):
                thing.step()
        model.zero_grad()


def with_optimizers(make: Callable[[nn.Module], Objects]) -> Callable[[int], Objects]:
    def build(seed: int) -> Objects:
        torch.manual_seed(seed)
        model = Tied()
        return {"model": model, **make(model)}

    return build


def two_optimizers(model: nn.Module) -> Objects:
    params = list(model.parameters())
    first = torch.optim.SGD(params[:1], lr=0.1, momentum=0.9, nesterov=True)
    second = torch.optim.AdamW(
        [{"params": params[1:2], "lr": 1e-2}, {"params": params[2:], "weight_decay": 0.0}], amsgrad=True
    )
    return {
        "opt.0": first,
        "opt.1": second,
        "sched.0": torch.optim.lr_scheduler.OneCycleLR(second, [1e-2, 1e-3], total_steps=50),
        "sched.1": torch.optim.lr_scheduler.SequentialLR(
            first,
            [torch.optim.lr_scheduler.LinearLR(first), torch.optim.lr_scheduler.CosineAnnealingLR(first, 9)],
            [3],
        ),
    }


def one(
    optimizer: Callable[..., Any], scheduler: Callable[..., Any] | None = None, **options: Any
) -> Callable[[nn.Module], Objects]:
    def make(model: nn.Module) -> Objects:
        objects: Objects = {"opt": optimizer(model.parameters(), **options)}
        if scheduler is not None:
            objects["sched"] = scheduler(objects["opt"])
        return objects

    return make


CASES: dict[str, Callable[[nn.Module], Objects]] = {
    "adamw": one(torch.optim.AdamW, lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [2, 4]), lr=1e-2),
    "adamw-foreach": one(torch.optim.AdamW, foreach=True),
    "adamw-fused": one(torch.optim.AdamW, fused=True),
    "adam-tensor-lr": one(
        torch.optim.Adam, lambda o: torch.optim.lr_scheduler.StepLR(o, 2), lr=torch.tensor(0.01)
    ),
    "sgd": one(torch.optim.SGD, lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda s: 0.9**s), lr=0.1),
    "sgd-momentum": one(torch.optim.SGD, lr=0.1, momentum=0.9),
    "rmsprop": one(torch.optim.RMSprop, centered=True, momentum=0.5),
    "adagrad": one(torch.optim.Adagrad),
    "adafactor": one(torch.optim.Adafactor),
    "lbfgs": one(torch.optim.LBFGS),
    "two": two_optimizers,
    "scaler": lambda model: {
        "opt": torch.optim.SGD(model.parameters(), lr=0.1),
        "scaler": torch.amp.GradScaler("cpu", init_scale=8.0),
    },
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("twin_steps", [0, 2], ids=["fresh", "used"])
def test_a_loaded_twin_trains_on_bit_for_bit(case: str, twin_steps: int) -> None:
    build = with_optimizers(CASES[case])
    ours, theirs = build(1), build(2)
    train(ours, 3, seed=3)
    train(theirs, twin_steps, seed=4)
    source, target = RegisteredState(ours), RegisteredState(theirs)
    before = source.digest(source.capture())
    move(source, target)
    assert target.digest(target.capture()) == before == source.digest(source.capture())
    train(ours, 3, seed=5)
    train(theirs, 3, seed=5)
    assert target.digest(target.capture()) == source.digest(source.capture()) != before
    assert theirs["model"].head.weight is theirs["model"].embed.weight


def test_bfloat16_model_with_float32_state_keeps_every_bit() -> None:
    class Averages(torch.optim.Optimizer):
        """Keeps float32 averages of bfloat16 weights; torch's load_state_dict would round them."""

        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for param in group["params"]:
                    state = self.state[param]
                    if not state:
                        state.update(
                            mean=torch.zeros_like(param, dtype=torch.float32),
                            mode="warm",
                            step=torch.tensor(0.0),
                        )
                    state["mean"].mul_(0.9).add_(param.grad.float(), alpha=0.1)
                    state["step"] += 1
                    param.data.add_(state["mean"].bfloat16(), alpha=-0.1)

    def build(seed: int) -> Objects:
        torch.manual_seed(seed)
        model = nn.Linear(4, 7).bfloat16()
        return {"model": model, "opt": Averages(model.parameters(), {})}

    ours, theirs = build(1), build(2)
    for _ in range(3):
        ours["model"](torch.randn(2, 4).bfloat16()).sum().backward()
        ours["opt"].step()
    source, target = RegisteredState(ours), RegisteredState(theirs)
    move(source, target)
    assert target.digest(target.capture()) == source.digest(source.capture())
    state = theirs["opt"].state[theirs["model"].weight]
    assert state["mean"].dtype == torch.float32 and state["mode"] == "warm"


def test_channels_last_state_keeps_its_memory_order() -> None:
    def build(seed: int) -> Objects:
        torch.manual_seed(seed)
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return {"model": model, "opt": torch.optim.AdamW(model.parameters())}

    ours, theirs = build(1), build(2)
    ours["model"](torch.randn(1, 3, 5, 5)).sum().backward()
    ours["opt"].step()
    source, target = RegisteredState(ours), RegisteredState(theirs)
    move(source, target)
    moment = theirs["opt"].state[theirs["model"].weight]["exp_avg"]
    assert moment.is_contiguous(memory_format=torch.channels_last) and not moment.is_contiguous()
    assert target.digest(target.capture()) == source.digest(source.capture())


def pair() -> tuple[Objects, Objects, RegisteredState, RegisteredState]:
    build = with_optimizers(one(torch.optim.AdamW))
    ours, theirs = build(1), build(2)
    train(ours, 2, seed=3)
    return ours, theirs, RegisteredState(ours), RegisteredState(theirs)


def test_modules_receive_in_place_and_optimizers_take_the_buffers() -> None:
    _, theirs, source, target = pair()
    weight = theirs["model"].embed.weight
    address = weight.data_ptr()
    buffers = {buffer.data_ptr() for buffer in move(source, target)}
    assert theirs["model"].embed.weight is weight and weight.data_ptr() == address
    assert address in buffers
    for state in theirs["opt"].state.values():
        assert state["exp_avg"].data_ptr() in buffers and state["step"].data_ptr() in buffers


def test_prepared_buffers_are_used_again_if_they_fit() -> None:
    _, _, source, target = pair()
    early = target.receive_buffers(source.capture().layout())
    own = {tensor.data_ptr() for tensor in early if tensor.data_ptr()}
    late = move(source, target, reuse=early)
    assert {tensor.data_ptr() for tensor in late if tensor.data_ptr()} == own


def test_live_memory_is_never_handed_out_twice() -> None:
    """Tied here, not tied there: two contents must not be received into one memory."""
    torch.manual_seed(0)
    untied = Tied()
    untied.head.weight = nn.Parameter(torch.randn(7, 4))
    source, target = RegisteredState({"model": untied}), RegisteredState({"model": Tied()})
    buffers = target.receive_buffers(source.capture().layout())
    spans = sorted((b.data_ptr(), b.data_ptr() + b.numel() * b.itemsize) for b in buffers if b.numel())
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))


def test_module_with_extra_state_and_non_persistent_buffers() -> None:
    class Counting(nn.Linear):
        def __init__(self) -> None:
            super().__init__(2, 2)
            self.count = 0
            self.register_buffer("cache", torch.zeros(3), persistent=False)

        def get_extra_state(self) -> dict[str, int]:
            return {"count": self.count}

        def set_extra_state(self, state: dict[str, int]) -> None:
            self.count = state["count"]

    ours, theirs = Counting(), Counting()
    ours.count = 5
    move(RegisteredState({"m": ours}), RegisteredState({"m": theirs}))
    assert theirs.count == 5 and torch.equal(theirs.weight, ours.weight)


def broken(change: Callable[[Objects], None]) -> tuple[RegisteredState, RegisteredState]:
    _, theirs, source, _ = pair()
    change(theirs)
    return source, RegisteredState(theirs)


def wider(objects: Objects) -> None:
    objects["model"].scale = nn.Parameter(torch.ones(2))


def half(objects: Objects) -> None:
    objects["model"].scale = nn.Parameter(torch.tensor(1.0).half())


def more(objects: Objects) -> None:
    objects["model"].extra = nn.Linear(1, 1)


def renamed(objects: Objects) -> None:
    objects["optimizer"] = objects.pop("opt")


def regrouped(objects: Objects) -> None:
    objects["opt"] = torch.optim.AdamW([{"params": [p]} for p in objects["model"].parameters()])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (wider, r"scale is float32 \[\] in the state, float32 \[2\] here"),
        (half, r"scale is float32 \[\] in the state, float16"),
        (more, r"only one side has \['extra.bias', 'extra.weight'\]"),
        (renamed, r"registered here are \['model', 'optimizer'\]"),
        (regrouped, "parameters per group are"),
    ],
)
def test_a_state_of_another_shape_is_refused_before_anything_is_touched(
    change: Callable[[Objects], None], message: str
) -> None:
    source, target = broken(change)
    before = target.digest(target.capture())
    snapshot = source.capture()
    with pytest.raises(StateMismatch, match=message):
        target.load(snapshot.skeleton, [tensor.clone() for tensor in snapshot.tensors])
    assert target.digest(target.capture()) == before


@pytest.mark.parametrize("node", [{"tensor": 10**6}, {"tensor": -1}, {"pickle": ""}], ids=str)
def test_a_malformed_skeleton_is_found_before_anything_is_touched(node: Any) -> None:
    _, _, source, target = pair()
    layout: Any = source.capture().layout()
    before = target.digest(target.capture())
    layout["skeleton"]["dict"][1][1] = {"dict": [["state", node]]}
    with pytest.raises(StateError):
        target.load(layout["skeleton"], source.capture().tensors)
    assert target.digest(target.capture()) == before
    layout["skeleton"]["dict"][0][1]["odict"][0][1] = node  # an entry of the module
    with pytest.raises((StateError, StateMismatch)):
        target.receive_buffers(layout)


def test_an_object_that_refuses_its_state_is_named() -> None:
    class Stubborn:
        def state_dict(self) -> Objects:
            return {}

        def load_state_dict(self, state: Objects) -> None:
            raise ValueError("no")

    state = RegisteredState({"thing": Stubborn()})
    with pytest.raises(StateError, match=r"'thing'.*refused.*mixed now"):
        state.load(state.capture().skeleton, [])


def test_dicts_filled_in_another_order_make_the_same_layout() -> None:
    class Values:
        def __init__(self, values: Objects) -> None:
            self.values = values

        def state_dict(self) -> Objects:
            return self.values

        def load_state_dict(self, state: Objects) -> None:
            self.values = state

    a, b = torch.arange(3.0), torch.arange(40.0)
    left = RegisteredState({"v": Values({"a": a, "b": b, "c": 1})}).capture()
    right = RegisteredState({"v": Values({"c": 1, "b": b.clone(), "a": a.clone()})}).capture()
    assert left.plan().fingerprint() == right.plan().fingerprint()
    assert left.layout()["tensors"] == right.layout()["tensors"]
    assert RegisteredState.digest(left) == RegisteredState.digest(right)
    assert isinstance(left, Snapshot)
