"""The alternatives to the engine, as strong as we can write them over Hugging Face's own model.

Nouns: a *peer* does forward and backward of one group and leaves the gradient in ``parameter.grad``. `Dense` runs every
response with its prompt as a sequence of its own, one after another. `Packed` runs the prompt once, with all responses
behind it in one sequence: they don't see each other, and their positions go on from the prompt.

What both do to be strong: every layer is checkpointed, response rows alone meet the head, the head's logits live for
the shortest time that autograd allows, gradients are added in place from the start.

Attention of the packed sequence comes in three forms, all through torch's fused CPU kernel: ``split`` (prompt rows
causal; the rows of all responses over all keys with a boolean mask, so that no key is copied for each response),
``grouped`` (the same, with a copy of the prompt's keys for each response, which needs equal lengths) and ``mask`` (one
call with a boolean mask over the whole square). `Packed` is exact under all three.

The loss is the mean over responses of the token mean of -A * ratio, where every ratio is 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, Protocol

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, AutoModelForCausalLM

from stages import Group

Form = Literal["split", "grouped", "mask"]
PACKED = "benchmark_packed"


class Peer(Protocol):
    """Forward and backward of one group; returns the loss."""

    def step(self) -> float: ...


def load_peer_model(directory: str) -> Any:
    """Return Hugging Face's model in float32 with every layer checkpointed, and gradients that are zero."""
    hf = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="sdpa").eval()
    for layer in hf.model.layers:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    for parameter in hf.parameters():
        parameter.grad = torch.zeros_like(parameter)
    return hf


@dataclass(frozen=True, kw_only=True)
class Head:
    """The head and the loss. ``rows`` is how many rows it scores at a time; their backward follows at once."""

    hf: Any
    rows: int

    def backward(self, hidden_NC: torch.Tensor, targets_N: torch.Tensor, weights_N: torch.Tensor) -> float:
        """Return the loss's part of these rows, and run the backward of them: head first, then the rest."""
        leaf_NC = hidden_NC.detach().requires_grad_()
        loss = 0.0
        for h_BC, t_B, w_B in zip(*(x.split(self.rows) for x in (leaf_NC, targets_N, weights_N)), strict=True):
            loss += self._block(h_BC, t_B, w_B)
        hidden_NC.backward(leaf_NC.grad)
        return loss

    def _block(self, hidden_BC: torch.Tensor, targets_B: torch.Tensor, weights_B: torch.Tensor) -> float:
        logits_BV = self.hf.lm_head(hidden_BC)
        logprobs_B = logits_BV.gather(1, targets_B[:, None])[:, 0] - torch.logsumexp(logits_BV, -1)
        ratios_B = torch.exp(logprobs_B - logprobs_B.detach())
        loss = -(weights_B * ratios_B).sum()
        loss.backward()
        return loss.item()


def row_weights(group: Group, advantages: Sequence[float], dtype: torch.dtype) -> list[torch.Tensor]:
    """Return ``A / (G * T)`` for every token of every response."""
    count = len(group.responses)
    return [
        torch.full((len(response.token_ids),), advantage / (count * len(response.token_ids)), dtype=dtype)
        for response, advantage in zip(group.responses, advantages, strict=True)
    ]


@dataclass(frozen=True, kw_only=True)
class Dense:
    """One sequence for each response, prompt included, one after another."""

    hf: Any
    group: Group
    advantages: Sequence[float]
    head_rows: int

    def step(self) -> float:
        self.hf.config._attn_implementation = "sdpa"
        head, prompt = Head(hf=self.hf, rows=self.head_rows), self.group.prompt_ids
        loss = 0.0
        for response, weights in zip(
            self.group.responses, row_weights(self.group, self.advantages, self.hf.dtype), strict=True
        ):
            ids = torch.tensor([[*prompt, *response.token_ids[:-1]]])
            hidden_SC = self.hf.model(ids, use_cache=False).last_hidden_state[0]
            loss += head.backward(hidden_SC[len(prompt) - 1 :], torch.tensor(response.token_ids), weights)
        return loss


@dataclass(frozen=True, kw_only=True)
class Packed:
    """The prompt once, all responses behind it in one sequence; see the module for the forms of attention."""

    hf: Any
    group: Group
    advantages: Sequence[float]
    head_rows: int
    form: Form = "split"

    def step(self) -> float:
        prompt = list(self.group.prompt_ids)
        inputs = [list(response.token_ids[:-1]) for response in self.group.responses]
        layout = Layout(prompt_tokens=len(prompt), response_tokens=tuple(map(len, inputs)), form=self.form)
        AttentionInterface.register(PACKED, layout.attend)
        self.hf.config._attn_implementation = PACKED
        ids = torch.tensor([prompt + [token for tokens in inputs for token in tokens]])
        hidden_SC = self.hf.model(ids, position_ids=layout.positions(), use_cache=False).last_hidden_state[0]
        targets = torch.tensor([token for response in self.group.responses for token in response.token_ids])
        weights = torch.cat(row_weights(self.group, self.advantages, self.hf.dtype))
        return Head(hf=self.hf, rows=self.head_rows).backward(hidden_SC[layout.rows()], targets, weights)


