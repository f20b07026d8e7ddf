"""Writes one replica's part of a checkpoint: a safetensors object, streamed, and an index of what is in it.

Called by the process that uploads, with chunks (`chunks.divide`) and their bytes in host memory. The bytes must not
change until the call returns. Decides nothing about commits: a part without a manifest is invisible, and is collected
later. Memory: what the store's writer holds, and one block.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import xxhash

from everstep.checkpoint import safetensors_file
from everstep.checkpoint import strict_json as strict
from everstep.checkpoint.bandwidth import Bandwidth
from everstep.checkpoint.chunks import Chunk, memory_shape, offset_in
from everstep.checkpoint.errors import CheckpointIncomplete, WriteCancelled
from everstep.checkpoint.hashing import byte_view, hash64
from everstep.checkpoint.manifest import Manifest
from everstep.checkpoint.records import (
    BLOCK_BYTES,
    MAX_CHUNKS,
    MAX_OBJECT_BYTES,
    MAX_TENSORS,
    StoredChunk,
    StoredObject,
    TensorEntry,
    chunk_from_json,
    chunks_as_json,
    incarnation_of,
    part_key,
    table_hash,
)
from everstep.checkpoint.safetensors_file import Entry
from everstep.checkpoint.state import Layout
from everstep.checkpoint.store import Store, Writer
from everstep.checkpoint.strict_json import Malformed
from everstep.checkpoint.tree import Json

if TYPE_CHECKING:
    import torch

PART_VERSION: Final = 1
_FIELDS: Final = {
    *["version", "step", "generation", "attempt", "rank", "table", "objects", "chunks"],
    *["written_bytes", "referenced_bytes"],
}

ViewOf: TypeAlias = Callable[[Chunk], memoryview]
"""The bytes of a chunk; may wait until they are staged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PartSpec:
    """Whose part it is, of which attempt, and the tensors that all parts of the attempt share."""

    step: int
    generation: int
    attempt: str
    """From `records.attempt_name`."""
    rank: int
    tensors: tuple[TensorEntry, ...]

    @property
    def key(self) -> str:
        return part_key(self.step, self.attempt, self.rank)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartIndex:
    """What one part holds, and what it refers to. JSON-safe by `as_json`."""

    step: int
    generation: int
    attempt: str
    rank: int
    table: str
    """`records.table_hash` of the tensors."""
    objects: tuple[StoredObject, ...]
    """The object that was written, if any chunk was, and those that unchanged chunks refer to."""
    chunks: tuple[StoredChunk, ...]
    written_bytes: int
    """Bytes of the new object, header included; 0 if nothing had changed."""
    referenced_bytes: int
    """Bytes of chunks that were already stored."""

    def as_json(self) -> dict[str, Json]:
        return {
            "version": PART_VERSION,
            "step": self.step,
            "generation": self.generation,
            "attempt": self.attempt,
            "rank": self.rank,
            "table": self.table,
            "objects": [held.as_json() for held in self.objects],
            "chunks": chunks_as_json(self.chunks, [held.key for held in self.objects]),
            "written_bytes": self.written_bytes,
            "referenced_bytes": self.referenced_bytes,
        }

    @classmethod
    def from_json(cls, raw: Any, tensors: Sequence[TensorEntry]) -> PartIndex:
        """Parse an index from another process. Raises CheckpointIncomplete if it is not one."""
        try:
            return cls._parse(raw, tensors)
        except Malformed as error:
            raise CheckpointIncomplete(f"part index: {error}") from error

    @classmethod
    def _parse(cls, raw: Any, tensors: Sequence[TensorEntry]) -> PartIndex:
        known = strict.fields(raw, _FIELDS, "part")
        if known["version"] != PART_VERSION:
            raise Malformed(f"version {str(known['version'])[:20]}, this is {PART_VERSION}")
        attempt = strict.text(known["attempt"], "attempt")
        incarnation_of(attempt)
        objects = [
            StoredObject.from_json(item, f"objects[{number}]")
            for number, item in enumerate(strict.items(known["objects"], "objects", max_length=MAX_TENSORS))
        ]
        chunks = [
            chunk_from_json(item, tensors, objects, f"chunks[{number}]")
            for number, item in enumerate(strict.items(known["chunks"], "chunks", max_length=MAX_CHUNKS))
        ]
        return cls(
            step=strict.integer(known["step"], "step"),
            generation=strict.integer(known["generation"], "generation"),
            attempt=attempt,
            rank=strict.integer(known["rank"], "rank"),
            table=strict.hex_text(known["table"], "table", 16),
            objects=tuple(objects),
            chunks=tuple(chunks),
            written_bytes=strict.integer(known["written_bytes"], "written_bytes", high=MAX_OBJECT_BYTES),
            referenced_bytes=strict.integer(known["referenced_bytes"], "referenced_bytes"),
        )


def views_of(layout: Layout, tensors: Sequence[torch.Tensor]) -> ViewOf:
    """The bytes of chunks in the dense CPU tensors of a whole layout, without copies."""
    held = [byte_view(tensor) for tensor in tensors]

    def view(chunk: Chunk) -> memoryview:
        spec = layout.tensors[chunk.tensor]
        shape = memory_shape(spec)
        offset = offset_in(chunk.start, (0,) * len(shape), shape, spec.dtype.itemsize)
        return held[chunk.tensor][offset : offset + chunk.nbytes]

    return view


def views_packed(chunks: Sequence[Chunk], memory: memoryview) -> ViewOf:
    """The bytes of chunks that lie in `memory` one behind the other, in their order."""
    offsets: dict[Chunk, int] = {}
    end = 0
    for chunk in chunks:
        offsets[chunk] = end
        end += chunk.nbytes
    return lambda chunk: memory[offsets[chunk] : offsets[chunk] + chunk.nbytes]


