"""The reducer: from the gradients of single shards to their mean over the global batch, the same on every replica.

The session drives it, in the training thread:

    attach(group, shares)                        once per attempt to reduce a step
    begin_shard(s, last=...)                     before the forward of each shard to compute here
    backward_final(); loss.backward()
    end_shard()
    flush(); wait(); reduce_buffers()            the mean is here; now vote, with vote_bits()
    install(summed bits); start_step()           it is history: gradients to the parameters, buffers committed
    discard()                                    it is not, as the group broke; complete shards are kept

During the last shard's backward, buckets go off one by one while later gradients are still being computed. Which
replica computed what, and how often an attempt failed, changes nothing in the result (strategy `ordered`: no bit).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from everstep.actors.groups.base import Group, Work
from everstep.actors.reduction.buffers import Buffers
from everstep.actors.reduction.collector import Collector
from everstep.actors.reduction.fast import Fast
from everstep.actors.reduction.layout import Gradients, describe, lay_out, trainable
from everstep.actors.reduction.ordered import Ordered
from everstep.actors.reduction.pipeline import Adder, Attempt
from everstep.actors.reduction.plan import Plan, Strategy, make_plan, room
from everstep.errors import InternalError, LoopError

StrategyName = Literal["ordered", "fast"]
BUCKET_BYTES = 25 << 20

_STRATEGIES: dict[StrategyName, Callable[[], Strategy]] = {"ordered": Ordered, "fast": Fast}


class Reducer:
    """One per replica and set of registered modules."""

    def __init__(
        self,
        named_parameters: Sequence[tuple[str, nn.Parameter]],
        named_buffers: Sequence[tuple[str, Tensor]],
        *,
        logical_shards: int,
        strategy: StrategyName = "ordered",
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """
        Args:
            named_parameters: those without requires_grad are left alone, tied ones are taken once.
            named_buffers: all buffers of the modules, shared ones once.
            logical_shards: V, the number of shards of every global batch.
            bucket_bytes: size from which gradients are reduced without waiting for more.
        """
        named = trainable(named_parameters)
        self._parameters = [parameter for _, parameter in named]
        self._frozen = [(name, p) for name, p in named_parameters if not p.requires_grad]
        self._buckets = lay_out(self._parameters, bucket_bytes)
        self._collector = Collector(named, self._buckets, logical_shards, self._launch)
        self._buffers = Buffers(named_buffers)
        self._num_shards = logical_shards
        self._strategy = _STRATEGIES[strategy]()
        self._adder = Adder()
        self._means = Gradients([])  # room for them is made by attach
        self._room_for = 0  # ranks
        self._plan: Plan | None = None
        self._attempt: Attempt | None = None
        self._launched = 0  # buckets of this attempt that are under way or done
        self._scale = 1.0  # weight of the open shard
        self._device = self._parameters[0].device if self._parameters else torch.device("cpu")
        self._stream = _side_stream(self._device)
        facts = (describe(named, self._buckets), logical_shards, strategy, self._buffers.describe())
        self.signature = hashlib.sha256(repr(facts).encode()).hexdigest()
        """Equal on two replicas iff they would launch the same collectives for the same shares."""

    # ---- the shards of a step

    def start_step(self) -> None:
        """Forget the shards of the last step."""
        self._leave_attempt()
        self._collector.clear()
        self._buffers.keep_only(())

    def attach(
        self,
        group: Group,
        shards_by_rank: Sequence[Sequence[int]],
        on_failure: Callable[[BaseException], None] = lambda error: None,
    ) -> None:
        """Begin an attempt: `group` will reduce, and `shards_by_rank` is what each rank will hold by then.

        `on_failure` is called at the moment when a collective fails or, where the group can tell, a peer is lost, also
        between collectives; once per attempt, from any thread. It must not raise.

        Raises InternalError if this replica holds a shard that is not to be its own, LoopError if a parameter was
        unfrozen since the start.
        """
        self._leave_attempt()
        if thawed := [name for name, parameter in self._frozen if parameter.requires_grad]:
            raise LoopError(
                f"parameter {thawed[0]!r} did not require a gradient when the loop began and does now: its gradient "
                "would not be reduced. Let it require one from the start, and give it a learning rate of 0 meanwhile"
            )
        plan = make_plan(shards_by_rank, group.rank, self._num_shards)
        if not self.kept() <= set(shards_by_rank[group.rank]):
            raise InternalError(
                f"shards {sorted(self.kept())} are held here, {shards_by_rank[group.rank]} are planned"
            )
        if self._room_for < plan.world_size:
            self._means = Gradients(self._buckets, partial(room, world_size=plan.world_size))
            self._room_for = plan.world_size
        self._plan, self._launched = plan, 0
        self._attempt = Attempt(group, self._adder, on_failure)

    def begin_shard(self, shard: int, *, last: bool, scale: float = 1.0) -> None:
        """Before the forward of `shard`.

        Args:
            last: after it this replica holds everything that the plan gives it, so buckets may go off in its backward.
            scale: the shard's weight in the mean, for its buffers. Gradients are expected to carry it already.
        """
        if shard in self.kept():
            raise InternalError(f"shard {shard} is held already")
        if last:
            self._check_complete(self.kept() | {shard})
        self._buffers.restore()
        self._collector.begin(shard, last=last)
        self._scale = scale

    def backward_final(self) -> None:
        """The backward that starts now is the last one of the open shard; before it, gradients only add up."""
        self._collector.backward_final()

    def end_shard(self) -> None:
        """After the last backward of the shard."""
        self._buffers.capture(self._collector.end(), self._scale)

    def kept(self) -> frozenset[int]:
        """The shards of this step whose gradients are held here."""
        return self._collector.store.kept

    # ---- the reduction

    def flush(self) -> None:
        """Launch every bucket that is not under way yet."""
        if self._launched < len(self._buckets):
            self._check_complete(self.kept())
            self._launch(len(self._buckets))

    def wait(self) -> None:
        """Until all buckets are reduced. Raises what ended the attempt, GroupBroken as a rule."""
        attempt = self._attempt
        if attempt is None or self._launched < len(self._buckets):
            raise InternalError("wait() before every bucket was launched")
        attempt.wait()
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        attempt.group.settle()

    def reduce_buffers(self) -> None:
        """Collective, after `wait`: the mean of the buffers in `buffer_set`. Raises GroupBroken."""
        assert self._attempt is not None and self._plan is not None
        self._buffers.reduce(self._attempt.group, self._plan, self._strategy, self._device)

    def install(self, bits: Tensor) -> None:
        """The step is history: set the parameters' `grad` to the mean and commit the buffers.

        Args:
            bits: int64 [num_bits], `vote_bits` summed over the generation. A parameter that no shard used gets None.
        """
        used = bits.tolist()
        for index, parameter in enumerate(self._parameters):
            parameter.grad = self._means.views[index] if used[index] else None
        self._buffers.commit()
        self._collector.stop_watching()

    def discard(self) -> None:
        """The attempt's group is over. Returns when nothing of it is under way; complete shards are kept, the live
        buffers are the committed ones again."""
        if self._attempt is not None:
            self._attempt.group.abort()
        self._leave_attempt()
        self._collector.abandon()
        self._buffers.keep_only(self.kept())
        self._buffers.undo()

    def close(self) -> None:
        """End the thread and take the hooks off the parameters."""
        self._leave_attempt()
        self._adder.close()
        self._collector.close()

    # ---- the vote, and buffers

    @property
    def num_bits(self) -> int:
        """Length of `vote_bits`."""
        return len(self._parameters) + len(self._buffers)

    def vote_bits(self) -> Tensor:
        """int64 [num_bits] on the CPU: per trainable parameter, had a shard kept here a gradient for it; then per
        buffer, did one write to it."""
        return torch.tensor([*map(int, self._collector.used), *self._buffers.bits()], dtype=torch.int64)

    def missing_buffers(self, bits: Tensor) -> bool:
        """Whether the summed bits show a buffer that was written to and is not in `buffer_set`."""
        return bool(self._buffers.missing(self._buffer_bits(bits)))

    def grow(self, bits: Tensor) -> None:
        """Take such buffers into `buffer_set`."""
        self._buffers.grow(self._buffer_bits(bits))

    @property
    def buffer_set(self) -> frozenset[str]:
        """Names of the buffers that are reduced: agreed state, which a joiner must be given."""
        return self._buffers.agreed

    @buffer_set.setter
    def buffer_set(self, names: frozenset[str]) -> None:
        self._buffers.agreed = names

    def committed_buffers(self) -> dict[str, Tensor]:
        """Name → value as of the last commit, whatever a forward has done to the live one since."""
        return self._buffers.committed()

    def reload_buffers(self) -> None:
        """State was loaded into the live buffers: that is the committed value now."""
        self._buffers.reload()

    def _buffer_bits(self, bits: Tensor) -> list[int]:
        found: list[int] = bits[len(self._parameters) :].tolist()
        return found

    # ---- launching

    def _launch(self, until: int) -> None:
        """Send the first `until` buckets off, those that are not yet. From the thread that runs backward, too."""
        attempt, plan = self._attempt, self._plan
        if attempt is None or plan is None:
            raise InternalError("a bucket is complete, but no group is attached")
        while self._launched < until:
            bucket = self._buckets[self._launched]
            nodes = self._collector.store.flats(bucket.number, plan.mine)
            steps = self._strategy.reduce(
                attempt.group, plan, nodes, self._means.flats[bucket.number], bucket.numel
            )
            attempt.launch(steps if self._stream is None else self._on_stream(self._stream, steps))
            self._launched += 1

    def _on_stream(self, stream: torch.cuda.Stream, steps: Iterator[Work]) -> Iterator[Work]:
        """All of `steps` at once on the side stream, behind what the current stream has computed: there, waiting only
        orders the stream, and one launch order is what NCCL needs. What it reads and writes lives on between steps."""
        ready = torch.cuda.current_stream(self._device).record_event()

        def run() -> Iterator[Work]:
            with torch.cuda.stream(stream):
                stream.wait_event(ready)
                for work in steps:
                    work.wait()
            yield from ()

        return run()

    def _check_complete(self, shards: frozenset[int]) -> None:
        planned = self._plan.shards if self._plan is not None else frozenset[int]()
        if self._attempt is None or shards != planned:
            raise InternalError(f"shards {sorted(shards)} are held here, {sorted(planned)} are to be reduced")

    def _leave_attempt(self) -> None:
        if self._attempt is not None:
            self._attempt.cancel()
            self._attempt = None
            if self._stream is not None:
                self._stream.synchronize()  # what was launched there ends with its group


def _side_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
