"""The commit point: parts become a checkpoint, or nothing does.

Called by the controller's executor (and by nothing else that writes). Order, each step useless without the next: parts
are there and cover the state, manifest is written, `commits/<step>.json` is created. Whoever creates that object first
has committed the step; its content names the manifest by SHA-256.

Fencing: a controller announces its incarnation once (`begin`); before it commits or deletes it looks whether a newer
one is there, and stops if so. An older controller that was frozen between that look and its commit can still commit a
whole checkpoint of its own history; the new one then gets AlreadyCommitted at that step and may `retire` it.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from everstep.checkpoint import strict_json as strict
from everstep.checkpoint.errors import (
    AlreadyCommitted,
    CheckpointDamaged,
    CheckpointIncomplete,
    ObjectExists,
    ObjectMissing,
    ObjectTooLarge,
    StoreError,
    Superseded,
)
from everstep.checkpoint.hashing import hash64
from everstep.checkpoint.manifest import MAX_MANIFEST_BYTES, Manifest
from everstep.checkpoint.part import PartIndex
from everstep.checkpoint.records import (
    StoredChunk,
    StoredObject,
    TensorEntry,
    attempt_folder,
    incarnation_of,
    manifest_key,
    split_object_key,
    table_hash,
)
from everstep.checkpoint.store import Store
from everstep.checkpoint.strict_json import Malformed
from everstep.checkpoint.tree import Json
from everstep.errors import InternalError

COMMIT_VERSION: Final = 1
MAX_RECORD_BYTES: Final = 64 << 10
_NUMBER: Final = re.compile(r"0|[1-9][0-9]{0,14}")
_FIELDS: Final = {
    *["version", "step", "attempt", "generation", "incarnation", "created_s"],
    *["manifest", "manifest_bytes", "manifest_sha256", "check"],
}


def commit_key(step: int) -> str:
    """Key of the object whose existence is the commit."""
    return f"commits/{step}.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Commit:
    """The record at the commit point."""

    step: int
    attempt: str
    generation: int
    incarnation: int
    created_s: float
    manifest_bytes: int
    manifest_sha256: str

    @property
    def manifest(self) -> str:
        """Key of the manifest."""
        return manifest_key(self.step, self.attempt)

    def to_bytes(self) -> bytes:
        body: dict[str, Json] = {
            "version": COMMIT_VERSION,
            "step": self.step,
            "attempt": self.attempt,
            "generation": self.generation,
            "incarnation": self.incarnation,
            "created_s": self.created_s,
            "manifest": self.manifest,
            "manifest_bytes": self.manifest_bytes,
            "manifest_sha256": self.manifest_sha256,
        }
        return strict.dumps({**body, "check": f"{hash64([memoryview(strict.dumps(body))]):016x}"})

    @classmethod
    def parse(cls, raw: bytes, step: int) -> Commit:
        """Raises CheckpointDamaged unless `raw` is, byte for byte, what `to_bytes` wrote for `step`."""
        try:
            known = strict.fields(strict.loads(raw, max_bytes=MAX_RECORD_BYTES), _FIELDS, "commit")
            commit = cls(
                step=strict.integer(known["step"], "step"),
                attempt=strict.text(known["attempt"], "attempt"),
                generation=strict.integer(known["generation"], "generation"),
                incarnation=strict.integer(known["incarnation"], "incarnation"),
                created_s=strict.number(known["created_s"], "created_s"),
                manifest_bytes=strict.integer(
                    known["manifest_bytes"], "manifest_bytes", high=MAX_MANIFEST_BYTES
                ),
                manifest_sha256=strict.hex_text(known["manifest_sha256"], "manifest_sha256", 64),
            )
            incarnation_of(commit.attempt)
            if commit.step != step:
                raise Malformed(f"it is of step {commit.step}")
            if commit.to_bytes() != raw:
                raise Malformed("its check sum, version or spelling is not what was written")
            return commit
        except Malformed as error:
            raise CheckpointDamaged(f"{commit_key(step)}: {error}") from error


def read_commit(store: Store, step: int) -> Commit:
    """Raises CheckpointDamaged, also if there is none."""
    try:
        return Commit.parse(store.get(commit_key(step), MAX_RECORD_BYTES), step)
    except ObjectMissing as error:
        raise CheckpointDamaged(f"step {step} is not committed: there is no {commit_key(step)}") from error
    except ObjectTooLarge as error:
        raise CheckpointDamaged(f"{commit_key(step)} is not a commit record: {error}") from error


def read_manifest(store: Store, commit: Commit) -> Manifest:
    """The manifest that a commit names, its hash checked. Raises CheckpointDamaged or StoreError."""
    key = commit.manifest
    try:
        raw = store.get(key, commit.manifest_bytes)
    except ObjectTooLarge as error:
        raise CheckpointDamaged(
            f"{key}: not the {commit.manifest_bytes} bytes that were committed: {error}"
        ) from error
    except ObjectMissing as error:
        raise CheckpointDamaged(f"{key} is missing") from error
    if len(raw) != commit.manifest_bytes or hashlib.sha256(raw).hexdigest() != commit.manifest_sha256:
        raise CheckpointDamaged(f"{key}: {len(raw)} bytes, not those that {commit_key(commit.step)} names")
    manifest = Manifest.parse(raw, key)
    for name in ("step", "attempt", "generation", "incarnation"):
        if getattr(manifest, name) != getattr(commit, name):
            raise CheckpointDamaged(f"{key}: its {name} is not that of {commit_key(commit.step)}")
    return manifest


def begin(store: Store, incarnation: int, identity: str) -> None:
    """Announce a controller. `identity` tells it from any other that would claim the same number.

    Raises Superseded if the number is taken, or a newer one is there.
    """
    body = strict.dumps({"incarnation": incarnation, "identity": identity})
    check_newest(store, incarnation)
    try:
        store.create(f"incarnations/{incarnation}", body)
    except ObjectExists as error:
        if store.get(f"incarnations/{incarnation}", MAX_RECORD_BYTES) != body:
            raise Superseded(
                f"incarnation {incarnation} of the run in {store.url} belongs to another controller"
            ) from error
    check_newest(store, incarnation)


def newest_incarnation(store: Store) -> int:
    """The newest one that was announced; -1 if none was."""
    names = [info.key.removeprefix("incarnations/") for info in store.listing("incarnations/")]
    return max((int(name) for name in names if _NUMBER.fullmatch(name)), default=-1)


def check_newest(store: Store, incarnation: int) -> None:
    """Raises Superseded if a newer controller has begun."""
    newest = newest_incarnation(store)
    if newest > incarnation:
        raise Superseded(
            f"the controller of incarnation {incarnation} may write no more: incarnation {newest} owns the run "
            f"in {store.url}"
        )


def commit(
    store: Store,
    parts: Sequence[PartIndex],
    *,
    run: str,
    step: int,
    generation: int,
    incarnation: int,
    attempt: str,
    tensors: tuple[TensorEntry, ...],
    skeleton: Json,
    world_size: int,
    created_s: float,
    config_digest: str = "",
    user: dict[str, Json] | None = None,
) -> Manifest:
    """Make the parts of one attempt the checkpoint of `step`, and return its manifest.

    The parts need not be all, if they cover the state; of two that hold the same slice the first is taken. Raises
    CheckpointIncomplete (parts do not belong together, do not cover, or their objects are not there), Superseded,
    AlreadyCommitted, StateError (`user` is not JSON) or StoreError. May be called again with the same arguments.
    """
    user = user or {}
    strict.check_json(user, "user data of a checkpoint")
    objects, chunks = _gather(parts, step, generation, attempt, table_hash(tensors))
    manifest = Manifest(
        run=run,
        step=step,
        generation=generation,
        incarnation=incarnation,
        attempt=attempt,
        created_s=float(created_s),
        world_size=world_size,
        config_digest=config_digest,
        skeleton=skeleton,
        tensors=tensors,
        objects=objects,
        chunks=chunks,
        user=user,
    )
    raw = manifest.to_bytes()
    try:
        same = Manifest.parse(raw, manifest_key(step, attempt)) == manifest
    except CheckpointDamaged as error:
        raise CheckpointIncomplete(f"step {step}, attempt {attempt}, {len(parts)} parts: {error}") from error
    if not same:  # a reader would get another checkpoint than the one that was written
        raise InternalError(f"step {step}, attempt {attempt}: the manifest changes when it is read")
    check_objects(store, manifest)
    check_newest(store, incarnation)
    _create_or_same(store, manifest_key(step, attempt), raw)
    record = Commit(
        step=step,
        attempt=attempt,
        generation=generation,
        incarnation=incarnation,
        created_s=float(created_s),
        manifest_bytes=len(raw),
        manifest_sha256=hashlib.sha256(raw).hexdigest(),
    )
    check_newest(store, incarnation)
    _create_or_same(store, commit_key(step), record.to_bytes())
    try:
        store.put("LATEST", str(step).encode())
    except StoreError:
        pass  # a hint for people; nothing here reads it
    return manifest


def _gather(
    parts: Sequence[PartIndex], step: int, generation: int, attempt: str, table: str
) -> tuple[tuple[StoredObject, ...], tuple[StoredChunk, ...]]:
    objects: dict[str, StoredObject] = {}
    chunks: dict[object, StoredChunk] = {}
    for part in parts:
        here = (part.step, part.generation, part.attempt, part.table)
        if here != (step, generation, attempt, table):
            raise CheckpointIncomplete(
                f"the part of rank {part.rank} is of step {part.step}, generation {part.generation}, attempt "
                f"{part.attempt}, tensors {part.table}; wanted are {step}, {generation}, {attempt}, {table}"
            )
        for held in part.objects:
            if objects.setdefault(held.key, held) != held:
                raise CheckpointIncomplete(f"two parts disagree about {held.key}")
        for chunk in part.chunks:
            chunks.setdefault((chunk.tensor, chunk.start, chunk.shape), chunk)
    used = {chunk.object for chunk in chunks.values()}
    kept = sorted((held for held in objects.values() if held.key in used), key=lambda held: held.key)
    return tuple(kept), tuple(sorted(chunks.values(), key=lambda chunk: (chunk.tensor, chunk.start)))


def object_sizes(store: Store, manifest: Manifest) -> dict[str, int]:
    """Sizes of what is in the folders of the manifest's objects, by key."""
    folders = {attempt_folder(*split_object_key(held.key, "objects")) for held in manifest.objects}
    return {info.key: info.size for folder in sorted(folders) for info in store.listing(folder)}


