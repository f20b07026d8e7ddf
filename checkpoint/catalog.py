"""Which checkpoints there are, and the newest whole one. Reads only.

Called by the controller on a start, by the command line, and by `retention`. A checkpoint exists if and only if its
commit does; one whose commit, manifest or objects are not what was written is refused with the reason, never skipped
silently.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from everstep.checkpoint.commit import Commit, check_objects, read_commit, read_manifest
from everstep.checkpoint.errors import CheckpointDamaged, CheckpointIncomplete
from everstep.checkpoint.manifest import Manifest
from everstep.checkpoint.store import Store

_COMMIT_NAME: Final = re.compile(r"commits/(0|[1-9][0-9]{0,14})\.json")
_PIN_NAME: Final = re.compile(r"pins/(0|[1-9][0-9]{0,14})")


@dataclass(frozen=True, slots=True)
class Listed:
    """One committed step."""

    step: int
    modified_s: float
    """When it was committed, by the store's clock, seconds since the epoch."""
    pinned: bool
    commit: Commit | None
    """None if the record is damaged."""
    damage: str
    """What is wrong with the record, or empty."""


@dataclass(frozen=True, slots=True)
class Refused:
    """A committed step that cannot be used, and why."""

    step: int
    reason: str


@dataclass(frozen=True, slots=True)
class Choice:
    """The newest whole checkpoint, if there is one, and the newer ones that were refused."""

    manifest: Manifest | None
    refused: tuple[Refused, ...]


def committed_steps(store: Store) -> list[int]:
    """Newest first."""
    matches = (_COMMIT_NAME.fullmatch(info.key) for info in store.listing("commits/"))
    return sorted((int(match[1]) for match in matches if match), reverse=True)


def list_checkpoints(store: Store) -> list[Listed]:
    """All committed steps, newest first. Reads their commit records, not their manifests."""
    pinned = pinned_steps(store)
    found = []
    for info in store.listing("commits/"):
        match = _COMMIT_NAME.fullmatch(info.key)
        if match is None:
            continue
        step = int(match[1])
        commit, damage = None, ""
        try:
            commit = read_commit(store, step)
        except CheckpointDamaged as error:
            damage = str(error)
        found.append(Listed(step, info.modified_s, step in pinned, commit, damage))
    return sorted(found, key=lambda listed: -listed.step)


def open_checkpoint(store: Store, step: int) -> Manifest:
    """The manifest of a committed step whose objects are all there. Raises CheckpointDamaged or StoreError."""
    manifest = read_manifest(store, read_commit(store, step))
    try:
        check_objects(store, manifest)
    except CheckpointIncomplete as error:
        raise CheckpointDamaged(str(error)) from error
    return manifest


def newest_whole(store: Store, *, before: int | None = None) -> Choice:
    """The newest checkpoint (of a step below `before`) whose commit, manifest and object sizes are right.

    Its bytes are verified when they are read; a reader that finds damage there calls again with `before` set to the
    damaged step. Raises StoreError if the store does not answer, never a guess.
    """
    refused: list[Refused] = []
    for step in committed_steps(store):
        if before is not None and step >= before:
            continue
        try:
            return Choice(open_checkpoint(store, step), tuple(refused))
        except CheckpointDamaged as error:
            refused.append(Refused(step, str(error)))
    return Choice(None, tuple(refused))


def pinned_steps(store: Store) -> set[int]:
    """Steps that retention keeps for ever."""
    matches = (_PIN_NAME.fullmatch(info.key) for info in store.listing("pins/"))
    return {int(match[1]) for match in matches if match}


def pin(store: Store, step: int) -> None:
    """Keep a committed step for ever. Raises CheckpointDamaged if it is not committed."""
    read_commit(store, step)
    store.put(f"pins/{step}", b"pinned")


def unpin(store: Store, step: int) -> None:
    """Give a step back to retention."""
    store.delete([f"pins/{step}"])
