"""Dense autograd of Hugging Face's own model: the oracle, and the honest alternative.

Every response is evaluated as one whole sequence, prompt included, through the model's own forward and autograd, one
sequence at a time with each layer checkpointed, response rows alone through the head. Nothing of the engine's
recursion, paging, attention or head is used: only the loss stage is shared, whose derivatives are needed before any
backward where sequences go one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from engine.memory import DEVICE, LiveBytes
from models.float64 import accumulation_dtype, lifted_casts
from models.policy import PolicySource
from stages.advantages import GroupAdvantages, group_advantages
from stages.groups import Group, Prompt, Response
from stages.losses import evaluate_loss, make_batch
from stages.settings import GrpoSettings


@dataclass(frozen=True, kw_only=True)
class WholeSequence:
    """One response as a whole sequence: ids ``[1, S]``, the rows that are scored and the ids they predict."""

    ids: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor


def dense_model(policy: PolicySource, settings: GrpoSettings) -> Any:
    """Return Hugging Face's model with its stock attention, each layer checkpointed."""
    hf: Any = policy.load_hf(settings.dtype, seed=settings.seed)
    hf.config._attn_implementation = "sdpa"
    for layer in hf.model.layers:
        layer.forward = partial(
            checkpoint,
            layer.forward,
            use_reentrant=False,
            context_fn=lambda: (nullcontext(), lifted_casts(settings.dtype)),  # function modes are off in a backward
        )
    return hf


def sequences(groups: Sequence[Group]) -> list[WholeSequence]:
    """Return the responses that have trainable tokens, in canonical order."""
    found = []
    for group in groups:
        for response in group.responses:
            scored = [position for position, trainable in enumerate(response.mask) if trainable]
            if scored:
                inputs = [*group.prompt_ids, *response.token_ids[: scored[-1]]]
                found.append(
                    WholeSequence(
                        ids=torch.tensor([inputs]),
                        rows=torch.tensor(scored) + len(group.prompt_ids) - 1,
                        targets=torch.tensor([response.token_ids[position] for position in scored]),
                    )
                )
    return found


def scores(hf: Any, sequence: WholeSequence, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and entropies of a sequence's scored rows, ``[R]`` each, with their graph."""
    return row_scores(hf, hidden_rows(hf, sequence), sequence.targets, temperature)


def hidden_rows(hf: Any, sequence: WholeSequence) -> torch.Tensor:
    """Return the last hidden state of a sequence's scored rows, ``[R, C]``."""
    hidden: torch.Tensor = hf.model(sequence.ids, use_cache=False).last_hidden_state[0, sequence.rows]
    return hidden


def row_scores(
    hf: Any, hidden_RC: torch.Tensor, targets_R: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probabilities and entropies of rows, ``[R]`` each."""
    logits = hf.lm_head(hidden_RC).to(accumulation_dtype(hf.dtype)) / temperature
    lse = torch.logsumexp(logits, -1)
    logprobs = logits.gather(1, targets_R[:, None])[:, 0] - lse
    entropies = lse - ((logits - lse[:, None]).exp() * logits).sum(-1)
    return logprobs, entropies


def dense_gradient(
    policy: PolicySource, groups: Sequence[Group], settings: GrpoSettings
) -> tuple[float, dict[str, torch.Tensor]]:
    """Return the loss and every parameter's gradient by dense autograd, in the accumulation dtype."""
    hf = dense_model(policy, settings)
    scale, baseline = settings.loss.scale_advantages, settings.baseline
    advantages = [group_advantages(group, scale=scale, baseline=baseline) for group in groups]
    wide = accumulation_dtype(settings.dtype)
    gradients = {name: torch.zeros_like(p, dtype=wide) for name, p in hf.named_parameters()}
    with lifted_casts(settings.dtype):
        loss, derivatives = _loss_derivatives(hf, groups, advantages, settings)
        for sequence, (d_logprobs, d_entropies) in zip(sequences(groups), derivatives, strict=True):
            outputs = scores(hf, sequence, settings.temperature)
            torch.autograd.backward(outputs, [d_logprobs, d_entropies])
            for name, parameter in hf.named_parameters():
                if parameter.grad is not None:
                    gradients[name] += parameter.grad
                    parameter.grad = None
    return loss, gradients


def _loss_derivatives(
    hf: Any, groups: Sequence[Group], advantages: Sequence[GroupAdvantages], settings: GrpoSettings
) -> tuple[float, list[tuple[torch.Tensor, torch.Tensor]]]:
    found = sequences(groups)
    with torch.no_grad():
        scored = [scores(hf, sequence, settings.temperature) for sequence in found]
    batch = make_batch(groups, advantages, accumulation_dtype(settings.dtype))
    logprobs, entropies = (torch.cat(parts) for parts in zip(*scored, strict=True))
    result = evaluate_loss(settings.loss, batch, logprobs, entropies)
    counts = [len(sequence.rows) for sequence in found]
    return result.loss, list(zip(result.d_logprobs.split(counts), result.d_entropies.split(counts), strict=True))


def largest_group(prompt: Prompt, *, group_size: int, max_response_tokens: int) -> Group:
    """Return a prompt's group with responses as long as they can get; what is in them is of no account."""
    response = Response(token_ids=(0,) * max_response_tokens, mask=(True,) * max_response_tokens, reward=0.0)
    return Group(prompt_ids=prompt.token_ids, responses=(response,) * group_size, source=prompt.source)


def dense_peak_bytes(policy: PolicySource, groups: Sequence[Group], settings: GrpoSettings) -> int:
    """Measure the device peak of dense autograd: weights, gradients, and the longest sequence forward and backward.

    Checkpointed, one sequence at a time, its head a few rows at a time, no optimizer, counted like the engine's own
    peak. Gradients exist from the start, as they do from the second sequence on; the longest sequence sets the peak,
    so it alone is run.
    """
    with LiveBytes() as meter:
        hf = dense_model(policy, settings)
        meter.adopt([*(parameter.detach() for parameter in hf.parameters()), *hf.buffers()])
        meter.restart_peak()
        for parameter in hf.parameters():
            parameter.grad = torch.zeros_like(parameter)
        longest = max(sequences(groups), key=lambda sequence: sequence.ids.shape[1])
        with lifted_casts(settings.dtype):
            hidden_RC = hidden_rows(hf, longest)
            hidden_RC.backward(_head_derivative(hf, hidden_RC.detach(), longest.targets, settings.temperature))
        return int(meter.peak[DEVICE])


LEAN_HEAD_ROWS = 16
# More rows at a time are not faster on CPUs, and each holds its logits several times.


def _head_derivative(
    hf: Any, hidden_RC: torch.Tensor, targets_R: torch.Tensor, temperature: float
) -> torch.Tensor | None:
    """Return the derivative of all scores by the hidden state, ``[R, C]``; the head's own are added to it."""
    hidden_RC.requires_grad_()
    for h_BC, t_B in zip(hidden_RC.split(LEAN_HEAD_ROWS), targets_R.split(LEAN_HEAD_ROWS), strict=True):
        outputs = row_scores(hf, h_BC, t_B, temperature)
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])
    return hidden_RC.grad
