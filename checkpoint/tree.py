"""State trees: nested containers of scalars and tensors, split into a JSON skeleton and a list of tensors.

Called by `checkpoint.state`. Used for what `state_dict()` returns, so it carries what state_dicts hold, keeps it
exactly (key types, tuples, NaN payloads, big integers), and refuses everything else by name. It never pickles and
never runs code from what it reads: a skeleton may come from another process, so it is parsed with bounds.

The skeleton is JSON. None, bool, str, small int and finite float stand for themselves, an array is a list, and
everything else is an object with exactly one key, its tag:

    dict odict counter   [[key, value], ...] in the order of the mapping
    tuple size           [item, ...]
    tensor ndarray       index into the list of tensors
    int                  hexadecimal text, for integers beyond 2**53
    float                the IEEE 754 double as 16 hex digits, for NaN and infinities
    bytes                base64 text
    dtype                name of a torch dtype
    scalar               [numpy dtype, bytes as hex]

Tensors are numbered in the order of *sorted* keys, whatever the order of the mappings: replicas whose dicts were
filled in another order agree on numbers, offsets and digests.
"""

from __future__ import annotations

import base64
import json
import re
import reprlib
import struct
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from everstep.errors import StateError

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
Path: TypeAlias = tuple[object, ...]

MAX_DEPTH: Final = 64
"""Containers inside containers. Real state_dicts stay under 10; the bound catches cycles and hostile input."""
MAX_NODES: Final = 4_000_000
"""Values in one foreign skeleton; bounds the memory that parsing it can take."""
MAX_INT_DIGITS: Final = 1 << 16
_EXACT_INT: Final = 1 << 53

ALLOWED: Final = (
    "None, bool, int, float, str, bytes, torch.Tensor, torch.dtype, torch.Size, numpy arrays and scalars of "
    "numbers, and dict, OrderedDict, Counter, list and tuple of these"
)

_DTYPE_NAMES: Final = [
    *["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"],
    *["float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"],
    *["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"],
]
DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in _DTYPE_NAMES}
"""The dtypes that state may have, by the name that is written into skeletons and layouts."""

_MAPPINGS: Final[dict[type, str]] = {dict: "dict", OrderedDict: "odict", Counter: "counter"}
_SEQUENCES: Final[dict[type, str]] = {tuple: "tuple", torch.Size: "size"}
_MALFORMED: Final = (TypeError, ValueError, KeyError, IndexError, OverflowError, struct.error, RuntimeError)
"""What reading a malformed node can raise; binascii.Error and json's errors are ValueErrors."""
_SCALAR_DTYPE: Final = re.compile(r"[<>|]?[biufc][0-9]{1,2}")


def dtype_name(dtype: torch.dtype) -> str:
    """`float32` for torch.float32."""
    return str(dtype).removeprefix("torch.")


def flatten(obj: object) -> tuple[Json, list[torch.Tensor]]:
    """Split `obj` into a JSON skeleton and its tensors: references to the live ones, detached, tied ones once.

    Raises StateError, naming the path to the value, for anything that is not in `ALLOWED`.
    """
    flattener = _Flattener()
    return flattener.encode(obj, ()), flattener.tensors


def unflatten(skeleton: object, tensors: Sequence[torch.Tensor]) -> Any:
    """The tree that `flatten` was given, around `tensors` (the very objects, not copies).

    Raises StateError if the skeleton is malformed, too deep, too large, or names a tensor that is not there.
    """
    return _Unflattener(tensors).decode(skeleton, ())


def canonical_json(value: Json) -> bytes:
    """The same bytes for equal trees, also if their dicts were filled in another order."""
    return json.dumps(_sorted_pairs(value), sort_keys=True, separators=(",", ":"), allow_nan=False).encode(
        "ascii"
    )


def parse_json(raw: bytes | bytearray | memoryview) -> Any:
    """JSON from outside. Raises StateError for anything that is not JSON, or is nested too deeply to read."""
    try:
        return json.loads(bytes(raw))
    except (ValueError, RecursionError) as error:
        raise StateError(
            f"not JSON: {error}. The sender is not this version of Everstep, or is broken."
        ) from error


def top_tensors(skeleton: object) -> dict[str, dict[str, int]]:
    """For a tree {name: {key: value}}: the numbers of those values that are tensors, by name and key.

    Raises StateError if the tree is not such a mapping of names.
    """
    found: dict[str, dict[str, int]] = {}
    for name, node in _pairs(skeleton, ("dict",)):
        if not isinstance(name, str):
            raise StateError(f"the top of a state tree maps names to states, not {name!r}")
        found[name] = {}
        if not isinstance(node, dict) or not node.keys() & {"dict", "odict"}:
            continue
        for key, value in _pairs(node, ("dict", "odict")):
            if isinstance(key, str) and isinstance(value, dict) and type(value.get("tensor")) is int:
                found[name][key] = value["tensor"]
    return found


