"""A recurrent layer over a chunk of tokens: Hugging Face's own modules, with a boundary in and a boundary out.

The layers are those of transformers' ``qwen3_5``, ``qwen3_next`` and ``qwen3_5_moe`` whose token mixer is a gated delta
net (Gated Delta Networks, arXiv 2412.06464, equation 10): each head keeps a matrix that a token decays, corrects and
reads, S_t = S_{t-1} (a_t (I - b_t k_t k_t^T)) + b_t v_t k_t^T and o_t = S_t q_t, after a short causal convolution over
queries, keys and values. Hugging Face stores S transposed, ``[key, value]``.

What a later token needs of the earlier ones is therefore of fixed size, the *boundary*: the convolution's last inputs
and the matrices. Of the inputs a kernel of k columns sees k - 1 besides the token's own, so k - 1 are kept. A chunk
shorter than that keeps columns of the boundary that it came from. A sequence begins at a boundary of zeros: ``None``
stands for it and is turned into zeros here, so both give the same bits.

How a layer meets its boundary: its mixer asks the cache for the state of the layer and hands the new one back
(``get_conv_state``, ``get_recurrent_state``, ``update_conv_state``, ``update_recurrent_state``). The stock cache writes
into its tensors, which autograd forbids. `_StandIn` takes its place and writes nowhere; for a layer of which nothing
but the boundary is wanted, it raises `_StateReady` instead of returning.

`run_layer` runs the mixer's own code with another rule under the names by which it looks one up. One token alone would
take other ways: a convolution that writes into its state, from which the stand-in keeps it, and the rule token by
token, whose GPU kernel has no backward; it gets the chunk rule, like every other chunk, with autograd or without. And
where the chunk rule is torch's, long chunks go through it in pieces: it works in blocks of 64 tokens one after the
other, and autograd answers each look at a block with a tensor of zeros as long as the chunk, which is quadratic. In
pieces it is linear, with the same bits. `decode_layer` lets the mixer go its own way.

Invariants: nothing that comes in is written to; with autograd and without, a chunk gives the same bits; the boundary
of several branches may be one (batch one), is then expanded, and its cotangent is the sum over branches. What follows
a token in its chunk changes neither its output nor, where it has no cotangent, any gradient; it does change the
boundary. So branches may be padded on the right in their last chunk, whose boundary nobody uses.

Shapes: B branches, S tokens, C hidden size, E channels of the convolution, H value heads, K and V key and value
dimension of a head, k width of the convolution.
"""

from __future__ import annotations

import importlib.util
import inspect
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from types import FunctionType, MethodType
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from transformers import PreTrainedConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from engine.errors import UnsupportedModelError
from models.float64 import accumulation_dtype

MODEL_TYPES = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
"""Architectures whose recurrent layers, alone, the tests hold against dense autograd, by their configuration's name."""

RECURRENT_LAYER = "linear_attention"
"""What ``layer_types`` of a configuration calls a recurrent layer."""

_MIXERS = (Qwen3_5GatedDeltaNet, Qwen3_5MoeGatedDeltaNet, Qwen3NextGatedDeltaNet)
_TOKEN_RULE, _CHUNK_RULE = "torch_recurrent_gated_delta_rule", "torch_chunk_gated_delta_rule"
# The names under which the mixers' modules look up the rule for one token and for a chunk, fast kernels or not.

BLOCK_TOKENS, PIECE_TOKENS = 64, 512
# A multiple of the rule's blocks, or bits would change. Measured: as fast as any from 256 to 1024, in less memory.

_FLA, _FLASH_QLA, _CAUSAL_CONV = "fla", "flash_qla", "causal_conv1d"
_DISPATCH_OFF = (("FLA_FLASH_QLA", "0"), ("FLA_DISABLE_BACKEND_DISPATCH", "1"))
# Settings with which flash-linear-attention does not hand over to FlashQLA, read by it at every call.