class Layout:
    """Where prompt and responses are in the packed sequence, and who sees whom."""

    def __init__(self, *, prompt_tokens: int, response_tokens: tuple[int, ...], form: Form) -> None:
        self.prompt_tokens, self.response_tokens, self.form = prompt_tokens, response_tokens, form
        self.num_tokens = prompt_tokens + sum(response_tokens)
        if form == "grouped" and len(set(response_tokens)) > 1:
            raise ValueError(f"response_tokens={response_tokens!r} must be equal for form='grouped'; choose split")
        self._mask = {"split": self._response_mask, "grouped": self._own_mask, "mask": self._square_mask}[form]()

    def positions(self) -> torch.Tensor:
        """Return the position of every token, ``[1, S]``."""
        first = self.prompt_tokens
        parts = [torch.arange(first), *(torch.arange(first, first + count) for count in self.response_tokens)]
        return torch.cat(parts)[None]

    def rows(self) -> torch.Tensor:
        """Return the rows that predict response tokens, response by response: the prompt's last row opens each."""
        found, first = [], self.prompt_tokens
        for count in self.response_tokens:
            found += [self.prompt_tokens - 1, *range(first, first + count)]
            first += count
        return torch.tensor(found)

    def _response_mask(self) -> torch.Tensor:
        """Return what the rows of responses see, ``[responses' rows, S]``."""
        own = torch.block_diag(*(torch.ones(count, count).tril() for count in self.response_tokens)).bool()
        return torch.cat([torch.ones(len(own), self.prompt_tokens, dtype=torch.bool), own], 1)

    def _own_mask(self) -> torch.Tensor:
        """Return what the rows of one response see of prompt and response, ``[R, P + R]``."""
        count = self.response_tokens[0]
        own = torch.ones(count, count, dtype=torch.bool).tril()
        return torch.cat([torch.ones(count, self.prompt_tokens, dtype=torch.bool), own], 1)

    def _square_mask(self) -> torch.Tensor:
        prompt = torch.ones(self.prompt_tokens, self.num_tokens, dtype=torch.bool).tril()
        return torch.cat([prompt, self._response_mask()])

    def attend(
        self, module: Any, q_BHSD: torch.Tensor, k_BKSD: torch.Tensor, v_BKSD: torch.Tensor, *_: Any, **options: Any
    ) -> tuple[torch.Tensor, None]:
        """Attention as Hugging Face calls it; returns ``[B, S, H, D]``."""
        repeat = q_BHSD.shape[1] // k_BKSD.shape[1]
        k_BHSD, v_BHSD = (x.repeat_interleave(repeat, 1) for x in (k_BKSD, v_BKSD))
        attend = partial(F.scaled_dot_product_attention, scale=options.get("scaling"))
        if self.form == "mask":
            out_BHSD = attend(q_BHSD, k_BHSD, v_BHSD, attn_mask=self._mask[None, None])
            return out_BHSD.transpose(1, 2), None
        first = self.prompt_tokens
        prompt_BHSD = attend(q_BHSD[:, :, :first], k_BHSD[:, :, :first], v_BHSD[:, :, :first], is_causal=True)
        tail = self._attend_split if self.form == "split" else self._attend_grouped
        out_BHSD = torch.cat([prompt_BHSD, tail(attend, q_BHSD, k_BHSD, v_BHSD)], 2)
        return out_BHSD.transpose(1, 2), None

    def _attend_split(self, attend: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = attend(q[:, :, self.prompt_tokens :], k, v, attn_mask=self._mask[None, None])
        return out

    def _attend_grouped(self, attend: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        size = (len(self.response_tokens), self.response_tokens[0])
        q_GHRD, k_GHRD, v_GHRD = (x[0, :, self.prompt_tokens :].unflatten(1, size).transpose(0, 1) for x in (q, k, v))
        k_GHTD, v_GHTD = (
            torch.cat([x[:, :, : self.prompt_tokens].expand(size[0], -1, -1, -1), own], 2)
            for x, own in ((k, k_GHRD), (v, v_GHRD))
        )
        out_GHRD = attend(q_GHRD, k_GHTD, v_GHTD, attn_mask=self._mask[None, None])
        return torch.as_tensor(out_GHRD.transpose(0, 1).flatten(1, 2)[None])
