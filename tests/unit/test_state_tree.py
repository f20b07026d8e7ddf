"""State trees: what goes through comes out exactly, what cannot is refused by name, and foreign input is only data."""

from __future__ import annotations

import json
import math
import pickle
import struct
from collections import Counter, OrderedDict, defaultdict, namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from everstep.checkpoint.tree import canonical_json, flatten, parse_json, show_path, top_tensors, unflatten
from everstep.errors import StateError


def through(value: Any) -> Any:
    """Flatten, through JSON text, and back."""
    skeleton, tensors = flatten(value)
    return unflatten(parse_json(json.dumps(skeleton, allow_nan=False).encode()), tensors)


def same(left: Any, right: Any) -> bool:
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, dict):
        pairs = zip(left.items(), right.items(), strict=True)
        return len(left) == len(right) and all(same(a, b) and same(x, y) for (a, x), (b, y) in pairs)
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, float):
        return struct.pack(">d", left) == struct.pack(">d", right)
    return bool(left == right)


def test_every_allowed_kind_comes_back_exactly() -> None:
    tree = {
        "scalars": [
            None,
            True,
            False,
            0,
            -1,
            1.5,
            -0.0,
            math.pi,
            5e-324,
            math.inf,
            -math.inf,
            "",
            "é\ud800",
            b"\0\xff",
        ],
        "numbers": (2**53, -(2**53) - 1, 2**20000, -(2**64)),
        "nested": {"a": ([], (), {}, [[()]])},
        "od": OrderedDict([("b", 1), ("a", 2)]),
        "milestones": Counter({10: 2, 5: 1}),
        "tensors": [
            torch.arange(6.0).reshape(2, 3),
            torch.tensor(3),
            torch.empty(0, 4),
            torch.tensor([True]),
        ],
        "numpy": [np.arange(4, dtype=np.int16), np.float64(0.1), np.int32(7), np.bool_(True), np.array(2.0)],
        "torch": [torch.bfloat16, torch.Size([2, 3])],
    }
    assert same(through(tree), tree)


def test_key_types_and_their_order_survive() -> None:
    tree = {"10": 0, 2: 1, None: 2, True: 3, 1.5: 4, b"k": 5, ("a", 1): 6, "2": 7, float("inf"): 8}
    result = through(tree)
    assert list(result) == list(tree)
    assert [type(key) for key in result] == [type(key) for key in tree]


def test_nan_keeps_its_payload() -> None:
    (odd_nan,) = struct.unpack(">d", bytes.fromhex("7ff80000deadbeef"))
    assert struct.pack(">d", through(odd_nan)).hex() == "7ff80000deadbeef"


@settings(max_examples=25, deadline=None)
@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.binary(max_size=8),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.tuples(inner, inner)
            | st.dictionaries(
                st.text(max_size=4) | st.integers() | st.tuples(st.integers(), st.text(max_size=2)),
                inner,
                max_size=4,
            )
        ),
        max_leaves=8,
    )
)
def test_random_trees_come_back_exactly(tree: Any) -> None:
    assert same(through(tree), tree)


@pytest.mark.parametrize(
    ("value", "where"),
    [
        ({"optimizer": {"state": {3: {"foo": object()}}}}, "optimizer.state[3].foo"),
        ({"model": {"fc.weight": {1, 2}}}, "model['fc.weight']"),
        ({"sched": [lambda: 0]}, "sched[0]"),
        ({"x": defaultdict(int)}, "x"),
        ({"x": namedtuple("P", "a")(1)}, "x"),
        ({"x": np.array(["text"])}, "x"),
        ({"x": np.array([object()])}, "x"),
        ({"x": torch.empty(2, device="meta")}, "x"),
        ({"x": torch.eye(2).to_sparse()}, "x"),
        ({"x": 1 + 2j}, "x"),
        ({"x": {object(): 1}}, "x"),
        ({"x": {torch.ones(1): 1}}, "x"),
    ],
)
def test_what_cannot_be_carried_is_named(value: Any, where: str) -> None:
    with pytest.raises(StateError) as caught:
        flatten(value)
    assert str(caught.value).startswith(where)


def test_refusal_says_what_is_allowed() -> None:
    with pytest.raises(StateError, match=r"class 'object'.*Allowed are None, bool"):
        flatten({"x": object()})


def test_a_container_that_holds_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(StateError, match="holds itself"):
        flatten({"x": loop})


