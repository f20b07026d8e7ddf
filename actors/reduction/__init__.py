"""Summing the shards' gradients over the generation, so that the result depends on the shards alone.

The session uses `Reducer`; everything else in here is its parts.
"""

from everstep.actors.reduction.reducer import BUCKET_BYTES, Reducer, StrategyName

__all__ = ["BUCKET_BYTES", "Reducer", "StrategyName"]
