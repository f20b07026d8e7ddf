"""Who a replica is. Made by `actors.replica`, used by `actors.member` in what it says."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Who this replica is. Constant for its life."""

    run: str
    replica: int
    token: str
    pid: int
    node: str
    host: str
    ip: str
    transfer: tuple[str, int]