def show_path(path: Path) -> str:
    """`optimizer.state[3].exp_avg` for ("optimizer", "state", 3, "exp_avg")."""
    text = ""
    for part in path[1:]:
        text += f".{part}" if isinstance(part, str) and part.isidentifier() else f"[{part!r}]"
    return f"{path[0]}{text}" if path else "the state itself"


class _Flattener:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._seen: dict[tuple[object, ...], int] = {}

    def encode(self, value: object, path: Path) -> Json:
        if len(path) > MAX_DEPTH:
            raise StateError(
                f"{show_path(path[:4])}...: nested more than {MAX_DEPTH} deep, or a container that holds itself"
            )
        kind = type(value)
        if kind in _MAPPINGS and isinstance(value, Mapping):
            return {_MAPPINGS[kind]: self._encode_mapping(value, path)}
        if (kind is list or kind in _SEQUENCES) and isinstance(value, list | tuple):
            items: list[Json] = [self.encode(item, (*path, i)) for i, item in enumerate(value)]
            return items if kind is list else {_SEQUENCES[kind]: items}
        if isinstance(value, torch.Tensor):
            return {"tensor": self._number(value, path)}
        if isinstance(value, np.ndarray):
            return {"ndarray": self._number(_from_numpy(value, path), path)}
        return _encode_scalar(value, path)

    def _encode_mapping(self, mapping: Mapping[object, object], path: Path) -> Json:
        keys = {key: _encode_key(key, path) for key in mapping}
        # Tensors get their numbers in sorted order, the pairs keep the order of the mapping.
        by_text = sorted(mapping, key=lambda key: json.dumps(keys[key]))
        values = {key: self.encode(mapping[key], (*path, key)) for key in by_text}
        return [[keys[key], values[key]] for key in mapping]

    def _number(self, tensor: torch.Tensor, path: Path) -> int:
        _check_tensor(tensor, path)
        # A state_dict makes a new tensor object of every tied weight: only the memory tells that they are one.
        same = (
            tensor.device,
            tensor.data_ptr(),
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            tensor.is_conj(),
        )
        if tensor.numel() and same in self._seen:
            return self._seen[same]
        self._seen[same] = len(self.tensors)
        self.tensors.append(tensor.detach())
        return self._seen[same]


def _check_tensor(tensor: torch.Tensor, path: Path) -> None:
    if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        why = f"{type(tensor)} is a special kind of tensor; only plain torch.Tensor is state"
    elif tensor.layout is not torch.strided or tensor.device.type == "meta":
        why = f"a tensor of layout {tensor.layout} on {tensor.device} holds no plain memory; register a dense one"
    elif dtype_name(tensor.dtype) not in DTYPES:
        why = f"dtype {tensor.dtype} is not one of {', '.join(DTYPES)}"
    else:
        return
    raise StateError(f"{show_path(path)}: {why}")


def _from_numpy(array: np.ndarray[Any, Any], path: Path) -> torch.Tensor:
    if not array.flags.writeable or any(stride < 0 for stride in array.strides):
        array = array.copy()
    try:
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise StateError(f"{show_path(path)}: numpy array of dtype {array.dtype}: {error}") from error


def _encode_scalar(value: object, path: Path) -> Json:
    kind = type(value)
    if value is None or kind is bool or kind is str:
        return value  # type: ignore[return-value]
    if kind is int and isinstance(value, int):
        return value if abs(value) <= _EXACT_INT else {"int": hex(value)}
    if kind is float and isinstance(value, float):
        return value if abs(value) < float("inf") else {"float": struct.pack(">d", value).hex()}
    if kind is bytes and isinstance(value, bytes):
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, torch.dtype) and dtype_name(value) in DTYPES:
        return {"dtype": dtype_name(value)}
    if isinstance(value, np.generic) and value.dtype.kind in "biufc":
        return {"scalar": [value.dtype.str, value.tobytes().hex()]}
    raise StateError(f"{show_path(path)}: {kind} cannot be carried as state. Allowed are {ALLOWED}.")


def _encode_key(key: object, path: Path) -> Json:
    if type(key) is tuple and len(path) < MAX_DEPTH:
        return {"tuple": [_encode_key(part, (*path, part)) for part in key]}
    if isinstance(key, torch.Tensor | np.ndarray):
        raise StateError(
            f"{show_path(path)}: a mapping key of {type(key)} cannot be carried; use names or numbers"
        )
    return _encode_scalar(key, (*path, key))


