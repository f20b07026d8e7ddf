"""Capture and digest: live memory and no copies, and a digest that is equal exactly when the state is."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from everstep.checkpoint import hashing
from everstep.checkpoint.state import Layout, RegisteredState, Snapshot
from everstep.checkpoint.tree import unflatten
from everstep.errors import StateError


class Values:
    """The smallest thing that can be registered."""

    def __init__(self, **values: Any) -> None:
        self.values = values

    def state_dict(self) -> dict[str, Any]:
        return self.values

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.values = state


def trained() -> tuple[nn.Module, torch.optim.Optimizer, RegisteredState]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    return model, optimizer, RegisteredState({"model": model, "optimizer": optimizer})


def test_object_without_state_dict_is_refused_with_the_way_out() -> None:
    with pytest.raises(StateError, match=r"'data'.*list.*without state_dict and load_state_dict.*wrap"):
        RegisteredState({"data": [1, 2]})


def test_snapshot_is_the_live_memory() -> None:
    model, optimizer, state = trained()
    snapshot = state.capture()
    pointers = {tensor.data_ptr() for tensor in snapshot.tensors}
    weight = model[0].weight
    assert weight.data_ptr() in pointers
    assert optimizer.state[weight]["exp_avg"].data_ptr() in pointers
    assert not any(tensor.requires_grad for tensor in snapshot.tensors)


def test_layout_is_json_and_aligned() -> None:
    layout = json.loads(json.dumps(trained()[2].capture().layout(), allow_nan=False))
    end = 0
    for spec in layout["tensors"]:
        assert spec["offset"] % 64 == 0 and 0 <= spec["offset"] - end < 64
        assert spec["nbytes"] == math.prod(spec["shape"]) * getattr(torch, spec["dtype"]).itemsize
        end = spec["offset"] + spec["nbytes"]
    assert layout["total_bytes"] == end
    assert Layout.from_json(layout).as_json() == layout


def test_overrides_stand_in_for_entries_and_touch_nothing() -> None:
    model, _, state = trained()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    other = torch.full((3,), 7.0)
    snapshot = state.capture({"model": {"1.running_mean": other}})
    pointers = [tensor.data_ptr() for tensor in snapshot.tensors]
    assert other.data_ptr() in pointers
    assert model[1].running_mean.data_ptr() not in pointers
    assert all(torch.equal(before[key], value) for key, value in model.state_dict().items())
    for unknown in ({"model": {"nope": other}}, {"nope": {"a": other}}):
        with pytest.raises(StateError, match="override of"):
            state.capture(unknown)


def test_override_reaches_shared_buffers_and_skips_those_that_are_not_state() -> None:
    model = nn.ModuleList([nn.BatchNorm1d(3), nn.BatchNorm1d(3)])
    model[1].running_mean = model[0].running_mean
    model[0].register_buffer("cache", torch.zeros(2), persistent=False)
    other = torch.full((3,), 7.0)
    snapshot = RegisteredState({"m": model}).capture(
        {"m": {"0.running_mean": other, "0.cache": torch.ones(2)}}
    )
    tree = unflatten(snapshot.skeleton, snapshot.tensors)["m"]
    assert torch.equal(tree["0.running_mean"], other) and torch.equal(tree["1.running_mean"], other)
    assert torch.equal(tree["0.running_var"], torch.ones(3)) and "0.cache" not in tree


def test_signature_names_modules_tensors_and_objects_but_no_lazy_state() -> None:
    model = nn.Linear(4, 2, bias=False)
    optimizer = torch.optim.AdamW(model.parameters())
    state = RegisteredState({"model": model, "optimizer": optimizer})
    expected = ["model Linear", "model.weight float32 [2, 4]", "optimizer AdamW"]
    assert state.signature() == expected
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    assert state.signature() == expected


def digest(**values: Any) -> str:
    return RegisteredState.digest(RegisteredState({"x": Values(**values)}).capture())


def test_digest_sees_every_flipped_bit() -> None:
    _, _, state = trained()
    snapshot = state.capture()
    first = state.digest(snapshot)
    seen = {first}
    num_bits = 0
    for tensor in snapshot.tensors:
        view = hashing.byte_view(tensor)
        for i in range(len(view)):
            bit = 1 << i % 8
            view[i] ^= bit
            seen.add(state.digest(snapshot))
            view[i] ^= bit
            num_bits += 1
    assert len(seen) == num_bits + 1 > 250
    assert state.digest(snapshot) == first


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ({"a": 1}, {"a": 2}),
        ({"a": 1}, {"a": 1.0}),
        ({"a": 1}, {"a": True}),
        ({"a": 0.0}, {"a": -0.0}),
        ({"a": 1}, {"b": 1}),
        ({"a": [1]}, {"a": (1,)}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, dtype=torch.int32)}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(2, 1)}),
        ({"a": torch.zeros(2)}, {"a": torch.zeros(3)}),
        ({"a": torch.zeros(2), "b": torch.zeros(1)}, {"a": torch.zeros(1), "b": torch.zeros(2)}),
        ({"a": torch.tensor(0.0)}, {"a": torch.tensor(-0.0)}),
        ({"a": {"1": 0}}, {"a": {1: 0}}),
    ],
    ids=str,
)
def test_digest_tells_states_apart(left: dict[str, Any], right: dict[str, Any]) -> None:
    assert digest(**left) != digest(**right)


def test_digest_is_equal_for_equal_states() -> None:
    assert digest(a=1, b=torch.arange(4.0)) == digest(b=torch.arange(4.0), a=1)
    square = torch.arange(6.0).reshape(2, 3)
    assert digest(a=square) == digest(a=square.t().contiguous().t())  # same values in another memory order
    assert digest(a=square[:, ::2]) == digest(a=square[:, ::2].clone())
    assert digest(a=torch.tensor(math.nan)) == digest(a=torch.tensor(math.nan))


def shapes(make: Callable[[], torch.Tensor]) -> torch.Tensor:
    torch.manual_seed(1)
    return make()


@pytest.mark.parametrize(
    "tensor",
    [
        shapes(lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)),
        shapes(lambda: torch.randn(4, 6).t()),
        shapes(lambda: torch.randn(2, 3, 4).permute(2, 0, 1)),
        shapes(lambda: torch.randn(4, 1, 6).transpose(0, 2)),
        shapes(lambda: torch.randn(3, 1, 1)),
        torch.empty(0, 3),
        torch.tensor(5.0),
        torch.arange(5, dtype=torch.bfloat16),
        torch.tensor([1 + 2j, 3]),
        torch.tensor([True, False]),
        torch.ones(3).to(torch.float8_e4m3fn),
        torch.arange(3).to(torch.uint16),
    ],
    ids=lambda tensor: f"{tensor.dtype}{list(tensor.shape)}{list(tensor.stride())}",
)
def test_dense_tensors_are_not_copied_and_keep_their_memory_order(tensor: torch.Tensor) -> None:
    snapshot = RegisteredState({"x": Values(t=tensor)}).capture()
    assert snapshot.tensors[0].data_ptr() == tensor.data_ptr()
    (spec,) = Layout.from_json(snapshot.layout()).tensors
    copy = spec.empty()
    hashing.byte_view(copy)[:] = hashing.byte_view(tensor)
    assert spec.fits(tensor)
    assert copy.dtype == tensor.dtype and copy.shape == tensor.shape
    assert [s for s, n in zip(copy.stride(), copy.shape, strict=True) if n > 1] == [
        s for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1
    ]
    assert hashing.byte_view(copy.contiguous()) == hashing.byte_view(tensor.contiguous())


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(10.0)[::2],
        torch.ones(1).expand(3, 4),
        torch.arange(12.0).reshape(3, 4)[:, 1:3],
        torch.tensor([1 + 2j]).conj(),
    ],
)
def test_tensors_with_gaps_or_overlaps_are_copied(tensor: torch.Tensor) -> None:
    snapshot = RegisteredState({"x": Values(t=tensor)}).capture()
    assert torch.equal(snapshot.tensors[0], tensor.resolve_conj())
    assert len(hashing.byte_view(snapshot.tensors[0])) == tensor.numel() * tensor.itemsize


GOOD = {"dtype": "float32", "shape": [2], "nbytes": 8, "offset": 0}


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "qint8"}, {"dtype": None}, {"shape": [-1]}, {"shape": [True]}, {"shape": [2.0]}, {"shape": "22"},
        {"shape": [2] * 65}, {"shape": [1 << 62, 1 << 62]}, {"nbytes": 9}, {"nbytes": -8}, {"offset": 64}, {"offset": -64},
        {"order": [1]}, {"order": [0, 0]}, {"order": "0"}, {"order": [False]},
    ],
    ids=str,
)  # fmt: skip
def test_hostile_layouts_are_refused(change: dict[str, Any]) -> None:
    layout = {"tensors": [{**GOOD, **change}], "total_bytes": 8, "skeleton": {"dict": []}}
    with pytest.raises(StateError):
        Layout.from_json(layout)


@pytest.mark.parametrize("layout", [None, [], {}, 5, {"tensors": 5, "total_bytes": 0, "skeleton": None},
    {"tensors": [GOOD], "total_bytes": 1 << 60, "skeleton": None}, {"tensors": [5], "total_bytes": 8, "skeleton": None}])  # fmt: skip
def test_malformed_layouts_are_refused(layout: Any) -> None:
    with pytest.raises(StateError):
        Layout.from_json(layout)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.integers(0, 300), max_size=8), st.data())
def test_any_stripe_is_exactly_its_bytes_of_the_space(sizes: list[int], data: st.DataObject) -> None:
    tensors = [torch.arange(size).to(torch.uint8) + i for i, size in enumerate(sizes)]
    plan = Snapshot(None, tuple(tensors)).plan()
    space = hashing.ByteSpace(tensors, plan.offsets)
    whole: list[int | None] = [None] * plan.total_bytes
    for spec, tensor in zip(plan.tensors, tensors, strict=True):
        whole[spec.offset : spec.offset + spec.nbytes] = tensor.tolist()
    offset = data.draw(st.integers(0, plan.total_bytes))
    length = data.draw(st.integers(0, plan.total_bytes - offset))
    max_bytes, max_views = data.draw(st.integers(1, 400)), data.draw(st.integers(1, 3))
    chunks = list(space.chunks(offset, length, max_bytes, max_views))
    assert all(0 < sum(map(len, chunk)) <= max_bytes and len(chunk) <= max_views for chunk in chunks)
    got = [byte for chunk in chunks for view in chunk for byte in view]
    assert got == [byte for byte in whole[offset : offset + length] if byte is not None]
