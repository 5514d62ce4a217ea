"""Sampled responses as Values: how a stage reads them.

A group's rollout Value has room for every response at its longest: ``token_ids`` [responses, tokens], ``lengths``
[responses] and ``logprobs`` [responses, tokens], the sampler's own. On torch's meta device, where stages are measured
before anything is sampled, every response has its longest length.
"""

from __future__ import annotations

from engine.budget import Tier
from engine.context import StageContext

VECTOR_TIERS = (Tier.DEVICE, Tier.HOST)
# Where a few numbers a token may live: a file for each would be absurd.


def read_responses(context: StageContext, rollout: str) -> list[list[int]]:
    """Return the ids of a group's sampled responses, in their order."""
    tensors = context.tensors(rollout)
    token_ids = tensors["token_ids"]
    if token_ids.device.type == "meta":
        return [[0] * token_ids.shape[1]] * token_ids.shape[0]
    lengths = tensors["lengths"].tolist()
    return [row[:length] for row, length in zip(token_ids.tolist(), lengths, strict=True)]


def read_logprobs(context: StageContext, rollout: str) -> list[list[float]]:
    """Return the sampler's log-probabilities (nats) of a group's sampled responses, one a token."""
    tensors = context.tensors(rollout)
    lengths = tensors["lengths"].tolist()
    return [row[:length] for row, length in zip(tensors["logprobs"].tolist(), lengths, strict=True)]
