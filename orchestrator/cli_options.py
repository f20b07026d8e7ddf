"""Options that several commands of `everstep` share, so that they read the same everywhere. Imported by cli*.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])


def address(command: F) -> F:
    """`--address`."""
    text = "The Ray cluster: http://HOST:8265, HOST:6379, or ray://HOST:10001."
    return click.option("--address", metavar="ADDRESS", help=text)(command)


def as_json(command: F) -> F:
    """`--json`."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")(command)


def storage(command: F) -> F:
    """`--storage`."""
    text = "Where runs keep what outlives them. Default: EVERSTEP_STORAGE, ~/everstep."
    return click.option("--storage", metavar="URL", help=text)(command)


def step(command: F) -> F:
    """`--step` of a checkpoint."""
    return click.option("--step", type=click.IntRange(min=0), help="Default: the newest.")(command)
