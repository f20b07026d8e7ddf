"""JSON from a store, read as if an enemy had written it. Called by everything here that parses a record.

Refuses duplicate keys, NaN and infinities, numbers that overflow, deep nesting and large input, and has small
accessors that check types: a parser built on them fails by name instead of somewhere later.
"""

from __future__ import annotations

import json
import math
import reprlib
from typing import Any, Final

from everstep.checkpoint.tree import Json
from everstep.errors import StateError

MAX_DEPTH: Final = 256
"""A state tree nests at most 64 deep, and each of its containers takes three levels of JSON."""


class Malformed(ValueError):
    """What was parsed is not what it should be. Callers turn it into an error that names the object."""


def loads(raw: bytes | bytearray | memoryview, *, max_bytes: int) -> Any:
    """Parse. Raises Malformed."""
    if len(raw) > max_bytes:
        raise Malformed(f"{len(raw)} bytes of JSON, at most {max_bytes} are read")
    try:
        value = json.loads(
            bytes(raw).decode("utf-8"),
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
        _check_depth(value)
        return value
    except Malformed:
        raise
    except (ValueError, RecursionError) as error:
        raise Malformed(f"not JSON: {str(error)[:200]}") from error


def dumps(value: Json) -> bytes:
    """Equal values give equal bytes. Raises ValueError for NaN, TypeError for what JSON cannot hold."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode("ascii")


def fields(raw: Any, names: set[str], what: str) -> dict[str, Any]:
    """`raw` as an object with exactly these keys."""
    if not isinstance(raw, dict):
        raise Malformed(f"{what}: expected an object, got {reprlib.repr(raw)}")
    if raw.keys() != names:
        missing, odd = sorted(names - raw.keys()), sorted(raw.keys() - names)
        raise Malformed(f"{what}: missing {missing}, unknown {reprlib.repr(odd)}")
    return raw


def integer(raw: Any, what: str, *, low: int = 0, high: int = 1 << 53) -> int:
    """`raw` as an int in [low, high]; a bool is not an int."""
    if type(raw) is not int or not low <= raw <= high:
        raise Malformed(f"{what}: expected an integer from {low} to {high}, got {reprlib.repr(raw)}")
    return raw


def number(raw: Any, what: str) -> float:
    """`raw` as a finite float."""
    if type(raw) not in (int, float) or not math.isfinite(raw):
        raise Malformed(f"{what}: expected a number, got {reprlib.repr(raw)}")
    return float(raw)


def text(raw: Any, what: str, *, max_length: int = 1024) -> str:
    """`raw` as a str."""
    if not isinstance(raw, str) or len(raw) > max_length:
        raise Malformed(f"{what}: expected a text of at most {max_length} letters, got {reprlib.repr(raw)}")
    return raw


def hex_text(raw: Any, what: str, num_digits: int) -> str:
    """`raw` as lower-case hexadecimal text of just `num_digits` digits."""
    if not isinstance(raw, str) or len(raw) != num_digits or not set(raw) <= set("0123456789abcdef"):
        raise Malformed(f"{what}: expected {num_digits} hexadecimal digits, got {reprlib.repr(raw)}")
    return raw


def items(raw: Any, what: str, *, max_length: int) -> list[Any]:
    """`raw` as a list."""
    if not isinstance(raw, list) or len(raw) > max_length:
        raise Malformed(f"{what}: expected an array of at most {max_length}, got {reprlib.repr(raw)}")
    return raw


def index(raw: Any, what: str, *, max_dims: int = 64) -> tuple[int, ...]:
    """`raw` as a tuple of non-negative ints."""
    return tuple(integer(part, what) for part in items(raw, what, max_length=max_dims))


def check_json(value: Any, what: str) -> Json:
    """`value` itself if JSON gives it back unchanged. Raises StateError for anything else (tuples, NaN, int keys)."""
    try:
        same = loads(dumps(value), max_bytes=1 << 30) == value
    except (TypeError, ValueError) as error:
        raise StateError(f"{what}: {error}; only what JSON holds can be kept here") from error
    if not same:
        raise StateError(f"{what}: changes when it is written as JSON; use lists and texts as keys")
    return value  # type: ignore[no-any-return]


def _check_depth(value: Any, left: int = MAX_DEPTH) -> None:
    if left < 0:
        raise Malformed(f"nested more than {MAX_DEPTH} deep")
    for part in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        if isinstance(part, dict | list):
            _check_depth(part, left - 1)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        names = [name for name, _ in pairs]
        twice = sorted({name for name in names if names.count(name) > 1}) if len(names) < 1000 else []
        raise Malformed(f"the same key twice in one object: {reprlib.repr(twice)}")
    return found


def _no_constant(name: str) -> Any:
    raise Malformed(f"{name} is not JSON")


def _finite(digits: str) -> float:
    value = float(digits)
    if not math.isfinite(value):
        raise Malformed(f"the number {digits[:40]} is too large")
    return value
