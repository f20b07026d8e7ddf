"""Small states, and checkpoints of them written by several replicas into a store."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from everstep.checkpoint import chunks, commit, part, records
from everstep.checkpoint.commit import begin
from everstep.checkpoint.hashing import dense
from everstep.checkpoint.manifest import Manifest
from everstep.checkpoint.part import PartIndex, PartSpec
from everstep.checkpoint.state import RegisteredState, Snapshot
from everstep.checkpoint.store import Retry, Store, Writer, open_store
from everstep.checkpoint.tree import Json, flatten

RUN = "trial"
NO_WAIT = Retry(sleep=lambda delay_s: None)


def snapshot_of(tree: Any) -> Snapshot:
    skeleton, tensors = flatten(tree)
    return Snapshot(skeleton, tuple(dense(tensor) for tensor in tensors))


def trained(seed: int = 0, width: int = 6) -> tuple[nn.Module, torch.optim.Optimizer, RegisteredState]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last), nn.Flatten())
    model.append(nn.Linear(12, width)).append(nn.BatchNorm1d(width))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(5, 2, 3, 3)).sum().backward()
    optimizer.step()
    return model, optimizer, RegisteredState({"model": model, "optimizer": optimizer})


def odd_state() -> dict[str, Any]:
    """One tensor of many a kind: empty, scalar, transposed, tied, of every size of item."""
    tied = torch.arange(7, dtype=torch.int16)
    return {
        "a": {"empty": torch.empty(0, 3), "scalar": torch.tensor(2.5, dtype=torch.float64), "tied": tied},
        "b": {"transposed": torch.arange(60.0).reshape(5, 12).t(), "tied": tied, 3: [torch.ones(2) * 1j]},
        "c": {"wide": torch.arange(6.0).to(torch.complex128), "half": torch.ones(9, dtype=torch.bfloat16)},
        "d": {"flags": torch.tensor([True, False, True]), "none": None, "rate": 0.1, "nan": float("nan")},
    }


def write_parts(
    store: Store,
    snapshot: Snapshot,
    step: int,
    *,
    world_size: int = 3,
    attempt: str = "i0-0",
    chunk_bytes: int = 128,
    previous: Manifest | None = None,
    generation: int = 1,
    ranks: list[int] | None = None,
) -> list[PartIndex]:
    layout = snapshot.plan()
    tensors = table(snapshot)
    view_of = part.views_of(layout, snapshot.tensors)
    shares = chunks.divide(chunks.cut(layout, chunk_bytes), world_size)
    return [
        part.write_part(
            store,
            PartSpec(step=step, generation=generation, attempt=attempt, rank=rank, tensors=tensors),
            shares[rank],
            view_of,
            previous=previous,
        )
        for rank in (range(world_size) if ranks is None else ranks)
    ]


def table(snapshot: Snapshot) -> tuple[records.TensorEntry, ...]:
    layout = snapshot.plan()
    return records.table_of(layout)


def commit_parts(
    store: Store,
    snapshot: Snapshot,
    step: int,
    parts: list[PartIndex],
    *,
    attempt: str = "i0-0",
    incarnation: int = 0,
    user: dict[str, Json] | None = None,
    generation: int = 1,
) -> Manifest:
    return commit.commit(
        store,
        parts,
        run=RUN,
        step=step,
        generation=generation,
        incarnation=incarnation,
        attempt=attempt,
        tensors=table(snapshot),
        skeleton=snapshot.skeleton,
        world_size=len(parts) or 1,
        created_s=1000.0 + step,
        user=user,
    )


def save(store: Store, state: Any, step: int, *, attempt: str = "i0-0", **options: Any) -> Manifest:
    """A whole checkpoint. `state` is a RegisteredState, or a tree."""
    snapshot = state.capture() if isinstance(state, RegisteredState) else snapshot_of(state)
    parts = write_parts(store, snapshot, step, attempt=attempt, **options)
    return commit_parts(
        store, snapshot, step, parts, attempt=attempt, incarnation=records.incarnation_of(attempt)
    )


def new_store(tmp_path: Any) -> Store:
    store = open_store(str(tmp_path / "run"), retry=NO_WAIT)
    begin(store, 0, "first")
    return store


class Killed(BaseException):
    """The process is gone: nothing after this does anything."""


class Mortal(Store):
    """A store whose process is killed at its n-th operation, before it or just after it took effect."""

    def __init__(self, inner: Store, dies_at: int, *, after: bool = False) -> None:
        super().__init__(inner.url, NO_WAIT)
        self.inner, self.dies_at, self.after, self.count = inner, dies_at, after, 0

    def tick(self, operation: Any) -> Any:
        number = self.count
        self.count += 1
        if number > self.dies_at or (number == self.dies_at and not self.after):
            raise Killed
        result = operation()
        if number == self.dies_at:
            raise Killed
        return result

    def _put(self, key: str, data: bytes | memoryview) -> None:
        self.tick(lambda: self.inner._put(key, data))

    def _create(self, key: str, data: bytes) -> None:
        self.tick(lambda: self.inner._create(key, data))

    def _writer(self, key: str, total_bytes: int) -> Writer:
        return MortalWriter(self, self.tick(lambda: self.inner._writer(key, total_bytes)))

    def _read_into(self, key: str, offset: int, into: memoryview) -> None:
        self.tick(lambda: self.inner._read_into(key, offset, into))

    def _get(self, key: str, max_bytes: int) -> bytes:
        return self.tick(lambda: self.inner._get(key, max_bytes))  # type: ignore[no-any-return]

    def _size(self, key: str) -> int:
        return self.tick(lambda: self.inner._size(key))  # type: ignore[no-any-return]

    def _list(self, prefix: str) -> Any:
        return self.tick(lambda: self.inner._list(prefix))

    def _delete(self, keys: list[str]) -> None:
        for key in keys:  # one by one, so that a kill may come between any two
            self.tick(lambda key=key: self.inner._delete([key]))  # type: ignore[misc]

    def _unfinished(self) -> Any:
        return self.tick(lambda: self.inner._unfinished())

    def _drop(self, upload: Any) -> None:
        self.tick(lambda: self.inner._drop(upload))


class MortalWriter(Writer):
    def __init__(self, store: Mortal, inner: Writer) -> None:
        self.store, self.inner = store, inner

    def write(self, data: memoryview) -> None:
        self.store.tick(lambda: self.inner.write(data))

    def commit(self) -> None:
        self.store.tick(self.inner.commit)

    def abort(self) -> None:
        if self.store.count <= self.store.dies_at:
            self.inner.abort()