class _Unflattener:
    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self._tensors = tensors
        self._num_nodes = 0
        self._readers: dict[str, Callable[[Any, Path], object]] = {
            "dict": lambda body, path: self._mapping(body, path),
            "odict": lambda body, path: OrderedDict(self._mapping(body, path)),
            "counter": lambda body, path: Counter(self._mapping(body, path)),
            "tuple": lambda body, path: tuple(self._items(body, path)),
            "size": lambda body, path: torch.Size(self._items(body, path)),
            "tensor": lambda body, path: self._tensor(body),
            "ndarray": lambda body, path: self._tensor(body).numpy(),
            "int": lambda body, path: _read_int(body),
            "float": lambda body, path: struct.unpack(">d", bytes.fromhex(body))[0],
            "bytes": lambda body, path: base64.b64decode(body, validate=True),
            "dtype": lambda body, path: DTYPES[body],
            "scalar": lambda body, path: _read_scalar(body),
        }

    def decode(self, node: object, path: Path) -> object:
        self._num_nodes += 1
        if len(path) > MAX_DEPTH or self._num_nodes > MAX_NODES:
            raise StateError(f"skeleton nests deeper than {MAX_DEPTH} or holds more than {MAX_NODES} values")
        if node is None or isinstance(node, bool | int | float | str):
            return node
        if isinstance(node, list):
            return self._items(node, path)
        tag, body = next(iter(node.items())) if isinstance(node, dict) and len(node) == 1 else (None, None)
        reader = self._readers.get(tag) if isinstance(tag, str) else None
        if reader is None:
            raise StateError(
                f"skeleton at {show_path(path)}: {reprlib.repr(node)} is not a node of a state tree"
            )
        try:
            return reader(body, path)
        except _MALFORMED as error:
            raise StateError(
                f"skeleton at {show_path(path)}: bad {tag}: {type(error).__name__}: {str(error)[:80]}"
            ) from error

    def _items(self, body: object, path: Path) -> list[Any]:
        if not isinstance(body, list):
            raise TypeError(f"expected an array, got {type(body).__name__}")
        return [self.decode(item, (*path, i)) for i, item in enumerate(body)]

    def _mapping(self, body: object, path: Path) -> dict[Any, Any]:
        result: dict[Any, Any] = {}
        for pair in body if isinstance(body, list) else [None]:
            if not isinstance(pair, list) or len(pair) != 2:
                raise TypeError("expected an array of [key, value]")
            key = self.decode(pair[0], (*path, "key"))
            if not _is_key(key) or key in result:
                raise ValueError(f"bad or repeated key {str(key)[:40]!r}")
            result[key] = self.decode(pair[1], (*path, key))
        return result

    def _tensor(self, index: object) -> torch.Tensor:
        if type(index) is not int or not 0 <= index < len(self._tensors):
            raise IndexError(f"tensor {str(index)[:40]} of {len(self._tensors)}")
        return self._tensors[index]


def _is_key(key: object) -> bool:
    if type(key) is tuple:
        return all(_is_key(part) for part in key)
    return key is None or isinstance(key, bool | int | float | str | bytes | np.generic | torch.dtype)


def _read_int(text: str) -> int:
    if len(text) > MAX_INT_DIGITS:
        raise ValueError(f"integer of {len(text)} digits")
    return int(text, 16)


def _read_scalar(body: Any) -> object:
    dtype, raw = body
    if not _SCALAR_DTYPE.fullmatch(dtype):
        raise ValueError(f"numpy dtype {dtype!r}")
    (value,) = np.frombuffer(bytes.fromhex(raw), dtype=np.dtype(dtype))
    return value


def _pairs(node: object, tags: tuple[str, ...]) -> list[tuple[object, Any]]:
    body = next((node[tag] for tag in tags if tag in node), None) if isinstance(node, dict) else None
    if not isinstance(body, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in body):
        raise StateError(f"skeleton: {reprlib.repr(node)} is not a mapping")
    return [(pair[0], pair[1]) for pair in body]


def _sorted_pairs(value: Json) -> Json:
    if isinstance(value, list):
        return [_sorted_pairs(item) for item in value]
    if not isinstance(value, dict):
        return value
    ordered = {key: _sorted_pairs(item) for key, item in value.items()}
    for tag in ("dict", "counter"):
        pairs = ordered.get(tag)
        if isinstance(pairs, list):
            ordered[tag] = sorted(
                pairs, key=lambda pair: json.dumps(pair[0] if isinstance(pair, list) else pair)
            )
    return ordered
