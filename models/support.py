"""What the dense adapter can evaluate exactly, and what it refuses by name.

Two nets. The first reads the configuration, before any weight: features that change what a token sees or that make
chunked evaluation depend on the chunk (sliding windows, dropout, encoders, positions that depend on the length of the
sequence). The second, `check_walk`, runs once the weights are there: the block walk's logits for a few tokens
against the model's own forward, so that an architecture that does something between its modules (scaled embeddings,
scaled or capped logits) is refused rather than trained wrong.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from engine.errors import UnsupportedModelError, UsageError
from models.attention import EmptyPrefix
from models.chunk import forward_chunk
from models.dense import DenseModel
from models.float64 import lifted_casts
from models.gated_delta import (
    MODEL_TYPES,
    RECURRENT_LAYER,
    check_recurrent_config,
    check_recurrent_layer,
    recurrent_layers,
)

TESTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "qwen3_5")
"""Architectures whose gradients the tests hold against dense autograd."""

_LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")
# Their frequencies depend on the longest position seen so far, so a chunk would not know its own.

_CHECK_TOKENS = 12
_CHECK_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
# Largest difference of logits over the largest logit: far above rounding, far below any scale or cap.


def check_config(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Refuse configurations that the adapter can't evaluate exactly in ``dtype``.

    Raises:
        UnsupportedModelError: naming the model type and the feature.
    """
    values = config.to_dict()
    reasons = [
        reason for reason in (_encoder(values), _layers(config, values), _dropout(values), _rope(values)) if reason
    ]
    if not reasons and recurrent_layers(config):
        check_recurrent_config(config, dtype)
    if reasons:
        raise UnsupportedModelError(
            f"model type {values.get('model_type')!r} is refused: {'; '.join(reasons)}; "
            f"tested types are {', '.join(TESTED_MODEL_TYPES)}"
        )


def _encoder(values: dict[str, Any]) -> str | None:
    if values.get("is_encoder_decoder"):
        return "it is an encoder-decoder model, and only causal decoders have state that later tokens need"
    missing = [key for key in ("vocab_size", "num_hidden_layers", "num_attention_heads") if not values.get(key)]
    return f"its configuration lacks {', '.join(missing)}, so it is no causal decoder known here" if missing else None


def _layers(config: PreTrainedConfig, values: dict[str, Any]) -> str | None:
    kinds = set(values.get("layer_types") or ()) - {"full_attention"}
    kinds -= {RECURRENT_LAYER} if values.get("model_type") in MODEL_TYPES else set()
    windowed = "sliding_attention" in kinds or (values.get("sliding_window") and not values.get("layer_types"))
    if windowed and values.get("use_sliding_window", True):
        return f"it uses a sliding window of {values.get('sliding_window')} tokens"
    if unknown := kinds - {"sliding_attention"}:
        return f"its layers keep a cache of unknown type: {', '.join(sorted(unknown))}"
    if values.get("num_local_experts") or values.get("num_experts") or values.get("n_routed_experts"):
        return "it is a mixture of experts, which this adapter does not cover"
    return None


def _dropout(values: dict[str, Any]) -> str | None:
    found = {
        k: v for k, v in values.items() if ("dropout" in k or k.endswith("pdrop")) and isinstance(v, float) and v > 0
    }
    if found:
        return f"dropout would make the recomputed chunks differ ({found}); set it to 0 in the configuration"
    return None


def _rope(values: dict[str, Any]) -> str | None:
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, dict) else "default"
    if kind in _LENGTH_DEPENDENT_ROPE:
        return f"its positions depend on the length of the sequence (rope type {kind!r})"
    return None


def check_structure(hf: PreTrainedModel) -> None:
    """Refuse models whose modules are not where the block walk needs them (works on weightless models).

    Raises:
        UnsupportedModelError: naming the class and the missing modules.
    """
    body: Any = getattr(hf, "model", None)
    missing = [f"model.{name}" for name in ("embed_tokens", "layers", "norm", "rotary_emb") if not hasattr(body, name)]
    if type(getattr(body, "embed_tokens", None)) is not torch.nn.Embedding:
        missing.append("plain embedding (its gradient is added row by row, so nothing may be scaled or projected)")
    if type(getattr(hf, "lm_head", None)) is not torch.nn.Linear:
        missing.append("plain linear lm_head")
    for layer in recurrent_layers(hf.config) if hasattr(body, "layers") else ():
        check_recurrent_layer(body.layers[layer])
    if missing:
        raise UnsupportedModelError(
            f"{type(hf).__name__} is refused: it has no {', '.join(missing)}; tested types are "
            f"{', '.join(TESTED_MODEL_TYPES)}"
        )


@torch.no_grad()
def check_walk(model: DenseModel) -> None:
    """Compare the block walk with the model's own forward under stock attention, on a few tokens.

    Raises:
        UnsupportedModelError: their logits differ by more than rounding.
        UsageError: the logits are not finite.
    """
    hf = cast(Any, model.hf)
    our_attention = hf.config._attn_implementation
    ours = walk_logits(model)
    hf.config._attn_implementation = "sdpa"
    try:
        with lifted_casts(model.dtype):
            theirs = hf(_check_ids(model), use_cache=False, logits_to_keep=1).logits
    finally:
        hf.config._attn_implementation = our_attention
    if not bool(torch.isfinite(theirs).all()):
        raise UsageError(
            f"the weights of this {type(model.hf).__name__} are no good: its logits for a few tokens are not finite"
        )
    error = ((ours - theirs).abs_().max() / theirs.abs().max().clamp_min(torch.finfo(theirs.dtype).tiny)).item()
    if not error <= _CHECK_TOLERANCE[model.dtype]:
        raise UnsupportedModelError(
            f"{type(model.hf).__name__} is refused: evaluated block by block its logits differ from its own forward by "
            f"{error:.1e} of the largest, so it does something between its layers that this adapter does not know; "
            f"tested types are {', '.join(TESTED_MODEL_TYPES)}"
        )


@torch.no_grad()
def walk_logits(model: DenseModel) -> torch.Tensor:
    """Return the last of a few tokens' logits ``[1, 1, V]``, evaluated block by block."""
    with lifted_casts(model.dtype):
        hidden = forward_chunk(
            model, _check_ids(model), first_position=0, prefix=EmptyPrefix(), keep_state=None, want_hidden=True
        )
        logits: torch.Tensor = model.head(model.body.norm(cast(torch.Tensor, hidden)[:, -1:]))
        return logits


def _check_ids(model: DenseModel) -> torch.Tensor:
    return torch.arange(min(_CHECK_TOKENS, model.head.out_features), device=model.head.weight.device)[None]
