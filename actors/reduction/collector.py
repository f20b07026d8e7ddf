"""From autograd to partial sums: takes each parameter's gradient as soon as it is complete.

Used by the reducer. `begin`, `end` and `abandon` are called in the training thread, the hooks in whatever thread runs
backward, and never at the same time. A gradient is moved, not copied and kept: the parameter's `grad` is None again at
once, and the memory serves the next layer's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from torch import Tensor, nn

from everstep.actors.reduction.layout import Bucket
from everstep.actors.reduction.store import OpenShard, Store
from everstep.errors import InternalError, LoopError, UserError


@dataclass(slots=True)
class _Open:
    """The shard that is being computed."""

    shard: int
    last: bool
    merging: OpenShard
    left: list[int]  # per bucket, gradients not taken yet
    taken: list[bool]  # per parameter
    used: list[bool]  # per parameter: it had a gradient
    fired: list[int]  # per parameter, hooks in the final backward; counted while watching only
    final: bool = False
    finished: int = field(default=0)  # buckets, from the first on, that are complete


class Collector:
    """Owns the hooks, and with the store the gradients of the shards computed here."""

    def __init__(
        self,
        named: Sequence[tuple[str, nn.Parameter]],
        buckets: Sequence[Bucket],
        num_shards: int,
        on_finished: Callable[[int], None],
    ) -> None:
        """`on_finished(n)`: during the last shard, the first n buckets are complete."""
        self._named = named
        self._buckets = buckets
        self._bucket_of = {slot.parameter: bucket.number for bucket in buckets for slot in bucket.slots}
        self._on_finished = on_finished
        self._opened: _Open | None = None
        self._overlap = True
        self._watching = True  # the first step's hooks only count, to see whether overlap is possible
        self.store = Store(buckets, num_shards)
        self.used = [False] * len(named)
        """Per parameter: a shard kept here had a gradient for it. May stay True after a shard was lost."""
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._gradient_ready, index))  # type: ignore[no-untyped-call]
            for index, (_, parameter) in enumerate(named)
        ]

    def begin(self, shard: int, *, last: bool) -> None:
        """Before the forward of `shard`, which must not be held."""
        if self._opened is not None:
            raise InternalError(f"shard {shard} begins before shard {self._opened.shard} has ended")
        for _, parameter in self._named:
            parameter.grad = None
        count = len(self._named)
        left = [len(bucket.slots) for bucket in self._buckets]
        merging = self.store.open(shard)
        self._opened = _Open(shard, last, merging, left, [False] * count, [False] * count, [0] * count)

    def backward_final(self) -> None:
        """The backward that starts now is the open shard's last: its gradients are complete as they come."""
        self._the_open().final = True

    def end(self) -> int:
        """Take what did not come through the hooks; the shard is held now. Returns its number."""
        opened = self._the_open()
        opened.final = False
        for index, taken in enumerate(opened.taken):
            if not taken:
                self._take(opened, index)
        if self._watching and max(opened.fired, default=0) > 1:
            self._overlap = False
        self.used = [old or new for old, new in zip(self.used, opened.used, strict=True)]
        opened.merging.close()
        self._opened = None
        return opened.shard

    def abandon(self) -> None:
        """The open shard, if there is one, will not be finished."""
        if self._opened is not None:
            self._opened.merging.abandon()
            self._opened = None

    def clear(self) -> None:
        """Forget all shards."""
        self.abandon()
        self.store.clear()
        self.used = [False] * len(self._named)

    def stop_watching(self) -> None:
        """The first step is over."""
        self._watching = False

    def close(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _the_open(self) -> _Open:
        if self._opened is None:
            raise InternalError("no shard has begun")
        return self._opened

    def _gradient_ready(self, index: int, parameter: Tensor) -> None:
        """The hook: some backward has accumulated the parameter's gradient."""
        opened = self._opened
        if opened is None or not opened.final:
            return
        if self._watching:
            opened.fired[index] += 1
        elif self._overlap:
            if opened.taken[index]:
                raise LoopError(
                    f"the gradient of {self._named[index][0]!r} came twice in one backward, which it did not in this "
                    "replica's first step. Use torch.utils.checkpoint with use_reentrant=False, and call backward "
                    "once per batch (or with final=False for all but the last call)"
                )
            self._take(opened, index)

    def _take(self, opened: _Open, index: int) -> None:
        name, parameter = self._named[index]
        bucket = self._bucket_of[index]
        gradient, parameter.grad = parameter.grad, None
        if gradient is not None:
            if gradient.is_sparse:
                raise UserError(
                    f"the gradient of {name!r} is sparse, which cannot be reduced; make the embedding with sparse=False"
                )
            if gradient.requires_grad:  # backward(create_graph=True)
                gradient = gradient.detach()
            opened.used[index] = True
        opened.merging.take(index, gradient)
        opened.taken[index] = True
        opened.left[bucket] -= 1
        if not opened.left[bucket]:
            opened.merging.finish_bucket(bucket)
            if opened.last:
                self._tell(opened)

    def _tell(self, opened: _Open) -> None:
        """Strictly in order, so that all ranks launch alike: a bucket waits for those before it."""
        before = opened.finished
        while opened.finished < len(opened.left) and not opened.left[opened.finished]:
            opened.finished += 1
        if opened.finished > before:
            self._on_finished(opened.finished)
