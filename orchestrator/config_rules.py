"""The rules that configs check themselves with, and how a mapping becomes a config. Called by config.py alone.

Pure: no clock, no files, no environment, neither ray nor torch. Every refusal is a ConfigError that names the
field by its dotted path, the value, and what would be right.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
from collections.abc import Callable, Iterable, Mapping
from math import isfinite
from typing import Any, NoReturn, TypeVar, cast

from everstep.errors import ConfigError

T = TypeVar("T")
Rule = Callable[[object], str | None]
"""Looks at a value and returns what would be right, or None when the value is."""


def refuse(path: str, value: object, right: str) -> NoReturn:
    """Raises the ConfigError for one field."""
    raise ConfigError(f"{path} = {value!r}: {right}")


def whole(at_least: int = 0, below: int | None = None, optional: bool = False) -> Rule:
    """An integer (True and False are none) within the bounds; None too when `optional`."""

    def rule(value: object) -> str | None:
        if value is None and optional:
            return None
        fits = isinstance(value, int) and not isinstance(value, bool)
        if fits and cast(int, value) >= at_least and (below is None or cast(int, value) < below):
            return None
        bound = f"of at least {at_least}" if below is None else f"from {at_least} to {below - 1}"
        return f"must be a whole number {bound}" + (", or none for no limit" if optional else "")

    return rule


def number(above: float | None = None, at_least: float | None = None, optional: bool = False) -> Rule:
    """A finite number within the bound; None too when `optional`."""

    def rule(value: object) -> str | None:
        if value is None and optional:
            return None
        fits = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if fits:
            found = cast(float, value)
            fits = (above is None or found > above) and (at_least is None or found >= at_least)
        if fits:
            return None
        bound = f"above {above:g}" if above is not None else f"of at least {at_least or 0:g}"
        return f"must be a number {bound}" + (", or none for no limit" if optional else "")

    return rule


def one_of(*choices: str) -> Rule:
    """One of the given words."""

    def rule(value: object) -> str | None:
        return None if value in choices else f"must be one of {', '.join(choices)}{_closest(value, choices)}"

    return rule


def instance(kind: type, optional: bool = False) -> Rule:
    """A `kind`, such as a nested config or text; None too when `optional`."""

    def rule(value: object) -> str | None:
        if isinstance(value, kind) or (value is None and optional):
            return None
        return f"must be {_article(kind)}, not {_article(type(value))}"

    return rule


def check(config: object, section: str, rules: Mapping[str, Rule]) -> None:
    """Holds every named field against its rule, in the order of `rules`."""
    for name, rule in rules.items():
        value = getattr(config, name)
        if right := rule(value):
            refuse(dotted(section, name), value, right)


def dotted(section: str, name: str) -> str:
    """`batch.logical_shards`; the run's own fields have no section."""
    return f"{section}.{name}" if section else name


def section(name: str) -> Callable[[type[T]], type[T]]:
    """Class decorator over a dataclass: unknown and missing fields become ConfigErrors under `name`.

    A dataclass alone answers a misspelt field with a TypeError that does not know the right spelling.
    """

    def decorate(cls: type[T]) -> type[T]:
        construct = cls.__init__

        @functools.wraps(construct)
        def __init__(self: T, **values: object) -> None:
            check_names(cls, name, values)
            construct(self, **values)

        setattr(cls, "__init__", __init__)  # noqa: B010 - mypy refuses the plain assignment
        return cls

    return decorate


def check_names(cls: type, section: str, values: Mapping[str, object]) -> None:
    """Raises ConfigError when `values` has a field that `cls` does not know, or lacks one that it needs."""
    fields = {field.name: field for field in dataclasses.fields(cls)}
    for name, value in values.items():
        if name not in fields:
            hint = _closest(name, fields) or f"; the fields here are {', '.join(fields)}"
            refuse(dotted(section, str(name)), value, f"there is no such field{hint}")
    for name, field in fields.items():
        needed = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if needed and name not in values:
            raise ConfigError(f"{dotted(section, name)} is missing: it has no default")


def build(cls: type[T], section: str, values: object, nested: Mapping[str, type]) -> T:
    """A `cls` from a plain mapping; fields named in `nested` are mappings of their own.

    Raises ConfigError for anything that is not such a mapping, and whatever `cls` refuses.
    """
    if not isinstance(values, Mapping):
        refuse(section or "config", values, f"must be a mapping of field names to values, for {cls.__name__}")
    check_names(cls, section, values)
    made = {}
    for name, value in values.items():
        is_mapping = name in nested and not isinstance(value, nested[name])
        made[name] = build(nested[name], dotted(section, name), value, {}) if is_mapping else value
    return cls(**made)


def plain(config: Any) -> dict[str, Any]:
    """The config as nested dicts of plain values, as `build` takes them."""
    return dataclasses.asdict(config)


def _closest(word: object, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(str(word), list(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _article(kind: type) -> str:
    words = {str: "text", dict: "a mapping", bool: "true or false", type(None): "none", Mapping: "a mapping"}
    return words.get(kind, f"a {kind.__name__}")
