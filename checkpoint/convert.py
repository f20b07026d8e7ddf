"""Checkpoints to safetensors files and back, slice by slice; and what every import has in common.

Called by the command line (`export`, `import`). `convert_dcp` does the same for torch's own format. Files are local.
Memory: one slice. What an export cannot say in the foreign format (nesting, scalars, user data) goes to `everstep.json`
beside it; an import that finds such a file gives the whole state back, and else a mapping of tensors by name.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np

from everstep.checkpoint import safetensors_file
from everstep.checkpoint import strict_json as strict
from everstep.checkpoint.chunks import CHUNK_BYTES, Chunk, Index, cut_tensor, offset_in
from everstep.checkpoint.commit import begin, commit
from everstep.checkpoint.errors import CheckpointDamaged
from everstep.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest
from everstep.checkpoint.names import all_names, tensor_names
from everstep.checkpoint.part import PartSpec, ViewOf, write_part
from everstep.checkpoint.reader import Wanted, read
from everstep.checkpoint.records import TensorEntry, attempt_name
from everstep.checkpoint.safetensors_file import Entry
from everstep.checkpoint.store import Store
from everstep.checkpoint.strict_json import Malformed
from everstep.checkpoint.tree import Json
from everstep.errors import ConfigError, StateError

SLICE_BYTES: Final = 32 << 20
"""Most bytes of a tensor that an export holds at once."""
FILE_BYTES: Final = 5 << 30
"""Data bytes after which the next file of an export begins."""
SIDE_FILE: Final = "everstep.json"
_SIDE_FIELDS: Final = {"format", "version", "run", "step", "skeleton", "tensors", "user"}
_SIDE_FORMAT: Final = "everstep-export"


def export_safetensors(
    store: Store,
    manifest: Manifest,
    folder: Path,
    *,
    file_bytes: int = FILE_BYTES,
    slice_bytes: int = SLICE_BYTES,
) -> list[Path]:
    """Write `checkpoint.safetensors`, or `checkpoint-00001-of-00003.safetensors` and so on; returns the paths.

    Each tensor stands under its name (`names.tensor_names`), in row-major order; a tied one once. Raises ConfigError
    if the folder holds something, CheckpointDamaged, or StoreError; then no file of a final name is there.
    """
    new_folder(folder)
    groups = _grouped(manifest.tensors, file_bytes)
    paths, written = [], []
    for number, group in enumerate(groups):
        end = "" if len(groups) == 1 else f"-{number + 1:05d}-of-{len(groups):05d}"
        paths.append(folder / f"checkpoint{end}.safetensors")
        written.append(folder / f".{paths[-1].name}")
        _write_file(store, manifest, group, written[-1], slice_bytes)
    write_side_file(manifest, folder)
    for temporary, path in zip(written, paths, strict=True):
        temporary.rename(path)
    return paths


def import_safetensors(
    files: Sequence[Path],
    store: Store,
    *,
    step: int,
    run: str,
    name: str | None = None,
    created_s: float = 0.0,
    incarnation: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
) -> Manifest:
    """Make files a checkpoint. `name` is the registered object that they are the state of, like `model`; without it
    the part of each tensor's name before its first dot is that object's name.

    Raises CheckpointDamaged if a file is malformed, StateError for tensors that are not state, and what `commit` raises.
    """
    found: dict[str, tuple[TensorEntry, Path, int]] = {}
    for path in files:
        for entry, offset in _read_entries(path):
            if found.setdefault(entry.name, (entry, path, offset))[1:] != (path, offset):
                raise CheckpointDamaged(f"{path}: tensor {entry.name[:100]!r} is in another file too")
    side = read_side_file(files[0].parent) if files else None
    target = target_of({key: entry for key, (entry, _, _) in found.items()}, side, name)

    def view_of(chunk: Chunk) -> memoryview:
        _, path, begin = found[target.sources[chunk.tensor]]
        entry = target.tensors[chunk.tensor]
        first = begin + offset_in(chunk.start, (0,) * len(entry.shape), entry.shape, entry.itemsize)
        return _read_range(path, first, chunk.nbytes)

    return write_state(
        store,
        target,
        view_of,
        step,
        run,
        created_s=created_s,
        incarnation=incarnation,
        chunk_bytes=chunk_bytes,
    )


@dataclass(frozen=True, slots=True)
class Target:
    """What an import makes: tensors in row-major order, the name that each has in the source, and the tree."""

    tensors: tuple[TensorEntry, ...]
    sources: tuple[str, ...]
    skeleton: Json
    user: dict[str, Json]


def target_of(found: Mapping[str, TensorEntry], side: Mapping[str, Any] | None, name: str | None) -> Target:
    """The tree of what an export wrote beside the tensors, else a mapping of tensors by name."""
    if side is not None and name is None:
        stated = side["tensors"]
        if missing := next((entry.name for entry in stated if entry.name not in found), None):
            raise CheckpointDamaged(f"tensor {missing[:100]!r} of {SIDE_FILE} is in none of the files")
        for entry in stated:
            here, as_bytes = found[entry.name], ("uint8", (*entry.shape, entry.itemsize))
            if (here.dtype, here.shape) not in ((entry.dtype, entry.shape), as_bytes):
                raise CheckpointDamaged(
                    f"tensor {entry.name[:100]!r} is {here.dtype} {list(here.shape)}, {SIDE_FILE} says "
                    f"{entry.dtype} {list(entry.shape)}"
                )
        tensors = tuple(replace(entry, order=tuple(range(len(entry.shape)))) for entry in stated)
        return Target(tensors, tuple(entry.name for entry in stated), side["skeleton"], side["user"])
    objects: dict[str, list[Json]] = {}
    sources = sorted(found)
    for number, source in enumerate(sources):
        top, dot, rest = (name, ".", source) if name is not None else source.partition(".")
        if not dot or not rest:
            raise StateError(
                f"tensor {source[:100]!r} belongs to no object; say which one, like name='model'"
            )
        objects.setdefault(top, []).append([rest, {"tensor": number}])
    skeleton: Json = {"dict": [[top, {"dict": pairs}] for top, pairs in objects.items()]}
    names = tensor_names(skeleton, len(sources))
    tensors = tuple(replace(found[source], name=new) for source, new in zip(sources, names, strict=True))
    return Target(tensors, tuple(sources), skeleton, {})


def write_state(
    store: Store,
    target: Target,
    view_of: ViewOf,
    step: int,
    run: str,
    *,
    created_s: float,
    incarnation: int,
    chunk_bytes: int,
) -> Manifest:
    """One part with all tensors, and its commit. Claims `incarnation`: raises Superseded where a run has begun."""
    begin(store, incarnation, f"import {secrets.token_hex(8)}")
    attempt = attempt_name(incarnation, 0)
    chunks = [
        chunk
        for number, entry in enumerate(target.tensors)
        for chunk in cut_tensor(number, entry.shape, entry.itemsize, chunk_bytes)
    ]
    spec = PartSpec(step=step, generation=0, attempt=attempt, rank=0, tensors=target.tensors)
    part = write_part(store, spec, chunks, view_of)
    return commit(
        store,
        [part],
        run=run,
        step=step,
        generation=0,
        incarnation=incarnation,
        attempt=attempt,
        tensors=target.tensors,
        skeleton=target.skeleton,
        world_size=1,
        created_s=created_s,
        user=target.user,
    )


def slices(entry: TensorEntry, slice_bytes: int) -> list[Chunk]:
    """Slices of a tensor that are contiguous in row-major order, in that order."""
    return cut_tensor(0, entry.shape, entry.itemsize, max(slice_bytes, entry.itemsize))


def read_slice(store: Store, manifest: Manifest, tensor: int, start: Index, shape: Index) -> bytes:
    """The elements of a slice (in the tensor's own dimensions) in row-major order."""
    entry = manifest.tensors[tensor]
    in_memory = tuple(shape[dim] for dim in entry.order)
    data = bytearray(prod(shape) * entry.itemsize)
    read(
        store,
        manifest,
        [Wanted(tensor, tuple(start[dim] for dim in entry.order), in_memory, memoryview(data))],
    )
    if entry.order == tuple(range(len(shape))):
        return bytes(data)
    box = np.frombuffer(data, f"V{entry.itemsize}").reshape(in_memory)
    return box.transpose(np.argsort(entry.order)).tobytes()


def new_folder(folder: Path) -> None:
    """Make it. Raises ConfigError if there is something in it."""
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        raise ConfigError(f"{folder} is not empty; export into a new folder")


def write_side_file(manifest: Manifest, folder: Path) -> None:
    """What the foreign format does not hold."""
    side: dict[str, Json] = {
        "format": _SIDE_FORMAT,
        "version": 1,
        "run": manifest.run,
        "step": manifest.step,
        "skeleton": manifest.skeleton,
        "tensors": [entry.as_json() for entry in manifest.tensors],
        "user": manifest.user,
    }
    (folder / SIDE_FILE).write_bytes(strict.dumps(side))


def read_side_file(folder: Path) -> dict[str, Any] | None:
    """None if there is none. Raises CheckpointDamaged."""
    path = folder / SIDE_FILE
    if not path.is_file():
        return None
    try:
        if path.stat().st_size > MAX_MANIFEST_BYTES:
            raise Malformed(f"{path.stat().st_size} bytes")
        side = strict.fields(
            strict.loads(path.read_bytes(), max_bytes=MAX_MANIFEST_BYTES), _SIDE_FIELDS, "export"
        )
        if (side["format"], side["version"]) != (_SIDE_FORMAT, 1) or not isinstance(side["user"], dict):
            raise Malformed("not of this version")
        raw = strict.items(side["tensors"], "tensors", max_length=1 << 20)
        side["tensors"] = [TensorEntry.from_json(one, f"tensors[{n}]") for n, one in enumerate(raw)]
        all_names(side["skeleton"], len(raw))
    except (Malformed, StateError) as error:
        raise CheckpointDamaged(f"{path}: {error}") from error
    return side


def _grouped(tensors: Sequence[TensorEntry], file_bytes: int) -> list[list[int]]:
    groups: list[list[int]] = [[]]
    size = 0
    for number, entry in enumerate(tensors):
        if groups[-1] and size + entry.nbytes > file_bytes:
            groups.append([])
            size = 0
        groups[-1].append(number)
        size += entry.nbytes
    return groups


def _write_file(store: Store, manifest: Manifest, group: list[int], path: Path, slice_bytes: int) -> None:
    by_name = {manifest.tensors[number].name: number for number in group}
    stored = [
        (name, *safetensors_file.stored_as(manifest.tensors[n].dtype, manifest.tensors[n].shape))
        for name, n in by_name.items()
    ]
    entries = safetensors_file.lay_out(stored)
    names = all_names(manifest.skeleton, len(manifest.tensors))
    aliases = {manifest.tensors[number].name: names[number][1:] for number in group if len(names[number]) > 1}
    metadata = {"format": "pt", "everstep_step": str(manifest.step), "everstep_aliases": json.dumps(aliases)}
    with path.open("wb") as file:
        file.write(safetensors_file.header(entries, metadata))
        for entry in entries:
            number = by_name[entry.name]
            for box in slices(manifest.tensors[number], slice_bytes):
                file.write(read_slice(store, manifest, number, box.start, box.shape))


def _read_entries(path: Path) -> Iterator[tuple[TensorEntry, int]]:
    """The tensors of a file, and where each begins in it."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            head = safetensors_file.header_bytes(file.read(8), size)
            entries, _ = safetensors_file.parse_header(file.read(head - 8), size - head)
        for entry in entries:
            yield _tensor_entry(entry), head + entry.offset
    except (OSError, Malformed) as error:
        raise CheckpointDamaged(f"{path}: {error}") from error


def _tensor_entry(entry: Entry) -> TensorEntry:
    raw = {"name": entry.name, "dtype": safetensors_file.dtype_of(entry.code), "shape": list(entry.shape)}
    return TensorEntry.from_json(
        {**raw, "order": list(range(len(entry.shape)))}, f"tensor {entry.name[:100]!r}"
    )


def _read_range(path: Path, first: int, size: int) -> memoryview:
    with path.open("rb") as file:
        file.seek(first)
        data = file.read(size)
    if len(data) != size:
        raise CheckpointDamaged(f"{path} ends before byte {first + size}")
    return memoryview(data)
