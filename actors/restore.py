"""A state read back from its checkpoint in storage. Called by the session of the replica that is to read it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from everstep.actors.places import checkpoints_url
from everstep.checkpoint.commit import read_commit, read_manifest
from everstep.checkpoint.reader import read_tensors
from everstep.checkpoint.store import open_store

if TYPE_CHECKING:
    from everstep.checkpoint.state import RegisteredState
    from everstep.orchestrator.config import RunConfig


def restore(config: RunConfig, step: int, state: RegisteredState, moved: Callable[[], None]) -> int:
    """Put the checkpoint of `step` into the live objects; returns the bytes that were read. `moved` is called now and then.

    Raises CheckpointDamaged if it is not what was written, StateMismatch if it is not what is registered here, StoreError.
    After an error the objects may be half changed: such a replica holds no state.
    """
    store = open_store(checkpoints_url(config), config.checkpoint.storage_options)
    manifest = read_manifest(store, read_commit(store, step))
    layout = manifest.layout()
    buffers = state.receive_buffers(layout)
    report = read_tensors(store, manifest, buffers, progress=lambda _: moved())
    state.load(layout.skeleton, buffers)
    return report.num_bytes
