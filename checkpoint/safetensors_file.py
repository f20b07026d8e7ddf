"""The safetensors container: header and names, without tensors and without I/O.

Called by `part`, `verify`, `export` and `importing`. Format: 8 bytes with the length of the header, little-endian; the
header, a JSON object {name: {dtype, shape, data_offsets}} and `__metadata__`; then the bytes of all tensors without
gaps (https://github.com/huggingface/safetensors#format). Tensors of larger items come first, so that each is aligned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

from everstep.checkpoint import strict_json as strict
from everstep.checkpoint.strict_json import Malformed
from everstep.checkpoint.tree import DTYPES

MAX_HEADER_BYTES: Final = 100_000_000
"""The limit of the format's own reader."""

CODES: Final[dict[str, str]] = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
}
"""Torch dtype names to safetensors codes. What has none (complex32, complex128) is stored as U8 with one more
dimension."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: `offset` counts from the end of the header."""

    name: str
    code: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def stored_as(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Code and shape under which a tensor of a torch dtype is stored."""
    if dtype in CODES:
        return CODES[dtype], shape
    return "U8", (*shape, DTYPES[dtype].itemsize)


def dtype_of(code: str) -> str:
    """The torch dtype name of a code. Raises Malformed."""
    for name, known in CODES.items():
        if known == code:
            return name
    raise Malformed(f"safetensors dtype {code[:20]!r} has no torch dtype")


def itemsize(code: str) -> int:
    """Bytes of one item."""
    return DTYPES[dtype_of(code)].itemsize


def lay_out(tensors: Sequence[tuple[str, str, tuple[int, ...]]]) -> list[Entry]:
    """Entries for (name, code, shape): larger items first, otherwise in the order given."""
    entries, offset = [], 0
    for name, code, shape in sorted(tensors, key=lambda tensor: -itemsize(tensor[1])):
        nbytes = prod(shape) * itemsize(code)
        entries.append(Entry(name, code, shape, offset, nbytes))
        offset += nbytes
    return entries


def header(entries: Sequence[Entry], metadata: Mapping[str, str]) -> bytes:
    """Length and header, padded so that the data starts at a multiple of 8."""
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    for entry in entries:
        if entry.name in table or entry.name == "__metadata__":
            raise ValueError(f"two tensors of one file are named {entry.name!r}, or one like the metadata")
        offsets = [entry.offset, entry.offset + entry.nbytes]
        table[entry.name] = {"dtype": entry.code, "shape": list(entry.shape), "data_offsets": offsets}
    raw = json.dumps(table, separators=(",", ":"), ensure_ascii=False).encode("utf-8", "strict")
    raw += b" " * (-len(raw) % 8)
    if len(raw) > MAX_HEADER_BYTES:
        raise ValueError(f"a safetensors header of {len(raw)} bytes, at most {MAX_HEADER_BYTES} are read")
    return len(raw).to_bytes(8, "little") + raw


def header_bytes(start: bytes | memoryview, size: int) -> int:
    """Bytes before the data, by the first 8 of a file of `size` bytes. Raises Malformed."""
    length = int.from_bytes(start[:8], "little")
    if len(start) < 8 or length > MAX_HEADER_BYTES or 8 + length > size:
        raise Malformed(f"a header of {length} bytes in a safetensors file of {size}")
    return 8 + length


def parse_header(raw: bytes | memoryview, data_bytes: int) -> tuple[list[Entry], dict[str, str]]:
    """Entries in order of offset, and `__metadata__`, of a header without its 8 length bytes.

    Raises Malformed unless the entries fill `data_bytes` bytes without gaps.
    """
    table = strict.loads(raw, max_bytes=MAX_HEADER_BYTES)
    if not isinstance(table, dict):
        raise Malformed("a safetensors header is an object")
    metadata = table.pop("__metadata__", {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise Malformed("__metadata__ maps texts to texts")
    entries = [_entry(name, value) for name, value in table.items()]
    entries.sort(key=lambda entry: (entry.offset, entry.nbytes))
    end = 0
    for entry in entries:
        if entry.offset != end:
            raise Malformed(
                f"tensor {entry.name[:100]!r} starts at {entry.offset}, the one before ends at {end}"
            )
        end += entry.nbytes
    if end != data_bytes:
        raise Malformed(f"the tensors take {end} bytes, the file has {data_bytes}")
    return entries, metadata


def _entry(name: str, value: object) -> Entry:
    what = f"tensor {name[:100]!r}"
    known = strict.fields(value, {"dtype", "shape", "data_offsets"}, what)
    code, shape = strict.text(known["dtype"], what), strict.index(known["shape"], what)
    offsets = strict.index(known["data_offsets"], what, max_dims=2)
    if len(offsets) != 2 or offsets[1] - offsets[0] != prod(shape) * itemsize(code):
        raise Malformed(f"{what}: offsets {offsets} for {code} {list(shape)}")
    return Entry(name, code, shape, offsets[0], offsets[1] - offsets[0])
