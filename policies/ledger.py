"""Which samples belong to which step: a function of (seed, step, logical shard) and of nothing else.

Called by the data path in every replica and in its loader processes, by the training session (to weigh partial
batches) and by the simulator. There is no cursor to store and none to lose: the step number is the ledger, so any
number of replicas can take up a run anywhere and no sample is read twice or left out. Order is part of a run's
identity and never changes between versions (golden values in the tests hold it).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from everstep.policies.seeds import MASK_64, derive_seed

_ORDER_TAG = 0x4F52444552
# Halves of one or two bits reach too few permutations: a dataset of 8 would be visibly less random.
_LEAST_BITS = 6
_ROUNDS = 6  # even: they alternate between the halves
# Odd multipliers with well spread bits (splitmix64's); the round function is called six times per sample.
_ROUND_A, _ROUND_B = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


@dataclass(frozen=True, slots=True)
class Permutation:
    """A pseudo-random permutation of range(size) in O(1) memory: `permutation[i]` is the value at position i.

    A Feistel network over the smallest power of two that holds `size`, with cycle walking: a value outside the range
    is sent through the network again until it falls inside, which takes fewer than two passes on average (above 32). Sources:
    Luby and Rackoff, "How to construct pseudorandom permutations from pseudorandom functions", 1988 (four rounds are
    enough for an ideal round function, ours has six); Black and Rogaway, "Ciphers with arbitrary finite domains",
    CT-RSA 2002 (cycle walking).
    """

    seed: int
    epoch: int
    size: int
    _right_bits: int = field(init=False, repr=False)
    _left_mask: int = field(init=False, repr=False)
    _keys: tuple[tuple[int, int], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"a permutation needs a size of at least 1, got {self.size}")
        bits = max(_LEAST_BITS, (self.size - 1).bit_length())
        keys = [derive_seed(_ORDER_TAG, self.seed, self.epoch, turn) for turn in range(_ROUNDS)]
        object.__setattr__(self, "_right_bits", bits - bits // 2)
        object.__setattr__(self, "_left_mask", (1 << bits // 2) - 1)
        object.__setattr__(self, "_keys", tuple(zip(keys[::2], keys[1::2], strict=True)))

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, position: int) -> int:
        """The value at `position`, 0 <= position < size; raises IndexError outside (negative positions too)."""
        if not 0 <= position < self.size:
            raise IndexError(f"position {position} is outside of a permutation of {self.size}")
        right_bits, left_mask, keys = self._right_bits, self._left_mask, self._keys
        right_mask = (1 << right_bits) - 1
        value = position
        while True:
            left, right = value >> right_bits, value & right_mask
            for first, second in keys:
                mixed = (right + first) * _ROUND_A & MASK_64
                left ^= ((mixed ^ mixed >> 32) * _ROUND_B & MASK_64) >> 32 & left_mask
                mixed = (left + second) * _ROUND_A & MASK_64
                right ^= ((mixed ^ mixed >> 32) * _ROUND_B & MASK_64) >> 32 & right_mask
            value = left << right_bits | right
            if value < self.size:
                return value


@dataclass(frozen=True, slots=True, kw_only=True)
class DataLedger:
    """The order of a map-style dataset over a whole run: sample i of epoch e is Permutation(seed, e, size)[i].

    Step k of an epoch takes the positions [k*B, (k+1)*B) and logical shard v of a full step the v-th of V equal
    slices. Raises ValueError at construction when the numbers cannot work.
    """

    dataset_size: int
    """Samples in the dataset."""
    global_batch_size: int
    """Samples in a full step, over all logical shards; a multiple of `logical_shards`."""
    logical_shards: int
    """V, fixed for the run."""
    seed: int
    """The run's seed, in [0, 2^64)."""
    shuffle: bool = True
    """False: every epoch in the dataset's own order."""
    last_batch: Literal["drop", "partial"] = "drop"
    """What becomes of the samples of an epoch that do not fill a step. "drop": left out of that epoch (with shuffling,
    others each time). "partial": they are one smaller step, in which some shards may be empty."""

    def __post_init__(self) -> None:
        batch, shards = self.global_batch_size, self.logical_shards
        if self.last_batch not in ("drop", "partial"):
            raise ValueError(f'last_batch must be "drop" or "partial", got {self.last_batch!r}')
        if shards < 1 or batch < 1:
            raise ValueError(
                f"global_batch_size and logical_shards must be at least 1, got {batch} and {shards}"
            )
        if batch % shards:
            nearest = max(shards, batch - batch % shards)
            raise ValueError(
                f"global_batch_size={batch} is not a multiple of logical_shards={shards}: every shard needs the same "
                f"number of samples. Set global_batch_size={nearest}, or logical_shards to a divisor of {batch}"
            )
        if self.dataset_size < 1:
            raise ValueError(f"the dataset is empty (dataset_size={self.dataset_size})")
        if self.last_batch == "drop" and self.dataset_size < batch:
            raise ValueError(
                f"the dataset has dataset_size={self.dataset_size} samples, fewer than global_batch_size={batch}, so an "
                f'epoch has no full step. Use a smaller global_batch_size, or last_batch="partial"'
            )
        derive_seed(self.seed)  # out of range: better now than in a loader process

    @property
    def steps_per_epoch(self) -> int:
        """Steps in each epoch, the partial one included."""
        rest = self.dataset_size % self.global_batch_size
        return self.dataset_size // self.global_batch_size + (self.last_batch == "partial" and rest > 0)

    def locate(self, step: int) -> tuple[int, int]:
        """(epoch, step within the epoch) of the run's step `step`, counted from 0."""
        if step < 0:
            raise ValueError(f"steps are counted from 0, got {step}")
        return divmod(step, self.steps_per_epoch)

    def size(self, step: int) -> int:
        """Samples of `step`, over all shards: global_batch_size but in a partial step."""
        first = self.locate(step)[1] * self.global_batch_size
        return min(self.global_batch_size, self.dataset_size - first)

    def shard_size(self, step: int, shard: int) -> int:
        """Samples of logical shard `shard` in `step`; may be 0 in a partial step."""
        return len(self._positions(step, shard))

    def indices(self, step: int, shard: int) -> list[int]:
        """Dataset indices of logical shard `shard` in `step`, in the order in which they are collated."""
        positions = self._positions(step, shard)
        if not self.shuffle:
            return list(positions)
        order = Permutation(self.seed, self.locate(step)[0], self.dataset_size)
        return [order[position] for position in positions]

    def scale(self, step: int, shard: int) -> float:
        """n_v * V / n: the weight of the mean loss of shard `shard`, 1.0 in a full step.

        With it sum_v(scale_v * mean_v) / V is the mean over all n samples of the step, and the same holds for gradients.
        """
        mine, total = self.shard_size(step, shard) * self.logical_shards, self.size(step)
        return 1.0 if mine == total else mine / total

    def _positions(self, step: int, shard: int) -> range:
        """Positions of the shard in its epoch's order. In a full step (v*n) // V is v * (B/V)."""
        if not 0 <= shard < self.logical_shards:
            raise ValueError(
                f"shard {shard} does not exist: the run has {self.logical_shards} logical shards"
            )
        first, count = self.locate(step)[1] * self.global_batch_size, self.size(step)
        shards = self.logical_shards
        return range(first + shard * count // shards, first + (shard + 1) * count // shards)
