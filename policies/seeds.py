"""Where every random number of a run begins: seeds derived from names of things, never from rank or world size.

Called by the training session (per logical shard), by the data path (per sample) and by the data ledger. The
mapping is part of a run's identity: a checkpoint resumed by a newer version must see the same numbers, so nothing
here may ever change (golden values in the tests hold it). Pure integer arithmetic; no generator lives here.
"""

from __future__ import annotations

from collections.abc import Sequence

MASK_64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

# One tag per kind of seed: step 3 of shard 5 and sample 5 of epoch 3 must not share their numbers.
_SHARD_TAG = 0x5348415244
_SAMPLE_TAG = 0x53414D504C45
_BATCH_TAG = 0x4241544348


def mix64(value: int) -> int:
    """The finalizer of splitmix64: a bijection of [0, 2^64) in which every input bit reaches every output bit.

    Source: Steele, Lea, Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014 (variant 13 of
    Stafford's constants, as in Java's SplittableRandom and in xoshiro's seeding).
    """
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK_64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK_64
    return value ^ (value >> 31)


def derive_seed(*parts: int) -> int:
    """A seed in [0, 2^63) from a sequence of integers in [0, 2^64); order and number of the parts matter.

    63 bits, so that it fits `torch.manual_seed` and a signed 64-bit field. Raises ValueError on a part out of range.
    """
    state = mix64((len(parts) + 1) * _GOLDEN & MASK_64)
    for part in parts:
        state = _absorbed(state, part)
    return state >> 1


def _absorbed(state: int, part: int) -> int:
    if not 0 <= part <= MASK_64:
        raise ValueError(f"a part of a seed must be in [0, 2^64), got {part}")
    return mix64((state + _GOLDEN + mix64(part ^ _GOLDEN)) & MASK_64)


def shard_seed(run_seed: int, step: int, shard: int) -> int:
    """The seed under which logical shard `shard` of step `step` is computed (dropout and the like)."""
    return derive_seed(_SHARD_TAG, run_seed, step, shard)


def sample_seed(run_seed: int, epoch: int, index: int) -> int:
    """The seed under which sample `index` of the dataset is read in epoch `epoch` (augmentation and the like)."""
    return derive_seed(_SAMPLE_TAG, run_seed, epoch, index)


def sample_seeds(run_seed: int, epoch: int, indices: Sequence[int]) -> list[int]:
    """`sample_seed` of each index, at half of the cost."""
    state = mix64(5 * _GOLDEN & MASK_64)
    for part in (_SAMPLE_TAG, run_seed, epoch):
        state = _absorbed(state, part)
    return [_absorbed(state, index) >> 1 for index in indices]


def batch_seed(run_seed: int, step: int, shard: int) -> int:
    """The seed under which the samples of a logical shard are made into a batch (mixup and the like)."""
    return derive_seed(_BATCH_TAG, run_seed, step, shard)