def write_part(
    store: Store,
    spec: PartSpec,
    chunks: Sequence[Chunk],
    view_of: ViewOf,
    *,
    previous: Manifest | None = None,
    bandwidth: Bandwidth | None = None,
    progress: Callable[[int, int], None] | None = None,
    cancel: threading.Event | None = None,
) -> PartIndex:
    """Write `chunks` as one object; those that `previous` (a committed manifest) holds already are only referred to.

    `progress(bytes done, bytes total)` is called after each block that was given to the store. Raises WriteCancelled
    once `cancel` is set, StoreError if the store fails; then nothing is visible. Raises ObjectExists if somebody wrote
    this part before: a part is written once, and who is told twice answers with the first index.
    """
    references, new = _unchanged(spec, chunks, view_of, previous)
    objects = {held.key: held for held in previous.objects} if previous is not None else {}
    written: list[StoredChunk] = []
    own: list[StoredObject] = []
    if new:
        entries, order = _lay_out(spec, new)
        head = safetensors_file.header(
            entries, {"format": "pt", "everstep_step": str(spec.step), "everstep_attempt": spec.attempt}
        )
        total = len(head) + sum(entry.nbytes for entry in entries)
        with store.writer(spec.key, total) as writer:
            stream = _Stream(writer, total, bandwidth, progress, cancel or threading.Event())
            stream.send(memoryview(head))
            for entry, chunk in zip(entries, order, strict=True):
                written.append(_send_chunk(stream, spec.key, len(head) + entry.offset, chunk, view_of(chunk)))
            stream.check()
            writer.commit()
        own.append(StoredObject(spec.key, total, len(head), f"{hash64([memoryview(head)]):016x}"))
    used = sorted({chunk.object for chunk in references})
    return PartIndex(
        step=spec.step,
        generation=spec.generation,
        attempt=spec.attempt,
        rank=spec.rank,
        table=table_hash(spec.tensors),
        objects=(*own, *(objects[key] for key in used)),
        chunks=tuple(sorted([*written, *references], key=lambda chunk: (chunk.tensor, chunk.start))),
        written_bytes=sum(held.size for held in own),
        referenced_bytes=sum(chunk.nbytes for chunk in references),
    )


def _unchanged(
    spec: PartSpec, chunks: Sequence[Chunk], view_of: ViewOf, previous: Manifest | None
) -> tuple[list[StoredChunk], list[Chunk]]:
    """Chunks that are stored already, under their numbers here, and those that are not."""
    stored: Mapping[object, StoredChunk] = {}
    if previous is not None:
        stored = {_identity(previous.tensors[c.tensor], c.start, c.shape): c for c in previous.chunks}
    references, new = [], []
    for chunk in chunks:
        older = stored.get(_identity(spec.tensors[chunk.tensor], chunk.start, chunk.shape))
        if older is not None and xxhash.xxh3_128_hexdigest(view_of(chunk)) == older.hash:
            references.append(
                StoredChunk(
                    chunk.tensor,
                    older.start,
                    older.shape,
                    older.nbytes,
                    older.object,
                    older.offset,
                    older.hash,
                    older.blocks,
                )
            )
        else:
            new.append(chunk)
    return references, new


def _identity(entry: TensorEntry, start: tuple[int, ...], shape: tuple[int, ...]) -> object:
    return (entry.name, entry.dtype, entry.shape, entry.order, start, shape)


def _lay_out(spec: PartSpec, chunks: Sequence[Chunk]) -> tuple[list[Entry], list[Chunk]]:
    """Entries of the file, and the chunks in the order of their entries."""
    by_name: dict[str, Chunk] = {}
    tensors = []
    for chunk in sorted(chunks):
        entry = spec.tensors[chunk.tensor]
        name = f"{entry.name}@{','.join(map(str, chunk.start))}"
        by_name[name] = chunk
        tensors.append((name, *safetensors_file.stored_as(entry.dtype, chunk.shape)))
    entries = safetensors_file.lay_out(tensors)
    return entries, [by_name[entry.name] for entry in entries]


def _send_chunk(stream: _Stream, key: str, offset: int, chunk: Chunk, view: memoryview) -> StoredChunk:
    if view.nbytes != chunk.nbytes:
        raise ValueError(f"{chunk} came with {view.nbytes} bytes")
    whole = xxhash.xxh3_128()
    blocks = []
    for first in range(0, chunk.nbytes, BLOCK_BYTES):
        block = view[first : first + BLOCK_BYTES]
        blocks.append(f"{hash64([block]):016x}")
        whole.update(block)
        stream.send(block)
    return StoredChunk(
        chunk.tensor, chunk.start, chunk.shape, chunk.nbytes, key, offset, whole.hexdigest(), tuple(blocks)
    )


class _Stream:
    def __init__(
        self,
        writer: Writer,
        total: int,
        bandwidth: Bandwidth | None,
        progress: Callable[[int, int], None] | None,
        cancel: threading.Event,
    ) -> None:
        self._writer, self._total, self._done = writer, total, 0
        self._bandwidth, self._progress, self._cancel = bandwidth, progress, cancel

    def send(self, data: memoryview) -> None:
        self.check()
        delay_s = self._bandwidth.delay_s(len(data)) if self._bandwidth is not None else 0.0
        if delay_s:
            self._cancel.wait(delay_s)
            self.check()
        self._writer.write(data)
        self._done += len(data)
        if self._progress is not None:
            self._progress(self._done, self._total)

    def check(self) -> None:
        if self._cancel.is_set():
            raise WriteCancelled(f"cancelled after {self._done} of {self._total} bytes; nothing is visible")
