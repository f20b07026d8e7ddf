"""The manifest: all that a reader needs to know about one checkpoint. Pure; strict about what it reads.

Built by `commit`, read by `catalog`, `reader`, `verify` and `export`. FORMAT.md describes the JSON. A manifest comes
from a store that others can write to: every key, number and slice in it is checked before anything is read or
allocated by it, and what is wrong is named. No pickle anywhere.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from typing import Any, Final

import torch

from everstep.checkpoint import strict_json as strict
from everstep.checkpoint.chunks import exact_cover
from everstep.checkpoint.errors import CheckpointDamaged
from everstep.checkpoint.names import tensor_names
from everstep.checkpoint.records import (
    MAX_CHUNKS,
    MAX_TENSORS,
    StoredChunk,
    StoredObject,
    TensorEntry,
    check_disjoint,
    chunk_from_json,
    chunks_as_json,
    incarnation_of,
    layout_of,
    split_object_key,
)
from everstep.checkpoint.state import MAX_TOTAL_BYTES, Layout
from everstep.checkpoint.strict_json import Malformed
from everstep.checkpoint.tree import Json, unflatten
from everstep.errors import StateError

FORMAT: Final = "everstep-checkpoint"
VERSION: Final = 1
MAX_MANIFEST_BYTES: Final = 512 << 20

_NUMPY: Final = {
    *["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"],
    *["float16", "float32", "float64", "complex64", "complex128"],
}
_STAND_IN: Final = (torch.empty(0, dtype=torch.bfloat16), torch.empty(0))
"""For a tensor whose dtype numpy has not, and has: what a skeleton can make of a tensor depends on that alone."""

_FIELDS: Final = {
    *["format", "version", "run", "step", "generation", "incarnation", "attempt", "created_s", "world_size"],
    *["config_digest", "skeleton", "tensors", "objects", "chunks", "user"],
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """One checkpoint. `parse` and `checked` give only consistent ones: every element of every tensor is in exactly
    one chunk, every chunk lies in its object."""

    run: str
    step: int
    generation: int
    incarnation: int
    """Of the controller that committed it."""
    attempt: str
    created_s: float
    """Wall time, seconds since the epoch."""
    world_size: int
    """Replicas of the generation. Says nothing about who can read it."""
    config_digest: str
    """What the run computes, as its owner digests it; free text."""
    skeleton: Json
    """The state tree around the tensors (`checkpoint.tree`)."""
    tensors: tuple[TensorEntry, ...]
    objects: tuple[StoredObject, ...]
    chunks: tuple[StoredChunk, ...]
    """Sorted by tensor and start."""
    user: dict[str, Json]
    """Data ledger, metrics and the like: what JSON holds."""

    @property
    def total_bytes(self) -> int:
        return sum(entry.nbytes for entry in self.tensors)

    def layout(self) -> Layout:
        """Layout of the state: for buffers, and for `RegisteredState`."""
        return layout_of(self.tensors, self.skeleton)

    def as_json(self) -> dict[str, Json]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "run": self.run,
            "step": self.step,
            "generation": self.generation,
            "incarnation": self.incarnation,
            "attempt": self.attempt,
            "created_s": self.created_s,
            "world_size": self.world_size,
            "config_digest": self.config_digest,
            "skeleton": self.skeleton,
            "tensors": [entry.as_json() for entry in self.tensors],
            "objects": [held.as_json() for held in self.objects],
            "chunks": chunks_as_json(self.chunks, [held.key for held in self.objects]),
            "user": self.user,
        }

    def to_bytes(self) -> bytes:
        """The JSON; equal manifests give equal bytes. Raises StateError if it would be too large to be read."""
        raw = strict.dumps(self.as_json())
        if len(raw) > MAX_MANIFEST_BYTES:
            raise StateError(
                f"a manifest of {len(raw)} bytes; use larger chunks, at most {MAX_MANIFEST_BYTES}"
            )
        return raw

    def checked(self) -> Manifest:
        """Itself. Raises Malformed unless it is consistent."""
        if incarnation_of(self.attempt) > self.incarnation:
            raise Malformed(f"attempt {self.attempt} is newer than incarnation {self.incarnation}")
        names = [entry.name for entry in self.tensors]
        if len(set(names)) != len(names):
            raise Malformed("two tensors have one name")
        if self.total_bytes > MAX_TOTAL_BYTES:
            raise Malformed(f"{self.total_bytes} bytes of tensors, at most {MAX_TOTAL_BYTES}")
        keys = [held.key for held in self.objects]
        if len(set(keys)) != len(keys):
            raise Malformed("the same object twice")
        for held in self.objects:
            step, _ = split_object_key(held.key, "objects")
            if step > self.step:
                raise Malformed(f"object {held.key} is of a later step than {self.step}")
        if unused := set(keys) - {chunk.object for chunk in self.chunks}:
            raise Malformed(f"no chunk is in object {min(unused)}")
        try:
            tensor_names(self.skeleton, len(self.tensors))
            unflatten(self.skeleton, [_STAND_IN[entry.dtype in _NUMPY] for entry in self.tensors])
        except StateError as error:
            raise Malformed(str(error)) from error
        places = [(chunk.tensor, chunk.start) for chunk in self.chunks]
        if places != sorted(places):
            raise Malformed("chunks are not sorted by tensor and start")
        self._check_cover()
        check_disjoint(self.chunks)
        return self

    def _check_cover(self) -> None:
        boxes: dict[int, list[tuple[tuple[int, ...], tuple[int, ...]]]] = defaultdict(list)
        for chunk in self.chunks:
            boxes[chunk.tensor].append((chunk.start, chunk.shape))
        for number, entry in enumerate(self.tensors):
            wrong = exact_cover(entry.memory_shape, boxes[number])
            if wrong is not None:
                raise Malformed(f"tensor {entry.name!r}: {wrong}")

    @classmethod
    def parse(cls, raw: bytes | memoryview, where: str) -> Manifest:
        """Read the JSON of the object `where`. Raises CheckpointDamaged, naming it and what is wrong."""
        try:
            return cls._parse(strict.loads(raw, max_bytes=MAX_MANIFEST_BYTES)).checked()
        except Malformed as error:
            raise CheckpointDamaged(f"{where}: {error}") from error

    @classmethod
    def _parse(cls, raw: Any) -> Manifest:
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise Malformed(f"not a manifest: its format is not {FORMAT!r}")
        if type(raw.get("version")) is not int or raw["version"] != VERSION:
            raise Malformed(
                f"version {str(raw.get('version'))[:20]}, this reads version {VERSION}; upgrade everstep"
            )
        known = strict.fields(raw, _FIELDS, "manifest")
        tensors = [
            TensorEntry.from_json(item, f"tensors[{number}]")
            for number, item in enumerate(strict.items(known["tensors"], "tensors", max_length=MAX_TENSORS))
        ]
        objects = [
            StoredObject.from_json(item, f"objects[{number}]")
            for number, item in enumerate(strict.items(known["objects"], "objects", max_length=MAX_TENSORS))
        ]
        chunks = [
            chunk_from_json(item, tensors, objects, f"chunks[{number}]")
            for number, item in enumerate(strict.items(known["chunks"], "chunks", max_length=MAX_CHUNKS))
        ]
        if not isinstance(known["user"], dict):
            raise Malformed("user: expected an object")
        return cls(
            run=strict.text(known["run"], "run"),
            step=strict.integer(known["step"], "step"),
            generation=strict.integer(known["generation"], "generation"),
            incarnation=strict.integer(known["incarnation"], "incarnation"),
            attempt=strict.text(known["attempt"], "attempt"),
            created_s=strict.number(known["created_s"], "created_s"),
            world_size=strict.integer(known["world_size"], "world_size", low=1),
            config_digest=strict.text(known["config_digest"], "config_digest"),
            skeleton=known["skeleton"],
            tensors=tuple(tensors),
            objects=tuple(objects),
            chunks=tuple(chunks),
            user=known["user"],
        )