def test_tied_tensors_are_taken_once_and_come_back_tied() -> None:
    weight = torch.nn.Parameter(torch.randn(3, 3))
    skeleton, tensors = flatten({"a": weight.detach(), "b": weight.detach(), "view": weight.detach()[0]})
    assert len(tensors) == 2  # the row is other bytes than the whole
    result = unflatten(skeleton, tensors)
    assert result["a"] is result["b"]
    assert tensors[0].data_ptr() == weight.data_ptr()


def test_empty_tensors_are_never_tied() -> None:
    _, tensors = flatten([torch.empty(0, 2), torch.empty(0, 3), torch.empty(0, 2)])
    assert [tuple(tensor.shape) for tensor in tensors] == [(0, 2), (0, 3), (0, 2)]


def test_tensor_numbers_do_not_depend_on_the_order_of_a_dict() -> None:
    one, two = torch.zeros(1), torch.ones(1)
    left, left_tensors = flatten({"x": {"a": one, "b": two}})
    right, right_tensors = flatten({"x": {"b": two, "a": one}})
    assert left_tensors[0] is not None and torch.equal(left_tensors[0], right_tensors[0])
    assert canonical_json(left) == canonical_json(right)
    assert list(unflatten(right, right_tensors)["x"]) == ["b", "a"]


def test_top_tensors_finds_the_entries_of_each_object() -> None:
    skeleton, _ = flatten({"m": OrderedDict(w=torch.ones(1), extra=3), "o": {"lr": 0.1}, "n": 5})
    assert top_tensors(skeleton) == {"m": {"w": 0}, "o": {}, "n": {}}


HOSTILE: list[Any] = [
    {"tensor": 1},
    {"tensor": -1},
    {"tensor": True},
    {"tensor": 10**30},
    {"tensor": "0"},
    {"tensor": 0, "list": 1},
    {},
    {"pickle": "gASV"},
    {"dict": 3},
    {"dict": [1]},
    {"dict": [[1]]},
    {"dict": [["a", 1], ["a", 2]]},
    {"dict": [[{"tensor": 0}, 1]]},
    {"dict": [[[1], 1]]},
    {"tuple": {"a": 1}},
    {"size": ["a"]},
    {"counter": [[[], 1]]},
    {"int": "zz"},
    {"int": 5},
    {"int": "f" * 100_000},
    {"float": "00"},
    {"float": None},
    {"bytes": "***"},
    {"dtype": "os.system"},
    {"dtype": []},
    {"scalar": ["O", "00"]},
    {"scalar": ["<f8", "00"]},
    {"scalar": ["<f8", "00" * 16]},
    {"scalar": ["<f99", "00"]},
    {"scalar": 1},
    {"ndarray": 0},
]


@pytest.mark.parametrize("skeleton", HOSTILE, ids=lambda value: str(value)[:40])
def test_hostile_skeletons_are_refused(skeleton: Any) -> None:
    with pytest.raises(StateError):
        unflatten(skeleton, [torch.ones(1, dtype=torch.bfloat16)])


def test_deep_and_huge_skeletons_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    deep: Any = 1
    for _ in range(70):
        deep = [deep]
    with pytest.raises(StateError, match="deeper"):
        unflatten(deep, [])
    monkeypatch.setattr("everstep.checkpoint.tree.MAX_NODES", 100)
    with pytest.raises(StateError, match="more than 100 values"):
        unflatten([0] * 200, [])
    with pytest.raises(StateError):
        parse_json(b"[" * 100_000)
    with pytest.raises(StateError):
        parse_json(pickle.dumps({"a": 1}))


TAGS = [
    "dict",
    "odict",
    "counter",
    "tuple",
    "size",
    "tensor",
    "ndarray",
    "int",
    "float",
    "bytes",
    "dtype",
    "scalar",
    "x",
]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(TAGS),
            inner,
            max_size=2,
        )
    ),
    max_leaves=8,
)


@settings(max_examples=80, deadline=None)
@given(JSON)
def test_any_json_is_a_tree_or_a_state_error(skeleton: Any) -> None:
    try:
        unflatten(skeleton, [torch.ones(2)])
        top_tensors(skeleton)
    except StateError:
        pass


def test_paths_read_like_python() -> None:
    assert show_path(("optimizer", "state", 3, "foo")) == "optimizer.state[3].foo"
    assert show_path(("optim.0", "a.b", ("k", 1))) == "optim.0['a.b'][('k', 1)]"
