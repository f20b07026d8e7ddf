"""Process groups that can be formed, aborted and dropped again and again in one process.

The controller runs the `RendezvousServer`; the replica forms one group per generation with `form_group`; the session and
the reduction use it. One seam, with an implementation per kind of device behind it. Names are loaded on first use: the
controller needs no torch for its part.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from everstep.actors.groups.rendezvous import Rendezvous, RendezvousServer

if TYPE_CHECKING:
    import torch

    from everstep.actors.groups.base import Group as Group
    from everstep.actors.groups.base import LocalGroup as LocalGroup
    from everstep.actors.groups.base import Work as Work

StoreServer = RendezvousServer

__all__ = ["Group", "LocalGroup", "Rendezvous", "RendezvousServer", "StoreServer", "Work", "form_group"]


def form_group(device: torch.device, rendezvous: Rendezvous, cancel: threading.Event | None = None) -> Group:
    """Form the group of one generation; `device` is where the tensors will be ("cpu": TCP, "cuda": NCCL).

    Blocks until all ranks are connected, for at most about `rendezvous.timeout_s`. Run it in a side thread when a peer
    may have died: set `cancel` and abandon the thread, and a group that still comes out of it closes itself.
    Raises GroupBroken.
    """
    cancel = cancel or threading.Event()
    if rendezvous.world_size == 1:
        from everstep.actors.groups.base import LocalGroup

        return LocalGroup()
    if device.type == "cuda":
        from everstep.actors.groups.nccl import form_nccl

        return form_nccl(device, rendezvous, cancel)
    from everstep.actors.groups.mesh import form_mesh

    return form_mesh(rendezvous, cancel)


def __getattr__(name: str) -> object:
    if name in __all__:
        from everstep.actors.groups import base

        return getattr(base, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
