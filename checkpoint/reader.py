"""Reads slices of a checkpoint into given memory: only the blocks that are needed, each checked before it is delivered.

Called by whoever restores state (any number of replicas, any division of the state), and by `export`. Requests for
neighbouring blocks are joined; several run at once in threads that end with the call. Memory: `num_threads` times the
larger of GET_BYTES and the largest chunk. Never looks at more than the manifest: what it is given is trusted to be
checked (`Manifest.parse`).
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from math import prod
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from everstep.checkpoint.chunks import Index, boxes_of_range, overlap
from everstep.checkpoint.errors import CheckpointDamaged, ObjectMissing, ObjectTooShort
from everstep.checkpoint.hashing import byte_view, hash64
from everstep.checkpoint.manifest import Manifest
from everstep.checkpoint.records import BLOCK_BYTES, StoredChunk, StoredObject, TensorEntry
from everstep.checkpoint.store import Store

if TYPE_CHECKING:
    import torch

GET_BYTES: Final = 8 << 20
"""Most bytes that neighbouring chunks are joined to for one request."""
NUM_THREADS: Final = 4
"""Requests at once. The store's answers overlap with hashing and copying."""
_MAX_RUNS: Final = 4096
_WORDS: Final = {1: "u1", 2: "u2", 4: "u4", 8: "u8"}


@dataclass(frozen=True, slots=True)
class Wanted:
    """A slice of a tensor, in memory order, and writable memory of just its bytes, in the same order."""

    tensor: int
    start: Index
    shape: Index
    into: memoryview


@dataclass(frozen=True, slots=True)
class ReadReport:
    """What a read took."""

    num_bytes: int
    """Bytes that came from the store."""
    num_requests: int
    seconds: float


def want_range(manifest: Manifest, tensor: int, first_byte: int, into: memoryview) -> list[Wanted]:
    """The bytes [first_byte, first_byte + len(into)) of a tensor in memory order; both must be whole elements."""
    entry = manifest.tensors[tensor]
    if first_byte % entry.itemsize or len(into) % entry.itemsize:
        raise ValueError(f"bytes {first_byte} + {len(into)} of {entry.name!r} are not whole elements")
    first, count = first_byte // entry.itemsize, len(into) // entry.itemsize
    wanted, done = [], 0
    for start, shape in boxes_of_range(entry.memory_shape, first, first + count):
        size = prod(shape) * entry.itemsize
        wanted.append(Wanted(tensor, start, shape, into[done : done + size]))
        done += size
    return wanted


def want_all(manifest: Manifest, tensors: Sequence[torch.Tensor]) -> list[Wanted]:
    """All bytes of dense CPU tensors laid out as the manifest says (`RegisteredState.receive_buffers`).

    Raises ValueError if a tensor does not fit.
    """
    layout = manifest.layout()
    wanted = []
    for number, (spec, tensor) in enumerate(zip(layout.tensors, tensors, strict=True)):
        if not spec.fits(tensor):
            raise ValueError(
                f"the buffer of {manifest.tensors[number].name!r} has another dtype, shape or order"
            )
        if tensor.numel():
            shape = manifest.tensors[number].memory_shape
            wanted.append(Wanted(number, (0,) * len(shape), shape, byte_view(tensor)))
    return wanted


