"""What is deleted: checkpoints beyond the retention, and orphans. The only code here that deletes data.

Called by the controller between commits, and by the command line. Safe to be killed at any point: a commit goes first,
then its manifest, then data that no commit refers to any more; what is left over then is an orphan for the next call.

It never deletes what a checkpoint that stays refers to, also when that is an older step's object; nor anything of a
live attempt, of a newer incarnation, or younger than the grace age by the store's own clock. A damaged checkpoint stays
until somebody retires it; if its manifest cannot be read, nobody knows what it refers to, and no data is deleted at all.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final

from everstep.checkpoint.catalog import committed_steps, pinned_steps
from everstep.checkpoint.commit import check_newest, check_objects, commit_key, read_commit, read_manifest
from everstep.checkpoint.errors import CheckpointDamaged, CheckpointIncomplete
from everstep.checkpoint.manifest import Manifest
from everstep.checkpoint.records import incarnation_of, manifest_key, split_step_key
from everstep.checkpoint.store import ObjectInfo, Store
from everstep.errors import ConfigError

GRACE_S: Final = 3600.0
"""An object without an owner is left alone for this long, seconds: its writer may be slow, or be another program."""
_BATCH: Final = 500
_RECORDS: Final = ("commits/", "incarnations/", "pins/", "retired/", "probe/", "LATEST")
"""Where small records are; an upload there that is older than the grace age has no writer that waits for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Retention:
    """Which checkpoints stay. The newest whole one always does, and pinned ones."""

    keep_last: int = 3
    """So many of the newest whole ones. Default: one to use, one if that turns out damaged, one more."""
    keep_every: int | None = None
    """Also those whose step is a multiple of this; None: no others."""

    def __post_init__(self) -> None:
        if self.keep_last < 1:
            raise ConfigError(f"keep_last is {self.keep_last}, must be at least 1")
        if self.keep_every is not None and self.keep_every < 1:
            raise ConfigError(f"keep_every is {self.keep_every}, must be at least 1 or None")


@dataclass(frozen=True, slots=True)
class LiveAttempt:
    """An attempt that replicas may still be writing, and the committed step whose chunks it may refer to."""

    step: int
    attempt: str
    base_step: int | None = None


@dataclass(frozen=True, slots=True)
class Pruned:
    """What was deleted, and what could not be."""

    steps: tuple[int, ...]
    objects: tuple[str, ...]
    num_bytes: int
    uploads: int
    """Uploads of dead writers that were aborted."""
    kept_damaged: tuple[str, ...]
    """What is wrong with checkpoints that are damaged and stay: `retire` them."""
    data_kept: bool
    """Whether no data was deleted at all, because a manifest cannot be read."""


@dataclass(frozen=True, slots=True)
class _Found:
    """Committed steps, by what can be said about them."""

    whole: dict[int, Manifest]
    broken: dict[int, Manifest]
    """The manifest is right; an object that it refers to is not there, or not of its size."""
    unreadable: frozenset[int]
    damage: tuple[str, ...]


def prune(
    store: Store,
    retention: Retention,
    *,
    incarnation: int,
    live: Collection[LiveAttempt] = (),
    grace_s: float = GRACE_S,
) -> Pruned:
    """Delete checkpoints beyond `retention`, then orphans. Raises Superseded or StoreError; may be called again."""
    check_newest(store, incarnation)
    found = _look(store, committed_steps(store))
    whole = found.whole
    keep = _kept(retention, list(whole), pinned_steps(store), live)
    gone = [step for step in whole if step not in keep]
    for step in reversed(gone):
        check_newest(store, incarnation)
        store.delete([commit_key(step)])
        store.delete([manifest_key(step, whole[step].attempt)])
    deleted: list[ObjectInfo] = []
    num_uploads = 0
    if not found.unreadable:
        staying = [*(whole[step] for step in whole if step in keep), *found.broken.values()]
        pruned_keys = {held.key for step in gone for held in whole[step].objects}
        deleted = _delete_orphans(store, staying, pruned_keys, incarnation, live, grace_s)
        num_uploads = _drop_uploads(store, incarnation, live, grace_s)
    return Pruned(
        tuple(gone),
        tuple(info.key for info in deleted),
        sum(info.size for info in deleted),
        num_uploads,
        found.damage,
        bool(found.unreadable),
    )


def _look(store: Store, steps: Iterable[int]) -> _Found:
    whole: dict[int, Manifest] = {}
    broken: dict[int, Manifest] = {}
    unreadable: set[int] = set()
    damage = []
    for step in steps:
        try:
            manifest = read_manifest(store, read_commit(store, step))
        except CheckpointDamaged as error:
            unreadable.add(step)
            damage.append(str(error))
            continue
        try:
            check_objects(store, manifest)
            whole[step] = manifest
        except CheckpointIncomplete as error:
            broken[step] = manifest
            damage.append(str(error))
    return _Found(whole, broken, frozenset(unreadable), tuple(damage))


def _kept(
    retention: Retention, newest_first: list[int], pinned: set[int], live: Collection[LiveAttempt]
) -> set[int]:
    keep = set(newest_first[: retention.keep_last]) | pinned
    if retention.keep_every is not None:
        keep |= {step for step in newest_first if step % retention.keep_every == 0}
    return keep | {attempt.base_step for attempt in live if attempt.base_step is not None}


def _delete_orphans(
    store: Store,
    staying: list[Manifest],
    pruned_keys: set[str],
    incarnation: int,
    live: Collection[LiveAttempt],
    grace_s: float,
) -> list[ObjectInfo]:
    """Delete what no manifest that stays refers to. Objects of checkpoints that were just deleted need no grace."""
    referred = {held.key for manifest in staying for held in manifest.objects}
    referred |= {manifest_key(manifest.step, manifest.attempt) for manifest in staying}
    candidates = [
        info
        for info in store.listing("steps/")
        if info.key not in referred and _may_delete(info.key, incarnation, live)
    ]
    if not candidates:
        return []
    oldest_s = store.clock_s() - grace_s
    doomed = [info for info in candidates if info.key in pruned_keys or info.modified_s < oldest_s]
    # Manifests first: one without its data would only look like damage.
    doomed.sort(key=lambda info: (not info.key.endswith("manifest.json"), info.key))
    for first in range(0, len(doomed), _BATCH):
        check_newest(store, incarnation)
        store.delete([info.key for info in doomed[first : first + _BATCH]])
    return doomed


def _may_delete(key: str, incarnation: int, live: Collection[LiveAttempt]) -> bool:
    """Whether an object under steps/ is ours to delete: of a dead attempt, by this or an older incarnation."""
    found = split_step_key(key)
    if found is None:
        return False
    step, attempt, _ = found
    return incarnation_of(attempt) <= incarnation and (step, attempt) not in {
        (one.step, one.attempt) for one in live
    }


def _drop_uploads(store: Store, incarnation: int, live: Collection[LiveAttempt], grace_s: float) -> int:
    """Abort uploads of dead writers, and delete what killed preflights left."""
    uploads = [
        one
        for one in store.unfinished()
        if one.key.startswith(_RECORDS) or _may_delete(one.key, incarnation, live)
    ]
    probes = store.listing("probe/")
    if not uploads and not probes:
        return 0
    oldest_s = store.clock_s() - grace_s
    check_newest(store, incarnation)
    old = [one for one in uploads if one.modified_s < oldest_s]
    store.drop(old)
    store.delete([info.key for info in probes if info.modified_s < oldest_s])
    return len(old)