class Boundary(NamedTuple):
    """What tokens behind a chunk need of a recurrent layer, or the gradient with respect to it.

    ``conv``: the convolution's last inputs, ``[B, E, k - 1]`` in the compute dtype, oldest first.
    ``recurrent``: the heads' matrices, ``[B, H, K, V]`` in the accumulation dtype.
    """

    conv: torch.Tensor
    recurrent: torch.Tensor


class LayerCotangents(NamedTuple):
    """Gradients of a layer's input ``[B, S, C]`` and of the boundary that it came from, None at a sequence's start."""

    hidden: torch.Tensor
    boundary: Boundary | None


@dataclass(frozen=True, kw_only=True)
class BoundaryLayout:
    """Shapes, without the branches, and dtypes of a recurrent layer's boundary; see `Boundary`."""

    conv_shape: tuple[int, int]
    conv_dtype: torch.dtype
    recurrent_shape: tuple[int, int, int]
    recurrent_dtype: torch.dtype

    @property
    def conv_bytes(self) -> int:
        """Bytes of one branch's convolution inputs after one layer."""
        channels, columns = self.conv_shape
        return channels * columns * self.conv_dtype.itemsize

    @property
    def recurrent_bytes(self) -> int:
        """Bytes of one branch's matrices after one layer."""
        heads, keys, values = self.recurrent_shape
        return heads * keys * values * self.recurrent_dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of one branch's boundary after one layer."""
        return self.conv_bytes + self.recurrent_bytes

    def zeros(self, branches: int, device: torch.device | str) -> Boundary:
        """Return the boundary at the start of a sequence for so many branches."""
        return Boundary(
            conv=torch.zeros((branches, *self.conv_shape), dtype=self.conv_dtype, device=device),
            recurrent=torch.zeros((branches, *self.recurrent_shape), dtype=self.recurrent_dtype, device=device),
        )


def boundary_layout(config: PreTrainedConfig, dtype: torch.dtype) -> BoundaryLayout:
    """Return the layout of every recurrent layer's boundary, for a model computing in ``dtype``; needs no weights.

    ``config`` may be that of a multimodal model. Raises AttributeError for one without recurrent layers.
    """
    text = _text(config)
    key_heads, value_heads = int(text.linear_num_key_heads), int(text.linear_num_value_heads)
    keys, values = int(text.linear_key_head_dim), int(text.linear_value_head_dim)
    return _layout(key_heads, value_heads, keys, values, int(text.linear_conv_kernel_dim), dtype)


def _layout(key_heads: int, value_heads: int, keys: int, values: int, width: int, dtype: torch.dtype) -> BoundaryLayout:
    return BoundaryLayout(
        conv_shape=(2 * key_heads * keys + value_heads * values, width - 1),
        conv_dtype=dtype,
        recurrent_shape=(value_heads, keys, values),
        recurrent_dtype=accumulation_dtype(dtype),
    )


