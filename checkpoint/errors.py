"""The errors of durable checkpoints. Raised by everything in this folder that touches a store; each is one message.

EverstepError
├── UserError
│   └── ConfigError
│       └── StoreUnusable           the preflight: this storage URL cannot hold checkpoints, and what to do about it
├── PeerError
│   ├── Superseded                  a newer controller owns the run; whoever gets this may write no more
│   └── AlreadyCommitted            another attempt at this step was committed first
└── InfrastructureError
    ├── StoreError                  an operation on the store did not succeed
    │   ├── TransientStoreError     may pass by itself; was retried until its budget was spent
    │   ├── PermanentStoreError     would fail again: invalid request, disk full, no such bucket
    │   │   ├── ObjectMissing       no object of that key
    │   │   ├── ObjectTooShort      the object ends before the bytes that were asked for
    │   │   └── StoreDenied         credentials or permissions
    │   └── ObjectExists            a create-only put lost: another writer was first
    ├── CheckpointDamaged           bytes, or what they say, are not what was written; names object and place
    ├── CheckpointIncomplete        the parts at hand do not cover the state
    └── WriteCancelled              a part was told to stop between two blocks

All are picklable: their only argument is the message.
"""

from __future__ import annotations

from everstep.errors import ConfigError, InfrastructureError, PeerError


class StoreUnusable(ConfigError):
    """The storage URL cannot hold checkpoints. Names the URL, the cause and the way out."""


class Superseded(PeerError):
    """A controller of a newer incarnation owns the run."""


class AlreadyCommitted(PeerError):
    """The step was committed by another attempt."""


class StoreError(InfrastructureError):
    """An operation on the store did not succeed."""


class TransientStoreError(StoreError):
    """The network, a timeout, a busy server: trying again may help."""


class PermanentStoreError(StoreError):
    """Trying the same again would fail again."""


class ObjectMissing(PermanentStoreError):
    """There is no object of that key."""


class ObjectTooShort(PermanentStoreError):
    """The object ends before the bytes that were asked for."""


class ObjectTooLarge(PermanentStoreError):
    """A small record was asked for, and the object is larger than such a record can be."""


class StoreDenied(PermanentStoreError):
    """Wrong credentials, or no permission."""


class ObjectExists(StoreError):
    """A create-only put found an object there."""


class CheckpointDamaged(InfrastructureError):
    """A checkpoint, or a record about one, is not what was written."""


class CheckpointIncomplete(InfrastructureError):
    """The parts of an attempt do not cover the state, or do not belong together."""


class WriteCancelled(InfrastructureError):
    """Writing a part was cancelled; nothing of it is visible."""
