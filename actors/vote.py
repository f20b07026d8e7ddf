"""The vote: the one small all-reduce after which a step is history, and everything that travels in it.

Used by `actors.session`. Each replica fills a vector of float64; the sum over the generation is the same everywhere,
so all replicas draw the same conclusions from it. Its length depends on registered state and configuration alone,
never on what happened in the step. Layout: counts, then one number per parameter and buffer (used or mutated by how
many replicas), then the names of the metrics, then per metric and logical shard a weight and a weighted value.

The names travel, because a replica without a batch in this step does not know them. Everyone who knows them adds the same
numbers, so the sum is a multiple of them.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from everstep.errors import LoopError

MAX_METRICS = 16
MAX_NAME_BYTES = 1024
"""Of all names of one step, UTF-8, with one byte between two."""
_NAME_WORDS = MAX_NAME_BYTES // 4  # four bytes each: sums over two million replicas are exact
_VOTERS, _PAUSE, _NON_FINITE, _SNAPSHOT, _BUSY, _NAMES_HASH, _NAMERS, _BITS = range(8)


class Ballot:
    """Fills and reads votes of one layout."""

    def __init__(self, num_bits: int, logical_shards: int) -> None:
        self._num_bits = num_bits
        self._shards = logical_shards
        self._names = slice(_BITS + num_bits, _BITS + num_bits + _NAME_WORDS)
        self._length = self._names.stop + 2 * MAX_METRICS * logical_shards

    def fill(
        self,
        *,
        bits: Tensor,
        pause: bool,
        non_finite: bool,
        metrics: Mapping[str, Mapping[int, tuple[float, float]]],
        snapshot: bool = False,
        busy: bool = False,
    ) -> Tensor:
        """This replica's vote.

        Args:
            bits: int64 [num_bits], what `Reducer.vote_bits` gave.
            pause: ask everybody to park after this step.
            non_finite: a loss here was NaN or infinite.
            metrics: name → shard → (weight, value).
            snapshot: ask everybody to keep the state after this step for a checkpoint.
            busy: this replica cannot, because it still has one.

        Returns: float64 [length] on the CPU, to be summed over the generation. Raises LoopError for too many metrics.
        """
        if len(metrics) > MAX_METRICS:
            raise LoopError(f"{len(metrics)} metrics in one step; at most {MAX_METRICS} are carried per step")
        names = sorted(metrics)
        packed = "\0".join(names).encode()
        if len(packed) > MAX_NAME_BYTES:
            raise LoopError(
                f"the names of this step's metrics have {len(packed)} bytes in all; at most {MAX_NAME_BYTES} are carried: "
                f"{names}"
            )
        vote = torch.zeros(self._length, dtype=torch.float64)
        vote[_VOTERS] = 1.0
        vote[_PAUSE] = float(pause)
        vote[_NON_FINITE] = float(non_finite)
        vote[_SNAPSHOT], vote[_BUSY] = float(snapshot), float(busy)
        if any(metrics.values()):
            vote[_NAMES_HASH], vote[_NAMERS] = _hash(packed), 1.0
            vote[self._names] = torch.tensor(
                struct.unpack(f"<{_NAME_WORDS}I", packed.ljust(MAX_NAME_BYTES, b"\0"))
            )
        vote[_BITS : _BITS + self._num_bits] = bits
        table = self._table(vote)
        for row, name in enumerate(names):
            for shard, (weight, value) in metrics[name].items():
                table[row, 0, shard] = weight
                table[row, 1, shard] = weight * value
        return vote

    def read(self, total: Tensor, own: Iterable[str] = ()) -> Outcome:
        """What the summed vote says. Raises LoopError if the replicas recorded metrics of different names; `own` are
        those of this replica, for the message."""
        names = self._read_names(total, own)
        return Outcome(
            pause=bool(total[_PAUSE] > 0),
            non_finite=bool(total[_NON_FINITE] > 0),
            snapshot=bool(total[_SNAPSHOT] > 0 and total[_BUSY] == 0),
            thinned=bool(total[_SNAPSHOT] > 0 and total[_BUSY] > 0),
            bits=total[_BITS : _BITS + self._num_bits].to(torch.int64),
            metrics=self._means(self._table(total), names),
        )

    def _read_names(self, total: Tensor, own: Iterable[str]) -> list[str]:
        namers = int(total[_NAMERS])
        if not namers:
            return []
        words = [int(word) // namers for word in total[self._names].tolist()]
        packed = struct.pack(f"<{_NAME_WORDS}I", *words).rstrip(b"\0")
        # Both are needed: the mean of different names may be a name, and that of different hashes its hash.
        if float(total[_NAMES_HASH]) != namers * _hash(packed) or any(
            word * namers != summed for word, summed in zip(words, total[self._names].tolist(), strict=True)
        ):
            raise LoopError(
                f"this replica records the metrics {sorted(own)} in this step, another one records others: "
                "record the same names on every replica and for every batch"
            )
        return packed.decode().split("\0")

    def parse(self, data: bytes) -> Tensor:
        """A summed vote that another replica reported. Raises ValueError if it has another layout."""
        total = torch.frombuffer(bytearray(data), dtype=torch.float64)
        if total.numel() != self._length:
            raise ValueError(f"a vote of {total.numel()} numbers where {self._length} were expected")
        return total

    def _table(self, vote: Tensor) -> Tensor:
        return vote[self._names.stop :].view(MAX_METRICS, 2, self._shards)

    @staticmethod
    def _means(table: Tensor, names: Sequence[str]) -> dict[str, float]:
        means = {}
        for row, name in enumerate(names):
            # math.fsum: exact, so the order of the shards cannot matter.
            weight = math.fsum(table[row, 0].tolist())
            if weight > 0.0:
                means[name] = _total(table[row, 1].tolist()) / weight
        return means


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """A vote's conclusions."""

    pause: bool
    non_finite: bool
    snapshot: bool
    thinned: bool
    """A snapshot was asked for, but somebody is busy with the one before."""
    bits: Tensor
    metrics: dict[str, float]


def _total(values: Sequence[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan


def _hash(names: bytes) -> float:
    return float(zlib.crc32(names))