def check_objects(store: Store, manifest: Manifest) -> None:
    """Raises CheckpointIncomplete unless every object of the manifest is in the store with its size."""
    there = object_sizes(store, manifest)
    for held in manifest.objects:
        if there.get(held.key) != held.size:
            state = "is missing" if held.key not in there else f"has {there[held.key]} bytes"
            raise CheckpointIncomplete(
                f"step {manifest.step}, attempt {manifest.attempt}: {held.key} {state}, {held.size} were written"
            )


def _create_or_same(store: Store, key: str, data: bytes) -> None:
    """Create an object, or find there what an earlier call has written. Raises AlreadyCommitted if it is another's."""
    try:
        store.create(key, data)
    except ObjectExists as error:
        if store.get(key, MAX_MANIFEST_BYTES) != data:
            raise AlreadyCommitted(
                f"{store.url}: {key} is there already, and is not what is written here; this one is dropped"
            ) from error


def retire(store: Store, step: int, reason: str, incarnation: int) -> None:
    """Move the commit of `step` aside, so that the step can be committed again.

    For a checkpoint that is damaged, or of a history that was given up. A record with the reason stays in `retired/`;
    its data is collected as orphans. Does nothing if the step is not committed. Raises Superseded or StoreError.
    """
    check_newest(store, incarnation)
    try:
        raw = store.get(commit_key(step), MAX_RECORD_BYTES)
    except ObjectMissing:
        return
    except ObjectTooLarge as error:  # whatever it is, no commit record is that large
        raw = str(error).encode()
    name = hashlib.sha256(raw).hexdigest()[:16]
    body: dict[str, Any] = {
        "step": step,
        "reason": reason[:2000],
        "commit_base64": base64.b64encode(raw).decode("ascii"),
    }
    store.put(f"retired/{step}-{name}.json", strict.dumps(body))
    check_newest(store, incarnation)
    store.delete([commit_key(step)])
