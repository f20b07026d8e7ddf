"""Modules' buffers: BatchNorm's statistics and whatever else a forward writes to.

Used by the reducer, in the training thread. Each shard's forward starts from the committed buffers, so what it leaves
in them depends on nothing but the shard. Floating-point buffers become the mean over the shards, in the order of the
tree; others (counters such as `num_batches_tracked`) the maximum. Only buffers that some forward was seen to write to
are reduced: that set is agreed on by vote, and only grows.

To see a write, a tensor's version counter is not enough: `torch.batch_norm` does not touch it. So buffers that are not
in the set yet are compared with the committed copy; large ones (masks and tables, as a rule) by version alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
from torch import Tensor

from everstep.actors.groups.base import Group
from everstep.actors.reduction.plan import Plan, Strategy, room
from everstep.actors.reduction.tree import fold, leaf

_SMALL = 1 << 16  # elements


class Buffers:
    """Live buffers, the committed copies, and what the shards computed here left in them."""

    def __init__(self, named: Sequence[tuple[str, Tensor]]) -> None:
        self._names = [name for name, _ in named]
        self._live = [tensor for _, tensor in named]
        self._committed = [tensor.detach().clone() for tensor in self._live]
        self._versions = [tensor._version for tensor in self._live]  # at which live equals committed
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
        for committed, live in zip(self._committed, self._live, strict=True):
            committed.copy_(live.detach())
        self._versions = [live._version for live in self._live]

    def restore(self) -> None:
        """Before a forward: undo what was written outside of shards."""
        self._set_live(self._agreed.union(self._moved()))

    def undo(self) -> None:
        """Undo what a forward that was broken off may have written."""
        self._set_live(self._agreed.union(self._moved(), self._changed()))

    def capture(self, shard: int, scale: float) -> None:
        """Keep what the forward of `shard` left, and undo it. `scale` is the shard's weight, for floating point."""
        written = self._agreed.union(self._moved(), self._changed())
        self._captured[shard] = {index: _weighted(self._live[index], scale) for index in written}
        self._scales[shard] = scale
        self._set_live(written)

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
        self._set_live(self._reduced)
        self._reduced = {}

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
            captured[index] if index in captured else _weighted(self._committed[index], scale)
            for index in indices
        ]
        return torch.cat([part.reshape(-1) for part in parts])

    def _unflatten(self, indices: list[int], flat: Tensor) -> Iterator[tuple[int, Tensor]]:
        offset = 0
        for index in indices:
            live = self._live[index]
            yield index, flat[offset : offset + live.numel()].view(live.shape)
            offset += live.numel()

    def _moved(self) -> list[int]:
        return [i for i, live in enumerate(self._live) if live._version != self._versions[i]]

    def _changed(self) -> list[int]:
        """Small buffers outside of the set whose content is not the committed one."""
        found: list[int] = []
        for device in {live.device for live in self._live}:
            others = [
                i
                for i, live in enumerate(self._live)
                if i not in self._agreed and live.numel() <= _SMALL and live.device == device
            ]
            if others:  # one transfer for all of them
                flags = torch.stack([(self._live[i].detach() != self._committed[i]).any() for i in others])
                found += [i for i, changed in zip(others, flags.tolist(), strict=True) if changed]
        return found

    def _set_live(self, indices: Iterable[int]) -> None:
        with torch.no_grad():
            for index in indices:
                live = self._live[index]
                live.copy_(self._committed[index])
                self._versions[index] = live._version


def _weighted(value: Tensor, scale: float) -> Tensor:
    value = value.detach()
    return value * scale if scale != 1.0 and _is_mean(value) else value.clone()


def _is_mean(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()
