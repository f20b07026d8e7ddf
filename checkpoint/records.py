"""What parts and manifests have in common: tensors, stored chunks and object keys, and their JSON.

Called by `part`, `manifest`, `commit`, `catalog` and `reader`. Pure. Everything here can be built from a foreign
record only by a parser that checks it, and raises Malformed (`strict_json`) by name.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Any, Final

from everstep.checkpoint import strict_json as strict
from everstep.checkpoint.hashing import ALIGN_BYTES, hash64
from everstep.checkpoint.names import MAX_NAME_LENGTH, tensor_names
from everstep.checkpoint.safetensors_file import MAX_HEADER_BYTES
from everstep.checkpoint.state import MAX_DIMS, MAX_TOTAL_BYTES, Layout
from everstep.checkpoint.strict_json import Malformed
from everstep.checkpoint.tree import DTYPES, Json, dtype_name

BLOCK_BYTES: Final = 1 << 20
"""Bytes that one block hash covers, counted from the start of the chunk: the unit of verified reading."""
MAX_CHUNK_BYTES: Final = 256 << 20
"""Largest chunk that is read; bounds the memory a reader needs."""
MAX_CHUNKS: Final = 4_000_000
MAX_TENSORS: Final = 1_000_000
MAX_OBJECT_BYTES: Final = 5 << 40

_ATTEMPT: Final = re.compile(r"i(0|[1-9][0-9]{0,14})-(0|[1-9][0-9]{0,14})")
_STEP_KEY: Final = re.compile(
    r"steps/(0|[1-9][0-9]{0,14})/(i(?:0|[1-9][0-9]{0,14})-(?:0|[1-9][0-9]{0,14}))/([A-Za-z0-9_\-][A-Za-z0-9_.\-]*)"
)
_PART_NAME: Final = re.compile(r"r[0-9]{4,9}\.safetensors")


def attempt_name(incarnation: int, number: int) -> str:
    """Name of an attempt in a generation (`number`) that the controller of `incarnation` has formed; with the step it
    is unique in the run."""
    return f"i{incarnation}-{number}"


def incarnation_of(attempt: str) -> int:
    """The incarnation in an attempt's name. Raises Malformed."""
    match = _ATTEMPT.fullmatch(attempt)
    if match is None:
        raise Malformed(f"{attempt[:60]!r} is not the name of an attempt, like i3-17")
    return int(match[1])


def attempt_folder(step: int, attempt: str) -> str:
    """`steps/7/i1-0/`."""
    return f"steps/{step}/{attempt}/"


def part_key(step: int, attempt: str, rank: int) -> str:
    """Key of the object that replica `rank` writes in one attempt; never written twice."""
    return f"{attempt_folder(step, attempt)}r{rank:04d}.safetensors"


def manifest_key(step: int, attempt: str) -> str:
    """Key of the manifest of one attempt."""
    return f"{attempt_folder(step, attempt)}manifest.json"


def split_step_key(key: str) -> tuple[int, str, str] | None:
    """Step, attempt and name of an object that some attempt wrote; None for any other key."""
    match = _STEP_KEY.fullmatch(key)
    return (int(match[1]), match[2], match[3]) if match else None


def split_object_key(key: Any, what: str) -> tuple[int, str]:
    """Step and attempt of a part's key. Raises Malformed for any other key: absolute, with `..`, elsewhere."""
    found = split_step_key(key) if isinstance(key, str) else None
    if found is None or not _PART_NAME.fullmatch(found[2]):
        raise Malformed(f"{what}: {str(key)[:100]!r} is not the key of a part below steps/")
    return found[:2]


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """One tensor of the state: its name, and its dtype, shape and memory order as in `TensorSpec`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.itemsize

    @property
    def memory_shape(self) -> tuple[int, ...]:
        return tuple(self.shape[dim] for dim in self.order)

    def as_json(self) -> dict[str, Json]:
        return {"name": self.name, "dtype": self.dtype, "shape": list(self.shape), "order": list(self.order)}

    @classmethod
    def from_json(cls, raw: Any, what: str) -> TensorEntry:
        known = strict.fields(raw, {"name", "dtype", "shape", "order"}, what)
        name = strict.text(known["name"], f"{what}.name", max_length=MAX_NAME_LENGTH)
        dtype = strict.text(known["dtype"], f"{what}.dtype")
        if not name or dtype not in DTYPES:
            raise Malformed(f"{what}: no name, or unknown dtype {dtype[:40]!r}")
        shape = strict.index(known["shape"], f"{what}.shape", max_dims=MAX_DIMS)
        order = strict.index(known["order"], f"{what}.order", max_dims=MAX_DIMS)
        if sorted(order) != list(range(len(shape))):
            raise Malformed(f"{what}: order {list(order)} of {len(shape)} dimensions")
        entry = cls(name, dtype, shape, order)
        # Also a tensor without elements needs strides that fit into an integer of the machine.
        if prod(max(size, 1) for size in shape) * entry.itemsize > MAX_TOTAL_BYTES:
            raise Malformed(f"{what}: shape {list(shape)}, at most {MAX_TOTAL_BYTES} bytes are read")
        return entry


@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A chunk (start and shape in memory order) and where its bytes are."""

    tensor: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    nbytes: int
    object: str
    """Key of the part that holds it: of this attempt, or of an older one if it has not changed since."""
    offset: int
    """First byte within the object."""
    hash: str
    """xxh3_128 of its bytes, 32 hex digits."""
    blocks: tuple[str, ...]
    """xxh3_64 of each BLOCK_BYTES of its bytes, the last one shorter, 16 hex digits each."""


