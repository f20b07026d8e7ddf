"""Reads every byte that one checkpoint depends on, and says by name what is wrong with it. Writes nothing.

Called by the command line and by whoever wants to know before the need comes. Unlike `reader.read` it goes on after
damage: everything that is wrong is reported. Memory: RUN_BYTES per thread.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import xxhash

from everstep.checkpoint import safetensors_file
from everstep.checkpoint.commit import object_sizes, read_commit, read_manifest
from everstep.checkpoint.errors import CheckpointDamaged, ObjectMissing, ObjectTooShort
from everstep.checkpoint.hashing import hash64
from everstep.checkpoint.manifest import Manifest
from everstep.checkpoint.reader import NUM_THREADS
from everstep.checkpoint.records import BLOCK_BYTES, StoredChunk, StoredObject
from everstep.checkpoint.store import Store
from everstep.checkpoint.strict_json import Malformed

RUN_BYTES: Final = 8 * BLOCK_BYTES
"""Bytes of one request."""
_BATCH: Final = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Verified:
    """What was looked at, and what is wrong with it."""

    step: int
    num_bytes: int
    """Bytes that were read and compared: chunks, headers and the manifest."""
    num_objects: int
    """Parts, of this step and of older ones that it refers to."""
    problems: tuple[str, ...]
    """One sentence each, naming object, tensor and place; empty if the checkpoint is whole."""

    @property
    def whole(self) -> bool:
        return not self.problems


def verify(store: Store, step: int, *, num_threads: int = NUM_THREADS) -> Verified:
    """Check commit, manifest, headers and all data of a step. Raises StoreError if the store does not answer."""
    try:
        commit = read_commit(store, step)
        manifest = read_manifest(store, commit)
    except CheckpointDamaged as error:
        return Verified(step=step, num_bytes=0, num_objects=0, problems=(str(error),))
    problems, there = _check_sizes(store, manifest)
    work = [(held, batch) for held in there for batch in _batches(manifest, held)]
    with ThreadPoolExecutor(num_threads, thread_name_prefix="verify") as threads:
        found = list(threads.map(lambda one: _check_batch(store, manifest, *one), work))
    num_bytes = commit.manifest_bytes + sum(count for count, _ in found)
    problems += [problem for _, some in found for problem in some]
    return Verified(
        step=step, num_bytes=num_bytes, num_objects=len(manifest.objects), problems=tuple(problems)
    )


def _check_sizes(store: Store, manifest: Manifest) -> tuple[list[str], list[StoredObject]]:
    """What is wrong with sizes, and the objects that can be read."""
    sizes = object_sizes(store, manifest)
    problems, there = [], []
    for held in manifest.objects:
        if held.key not in sizes:
            problems.append(f"{held.key} is missing")
            continue
        there.append(held)
        if sizes[held.key] != held.size:
            problems.append(f"{held.key} has {sizes[held.key]} bytes, {held.size} were written")
    return problems, there


def _batches(manifest: Manifest, held: StoredObject) -> Iterator[list[StoredChunk] | None]:
    """None stands for the header."""
    yield None
    chunks = [chunk for chunk in manifest.chunks if chunk.object == held.key]
    chunks.sort(key=lambda chunk: chunk.offset)
    for first in range(0, len(chunks), _BATCH):
        yield chunks[first : first + _BATCH]


def _check_batch(
    store: Store, manifest: Manifest, held: StoredObject, chunks: list[StoredChunk] | None
) -> tuple[int, list[str]]:
    if chunks is None:
        return _check_header(store, held)
    num_bytes, problems = 0, []
    for chunk in chunks:
        size, wrong = _check_chunk(store, chunk)
        num_bytes += size
        if wrong:
            name = manifest.tensors[chunk.tensor].name
            problems.append(f"{chunk.object}, tensor {name!r} from {list(chunk.start)}: {wrong}")
    return num_bytes, problems


def _check_header(store: Store, held: StoredObject) -> tuple[int, list[str]]:
    head = memoryview(bytearray(held.header_bytes))
    try:
        store.read_into(held.key, 0, head)
        if f"{hash64([head]):016x}" != held.header_hash:
            return len(head), [f"{held.key}: its header is not what was written"]
        safetensors_file.header_bytes(head[:8], held.size)
        safetensors_file.parse_header(head[8:], held.size - held.header_bytes)
    except (ObjectMissing, ObjectTooShort, Malformed) as error:
        return 0, [f"{held.key}: header: {error}"]
    return len(head), []


def _check_chunk(store: Store, chunk: StoredChunk) -> tuple[int, str]:
    """Bytes that were read, and what is wrong or nothing."""
    whole, done = xxhash.xxh3_128(), 0
    scratch = memoryview(bytearray(min(RUN_BYTES, chunk.nbytes)))
    for first in range(0, chunk.nbytes, RUN_BYTES):
        run = scratch[: min(RUN_BYTES, chunk.nbytes - first)]
        try:
            store.read_into(chunk.object, chunk.offset + first, run)
        except (ObjectMissing, ObjectTooShort) as error:
            return done, str(error)
        done += len(run)
        whole.update(run)
        for place in range(0, len(run), BLOCK_BYTES):
            block = run[place : place + BLOCK_BYTES]
            if f"{hash64([block]):016x}" != chunk.blocks[(first + place) // BLOCK_BYTES]:
                begin = chunk.offset + first + place
                return done, f"bytes {begin} to {begin + len(block)} are not what was written"
    return done, "" if whole.hexdigest() == chunk.hash else "its hash is not that of its blocks"
