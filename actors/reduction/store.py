"""The partial sums that this replica holds: one set of flat tensors per node of the tree.

Used by the reducer, in the thread that runs backward. A shard's gradients are merged into what is held while they come
in: into the sibling's tensors where it is held, so that accumulation costs one addition per gradient as it does in
plain PyTorch. The reduction only reads from here: after a failure all of it is still good.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from torch import Tensor

from everstep.actors.reduction.layout import Bucket, Gradients
from everstep.actors.reduction.tree import Node, merges, shards_of


class Store:
    """Held nodes. At most one shard is open at a time."""

    def __init__(self, buckets: Sequence[Bucket], num_shards: int) -> None:
        self._buckets = buckets
        self.num_shards = num_shards
        self.held: dict[Node, Gradients] = {}
        self._opened: OpenShard | None = None
        self._free: list[Gradients] = []
        self._peak = 0  # most partial sums in use at once since `clear`

    @property
    def kept(self) -> frozenset[int]:
        """Shards whose gradients are held."""
        return frozenset(shard for node in self.held for shard in shards_of(node, self.num_shards))

    def flats(self, bucket: int, nodes: Iterable[Node]) -> list[Tensor]:
        """The bucket's part of `nodes`, each of which is held, or is the open shard's and has this bucket finished."""
        opened = self._opened
        present = self.held if opened is None else {**self.held, opened.node: opened.target}
        return [present[node].flats[bucket] for node in nodes]

    def clear(self) -> None:
        """Hold nothing. Memory that the last round did not need is given back."""
        self._free += self.held.values()
        self.held.clear()
        del self._free[self._peak :]
        self._peak = 0

    def open(self, shard: int) -> OpenShard:
        """Begin to collect the gradients of `shard`, which must not be held."""
        siblings, node = merges(shard, self.held, self.num_shards)
        partials = [self.held.pop(sibling) for sibling in siblings]
        target = partials[0] if partials else self._take()
        self._peak = max(self._peak, len(self.held) + max(1, len(partials)))
        self._opened = OpenShard(self, siblings, partials, node, target)
        return self._opened

    def closed(self, held: Mapping[Node, Gradients], unused: Iterable[Gradients]) -> None:
        """For OpenShard: this is what became of it and its siblings."""
        self._opened = None
        self.held.update(held)
        self._free += unused

    def _take(self) -> Gradients:
        return self._free.pop() if self._free else Gradients(self._buckets)


class OpenShard:
    """A shard on its way into `node`. Made by `Store.open`; ends with `close` or `abandon`."""

    __slots__ = ("_merged", "_partials", "_siblings", "_store", "_touched", "node", "target")

    def __init__(
        self, store: Store, siblings: list[Node], partials: list[Gradients], node: Node, target: Gradients
    ) -> None:
        self._store = store
        self._siblings = siblings
        self._partials = partials
        self._merged = bool(partials)
        self._touched = False
        self.node = node
        self.target = target

    def take(self, parameter: int, gradient: Tensor | None) -> None:
        """Merge in the shard's gradient of one parameter; None: there is none, which adds zero."""
        self._touched = True
        view = self.target.views[parameter]
        if gradient is None:
            # Adding zero is no no-op: it turns -0.0 into 0.0, as it does where another rank adds this shard.
            view.add_(0) if self._merged else view.zero_()
        elif self._merged:
            view.add_(gradient)
        else:
            view.copy_(gradient)

    def finish_bucket(self, bucket: int) -> None:
        """All gradients of the bucket were taken: add the further siblings' sums."""
        for partial in self._partials[1:]:
            self.target.flats[bucket].add_(partial.flats[bucket])

    def close(self) -> None:
        """All buckets are finished: the node is held now."""
        self._store.closed({self.node: self.target}, self._partials[1:])

    def abandon(self) -> None:
        """The shard will not be finished. Siblings that it was partly added to are lost with it."""
        if self._touched or not self._partials:
            self._store.closed({}, self._partials or [self.target])
        else:
            self._store.closed(dict(zip(self._siblings, self._partials, strict=True)), ())
