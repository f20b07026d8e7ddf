"""What is state: capture it without copies, describe it, compare it, and put it back.

Called by the replica (capture at a commit boundary, load after a fetch), by the state transfer (layout, buffers) and
by whatever writes checkpoints. Knows objects with `state_dict`/`load_state_dict` and nothing about sockets, processes
or storage. It never decides *when* state may be read: a snapshot refers to live memory and is valid only until the
next optimizer step or forward pass changes it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from typing import Any, Final, cast

import torch

from everstep.checkpoint import hashing
from everstep.checkpoint.tree import (
    DTYPES,
    Json,
    canonical_json,
    dtype_name,
    flatten,
    top_tensors,
    unflatten,
)
from everstep.errors import StateError, StateMismatch

MAX_TOTAL_BYTES: Final = 1 << 50
MAX_DIMS: Final = 64


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a layout: `order` is its dimensions from slowest to fastest in memory."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    order: tuple[int, ...]
    offset: int
    """Where its bytes start in the byte space, a multiple of 64."""

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def empty(self, *, device: str = "cpu", pin_memory: bool = False) -> torch.Tensor:
        strides = hashing.strides_of(self.shape, self.order)
        return torch.empty_strided(
            self.shape, strides, dtype=self.dtype, device=device, pin_memory=pin_memory
        )

    def fits(self, tensor: torch.Tensor) -> bool:
        """Whether the memory of `tensor` is laid out as this spec says."""
        if tensor.dtype != self.dtype or tuple(tensor.shape) != self.shape:
            return False
        # The stride of a dimension of size 1 means nothing.
        strides = zip(tensor.stride(), hashing.strides_of(self.shape, self.order), self.shape, strict=True)
        return all(here == stated or size == 1 for here, stated, size in strides)

    def as_json(self) -> dict[str, Json]:
        spec: dict[str, Json] = {
            "dtype": dtype_name(self.dtype),
            "shape": list(self.shape),
            "nbytes": self.nbytes,
            "offset": self.offset,
        }
        if self.order != tuple(range(len(self.shape))):
            spec["order"] = list(self.order)
        return spec


@dataclass(frozen=True, slots=True)
class Layout:
    """Where each tensor of a snapshot lies in one byte space, and the skeleton around them."""

    tensors: tuple[TensorSpec, ...]
    skeleton: Json
    total_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "total_bytes", _end_of(self.tensors[-1]) if self.tensors else 0)

    @classmethod
    def of(cls, skeleton: Json, tensors: Iterable[torch.Tensor]) -> Layout:
        specs: list[TensorSpec] = []
        for tensor in tensors:
            order = hashing.memory_order(tensor)
            assert order is not None  # snapshots hold dense tensors only
            offset = _next_offset(specs)
            specs.append(TensorSpec(tensor.dtype, tuple(tensor.shape), order, offset))
        return cls(tuple(specs), skeleton)

    @property
    def offsets(self) -> list[int]:
        return [spec.offset for spec in self.tensors]

    def as_json(self) -> dict[str, Json]:
        return {
            "tensors": [spec.as_json() for spec in self.tensors],
            "total_bytes": self.total_bytes,
            "skeleton": self.skeleton,
        }

    def fingerprint(self) -> str:
        """16 hex digits, equal for layouts of equal trees (filled in whatever order) and equal memory orders."""
        return f"{hashing.hash64([memoryview(canonical_json(self.as_json()))]):016x}"

    @classmethod
    def from_json(cls, raw: object) -> Layout:
        """Parse a layout from outside. Raises StateError unless every number in it follows from the shapes."""
        specs: list[TensorSpec] = []
        try:
            entries, total_bytes, skeleton = (
                cast(Any, raw)[key] for key in ("tensors", "total_bytes", "skeleton")
            )
            for entry in entries:
                specs.append(_read_spec(entry, _next_offset(specs)))
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            raise StateError(
                f"layout, tensor {len(specs)}: {type(error).__name__}: {str(error)[:200]}"
            ) from error
        layout = cls(tuple(specs), skeleton)
        if type(total_bytes) is not int or total_bytes != layout.total_bytes or total_bytes > MAX_TOTAL_BYTES:
            raise StateError(
                f"layout: total_bytes is {str(total_bytes)[:40]}, the tensors take {layout.total_bytes}"
            )
        return layout


@dataclass(frozen=True, slots=True)
class Snapshot:
    """State after one step: a skeleton and references to the live tensors (dense, detached, any device)."""

    skeleton: Json
    tensors: tuple[torch.Tensor, ...]

    def plan(self) -> Layout:
        return Layout.of(self.skeleton, self.tensors)

    def layout(self) -> dict[str, Json]:
        """JSON-able: `tensors` (dtype, shape, nbytes, offset, order if not row-major), `total_bytes`, `skeleton`."""
        return self.plan().as_json()

    def host_tensors(self) -> tuple[torch.Tensor, ...]:
        """The tensors in CPU memory: CPU tensors as they are, others copied through pinned memory."""
        staged = tuple(_to_host(tensor) for tensor in self.tensors)
        if any(tensor.is_cuda for tensor in self.tensors):
            torch.cuda.synchronize()
        return staged


class RegisteredState:
    """The named objects that make up a replica's state.

    Not thread-safe: capture and load belong to the training thread. `receive_buffers` may hand out the live memory of
    modules, so from then until `load` has returned the replica must not compute with them, and if a transfer fails in
    between, its modules are torn: such a replica holds no state, serves none and never votes. Only a joiner, or a
    replica that already counts as lost, may receive.
    """

    def __init__(self, objects: Mapping[str, object]) -> None:
        for name, value in objects.items():
            if not all(
                callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")
            ):
                raise StateError(
                    f"registered object {name!r} is a {type(value)} without state_dict and load_state_dict; "
                    "give it both methods, or wrap the values in a small class that has them"
                )
        self._objects: dict[str, Any] = dict(objects)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._objects)

    def capture(self, overrides: Mapping[str, Mapping[str, torch.Tensor]] | None = None) -> Snapshot:
        """References to everything that is state now; nothing that is dense is copied.

        `overrides[name][key]` stands in for that entry of the object's state_dict, and for entries that share its
        memory: module buffers as they were before a forward pass changed them. Non-persistent buffers are not state,
        and are skipped. Raises StateError for a value that cannot be carried, or an unknown override.
        """
        tree = {name: value.state_dict() for name, value in self._objects.items()}
        for name, entries in (overrides or {}).items():
            tree[name] = self._override(name, tree.get(name), entries)
        skeleton, tensors = flatten(tree)
        return Snapshot(skeleton, tuple(hashing.dense(tensor) for tensor in tensors))

    def _override(self, name: str, state: Any, entries: Mapping[str, torch.Tensor]) -> Any:
        replaced = state.copy() if isinstance(state, dict) else {}
        module = self._objects.get(name)
        skipped = dict(module.named_buffers()).keys() if isinstance(module, torch.nn.Module) else set()
        for key, tensor in entries.items():
            if key not in replaced and key not in skipped:
                raise StateError(f"override of {name!r}: its state_dict has no entry {key!r}")
            if key in replaced:
                shared = [other for other, value in state.items() if _same_memory(value, state[key])]
                replaced.update(dict.fromkeys([key, *shared], tensor))
        return replaced

    def signature(self) -> list[str]:
        """What replicas compare before they train together: 'model.fc.weight float32 [10, 4]', 'optimizer AdamW'.

        One line per object and per tensor of a module's state_dict, sorted. State that optimizers create lazily is
        not in it.
        """
        lines = [f"{name} {type(value).__name__}" for name, value in self._objects.items()]
        for name, module in self._modules():
            for key, value in module.state_dict().items():
                if isinstance(value, torch.Tensor):
                    lines.append(f"{name}.{key} {dtype_name(value.dtype)} {list(value.shape)}")
        return sorted(lines)

    @staticmethod
    def digest(snapshot: Snapshot) -> str:
        """xxh3_128 over skeleton, dtypes, shapes and every byte: equal if and only if the state is, bit for bit."""
        kinds: Json = [[dtype_name(tensor.dtype), list(tensor.shape)] for tensor in snapshot.tensors]
        head = canonical_json({"skeleton": snapshot.skeleton, "tensors": kinds})
        return hashing.hash128(head, snapshot.host_tensors())

    def receive_buffers(
        self, layout: object, *, reuse: Sequence[torch.Tensor] = (), touch_pages: bool = True
    ) -> list[torch.Tensor]:
        """CPU tensors to receive the bytes of `layout` into, one per tensor.

        The live memory of a registered module's parameter or buffer where it is CPU memory of the same dtype, shape
        and order; else a tensor of `reuse` (from an earlier call) that fits; else a new one, its pages touched unless
        `touch_pages` is false. Raises StateMismatch if a module here is not the one in the layout, StateError if
        the layout is malformed.
        """
        plan = layout if isinstance(layout, Layout) else Layout.from_json(layout)
        self._check(plan)
        live = self._live_targets(plan)
        live_memory = {tensor.data_ptr() for tensor in live.values()}
        spare = [tensor for tensor in reuse if tensor.numel() and tensor.data_ptr() not in live_memory]
        pool: dict[object, list[torch.Tensor]] = {}
        for tensor in spare:
            pool.setdefault((tensor.dtype, tensor.shape, tensor.stride()), []).append(tensor)
        pin = torch.cuda.is_available() and any(
            tensor.is_cuda
            for _, module in self._modules()
            for tensor in module.state_dict().values()
            if isinstance(tensor, torch.Tensor)
        )
        buffers: list[torch.Tensor] = []
        for number, spec in enumerate(plan.tensors):
            fitting = pool.get((spec.dtype, spec.shape, hashing.strides_of(spec.shape, spec.order)))
            if number in live:
                buffers.append(live[number])
            elif fitting:
                buffers.append(fitting.pop())
            else:
                buffers.append(_new_buffer(spec, pin, touch_pages))
        return buffers

    def load(self, skeleton: Json, tensors: Sequence[torch.Tensor]) -> None:
        """Put a state into the live objects. `tensors` become the property of the optimizers: do not reuse them.

        Everything that can be checked is checked before anything is touched: names, module keys, shapes and dtypes,
        parameter groups. Raises StateMismatch or StateError then. An object whose own load_state_dict fails halfway
        leaves the state torn (see the class): that is a StateError too, and the replica must not go on with it.
        """
        self._check(Layout.of(skeleton, tensors))
        tree = unflatten(skeleton, tensors)
        for name, value in self._objects.items():
            if isinstance(value, torch.optim.Optimizer):
                _check_groups(name, value, tree[name])
        # Modules first: what is received in place is theirs already, and other objects may refer to their tensors.
        for name, value in sorted(
            self._objects.items(), key=lambda item: not isinstance(item[1], torch.nn.Module)
        ):
            try:
                _load_one(value, tree[name])
            except (RuntimeError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
                raise StateError(
                    f"{name!r} ({type(value).__name__}) refused the state it was given: {error}. "
                    "The state of this replica is mixed now and must not be used."
                ) from error

    def _modules(self) -> list[tuple[str, torch.nn.Module]]:
        return [(name, value) for name, value in self._objects.items() if isinstance(value, torch.nn.Module)]

    def _check(self, plan: Layout) -> None:
        there = top_tensors(plan.skeleton)
        if there.keys() != self._objects.keys():
            raise StateMismatch(
                f"the state holds the objects {sorted(there)}, registered here are {sorted(self._objects)}; "
                "every replica must run the same script and register the same names"
            )
        for name, module in self._modules():
            here = {
                key: value for key, value in module.state_dict().items() if isinstance(value, torch.Tensor)
            }
            if odd := here.keys() ^ there[name].keys():
                raise StateMismatch(f"module {name!r}: only one side has {sorted(odd)[:5]}")
            for key, number in there[name].items():
                if not 0 <= number < len(plan.tensors):
                    raise StateError(
                        f"module {name!r}: {key} refers to tensor {number} of {len(plan.tensors)}"
                    )
                spec, tensor = plan.tensors[number], here[key]
                if spec.dtype != tensor.dtype or spec.shape != tuple(tensor.shape):
                    raise StateMismatch(
                        f"module {name!r}: {key} is {dtype_name(spec.dtype)} {list(spec.shape)} in the state, "
                        f"{dtype_name(tensor.dtype)} {list(tensor.shape)} here"
                    )

    def _live_targets(self, plan: Layout) -> dict[int, torch.Tensor]:
        """Live module tensors that can receive in place, by tensor number; no two of them share a byte."""
        there = top_tensors(plan.skeleton)
        targets: dict[int, torch.Tensor] = {}
        taken: list[tuple[int, int]] = []
        for name, module in self._modules():
            here = module.state_dict()
            for key, number in there[name].items():
                tensor = here[key].detach()
                start, end = tensor.data_ptr(), tensor.data_ptr() + plan.tensors[number].nbytes
                if number in targets or tensor.device.type != "cpu" or start == end:
                    continue
                if plan.tensors[number].fits(tensor):
                    targets[number] = tensor
                    taken.append((start, end))
        # Weights tied here but not at the source would receive two different contents into one memory.
        taken.sort()
        overlap = any(start < end for (_, end), (start, _) in pairwise(taken))
        return {} if overlap else targets


def _end_of(spec: TensorSpec) -> int:
    return spec.offset + spec.nbytes


def _next_offset(specs: Sequence[TensorSpec]) -> int:
    return -(-_end_of(specs[-1]) // hashing.ALIGN_BYTES) * hashing.ALIGN_BYTES if specs else 0


def _read_spec(entry: Any, offset: int) -> TensorSpec:
    shape, order = entry["shape"], entry.get("order")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS:
        raise ValueError(f"shape {str(shape)[:80]}")
    if not all(type(size) is int and 0 <= size <= MAX_TOTAL_BYTES for size in shape):
        raise ValueError(f"shape {str(shape)[:80]}")
    dims = list(range(len(shape)))
    order = dims if order is None else order
    if not isinstance(order, list) or not all(type(dim) is int for dim in order) or sorted(order) != dims:
        raise ValueError(f"order {str(order)[:80]} of {len(shape)} dimensions")
    spec = TensorSpec(DTYPES[entry["dtype"]], tuple(shape), tuple(order), offset)
    if entry["nbytes"] != spec.nbytes or entry["offset"] != offset or _end_of(spec) > MAX_TOTAL_BYTES:
        raise ValueError(
            f"{spec.nbytes} bytes at {offset} by its shape, {entry['nbytes']} at {entry['offset']} stated"
        )
    return spec


def _same_memory(left: Any, right: Any) -> bool:
    if not isinstance(left, torch.Tensor) or not isinstance(right, torch.Tensor) or not left.numel():
        return False
    return left.data_ptr() == right.data_ptr() and left.shape == right.shape


def _to_host(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_cuda:
        return torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    return tensor.cpu()


def _new_buffer(spec: TensorSpec, pin_memory: bool, touch_pages: bool) -> torch.Tensor:
    try:
        buffer = spec.empty(pin_memory=pin_memory)
    except RuntimeError as error:
        raise StateError(f"no memory for a tensor of {spec.nbytes} bytes: {error}") from error
    if touch_pages:
        hashing.prefault(buffer)
    return buffer


def _check_groups(name: str, optimizer: torch.optim.Optimizer, state: Any) -> None:
    here = [len(group["params"]) for group in optimizer.param_groups]
    try:
        there = [len(group["params"]) for group in state["param_groups"]]
    except (TypeError, KeyError) as error:
        raise StateMismatch(
            f"optimizer {name!r}: the state is not one of an optimizer ({error!r})"
        ) from error
    if here != there:
        raise StateMismatch(f"optimizer {name!r}: parameters per group are {there} in the state, {here} here")


def _load_one(value: Any, state: Any) -> None:
    if isinstance(value, torch.nn.Module):
        incoming = OrderedDict(state)
        # Versions of module classes, which torch keeps beside the entries; both sides run the same code.
        incoming._metadata = getattr(value.state_dict(), "_metadata", None)  # type: ignore[attr-defined]
        # Where the bytes were received in place, torch sees source and target coincide and copies nothing.
        value.load_state_dict(incoming)
    elif isinstance(value, torch.optim.Optimizer):
        value.load_state_dict(state)
        _restore_exactly(value, state)
    else:
        value.load_state_dict(state)


def _restore_exactly(optimizer: torch.optim.Optimizer, state: Any) -> None:
    """Undo what Optimizer.load_state_dict (torch 2.13) changes: it casts floating state to the parameter's dtype, so
    float32 averages of bfloat16 weights lose bits, and it rebuilds text from its letters, which garbles it."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    by_number = dict(zip(numbers, params, strict=True))
    for number, entries in state["state"].items():
        if number not in by_number or not isinstance(entries, dict):
            continue
        loaded = optimizer.state[by_number[number]]
        for key, value in entries.items():
            current = loaded.get(key)
            if isinstance(value, str | bytes):
                loaded[key] = value
            elif (
                key == "step" or not isinstance(value, torch.Tensor) or not isinstance(current, torch.Tensor)
            ):
                continue  # torch keeps what is not floating state; fused optimizers want their own kind of step
            elif current.dtype != value.dtype:
                loaded[key] = value.to(current.device)
