"""The training session: what the user's `train(run)` sees, and the one thread that computes.

A `Session` is handed to the user's function in every replica. Its loop has no failure handling in it, because all of
it is here: when a peer dies, `Step.commit` or `Step.batches` enters the next generation, and the same step goes on
with the shards that are missing. Everything in this file runs in the training thread; orders from the controller come
through `actors.member`.

    def train(run):
        model = Net().to(run.device)
        optimizer = torch.optim.AdamW(model.parameters())
        run.register(model=model, optimizer=optimizer)
        for step in run.steps(dataset, total=1000):
            for batch in step.batches():
                step.backward(loss_fn(model, batch))
            step.commit(metrics={"loss": step.mean_loss})
"""

from __future__ import annotations

import base64
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from everstep.actors import wire
from everstep.actors.data import ShardSource, make_source
from everstep.actors.data_common import seed_generators
from everstep.actors.groups.pending import PendingGroup
from everstep.actors.intake import Intake
from everstep.actors.member import Member
from everstep.actors.order import Order
from everstep.actors.progress import Positions, Progress
from everstep.actors.reduction import Reducer
from everstep.actors.registry import Registry
from everstep.actors.snapshots import Snapshots
from everstep.actors.step import Step
from everstep.actors.transfer import StateServer
from everstep.actors.vote import Ballot, Outcome
from everstep.errors import (
    Fenced,
    GroupBroken,
    LoopError,
    NonFiniteLoss,
    TransferFailed,
)
from everstep.policies.seeds import derive_seed
from everstep.policies.straggler import smoothed

if TYPE_CHECKING:
    from everstep.actors.groups import Group
    from everstep.orchestrator.config import RunConfig


