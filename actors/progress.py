"""The session's own state beside the user's: which buffers are reduced, where iterable data stand. Used by
`actors.session` only."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch

from everstep.actors.data import MapSource, ShardSource

if TYPE_CHECKING:
    from everstep.actors.groups import Group
    from everstep.actors.session import Session


class Positions:
    """Everyone knows where every shard's iterator stood after the last committed step, so that whoever takes a shard
    over reads a step again at most, not the whole stream. Map-style datasets need none of it."""

    def __init__(self) -> None:
        self.by_shard: dict[int, Any] = {}
        """JSON-safe states."""

    def share(self, source: ShardSource, group: Group, device: torch.device) -> None:
        """Exchange them over the group. A collective: all members call it."""
        if isinstance(source, MapSource):
            return
        mine = json.dumps({str(k): v for k, v in source.states().items()}).encode()
        sizes = torch.zeros(group.world_size, dtype=torch.int64, device=device)
        sizes[group.rank] = len(mine)
        group.all_reduce(sizes)
        longest = int(sizes.max())
        padded = torch.zeros(longest, dtype=torch.uint8, device=device)
        padded[: len(mine)] = torch.frombuffer(bytearray(mine), dtype=torch.uint8)
        rows = padded.new_zeros(longest * group.world_size)
        group.all_gather(rows, padded)
        for row, size in zip(rows.cpu().view(-1, longest), sizes.tolist(), strict=True):
            self.take(json.loads(row[:size].numpy().tobytes()))
        source.load_states(self.by_shard)

    def as_json(self) -> dict[str, Any]:
        """All of them, in the order of the shards."""
        return {str(k): v for k, v in sorted(self.by_shard.items())}

    def take(self, states: Mapping[str, Any]) -> None:
        """Newer ones."""
        self.by_shard.update({int(k): v for k, v in states.items()})


class Progress:
    """Registered like the user's objects."""

    def __init__(self, session: Session) -> None:
        self._session = session

    def state_dict(self) -> dict[str, Any]:
        reducer = self._session._reducer
        assert reducer is not None
        return {
            "buffers": sorted(reducer.buffer_set),
            "positions": self._session._positions.as_json(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        reducer, source = self._session._reducer, self._session._source
        assert reducer is not None and source is not None
        reducer.buffer_set = frozenset(state["buffers"])
        self._session._positions.by_shard.clear()
        self._session._positions.take(state["positions"])
        source.load_states(self._session._positions.by_shard)