@dataclass(frozen=True, slots=True)
class StoredObject:
    """A part: its size, and the xxh3_64 of everything before its data."""

    key: str
    size: int
    header_bytes: int
    header_hash: str

    def as_json(self) -> dict[str, Json]:
        return {
            "key": self.key,
            "size": self.size,
            "header_bytes": self.header_bytes,
            "header_hash": self.header_hash,
        }

    @classmethod
    def from_json(cls, raw: Any, what: str) -> StoredObject:
        known = strict.fields(raw, {"key", "size", "header_bytes", "header_hash"}, what)
        split_object_key(known["key"], what)
        size = strict.integer(known["size"], f"{what}.size", low=8, high=MAX_OBJECT_BYTES)
        # A reader allocates so many bytes.
        most = min(size, 8 + MAX_HEADER_BYTES)
        head = strict.integer(known["header_bytes"], f"{what}.header_bytes", low=8, high=most)
        return cls(known["key"], size, head, strict.hex_text(known["header_hash"], f"{what}.header_hash", 16))


def table_of(layout: Layout) -> tuple[TensorEntry, ...]:
    """The tensors of a layout under their names (`names.tensor_names`). Raises StateError for a malformed skeleton."""
    names = tensor_names(layout.skeleton, len(layout.tensors))
    return tuple(
        TensorEntry(name, dtype_name(spec.dtype), spec.shape, spec.order)
        for name, spec in zip(names, layout.tensors, strict=True)
    )


def layout_of(tensors: Sequence[TensorEntry], skeleton: Json) -> Layout:
    """The layout again, with the offsets that `Layout.of` gives."""
    offset, specs = 0, []
    end = 0
    for entry in tensors:
        spec: dict[str, Json] = {
            "dtype": entry.dtype,
            "shape": list(entry.shape),
            "nbytes": entry.nbytes,
            "offset": offset,
            "order": list(entry.order),
        }
        specs.append(spec)
        end = offset + entry.nbytes
        offset = -(-end // ALIGN_BYTES) * ALIGN_BYTES
    return Layout.from_json({"tensors": specs, "total_bytes": end, "skeleton": skeleton})


def table_hash(tensors: Sequence[TensorEntry]) -> str:
    """16 hex digits that parts of one attempt must share: they cut the same tensors."""
    return f"{hash64([memoryview(strict.dumps([entry.as_json() for entry in tensors]))]):016x}"


def num_blocks(nbytes: int) -> int:
    """Blocks of a chunk."""
    return -(-nbytes // BLOCK_BYTES)


def chunks_as_json(chunks: Sequence[StoredChunk], objects: Sequence[str]) -> list[Json]:
    """One array per chunk: [tensor, start, shape, object number, offset, hash, block hashes joined]."""
    numbers = {key: number for number, key in enumerate(objects)}
    return [
        [
            chunk.tensor,
            list(chunk.start),
            list(chunk.shape),
            numbers[chunk.object],
            chunk.offset,
            chunk.hash,
            "".join(chunk.blocks),
        ]
        for chunk in chunks
    ]


def chunk_from_json(
    raw: Any, tensors: Sequence[TensorEntry], objects: Sequence[StoredObject], what: str
) -> StoredChunk:
    """A chunk whose numbers all fit: tensor, slice, place in the object, blocks."""
    parts = strict.items(raw, what, max_length=7)
    if len(parts) != 7:
        raise Malformed(f"{what}: expected 7 values")
    tensor = strict.integer(parts[0], f"{what}.tensor", high=len(tensors) - 1)
    start, shape = strict.index(parts[1], f"{what}.start"), strict.index(parts[2], f"{what}.shape")
    entry = tensors[tensor]
    if len(start) != len(entry.shape) or len(shape) != len(entry.shape):
        raise Malformed(
            f"{what}: {len(start)} and {len(shape)} dimensions, {entry.name!r} has {len(entry.shape)}"
        )
    if any(n < 1 or a + n > whole for a, n, whole in zip(start, shape, entry.memory_shape, strict=True)):
        raise Malformed(f"{what}: slice {list(start)} + {list(shape)} does not lie in {entry.name!r}")
    nbytes = prod(shape) * entry.itemsize
    if nbytes > MAX_CHUNK_BYTES:
        raise Malformed(f"{what}: {nbytes} bytes, a chunk has at most {MAX_CHUNK_BYTES}")
    held = objects[strict.integer(parts[3], f"{what}.object", high=len(objects) - 1)]
    offset = strict.integer(
        parts[4], f"{what}.offset", low=held.header_bytes, high=max(held.size - nbytes, held.header_bytes)
    )
    if offset + nbytes > held.size:
        raise Malformed(f"{what}: bytes {offset} to {offset + nbytes} of {held.key}, which has {held.size}")
    digest = strict.hex_text(parts[5], f"{what}.hash", 32)
    blocks = strict.hex_text(parts[6], f"{what}.blocks", 16 * num_blocks(nbytes))
    hashes = tuple(blocks[i : i + 16] for i in range(0, len(blocks), 16))
    return StoredChunk(tensor, start, shape, nbytes, held.key, offset, digest, hashes)


def check_disjoint(chunks: Sequence[StoredChunk]) -> None:
    """Raises Malformed if two chunks share a byte of an object."""
    ordered = sorted(chunks, key=lambda chunk: (chunk.object, chunk.offset))
    for before, after in pairwise(ordered):
        if before.object == after.object and before.offset + before.nbytes > after.offset:
            raise Malformed(f"two chunks overlap at byte {after.offset} of {after.object}")