class Session:
    """One replica's view of the run. Users get it as the argument of their function and never construct it."""

    def __init__(
        self, *, config: RunConfig, member: Member, server: StateServer, device: torch.device
    ) -> None:
        self.config = config
        self.device = device
        """Where this replica computes."""
        self.seed = config.seed
        """The run's seed. Module initialization after the start of `train` is seeded with it."""
        self._member = member
        self._server = server
        self._registry = Registry()
        self._source: ShardSource | None = None
        self._reducer: Reducer | None = None
        self._ballot: Ballot | None = None
        self._group: Group | None = None
        self._generation: wire.Generation | None = None
        self._intake = Intake(member, self._registry)
        self._described = False
        self._snapshots = Snapshots(config, member, self._registry)
        self._step: Step | None = None
        self._todo: list[int] = []
        self._shares: list[list[int]] = []
        self._total = 0
        self._positions = Positions()
        self._committed_at = time.monotonic()
        seed_generators(derive_seed(config.seed))

    # ---- what users read

    @property
    def name(self) -> str:
        """Name of the run."""
        return self.config.name

    @property
    def generation(self) -> int:
        """Number of the present generation; 0 before the first."""
        return self._generation.number if self._generation else 0

    @property
    def world_size(self) -> int:
        """Replicas in the present generation. Nothing that training computes may depend on it."""
        return len(self._generation.members) if self._generation else 0

    @property
    def rank(self) -> int:
        """Rank in the present generation. Use it to decide who prints or writes a file, never what is computed."""
        return self._generation.rank_of(self._member.identity.replica) if self._generation else -1

    @property
    def replica(self) -> int:
        """This replica's id, the same for its whole life."""
        return self._member.identity.replica

    # ---- what users call

    def register(self, **objects: Any) -> None:
        """Say what is state: everything that a joiner must receive and a failed step must leave untouched.

        Each object needs `state_dict` and `load_state_dict`; lists of such objects are taken too. Modules' gradients
        are reduced, optimizers are stepped by `commit`, LR schedulers after them, a GradScaler is applied around them.

        Raises StateError for an object that cannot be state, LoopError when called after `steps` has begun.
        """
        if self._source is not None:
            raise LoopError(
                "register() was called after the loop had begun; register everything before run.steps()"
            )
        self._registry.add(objects)

    def steps(
        self,
        dataset: Any,
        *,
        total: int | None = None,
        epochs: int | None = None,
        global_batch_size: int | None = None,
        num_workers: int = 0,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        pin_memory: bool = False,
        prefetch_factor: int = 2,
        shuffle: bool = True,
        seed_samples: bool = True,
        worker_init_fn: Callable[[int], None] | None = None,
    ) -> Iterator[Step]:
        """The loop's steps, from wherever the run stands to the last one.

        A step whose commit failed because a peer died is yielded again; its `batches()` are then only the shards that
        nobody has computed yet. `total` counts steps, `epochs` passes over the dataset; one of them is needed.
        The other arguments are those of torch's DataLoader; per-sample randomness hangs on (seed, epoch, index) alone.

        Raises ConfigError for numbers that cannot work, LoopError when the loop breaks a rule.
        """
        batch = self.config.batch
        if global_batch_size is not None and global_batch_size != batch.global_batch_size:
            raise LoopError(
                f"steps(global_batch_size={global_batch_size}) contradicts BatchConfig.global_batch_size="
                f"{batch.global_batch_size}; leave it out here or make them equal"
            )
        if self._source is not None:
            raise LoopError("steps() was called twice; one run has one loop")
        self._source = make_source(
            dataset,
            global_batch_size=batch.global_batch_size,
            logical_shards=batch.logical_shards,
            seed=self.config.seed,
            shuffle=shuffle,
            last_batch=batch.last_batch,
            num_workers=num_workers,
            collate_fn=collate_fn,
            pin_memory=pin_memory and self.device.type == "cuda",
            prefetch_factor=prefetch_factor,
            seed_samples=seed_samples,
            worker_init_fn=worker_init_fn,
        )
        self._total = self._count(total, epochs)
        self._prepare()
        try:
            yield from self._loop()
        finally:
            self._member.loop_done()
            self._source.close()
            if self._reducer is not None:
                self._reducer.close()

    def _count(self, total: int | None, epochs: int | None) -> int:
        assert self._source is not None
        per_epoch = self._source.steps_per_epoch
        if (total is None) == (epochs is None):
            raise LoopError("steps() needs either total= (steps) or epochs=, and not both")
        if epochs is not None and per_epoch is None:
            raise LoopError(
                "steps(epochs=...) needs a dataset of known length; give total= for an iterable dataset"
            )
        count = total if total is not None else (epochs or 0) * (per_epoch or 0)
        if count < 1:
            raise LoopError(f"the loop would have {count} steps; it needs at least one")
        return count

    def _prepare(self) -> None:
        """Everything is registered: lay out the reduction, and tell the controller that we are warm."""
        registry, batch = self._registry, self.config.batch
        registry.seal()
        self._reducer = Reducer(
            registry.named_parameters(),
            registry.named_buffers(),
            logical_shards=batch.logical_shards,
            strategy=self.config.reduction,
            bucket_bytes=self.config.bucket_bytes,
        )
        self._ballot = Ballot(self._reducer.num_bits, batch.logical_shards)
        registry.add_internal(everstep_session=Progress(self))
        signature = (*registry.state.signature(), f"reduction {self._reducer.signature}")
        self._intake.make_room()
        self._member.announce_ready(signature, registry.state.digest(self._snapshot()), self._total)

    def _loop(self) -> Iterator[Step]:
        self._enter_next()
        while self._member.applied < self._total:
            step = self._step = Step(self, self._member.applied)
            while not step.committed:
                self._member.moved("data")
                yield step
                step._must_be_over()
            self._member.moved("user")

    # ---- entering generations

    def _enter_next(self) -> None:
        """Enter the newest generation; returns only when this replica is in it and holds its state."""
        while True:
            order = self._member.next_order()
            try:
                if self._enter(order):
                    return
            except (GroupBroken, TransferFailed, Fenced) as error:
                self._member.fault(order.generation.number, error)

    def _enter(self, order: Order) -> bool:
        """False if the order was only to serve others, or to catch up with the last step."""
        generation, me = order.generation, self._member.identity.replica
        assert self._reducer is not None and self._source is not None
        self._group = None
        self._snapshots.settle()  # what is fetched is received into the live memory
        if me in generation.roll_forward and self._member.applied == generation.step - 1:
            self._roll_forward(generation)
        elif self._member.applied == generation.step and me not in generation.fetch:
            self._reducer.discard()
        if me in generation.restore:
            self._restore(generation)
        if me in generation.fetch:
            self._fetch_state(generation, order)
        elif generation.fetch:
            self._server.offer(generation.version, self._snapshot())
        if me not in generation.members:
            self._member.enter(order)
            return False
        self._member.enter(order)
        self._generation = generation
        if generation.final:
            return True
        # The group may still be forming; what is to be computed first does not wait for it.
        rank, size = generation.rank_of(me), len(generation.members)
        self._group = PendingGroup(rank, size, partial(self._member.group_of, order))
        self._take_shares(generation, me)
        return True

    def _take_shares(self, generation: wire.Generation, me: int) -> None:
        assert self._reducer is not None and self._source is not None and self._group is not None
        rank = generation.rank_of(me)
        planned = {*generation.held[rank], *generation.todo[rank]}
        if not self._member.kept <= planned:
            # Others hold some of them too. Partial sums cannot be taken apart again, so all of them are computed anew.
            self._reducer.start_step()
            self._member.forget_shards()
        todo = sorted(planned - self._member.kept)
        self._source.deal(generation.step, todo, range(*generation.ranges[rank]), self._total)
        self._todo = self._empty_first(generation.step, todo)
        shares = [sorted({*h, *t}) for h, t in zip(generation.held, generation.todo, strict=True)]
        self._shares = [list(range(*r)) for r in generation.ranges]
        self._attach(shares)

    def _attach(self, shares: list[list[int]]) -> None:
        assert self._reducer is not None and self._group is not None and self._generation is not None
        # A failure is told at once, also from other threads, while the training thread still computes.
        self._reducer.attach(
            self._group, shares, on_failure=partial(self._member.fault, self._generation.number)
        )

    def _empty_first(self, step: int, shards: list[int]) -> list[int]:
        """Shards without samples go first, so that the last backward is a real one and overlaps with the reduction."""
        assert self._source is not None
        return sorted(shards, key=lambda s: (self._source.scale(step, s) > 0.0, s))  # type: ignore[union-attr]

    def _roll_forward(self, generation: wire.Generation) -> None:
        """Others have applied this step, and we hold its reduced gradient: apply it too. Raises Fenced."""
        assert self._ballot is not None
        data = base64.b64decode(generation.vote)
        outcome = self._ballot.read(self._ballot.parse(data))
        step = self._member.applied
        self._member.begin_roll_forward(generation.number, data)
        self._apply(step, outcome, self._clip)
        self._tell_metrics(step, outcome)

    def _tell_metrics(self, step: int, outcome: Outcome) -> None:
        """The user's loop is in this step, which is history now, and will ask for them."""
        if self._step is not None and self._step.number == step:
            self._step.metrics = outcome.metrics

    def _fetch_state(self, generation: wire.Generation, order: Order) -> None:
        self._member.moved("fetch")
        result = self._intake.fetch(order)
        self._loaded(generation)
        if generation.vote:
            assert self._ballot is not None
            data = base64.b64decode(generation.vote)
            self._tell_metrics(generation.step - 1, self._ballot.read(self._ballot.parse(data)))
        self._member.fetched(generation.number, result.num_bytes, result.seconds)

    def _loaded(self, generation: wire.Generation) -> None:
        """The state with which the generation begins is in the live objects. Raises Fenced."""
        assert self._reducer is not None
        self._registry.after_load()
        self._reducer.reload_buffers()
        self._reducer.start_step()
        self._member.adopt_state(generation)

    def _restore(self, generation: wire.Generation) -> None:
        """Read the state from its checkpoint. Raises Fenced, GroupBroken."""
        self._member.moved("fetch")
        begin = time.monotonic()
        num_bytes = self._snapshots.restore(generation)
        self._loaded(generation)
        self._member.fetched(generation.number, num_bytes, time.monotonic() - begin)

    def _settle(self) -> None:
        """The state is about to change: whoever still copies or reads it must be done."""
        self._snapshots.settle()
        self._server.withdraw()

    def _snapshot(self) -> Any:
        assert self._reducer is not None
        return self._registry.state.capture(
            self._registry.buffer_overrides(self._reducer.committed_buffers())
        )

    # ---- one step (called by Step)

    def _next_shard(self, step: Step) -> int | None:
        """The next shard to compute, entering a new generation first if ours is over; None when all are done."""
        if self._member.fenced():
            self._enter_next()
        self._check_not_left()
        while self._todo and self._member.applied == step.number:
            shard = self._todo[0]
            try:
                self._member.begin_shard(shard)
            except GroupBroken:
                self._enter_next()
                continue
            self._todo.pop(0)
            return shard
        return None

    def _shards_left(self, step: Step) -> list[int]:
        """Shards whose batches this replica still has to compute before it may commit."""
        if self._member.fenced() or self._member.applied != step.number:
            return []
        return self._todo

    _clip: tuple[float | None, float | None] = (None, None)

    def _commit(
        self, step: Step, metrics: Mapping[str, Any], clip: tuple[float | None, float | None]
    ) -> bool:
        """True when the step is history; False when some of its shards have to be computed here first."""
        self._clip = clip
        while self._member.applied == step.number:
            self._check_not_left()
            if self._todo:
                return False
            try:
                self._member.check()
                total = self._reduce_and_vote(step, metrics)
                outcome = self._judge(step, total)
                self._member.begin_commit(total.numpy().tobytes())
            except GroupBroken as error:
                self._give_up_generation(error)
                continue
            self._apply(step.number, outcome, clip)
            self._tell_metrics(step.number, outcome)
            if outcome.pause:
                self._member.park_at_boundary()
                self._enter_next()
            elif self._member.applied < self._total:
                self._continue_generation()
        return True

    def _check_not_left(self) -> None:
        """Raises LoopError if others ended the run by leaving their loops, while this one goes on."""
        generation = self._generation
        if generation is not None and generation.final and generation.step < self._total:
            raise LoopError(
                f"another replica left the loop after {generation.step} steps, this one did not: decide a `break` by what "
                "is the same on all replicas, such as step.metrics after the commit"
            )

    def _give_up_generation(self, error: GroupBroken) -> None:
        assert self._generation is not None
        self._member.fault(self._generation.number, error)
        self._enter_next()

    def _continue_generation(self) -> None:
        """The next step of the same generation."""
        self._todo = self._empty_first(self._member.applied, self._shares[self.rank])
        self._attach(self._shares)

    def _reduce_and_vote(self, step: Step, metrics: Mapping[str, Any]) -> Tensor:
        assert self._reducer is not None and self._group is not None and self._ballot is not None
        assert self._source is not None
        self._member.moved("reduce")
        self._reducer.flush()
        self._reducer.wait()
        self._reducer.reduce_buffers()
        self._positions.share(self._source, self._group, self.device)
        numbers = step._shard_metrics(metrics)
        while True:
            self._member.reduction_complete()
            bits = self._reducer.vote_bits()
            vote = self._ballot.fill(
                bits=bits,
                pause=self._member.pause_wanted,
                non_finite=step._non_finite(),
                metrics=numbers,
                snapshot=self._snapshots.due(step.number + 1, self.rank),
                busy=self._snapshots.busy,
            )
            total = self._vote(vote)
            summed = self._ballot.read(total, numbers).bits
            if not self._reducer.missing_buffers(summed):
                return total
            # A buffer was written to for the first time: reduce it too, and vote again.
            self._reducer.grow(summed)
            self._reducer.reduce_buffers()

    def _vote(self, vote: Tensor) -> Tensor:
        assert self._group is not None
        if self.device.type == "cuda":
            on_device = vote.to(self.device)
            self._group.all_reduce(on_device)
            return on_device.cpu()
        self._group.all_reduce(vote)
        return vote

    def _judge(self, step: Step, total: Tensor) -> Outcome:
        assert self._ballot is not None
        outcome = self._ballot.read(total)
        if outcome.non_finite and self.config.failure.non_finite == "stop":
            raise NonFiniteLoss(
                f"run {self.name!r}, step {step.number}: a loss is NaN or infinite. FailureConfig.non_finite decides: "
                "'stop' (now), 'skip' (no update in such a step, on any replica) or 'ignore'"
            )
        return outcome

    def _apply(self, step: int, outcome: Outcome, clip: tuple[float | None, float | None]) -> None:
        """The step is history. Whoever fails in here is half-applied, and therefore dead (`actors.replica`)."""
        assert self._reducer is not None and self._source is not None and self._generation is not None
        generation = self._generation  # the one that voted, also where the step is rolled forward
        self._member.moved("apply")
        skip = outcome.non_finite and self.config.failure.non_finite == "skip"
        self._settle()
        self._reducer.install(outcome.bits)
        self._registry.update(skip=skip, clip_norm=clip[0], clip_value=clip[1])
        self._source.committed(step)
        self._reducer.start_step()
        if not self._described:
            self._described = True
            self._server.describe(self._snapshot().plan())
        now = time.monotonic()
        record = wire.Record(
            history=generation.history,
            generation=generation.number,
            step=step,
            metrics=outcome.metrics,
            samples=self._source.samples(step),
            step_s=now - self._committed_at,
            skipped=skip,
            snapshot=self._snapshots.attempt(generation) if outcome.snapshot else "",
            thinned=outcome.thinned,
        )
        self._committed_at = now
        self._member.committed(record, speak=self.rank == 0)
        if outcome.snapshot:
            self._snapshots.take(step + 1, generation, self._snapshot())
        self._member.moved("user")

    def _computed(self, shard: int, seconds: float) -> None:
        self._member.end_shard(shard)
        before = self._member.compute_s
        self._member.compute_s = smoothed(before if before > 0 else None, seconds)

    def close(self) -> None:
        """The replica leaves."""
        self._snapshots.close()

    def explain(self, error: BaseException) -> None:
        """A note for the user, where an error of the loop has a cause that cannot be seen in it."""
        if isinstance(error, NameError) and self._step is not None and not self._step._scales:
            error.add_note(
                f"step {self._step.number} had no batch for this replica, so names that are set inside `for batch in "
                "step.batches()` are not set here. Report means with step.mean_loss and step.record(...)"
            )

    def check_trained(self) -> None:
        """The train function has returned. Raises LoopError if it did so without having trained."""
        if self._source is None:
            raise LoopError(
                "the train function returned without `for step in run.steps(...)`: it trains nothing that way"
            )
        if self._member.applied == 0:
            raise LoopError("the train function returned before its first step was committed")

    def checkpoint_at_end(self) -> None:
        """The loop is over: what it came to goes to storage, as the run's configuration wants it."""
        self._snapshots.at_end(self._member.applied, self._generation, self._snapshot)

    def state_digest(self) -> str:
        """xxh3_128 (hex) over all registered state; equal on two replicas iff their state is bit for bit the same."""
        return self._registry.state.digest(self._snapshot())
