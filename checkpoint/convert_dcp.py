"""Checkpoints to the format of `torch.distributed.checkpoint` (DCP) and back, slice by slice.

Called by the command line (`export`, `import`). A DCP folder has a `.metadata` file, which is a pickle: reading one runs
whatever code its writer put there. So importing asks for `trust_pickle`, and nothing else here reads a pickle.
"""

from __future__ import annotations

import io
import pickle
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict_loader import load

from everstep.checkpoint.chunks import CHUNK_BYTES, Chunk, offset_in
from everstep.checkpoint.convert import (
    SLICE_BYTES,
    new_folder,
    read_side_file,
    read_slice,
    slices,
    target_of,
    write_side_file,
    write_state,
)
from everstep.checkpoint.errors import CheckpointDamaged
from everstep.checkpoint.hashing import byte_view
from everstep.checkpoint.manifest import Manifest
from everstep.checkpoint.names import all_names
from everstep.checkpoint.records import TensorEntry
from everstep.checkpoint.store import Store
from everstep.checkpoint.tree import DTYPES, dtype_name
from everstep.errors import ConfigError, StateError

if TYPE_CHECKING:
    from collections.abc import Callable

_DATA_FILE: Final = "__0_0.distcp"


@dataclass(frozen=True, slots=True)
class Imported:
    """A checkpoint made from a DCP folder."""

    manifest: Manifest
    skipped: tuple[str, ...]
    """Entries that are no tensors: they are pickles, and are not read."""


def export_dcp(store: Store, manifest: Manifest, folder: Path, *, slice_bytes: int = SLICE_BYTES) -> None:
    """Write a folder that `torch.distributed.checkpoint.load` reads into tensors, under all their names.

    `.metadata` comes last: without it there is no DCP checkpoint. Raises ConfigError if the folder holds something,
    CheckpointDamaged, or StoreError.
    """
    new_folder(folder)
    names = all_names(manifest.skeleton, len(manifest.tensors))
    described: dict[str, Any] = {}
    places: dict[MetadataIndex, Any] = {}
    with (folder / _DATA_FILE).open("wb") as file:
        for number, entry in enumerate(manifest.tensors):
            boxes = slices(entry, slice_bytes) or [Chunk(0, (0,) * len(entry.shape), entry.shape, 0)]
            spots = []
            for box in boxes:
                raw = _saved(_slice_tensor(store, manifest, number, box))
                spots.append(_StorageInfo(_DATA_FILE, file.tell(), len(raw)))
                file.write(raw)
            stored = [ChunkStorageMetadata(torch.Size(box.start), torch.Size(box.shape)) for box in boxes]
            properties = TensorProperties(DTYPES[entry.dtype])
            for name in names[number]:
                described[name] = TensorStorageMetadata(properties, torch.Size(entry.shape), stored)
                for position, (box, spot) in enumerate(zip(boxes, spots, strict=True)):
                    places[MetadataIndex(name, torch.Size(box.start), position)] = spot
    write_side_file(manifest, folder)
    temporary = folder / ".metadata.tmp"
    temporary.write_bytes(pickle.dumps(Metadata(described, storage_data=places)))
    temporary.rename(folder / ".metadata")


def import_dcp(
    folder: Path,
    store: Store,
    *,
    step: int,
    run: str,
    trust_pickle: bool,
    name: str | None = None,
    created_s: float = 0.0,
    incarnation: int = 0,
    chunk_bytes: int = CHUNK_BYTES,
) -> Imported:
    """Make a DCP folder a checkpoint, one tensor in memory at a time. `name` is as in `import_safetensors`.

    Raises ConfigError without `trust_pickle`, CheckpointDamaged if torch cannot read the folder, StateError for
    tensors that are not state, and what `commit` raises.
    """
    if trust_pickle is not True:
        raise ConfigError(
            f"{folder}/.metadata is a pickle, and reading it runs whatever code is in it; if you know who wrote it, say "
            "trust_pickle=True"
        )
    reader = _Reader(folder)
    described = reader.read_metadata().state_dict_metadata
    found, skipped = {}, []
    for key, value in described.items():
        if isinstance(value, TensorStorageMetadata):
            found[key] = _entry_of(key, value)
        else:
            skipped.append(key)
    target = target_of(found, read_side_file(folder), name)
    view_of = _views(reader, found, target.sources)
    manifest = write_state(
        store,
        target,
        view_of,
        step,
        run,
        created_s=created_s,
        incarnation=incarnation,
        chunk_bytes=chunk_bytes,
    )
    return Imported(manifest, tuple(sorted(skipped)))


class _Reader(FileSystemReader):
    """Reads the metadata once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._folder = folder
        self._held: Metadata | None = None

    def read_metadata(self, *arguments: Any, **options: Any) -> Metadata:
        if self._held is None:
            try:
                self._held = super().read_metadata(*arguments, **options)
            except (
                OSError,
                pickle.UnpicklingError,
                EOFError,
                AttributeError,
                ImportError,
                IndexError,
            ) as error:
                raise CheckpointDamaged(f"{self._folder}: not a DCP checkpoint: {error}") from error
            if not isinstance(self._held, Metadata):
                raise CheckpointDamaged(f"{self._folder}: its .metadata is not DCP's")
        return self._held

    def fill(self, name: str, tensor: torch.Tensor) -> None:
        """Read one tensor. Raises CheckpointDamaged."""
        try:
            with warnings.catch_warnings():
                # That nothing here is distributed is meant.
                warnings.filterwarnings("ignore", "torch.distributed is disabled")
                load({name: tensor}, storage_reader=self, no_dist=True)
        except CheckpointException as error:
            raise CheckpointDamaged(f"{self._folder}: tensor {name[:100]!r}: {str(error)[:500]}") from error


def _views(
    reader: _Reader, found: dict[str, TensorEntry], sources: tuple[str, ...]
) -> Callable[[Chunk], memoryview]:
    """The bytes of chunks; the tensor of the last one is held, since chunks of one tensor follow each other."""
    held: list[tuple[str, torch.Tensor]] = []

    def view_of(chunk: Chunk) -> memoryview:
        source = sources[chunk.tensor]
        entry = found[source]
        if not held or held[0][0] != source:
            held.clear()
            tensor = torch.empty(entry.shape, dtype=DTYPES[entry.dtype])
            reader.fill(source, tensor)
            held.append((source, tensor))
        first = offset_in(chunk.start, (0,) * len(entry.shape), entry.shape, entry.itemsize)
        return byte_view(held[0][1])[first : first + chunk.nbytes]

    return view_of


def _entry_of(name: str, value: TensorStorageMetadata) -> TensorEntry:
    dtype, shape = dtype_name(value.properties.dtype), tuple(value.size)
    if dtype not in DTYPES:
        raise StateError(f"tensor {name[:100]!r}: dtype {dtype} cannot be carried as state")
    return TensorEntry(name, dtype, shape, tuple(range(len(shape))))


def _slice_tensor(store: Store, manifest: Manifest, number: int, box: Chunk) -> torch.Tensor:
    entry = manifest.tensors[number]
    tensor = torch.empty(box.shape, dtype=DTYPES[entry.dtype])
    if tensor.numel():
        byte_view(tensor)[:] = read_slice(store, manifest, number, box.start, box.shape)
    return tensor


def _saved(tensor: torch.Tensor) -> bytes:
    buffer = io.BytesIO()
    torch.save(tensor, buffer)
    return buffer.getvalue()
