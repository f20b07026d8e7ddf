"""The vote: the one small all-reduce after which a step is history, and everything that travels in it.

Used by `actors.session`. Each replica fills a vector of float64; the sum over the generation is the same everywhere,
so all replicas draw the same conclusions from it. Its length depends on registered state and configuration alone,
never on what happened in the step. Layout: counts, then one number per parameter and buffer (used or mutated by how
many replicas), then per metric and logical shard a weight and a weighted value.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from everstep.errors import LoopError

MAX_METRICS = 16
_VOTERS, _PAUSE, _NON_FINITE, _NAMES_HASH, _NAMERS, _BITS = range(6)


class Ballot:
    """Fills and reads votes of one layout."""

    def __init__(self, num_bits: int, logical_shards: int) -> None:
        self._num_bits = num_bits
        self._shards = logical_shards
        self._length = _BITS + num_bits + 2 * MAX_METRICS * logical_shards

    def fill(
        self,
        *,
        bits: Tensor,
        pause: bool,
        non_finite: bool,
        metrics: Mapping[str, Mapping[int, tuple[float, float]]],
    ) -> Tensor:
        """This replica's vote.

        Args:
            bits: int64 [num_bits], what `Reducer.vote_bits` gave.
            pause: ask everybody to park after this step.
            non_finite: a loss here was NaN or infinite.
            metrics: name → shard → (weight, value).

        Returns: float64 [length] on the CPU, to be summed over the generation.
        """
        if len(metrics) > MAX_METRICS:
            raise LoopError(f"{len(metrics)} metrics in one step; at most {MAX_METRICS} are carried per step")
        vote = torch.zeros(self._length, dtype=torch.float64)
        vote[_VOTERS] = 1.0
        vote[_PAUSE] = float(pause)
        vote[_NON_FINITE] = float(non_finite)
        if any(metrics.values()):
            vote[_NAMES_HASH], vote[_NAMERS] = _hash(sorted(metrics)), 1.0
        vote[_BITS : _BITS + self._num_bits] = bits
        table = self._table(vote)
        for row, name in enumerate(sorted(metrics)):
            for shard, (weight, value) in metrics[name].items():
                table[row, 0, shard] = weight
                table[row, 1, shard] = weight * value
        return vote

    def read(self, total: Tensor, names: Sequence[str]) -> Outcome:
        """What the summed vote says. Raises LoopError if the replicas recorded metrics of other names."""
        namers = float(total[_NAMERS])
        names = sorted(names)
        if names and namers and float(total[_NAMES_HASH]) != namers * _hash(names):
            raise LoopError(
                f"this replica records the metrics {names} in this step, another one records others: "
                "record the same names on every replica and for every batch"
            )
        return Outcome(
            pause=bool(total[_PAUSE] > 0),
            non_finite=bool(total[_NON_FINITE] > 0),
            bits=total[_BITS : _BITS + self._num_bits].to(torch.int64),
            metrics=self._means(self._table(total), names),
        )

    def parse(self, data: bytes) -> Tensor:
        """A summed vote that another replica reported. Raises ValueError if it has another layout."""
        total = torch.frombuffer(bytearray(data), dtype=torch.float64)
        if total.numel() != self._length:
            raise ValueError(f"a vote of {total.numel()} numbers where {self._length} were expected")
        return total

    def _table(self, vote: Tensor) -> Tensor:
        return vote[_BITS + self._num_bits :].view(MAX_METRICS, 2, self._shards)

    @staticmethod
    def _means(table: Tensor, names: Sequence[str]) -> dict[str, float]:
        means = {}
        for row, name in enumerate(names):
            # math.fsum: exact, so the order of the shards cannot matter.
            weight = math.fsum(table[row, 0].tolist())
            if weight > 0.0:
                means[name] = _total(table[row, 1].tolist()) / weight
        return means


class Outcome:
    """A vote's conclusions."""

    __slots__ = ("bits", "metrics", "non_finite", "pause")

    def __init__(self, *, pause: bool, non_finite: bool, bits: Tensor, metrics: dict[str, float]) -> None:
        self.pause = pause
        self.non_finite = non_finite
        self.bits = bits
        self.metrics = metrics


def _total(values: Sequence[float]) -> float:
    return math.fsum(values) if all(map(math.isfinite, values)) else math.nan


def _hash(names: Sequence[str]) -> float:
    return float(zlib.crc32("\0".join(names).encode()))