def recurrent_layers(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the indices of the recurrent layers; none for a configuration that does not tell layers apart."""
    kinds = getattr(_text(config), "layer_types", None) or ()
    return tuple(index for index, kind in enumerate(kinds) if kind == RECURRENT_LAYER)


def is_recurrent(layer: nn.Module) -> bool:
    """Return whether a decoder layer is one that this module evaluates."""
    return type(getattr(layer, "linear_attn", None)) in _MIXERS


def _text(config: PreTrainedConfig) -> Any:
    return config.get_text_config(decoder=True)


# Evaluation


class _StateReady(Exception):
    """Raised inside a mixer once its boundary exists and nothing else is wanted."""


class _StandIn:
    """Stands in for the cache of one layer call: hands over the boundary and takes the new one, writing nowhere."""

    def __init__(self, boundary: Boundary, *, state_only: bool) -> None:
        self._before, self._state_only = boundary, state_only
        self._conv: torch.Tensor | None = None
        self._recurrent: torch.Tensor | None = None

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        return self._before.conv

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor:
        return self._before.recurrent

    def is_recording_past(self, layer_idx: int) -> bool:
        """Say yes: whoever keeps its past may not have it overwritten, so one token is convolved like many."""
        return True

    def update_conv_state(self, inputs_BES: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> torch.Tensor:
        columns = self._before.conv.shape[-1]
        seen = torch.cat([self._before.conv, inputs_BES], dim=-1)
        self._conv = seen[..., seen.shape[-1] - columns :].clone(memory_format=torch.contiguous_format)
        return seen

    def update_recurrent_state(self, state_BHKV: torch.Tensor, layer_idx: int, *_: Any, **__: Any) -> torch.Tensor:
        self._recurrent = state_BHKV
        if self._state_only:
            raise _StateReady
        return state_BHKV

    def boundary(self) -> Boundary:
        """Return the new boundary, and forget it: whoever holds this object does not keep that alive."""
        conv, recurrent = self._conv, self._recurrent
        self._conv = self._recurrent = None
        if conv is None or recurrent is None:
            raise RuntimeError("the layer did not update its boundary")
        if recurrent.dtype is not self._before.recurrent.dtype:
            raise RuntimeError(
                f"the layer's matrices came in as {self._before.recurrent.dtype} and went out as {recurrent.dtype}; "
                "evaluate a float64 model under models.float64.lifted_casts"
            )
        return Boundary(conv, recurrent)


@cache
def _with_own_rules(forward: Any) -> FunctionType:
    """Return a mixer's forward that finds the chunk rule, in pieces where it is torch's, under the names of both rules.

    It is the same code in a copy of its module's names, so nobody else's forward changes. The decorators around it
    rename deprecated arguments and fire hooks for offloaded weights: neither occurs here.
    """
    inner = cast(FunctionType, inspect.unwrap(forward))
    rule = inner.__globals__[_CHUNK_RULE]
    rule = rule if _importable(_FLA) else _in_pieces(rule)
    names = {**inner.__globals__, _CHUNK_RULE: rule, _TOKEN_RULE: rule}
    own = FunctionType(inner.__code__, names, inner.__name__, inner.__defaults__, inner.__closure__)
    own.__kwdefaults__ = inner.__kwdefaults__
    return own


def _in_pieces(rule: Any) -> Any:
    """Return the chunk rule applied to `PIECE_TOKENS` tokens at a time, with the arguments and results of ``rule``."""

    def in_pieces(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        g: torch.Tensor,
        beta: torch.Tensor,
        initial_state: torch.Tensor,
        **others: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        outs, state = [], initial_state
        for q, k, v, decay, rate in zip(*(x.split(PIECE_TOKENS, 1) for x in (query, key, value, g, beta)), strict=True):
            out, state = rule(q, k, v, g=decay, beta=rate, initial_state=state, **others)
            outs.append(out)
        return outs[0] if len(outs) == 1 else torch.cat(outs, 1), state

    return in_pieces


@contextmanager
def _own_rules(mixer: nn.Module) -> Iterator[None]:
    """While active, let a mixer run with our rules; one call of a layer at a time."""
    mixer.forward = MethodType(_with_own_rules(type(mixer).forward), mixer)
    try:
        yield
    finally:
        del mixer.forward  # for good, it would be a cycle that keeps the weights


def _call(
    layer: nn.Module, hidden_BSC: torch.Tensor, boundary: Boundary | None, *, state_only: bool, token_rule: bool
) -> tuple[torch.Tensor | None, Boundary]:
    mixer = cast(nn.Module, layer.linear_attn)
    entry = _for_branches(_entry(mixer, hidden_BSC, boundary), hidden_BSC.shape[0])
    stand_in = _StandIn(entry, state_only=state_only)
    with nullcontext() if token_rule else _own_rules(mixer):
        try:
            out = layer(hidden_BSC, position_embeddings=None, attention_mask=None, cache=stand_in)
        except _StateReady:
            out = None
    return out, stand_in.boundary()


def _entry(mixer: Any, hidden_BSC: torch.Tensor, boundary: Boundary | None) -> Boundary:
    """Return the boundary, or that of a sequence's start. Raises ValueError for one of another layout."""
    layout = _layout(
        mixer.num_k_heads,
        mixer.num_v_heads,
        mixer.head_k_dim,
        mixer.head_v_dim,
        mixer.conv_kernel_size,
        hidden_BSC.dtype,
    )
    if boundary is None:
        return layout.zeros(1, hidden_BSC.device)
    branches = hidden_BSC.shape[0]
    for name, tensor, shape, dtype in (
        ("conv", boundary.conv, layout.conv_shape, layout.conv_dtype),
        ("recurrent", boundary.recurrent, layout.recurrent_shape, layout.recurrent_dtype),
    ):
        if tensor.shape[1:] != shape or tensor.shape[0] not in (1, branches) or tensor.dtype is not dtype:
            raise ValueError(
                f"boundary.{name} is {tuple(tensor.shape)} in {tensor.dtype}, and this layer, for {branches} branches, "
                f"needs {(branches, *shape)}, or batch one, in {dtype}"
            )
    return boundary


def _for_branches(boundary: Boundary, branches: int) -> Boundary:
    """Return the boundary for each branch, without a copy."""
    return Boundary(boundary.conv.expand(branches, -1, -1), boundary.recurrent.expand(branches, -1, -1, -1))


def run_layer(layer: nn.Module, hidden_BSC: torch.Tensor, boundary: Boundary | None) -> tuple[torch.Tensor, Boundary]:
    """Return a recurrent decoder layer's output ``[B, S, C]`` and the boundary behind the chunk (batch B).

    ``boundary`` is the one before the chunk: of every branch, or one (batch one) for all of them; None at the start of
    a sequence. Differentiable by all that comes in, for any S from 1. For float64 call it under
    `models.float64.lifted_casts`.

    Raises:
        ValueError: ``boundary`` has other shapes or dtypes than this layer's.
    """
    out, after = _call(layer, hidden_BSC, boundary, state_only=False, token_rule=False)
    return cast(torch.Tensor, out), after


def run_state(layer: nn.Module, hidden_BSC: torch.Tensor, boundary: Boundary | None) -> Boundary:
    """Return only the boundary behind the chunk, as `run_layer` does and with the same bits.

    What follows the recurrence does not run: gated norm, output projection, feed-forward. The projection to the
    mixer's gate does, since the mixer computes it first.

    Raises:
        ValueError: as `run_layer`.
    """
    return _call(layer, hidden_BSC, boundary, state_only=True, token_rule=False)[1]


def layer_backward(
    layer: nn.Module,
    hidden_BSC: torch.Tensor,
    boundary: Boundary | None,
    d_out_BSC: torch.Tensor | None,
    d_boundary: Boundary | None,
) -> LayerCotangents:
    """Recompute a chunk with autograd, pull the cotangents back, and return those of what came in.

    ``d_out_BSC`` is None where nothing but the layer's boundary is used (then the rest of the layer does not run),
    ``d_boundary`` (batch B, or one to be expanded) where no later token sees the boundary. The cotangent of the
    boundary before the chunk has the shapes and dtypes of ``boundary``, summed over branches where those share it; it
    takes the place of ``d_boundary`` in a sweep from the last chunk to the first, and nothing is added to it: only
    this chunk used that boundary, or several waves of branches did, whose cotangents are added. Parameters' gradients
    go where autograd puts them.

    Raises:
        ValueError: there is no cotangent at all, or as `run_layer`.
    """
    if d_out_BSC is None and d_boundary is None:
        raise ValueError("a backward needs a cotangent, and both d_out_BSC and d_boundary are None")
    with torch.enable_grad():
        entry = hidden_BSC.detach().requires_grad_()
        before = None if boundary is None else Boundary(*(tensor.detach().requires_grad_() for tensor in boundary))
        out, after = _call(layer, entry, before, state_only=d_out_BSC is None, token_rule=False)
    outputs, cotangents = ([] if out is None else [out]), ([] if d_out_BSC is None else [d_out_BSC])
    if d_boundary is not None:
        outputs += after
        spread = _for_branches(d_boundary, hidden_BSC.shape[0])
        cotangents += [d_after.to(tensor.dtype) for d_after, tensor in zip(spread, after, strict=True)]
    del out, after  # or they would outlive the backward
    torch.autograd.backward(outputs, cotangents)
    d_before = None if before is None else Boundary(*(cast(torch.Tensor, tensor.grad) for tensor in before))
    return LayerCotangents(cast(torch.Tensor, entry.grad), d_before)


@torch.no_grad()
def decode_layer(layer: nn.Module, hidden_B1C: torch.Tensor, boundary: Boundary) -> tuple[torch.Tensor, Boundary]:
    """Return a layer's output ``[B, 1, C]`` for one more token of each branch, and the boundary behind it (batch B).

    The rule runs token by token, which is cheaper here than by chunks and differs from `run_layer` by rounding.

    Raises:
        ValueError: there is more than one token, or as `run_layer`.
    """
    if hidden_B1C.shape[1] != 1:
        raise ValueError(f"decoding takes one token of each branch, and here are {hidden_B1C.shape[1]}; use run_layer")
    out, after = _call(layer, hidden_B1C, boundary, state_only=False, token_rule=True)
    return cast(torch.Tensor, out), after


# Support


def check_recurrent_config(config: PreTrainedConfig, dtype: torch.dtype) -> None:
    """Refuse a configuration whose recurrent layers can't be evaluated exactly here; needs no weights.

    Raises:
        UnsupportedModelError: naming the model type and the feature.
    """
    text = _text(config)
    if text.model_type not in MODEL_TYPES:
        _refuse(text.model_type, f"its recurrent layers are unknown here; known are those of {', '.join(MODEL_TYPES)}")
    if text.linear_conv_kernel_dim < 2:
        _refuse(text.model_type, f"its convolution is {text.linear_conv_kernel_dim} wide, and less than 2 keep nothing")
    if text.linear_num_value_heads % text.linear_num_key_heads:
        _refuse(
            text.model_type,
            f"its {text.linear_num_value_heads} value heads can't share {text.linear_num_key_heads} key heads evenly",
        )
    if reason := _kernels(dtype):
        _refuse(text.model_type, reason)


def check_recurrent_layer(layer: nn.Module) -> None:
    """Refuse a recurrent decoder layer whose code is not what the tests hold against dense autograd.

    Raises:
        UnsupportedModelError: naming the class and what is different.
    """
    mixer = getattr(layer, "linear_attn", None)
    if type(mixer) not in _MIXERS:
        known = ", ".join(kind.__name__ for kind in _MIXERS)
        _refuse(type(layer).__name__, f"its mixer is a {type(mixer).__name__}, and known are {known}")
    if "forward" in vars(mixer):
        _refuse(type(mixer).__name__, "its forward was replaced, by an offloading hook or a kernel from a hub")
    names = cast(FunctionType, inspect.unwrap(type(cast(nn.Module, mixer)).forward)).__globals__
    if missing := [name for name in (_TOKEN_RULE, _CHUNK_RULE) if name not in names]:
        _refuse(
            type(mixer).__name__,
            f"its module no longer has {' and '.join(missing)}, so chunks can't be evaluated with ours; "
            "use a version of transformers that was tested (constraints.txt)",
        )


def _kernels(dtype: torch.dtype) -> str | None:
    """Return why the kernels that transformers finds for convolution and rule are not exact, None if they are."""
    if dtype is torch.float64 and _importable(_CAUSAL_CONV):
        return "causal_conv1d is installed, and its kernels take no float64; use an environment without it for float64"
    if not _importable(_FLA):
        return None  # then its modules use torch, on any device
    if dtype is torch.float64:
        return (
            "flash-linear-attention is installed, and its kernels compute float64 in less; "
            "use an environment without it for float64"
        )
    if _importable(_FLASH_QLA) and not any(os.environ.get(name) == value for name, value in _DISPATCH_OFF):
        return (
            "flash-linear-attention would hand long sequences over to FlashQLA, which forgets what decayed far enough; "
            "set FLA_FLASH_QLA=0 in the environment"
        )
    return None


def _importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _refuse(what: str, reason: str) -> None:
    raise UnsupportedModelError(f"{what!r} is refused: {reason}")
