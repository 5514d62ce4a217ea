"""The oracle: one dense autograd graph over all whole sequences of a step, with the loss written out by hand.

Nothing here is shared with the engine's way to a gradient, nor with ``stages.dense`` and ``stages.losses``: every
response is run with its prompt through Hugging Face's own forward under a stock attention, all log-probabilities stay
in one graph, the loss is plain loops over responses, and there is one backward. Float64 unless another dtype is asked
for, with log-probabilities in float32 where that is wider than the dtype.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM
from transformers.cache_utils import LinearAttentionLayer

from models.float64 import lifted_casts
from stages import Group, LossConfig, Response

STOCK_AGGREGATION = {
    "grpo": "seq-mean-token-mean",
    "gspo": "seq-mean-token-mean",
    "dapo": "token-mean",
    "bnpo": "token-mean",
    "cispo": "token-mean",
    "dr_grpo": "seq-mean-token-sum-norm",
}


@dataclass(frozen=True, kw_only=True)
class Scored:
    """Log-probabilities of all tokens of a response and entropies of the distributions they were drawn from."""

    response: Response
    logprobs: torch.Tensor
    entropies: torch.Tensor


def load(policy: Path, attention: str, dtype: torch.dtype = torch.float64) -> Any:
    """Return Hugging Face's model in ``dtype``."""
    with lifted_casts(dtype):
        return AutoModelForCausalLM.from_pretrained(policy, dtype=dtype, attn_implementation=attention).eval()


def score(hf: Any, group: Group, response: Response, temperature: float, *, stop_prompt: bool = False) -> Scored:
    """Return a response's scores with their graph; ``stop_prompt`` cuts it at the keys and values of the prompt.

    The prompt's last token opens the response, so its own keys and values keep their graph.
    """
    prompt, ids = list(group.prompt_ids), list(response.token_ids)
    with lifted_casts(hf.dtype):
        if not stop_prompt or len(prompt) == 1:
            rows = hf(torch.tensor([prompt + ids]), use_cache=False, logits_to_keep=len(ids) + 1).logits[0, :-1]
        else:
            with torch.no_grad():
                cache = hf(torch.tensor([prompt[:-1]]), use_cache=True).cache
            _write_nowhere(cache)
            rows = hf(torch.tensor([prompt[-1:] + ids]), cache=cache, use_cache=True).logits[0, :-1]
        wide = torch.promote_types(rows.dtype, torch.float32)
        table = torch.log_softmax(rows.to(wide) / temperature, -1)
        chosen = table.gather(1, torch.tensor(ids, dtype=torch.int64)[:, None])[:, 0]
        return Scored(response=response, logprobs=chosen, entropies=-(table.exp() * table).sum(-1))


def _write_nowhere(cache: Any) -> None:
    """Keep a cache's recurrent layers from writing into tensors that autograd needs; their state stays as it is."""
    for layer in cache.layers:
        if isinstance(layer, LinearAttentionLayer):
            layer.record_past = True
            cast(Any, layer).update_recurrent_state = lambda state, *_, **__: state


def gradient(
    policy: Path,
    groups: Sequence[Group],
    config: LossConfig,
    temperature: float,
    *,
    attention: str = "eager",
    dtype: torch.dtype = torch.float64,
    stop_prompt: bool = False,
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss of a step and the gradient of every parameter."""
    hf = load(policy, attention, dtype)
    scored = [
        (score(hf, group, response, temperature, stop_prompt=stop_prompt), advantage)
        for group in groups
        for response, advantage in zip(group.responses, advantages(group, scale=config.loss != "dr_grpo"), strict=True)
    ]
    loss = step_loss(scored, config)
    loss.backward()
    return loss.item(), {
        name: torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        for name, parameter in hf.named_parameters()
    }


def advantages(group: Group, *, scale: bool) -> list[list[float]]:
    """Return one number a token for every response of a group."""
    responses = group.responses
    given = [response.advantage for response in responses if response.advantage is not None]
    if given:
        return [
            list(value) if isinstance(value, tuple) else [value] * len(response.token_ids)
            for response, value in zip(responses, given, strict=True)
        ]
    rewards = [response.reward for response in responses if response.reward is not None]
    centred = [reward - statistics.fmean(rewards) for reward in rewards]
    if scale and len(set(rewards)) > 1:
        centred = [value / (statistics.stdev(rewards) + 1e-4) for value in centred]
    return [[value] * len(response.token_ids) for response, value in zip(responses, centred, strict=True)]


def step_loss(scored: Sequence[tuple[Scored, list[float]]], config: LossConfig) -> torch.Tensor:
    """Return the scalar loss of all responses of a step."""
    aggregation = config.aggregation or STOCK_AGGREGATION[config.loss]
    longest = config.max_response_tokens or max(len(item.response.token_ids) for item, _ in scored)
    all_tokens = sum(sum(item.response.mask) for item, _ in scored)
    total = torch.zeros((), dtype=scored[0][0].logprobs.dtype)
    for item, advantage in scored:
        kept = [position for position, trainable in enumerate(item.response.mask) if trainable]
        if not kept:
            continue
        summed = token_losses(item, kept, advantage, config).sum()
        total = (
            total
            + summed
            / {
                "token-sum": 1,
                "token-mean": all_tokens,
                "seq-mean-token-sum": len(scored),
                "seq-mean-token-mean": len(scored) * len(kept),
                "seq-mean-token-sum-norm": len(scored) * longest,
            }[aggregation]
        )
    return total


def token_losses(item: Scored, kept: list[int], advantage: list[float], config: LossConfig) -> torch.Tensor:
    """Return what each trainable token of a response adds to the loss, before aggregation."""
    logp = item.logprobs[kept]
    old = logp.detach() if item.response.old_logprobs is None else _pick(item.response.old_logprobs, kept, logp)
    ratio = torch.exp(logp - old)
    if config.loss == "gspo":
        ratio = torch.exp((logp - old).mean()).expand(len(kept))
    a = _pick(advantage, kept, logp)
    high = 1 + (config.epsilon if config.epsilon_high is None else config.epsilon_high)
    clipped = torch.clip(ratio, 1 - config.epsilon, high)
    if config.loss == "cispo":
        term = clipped.detach() * a * logp
    else:
        capped = ratio if config.delta is None else torch.clip(ratio, max=config.delta)
        term = torch.minimum(capped * a, clipped * a)
    loss = -term - config.entropy_bonus * item.entropies[kept]
    if config.beta and item.response.ref_logprobs is not None:
        d = logp - _pick(item.response.ref_logprobs, kept, logp)
        loss = loss + config.beta * {"k1": d, "k2": d * d / 2, "k3": torch.exp(-d) - 1 + d}[config.kl or "k3"]
    return loss


def _pick(values: Sequence[float], kept: list[int], like: torch.Tensor) -> torch.Tensor:
    return torch.tensor([values[position] for position in kept], dtype=like.dtype)
