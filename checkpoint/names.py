"""Names of tensors by where they stand in the state tree: `model.fc.weight`, `optimizer.state.3.exp_avg`.

Called by whoever writes checkpoints and by `export`. These are the names that torch's own checkpoint format (DCP)
gives: the keys on the way, joined by dots.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any, Final

from everstep.checkpoint.tree import MAX_DEPTH, Json
from everstep.errors import StateError

MAX_NAME_LENGTH: Final = 4096
"""Letters of a tensor's name; longer ones are refused when they are written, not when they are read."""


def all_names(skeleton: Json, num_tensors: int) -> list[list[str]]:
    """For each tensor of the skeleton all its names, sorted; tied tensors have several. No two tensors share one.

    Raises StateError if the skeleton is malformed, does not mention a tensor, or gives one no usable name.
    """
    found: list[set[str]] = [set() for _ in range(num_tensors)]
    taken: dict[str, int] = {}
    for name, number in _walk(skeleton, (), 0):
        if type(number) is not int or not 0 <= number < num_tensors:
            raise StateError(f"skeleton at {name[:100]!r}: tensor {str(number)[:40]} of {num_tensors}")
        _check_name(name)
        unique, again = name, 1
        while taken.setdefault(unique, number) != number:
            again += 1
            unique = f"{name}#{again}"
        found[number].add(unique)
    missing = next((number for number, names in enumerate(found) if not names), None)
    if missing is not None:
        raise StateError(f"the skeleton does not mention tensor {missing}")
    return [sorted(names) for names in found]


def tensor_names(skeleton: Json, num_tensors: int) -> list[str]:
    """One name per tensor, the first of its sorted names."""
    return [names[0] for names in all_names(skeleton, num_tensors)]


def _check_name(name: str) -> None:
    if not 0 < len(name) <= MAX_NAME_LENGTH - 20:
        raise StateError(
            f"a tensor's name is its path in the state, 1 to {MAX_NAME_LENGTH - 20} letters: {name[:100]!r}"
        )
    if not name.isascii():
        try:
            name.encode("utf-8")
        except UnicodeEncodeError as error:
            raise StateError(f"the name {name[:100]!a} of a tensor is not Unicode: {error}") from error


def _walk(node: Any, path: tuple[str, ...], depth: int) -> Iterator[tuple[str, Any]]:
    if depth > MAX_DEPTH:
        raise StateError(f"skeleton nests deeper than {MAX_DEPTH}")
    if isinstance(node, list):
        for number, item in enumerate(node):
            yield from _walk(item, (*path, str(number)), depth + 1)
        return
    if not isinstance(node, dict) or len(node) != 1:
        return
    [(tag, body)] = node.items()
    if tag in ("tensor", "ndarray"):
        yield ".".join(path), body
    elif tag in ("tuple", "size") and isinstance(body, list):
        yield from _walk(body, path, depth)
    elif tag in ("dict", "odict", "counter") and isinstance(body, list):
        pairs = [pair for pair in body if isinstance(pair, list) and len(pair) == 2]
        for key, value in sorted(pairs, key=lambda pair: (_key_text(pair[0]), json.dumps(pair[0]))):
            yield from _walk(value, (*path, _key_text(key)), depth + 1)


def _key_text(key: Any) -> str:
    """Texts and numbers as they are; other keys by their JSON."""
    if isinstance(key, str | bool | int | float) or key is None:
        return str(key)
    [(tag, body)] = key.items() if isinstance(key, dict) and len(key) == 1 else [("", key)]
    return ",".join(map(_key_text, body)) if tag == "tuple" and isinstance(body, list) else str(body)
