"""Modules' buffers: BatchNorm's statistics and whatever else a forward writes to.

Used by the reducer, in the training thread. Each shard's forward starts from the committed buffers, so what it leaves
in them depends on nothing but the shard. Floating-point buffers become the mean over the shards, in the order of the
tree; others (counters such as `num_batches_tracked`) the maximum. Only buffers that some forward was seen to write to
are reduced: that set is agreed on by vote, and only grows.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from everstep.actors.groups.base import Group
from everstep.actors.reduction.plan import Plan, Strategy, room
from everstep.actors.reduction.tree import fold, leaf


class Buffers:
    """Live buffers, the committed copies, and what the shards computed here left in them."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._names = [name for name, _ in named]
        self._live = [tensor for _, tensor in named]
        self._committed = [tensor.detach().clone() for tensor in self._live]
        self._clean = [tensor._version for tensor in self._live]  # versions at which live equals committed
        self._captured: dict[
            int, dict[int, Tensor]
        ] = {}  # shard → buffer → what its forward left there, scaled
        self._scales: dict[int, float] = {}
        self._reduced: dict[int, Tensor] = {}
        self._agreed: set[int] = set()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def agreed(self) -> frozenset[str]:
        """Names of the buffers that are reduced, equal on all ranks."""
        return frozenset(self._names[index] for index in self._agreed)

    @agreed.setter
    def agreed(self, names: Iterable[str]) -> None:
        wanted = frozenset(names)
        self._agreed = {index for index, name in enumerate(self._names) if name in wanted}

    def committed(self) -> dict[str, Tensor]:
        """Name → committed value."""
        return dict(zip(self._names, self._committed, strict=True))

    def describe(self) -> str:
        """What must be equal on all ranks."""
        pairs = zip(self._names, self._live, strict=True)
        return repr([(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in pairs])

    def reload(self) -> None:
        """The live buffers were loaded: they are the committed ones now."""
        for index, live in enumerate(self._live):
            self._committed[index].copy_(live.detach())
            self._clean[index] = live._version

    def restore(self) -> None:
        """Set what a forward has written to back to the committed value."""
        for index in self._dirty():
            self._set_live(index)

    def capture(self, shard: int, scale: float) -> None:
        """Keep what the forward of `shard` left. `scale` is the shard's weight, applied to floating-point buffers."""
        self._captured[shard] = {index: self._weighted(self._live[index], scale) for index in self._dirty()}
        self._scales[shard] = scale

    def keep_only(self, shards: Collection[int]) -> None:
        """Forget the other shards."""
        self._captured = {shard: captured for shard, captured in self._captured.items() if shard in shards}

    def bits(self) -> list[int]:
        """Per buffer 1 if a shard kept here has written to it, else 0."""
        written = {index for captured in self._captured.values() for index in captured}
        return [int(index in written) for index in range(len(self._live))]

    def missing(self, bits: Sequence[int]) -> list[int]:
        """Buffers that somebody has written to and that are not reduced yet."""
        return [index for index, bit in enumerate(bits) if bit and index not in self._agreed]

    def grow(self, bits: Sequence[int]) -> None:
        """Reduce those too, from now on."""
        self._agreed.update(self.missing(bits))

    def reduce(self, group: Group, plan: Plan, strategy: Strategy, device: torch.device) -> None:
        """Collective, synchronous. Raises GroupBroken."""
        self._reduced = {}
        means = [index for index in sorted(self._agreed) if _is_mean(self._live[index])]
        for dtype in sorted({self._live[index].dtype for index in means}, key=str):
            self._reduce_means(
                [i for i in means if self._live[i].dtype == dtype], group, plan, strategy, device
            )
        if counters := sorted(self._agreed.difference(means)):
            self._reduce_maxima(counters, group, device)
        group.settle()

    def commit(self) -> None:
        """Make the reduced values the committed and the live ones."""
        for index, value in self._reduced.items():
            self._committed[index].copy_(value)
            self._set_live(index)
        self._reduced = {}
        self.restore()

    def _reduce_means(
        self, indices: list[int], group: Group, plan: Plan, strategy: Strategy, device: torch.device
    ) -> None:
        leaves = {leaf(shard): self._flat(indices, shard).to(device) for shard in self._captured}
        nodes = [fold(leaves, plan.num_shards, torch.add, top) for top in plan.mine]
        numel = sum(self._live[index].numel() for index in indices)
        out = torch.empty(room(numel, plan.world_size), dtype=self._live[indices[0]].dtype, device=device)
        for work in strategy.reduce(group, plan, nodes, out, numel):
            work.wait()
        self._reduced |= dict(self._unflatten(indices, out))

    def _reduce_maxima(self, indices: list[int], group: Group, device: torch.device) -> None:
        rows = [self._flat(indices, shard) for shard in self._captured] or [self._flat(indices, None)]
        mine = torch.stack(rows).to(device, torch.int64).amax(0)
        gathered = mine.new_empty(group.world_size * mine.numel())
        group.all_gather(gathered, mine)
        self._reduced |= dict(self._unflatten(indices, gathered.view(group.world_size, -1).amax(0)))

    def _flat(self, indices: list[int], shard: int | None) -> Tensor:
        """The buffers as `shard` left them, in a row; the committed ones without a shard."""
        captured = {} if shard is None else self._captured[shard]
        scale = 1.0 if shard is None else self._scales[shard]
        parts = [
            captured[index] if index in captured else self._weighted(self._committed[index], scale)
            for index in indices
        ]
        return torch.cat([part.reshape(-1) for part in parts])

    def _unflatten(self, indices: list[int], flat: Tensor) -> Iterator[tuple[int, Tensor]]:
        offset = 0
        for index in indices:
            live = self._live[index]
            yield index, flat[offset : offset + live.numel()].view(live.shape)
            offset += live.numel()

    def _dirty(self) -> list[int]:
        return [i for i, live in enumerate(self._live) if live._version != self._clean[i]]

    def _set_live(self, index: int) -> None:
        live = self._live[index]
        with torch.no_grad():
            live.copy_(self._committed[index])
        self._clean[index] = live._version

    @staticmethod
    def _weighted(value: Tensor, scale: float) -> Tensor:
        value = value.detach()
        return value * scale if scale != 1.0 and _is_mean(value) else value.clone()


def _is_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