def read(
    store: Store,
    manifest: Manifest,
    wanted: Sequence[Wanted],
    *,
    check_headers: bool = False,
    num_threads: int = NUM_THREADS,
    get_bytes: int = GET_BYTES,
    progress: Callable[[int], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> ReadReport:
    """Fill the memory of all `wanted` slices.

    `check_headers` also reads and checks what stands before the data of each object that is touched, which nothing
    here depends on. `progress(bytes)` is called from several threads, with the bytes of each request. Raises
    CheckpointDamaged naming object, tensor and offset; StoreError. What was wanted is undefined then.
    """
    begin = clock()
    jobs = _jobs(manifest, wanted, get_bytes)
    reader = _Reader(store, manifest, progress)
    work: list[Callable[[], None]] = []
    if check_headers:
        touched = {job.object for job in jobs}
        work += [_bind(reader.check_header, held) for held in manifest.objects if held.key in touched]
    work += [_bind(reader.perform, job) for job in jobs]
    if len(work) == 1:
        work[0]()
    elif work:
        with ThreadPoolExecutor(min(num_threads, len(work)), thread_name_prefix="read") as threads:
            futures = [threads.submit(one) for one in work]
            try:
                done, _ = wait(futures, return_when=FIRST_EXCEPTION)
                for future in done:
                    future.result()
            finally:  # also if the caller is interrupted: what has not begun never does
                reader.stopped = True
                for future in futures:
                    future.cancel()
    return ReadReport(reader.num_bytes, reader.num_requests, clock() - begin)


def read_tensors(
    store: Store,
    manifest: Manifest,
    tensors: Sequence[torch.Tensor],
    progress: Callable[[int], None] | None = None,
) -> ReadReport:
    """Fill the buffers of the whole layout; also checks the headers of the objects. See `read`."""
    return read(store, manifest, want_all(manifest, tensors), check_headers=True, progress=progress)


def _bind(function: Callable[[Any], None], argument: Any) -> Callable[[], None]:
    return lambda: function(argument)


@dataclass(slots=True)
class _Need:
    """What is wanted of one chunk."""

    chunk: StoredChunk
    itemsize: int
    copies: list[tuple[Wanted, Index, Index]] = field(default_factory=list)
    blocks: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Job:
    """Neighbouring chunks of one object."""

    object: str
    needs: list[_Need]
    first: int
    end: int


def _jobs(manifest: Manifest, wanted: Sequence[Wanted], get_bytes: int) -> list[_Job]:
    by_tensor: dict[int, list[StoredChunk]] = defaultdict(list)
    tensors = {one.tensor for one in wanted}
    for chunk in manifest.chunks:
        if chunk.tensor in tensors:
            by_tensor[chunk.tensor].append(chunk)
    needs: dict[tuple[str, int], _Need] = {}
    for one in wanted:
        entry = manifest.tensors[one.tensor]
        _check_wanted(one, entry)
        for chunk in _candidates(by_tensor[one.tensor], one):
            common = overlap(one.start, one.shape, chunk.start, chunk.shape)
            if common is not None:
                need = needs.setdefault((chunk.object, chunk.offset), _Need(chunk, entry.itemsize))
                need.copies.append((one, *common))
                need.blocks |= _blocks(chunk, *common, entry.itemsize)
    jobs: list[_Job] = []
    for _, need in sorted(needs.items(), key=lambda item: item[0]):
        first = need.chunk.offset + min(need.blocks) * BLOCK_BYTES
        end = need.chunk.offset + min((max(need.blocks) + 1) * BLOCK_BYTES, need.chunk.nbytes)
        last = jobs[-1] if jobs else None
        if last and last.object == need.chunk.object and last.end == first and end - last.first <= get_bytes:
            last.needs.append(need)
            last.end = end
        else:
            jobs.append(_Job(need.chunk.object, [need], first, end))
    return jobs


def _check_wanted(one: Wanted, entry: TensorEntry) -> None:
    """Raises ValueError for a slice that the checkpoint could not fill whole."""
    whole = entry.memory_shape
    if len(one.start) != len(whole) or len(one.shape) != len(whole):
        raise ValueError(
            f"slice {one.start} + {one.shape} of {entry.name!r}, which has {len(whole)} dimensions"
        )
    if any(a < 0 or n < 0 or a + n > size for a, n, size in zip(one.start, one.shape, whole, strict=True)):
        raise ValueError(
            f"slice {one.start} + {one.shape} does not lie in {entry.name!r}, {whole} in memory order"
        )
    if one.into.nbytes != prod(one.shape) * entry.itemsize or one.into.readonly:
        raise ValueError(f"{one.into.nbytes} bytes for slice {one.start} + {one.shape} of {entry.name!r}")


def _candidates(chunks: list[StoredChunk], wanted: Wanted) -> Iterator[StoredChunk]:
    """Chunks are sorted by start, so those that begin behind the slice in the slowest dimension end the search."""
    if not wanted.shape:
        yield from chunks
        return
    end: Index = (wanted.start[0] + wanted.shape[0],)
    for chunk in chunks[: bisect_left(chunks, end, key=lambda chunk: chunk.start)]:
        if chunk.start[0] + chunk.shape[0] > wanted.start[0]:
            yield chunk


def _blocks(chunk: StoredChunk, start: Index, shape: Index, itemsize: int) -> set[int]:
    """Blocks of the chunk that hold any of the box; too scattered boxes count with what lies between."""
    inner, dim = itemsize, len(shape)
    while dim > 0 and shape[dim - 1] == chunk.shape[dim - 1]:
        dim -= 1
        inner *= shape[dim]
    run = inner * (shape[dim - 1] if dim else 1)
    outer = shape[: max(dim - 1, 0)]
    strides = [prod(chunk.shape[d + 1 :]) * itemsize for d in range(len(shape))]
    base = sum((a - b) * stride for a, b, stride in zip(start, chunk.start, strides, strict=True))
    if prod(outer) > _MAX_RUNS:
        end = base + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) + itemsize
        return set(range(base // BLOCK_BYTES, (end - 1) // BLOCK_BYTES + 1))
    blocks: set[int] = set()
    for index in np.ndindex(*outer):
        first = base + sum(i * stride for i, stride in zip(index, strides, strict=False))
        blocks.update(range(first // BLOCK_BYTES, (first + run - 1) // BLOCK_BYTES + 1))
    return blocks


class _Reader:
    def __init__(self, store: Store, manifest: Manifest, progress: Callable[[int], None] | None) -> None:
        self._store, self._manifest, self._progress = store, manifest, progress
        self._lock = threading.Lock()
        self._scratch = threading.local()
        self.num_bytes = self.num_requests = 0
        self.stopped = False

    def check_header(self, held: StoredObject) -> None:
        head = memoryview(bytearray(held.header_bytes))
        for _ in range(2):
            self._fetch(held.key, 0, head, "the header")
            if f"{hash64([head]):016x}" == held.header_hash:
                return
        raise CheckpointDamaged(
            f"{held.key}: the {held.header_bytes} bytes before its data are not what was written"
        )

    def perform(self, job: _Job) -> None:
        if self.stopped:
            return
        space = self._space(job.end - job.first)
        for first, end in _runs(job):
            what = f"tensor {self._manifest.tensors[job.needs[0].chunk.tensor].name!r}"
            self._fetch(job.object, first, space[first - job.first : end - job.first], what)
        for need in job.needs:
            for number in sorted(need.blocks):
                self._check(job, need, number, space)
            _deliver(need, space, need.chunk.offset - job.first)

    def _space(self, size: int) -> memoryview:
        held: bytearray | None = getattr(self._scratch, "space", None)
        if held is None or len(held) < size:
            held = self._scratch.space = bytearray(max(size, 1 << 16))
        return memoryview(held)[:size]

    def _fetch(self, key: str, offset: int, into: memoryview, what: str) -> None:
        try:
            self._store.read_into(key, offset, into)
        except (ObjectMissing, ObjectTooShort) as error:
            raise CheckpointDamaged(
                f"{key}, {what}, bytes {offset} to {offset + len(into)}: {error}"
            ) from error
        with self._lock:
            self.num_bytes += len(into)
            self.num_requests += 1
        if self._progress is not None:
            self._progress(len(into))

    def _check(self, job: _Job, need: _Need, number: int, space: memoryview) -> None:
        chunk = need.chunk
        first = chunk.offset + number * BLOCK_BYTES
        size = min(BLOCK_BYTES, chunk.nbytes - number * BLOCK_BYTES)
        block = space[first - job.first : first - job.first + size]
        if f"{hash64([block]):016x}" == chunk.blocks[number]:
            return
        # What was damaged on the way comes right when it is read again; what is damaged there does not.
        entry = self._manifest.tensors[chunk.tensor]
        self._fetch(job.object, first, block, f"tensor {entry.name!r}")
        if f"{hash64([block]):016x}" != chunk.blocks[number]:
            raise CheckpointDamaged(
                f"{job.object}: bytes {first} to {first + size}, of tensor {entry.name!r} from {list(chunk.start)}, "
                "are not what was written; use an older checkpoint"
            )


def _runs(job: _Job) -> list[tuple[int, int]]:
    """Byte ranges of the object to fetch: the needed blocks, neighbours joined."""
    runs: list[tuple[int, int]] = []
    for need in job.needs:
        for number in sorted(need.blocks):
            first = need.chunk.offset + number * BLOCK_BYTES
            end = need.chunk.offset + min((number + 1) * BLOCK_BYTES, need.chunk.nbytes)
            if runs and runs[-1][1] == first:
                runs[-1] = (runs[-1][0], end)
            else:
                runs.append((first, end))
    return runs


def _deliver(need: _Need, space: memoryview, offset: int) -> None:
    """Copy what is wanted out of a chunk whose byte 0 would lie at `offset` of `space` (perhaps before it)."""
    chunk = need.chunk
    strides = [prod(chunk.shape[d + 1 :]) * need.itemsize for d in range(len(chunk.shape))]
    for wanted, start, shape in need.copies:
        base = offset + sum((a - b) * s for a, b, s in zip(start, chunk.start, strides, strict=True))
        source = _boxed(space, base, shape, strides, need.itemsize)
        into_strides = [prod(wanted.shape[d + 1 :]) * need.itemsize for d in range(len(shape))]
        into = sum((a - b) * s for a, b, s in zip(start, wanted.start, into_strides, strict=True))
        _boxed(wanted.into, into, shape, into_strides, need.itemsize)[...] = source


def _boxed(space: memoryview, offset: int, shape: Index, strides: list[int], itemsize: int) -> Any:
    """Elements of any itemsize as words: what is copied are bytes, whatever they mean."""
    if itemsize in _WORDS:
        return np.ndarray(shape, _WORDS[itemsize], space, offset, strides)
    return np.ndarray((*shape, itemsize), "u1", space, offset, (*strides, 1))
