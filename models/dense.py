"""A dense decoder, walked block by block over Hugging Face's own modules.

One adapter serves every causal language model of the shape embedding, decoder layers, final norm, linear head, whose
layers run their attention through transformers' attention registry. The walk is ours and the arithmetic is theirs:
`DenseModel` calls the model's own embedding, rotary embedding, layers, norm and head, one at a time, so that memory
is explicit and each layer is recomputed and differentiated alone.

How a layer meets the prefix: transformers 5.24 calls ``cache.update(k, v, layer_idx, kwargs=kwargs)`` with the very
dictionary that it passes on to the attention function. `_Probe` stands in for the cache: it notes the new keys and
values and puts the prefix into that dictionary. For the last layer of a prompt chunk it raises `_StateReady`
instead: nothing after the state of the last layer is ever needed for a prompt token. While branches are decoded token
by token, it hands over their own earlier keys and values too.

A layer is of one of two kinds: attention, whose state is keys and values, or recurrent, whose state is a boundary
(`models.gated_delta`).

Gradients: parameters' gradients are added to accumulators as soon as autograd has each (one parameter's gradient at a
time is alive), the embedding's row by row for the rows used, in the order of their ids.
Where few ids are in use, its accumulator has a row for each of those only.

Shapes: B branches, S tokens, C hidden size, K key/value heads, D head dimension.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedModel

from engine.device_kind import DeviceKind
from models import gated_delta, head
from models.attention import AttentionResults, OwnState, Prefix
from models.float64 import accumulation_dtype
from models.gated_delta import Boundary

HEAD_GRADIENT = "lm_head.weight"
EMBEDDING_GRADIENT = "model.embed_tokens.weight"
Positions = tuple[torch.Tensor, torch.Tensor]


class _StateReady(Exception):
    """Raised inside a layer once its keys and values exist and nothing else is wanted."""


class _Probe:
    """Stands in for the cache of one layer call: takes the new state, hands over the prefix and the own state."""

    def __init__(
        self,
        prefix: Prefix,
        *,
        state_only: bool,
        own: OwnState | None = None,
        results: AttentionResults | None = None,
        kind: DeviceKind | None = None,
    ) -> None:
        self.prefix, self.state_only, self.own, self.results = prefix, state_only, own, results
        self.kind = kind
        self.key: torch.Tensor | None = None
        self.value: torch.Tensor | None = None

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, kwargs: dict[str, Any], **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.key, self.value = key, value
        if self.state_only:
            raise _StateReady
        kwargs["prefix"], kwargs["results"], kwargs["kind"] = self.prefix, self.results, self.kind
        return (key, value) if self.own is None else self.own.append(layer_idx, key, value)

    def state(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the layer's new keys and values, ``[B, K, S, D]`` each."""
        if self.key is None or self.value is None:
            raise RuntimeError("the layer did not update its cache")
        return self.key, self.value


class DenseModel:
    """A loaded decoder as the phases that stages are made of.

    ``gradients`` maps a gradient's name to its accumulator and is set by `accumulate_into`; names are those of
    ``named_parameters()``, plus `HEAD_GRADIENT` for the head's own share of a tied embedding. With ``lookup_ids``
    (ascending, int64), `EMBEDDING_GRADIENT` has a row for each of them instead of one for every word. ``kind`` is that
    of the device that a model on the meta device is planned for; a model with data is where it is.
    """

    def __init__(self, hf: PreTrainedModel, kind: DeviceKind | None = None) -> None:
        self.hf, self.kind = hf.eval(), kind
        self.body = cast(Any, hf).model
        self.head = cast(nn.Linear, cast(Any, hf).lm_head)
        self.dtype: torch.dtype = self.head.weight.dtype
        self.num_layers = len(self.body.layers)
        self.gradients: Mapping[str, torch.Tensor] = {}
        self.lookup_ids: torch.Tensor | None = None
        self._attached: tuple[str, ...] = ()
        self._watch_gradients()

    def _watch_gradients(self) -> None:
        for name, parameter in self.hf.named_parameters():
            parameter.requires_grad_()
            parameter.register_post_accumulate_grad_hook(self._collector(name))

    def _collector(self, name: str) -> Any:
        owner = weakref.ref(self)  # hooks are invisible to the cycle collector: a strong one would keep the weights

        def collect(parameter: torch.Tensor) -> None:
            gradient, parameter.grad = parameter.grad, None
            cast(DenseModel, owner()).gradients[name].add_(cast(torch.Tensor, gradient))

        return collect

    def accumulate_into(self, gradients: Mapping[str, torch.Tensor], lookup_ids: torch.Tensor | None = None) -> None:
        """Let every later backward add to ``gradients`` (in the accumulation dtype, shaped like the parameters)."""
        self.gradients, self.lookup_ids = gradients, lookup_ids

    def attach(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Point the parameters of those names at ``tensors``, without a copy, until `detach`."""
        for name, tensor in tensors.items():
            self.hf.get_parameter(name).data = tensor
        self._attached = tuple(tensors)

    def detach(self) -> None:
        """Leave the parameters that were attached without data."""
        for name in self._attached:
            parameter = self.hf.get_parameter(name)
            parameter.data = parameter.new_empty(0)
        self._attached = ()

    # Phases. Each is one step of a chunk's evaluation; `models.tracing` measures their memory one by one.

    @torch.no_grad()
    def embed(self, ids_BS: torch.Tensor) -> torch.Tensor:
        """Return ``[B, S, C]`` input embeddings."""
        return cast(torch.Tensor, self.body.embed_tokens(ids_BS))

    @torch.no_grad()
    def positions(self, hidden_BSC: torch.Tensor, first: int) -> Positions:
        """Return the rotary cosines and sines of positions ``first`` to ``first + S``, ``[1, S, D]`` each."""
        stop = first + hidden_BSC.shape[1]
        ids = torch.arange(first, stop, dtype=torch.int64, device=hidden_BSC.device)[None]
        return cast(Positions, self.body.rotary_emb(hidden_BSC, position_ids=ids))

    def _layer(self, layer: int, hidden_BSC: torch.Tensor, positions: Positions, probe: _Probe) -> torch.Tensor | None:
        try:
            out = self.body.layers[layer](
                hidden_BSC, attention_mask=None, position_embeddings=positions, cache=probe, use_cache=True
            )
        except _StateReady:
            return None
        return cast(torch.Tensor, out[0] if isinstance(out, tuple) else out)

    @torch.no_grad()
    def block_forward(
        self,
        layer: int,
        hidden_BSC: torch.Tensor,
        positions: Positions,
        prefix: Prefix,
        results: AttentionResults | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a layer's output ``[B, S, C]`` and its new keys and values ``[B, K, S, D]``, without autograd.

        ``results`` keep what its attention gives.
        """
        probe = _Probe(prefix, state_only=False, results=results, kind=self.kind)
        out = self._layer(layer, hidden_BSC, positions, probe)
        return (cast(torch.Tensor, out), *probe.state())

    @torch.no_grad()
    def block_decode(
        self, layer: int, hidden_B1C: torch.Tensor, positions: Positions, prefix: Prefix, own: OwnState
    ) -> torch.Tensor:
        """Return a layer's output ``[B, 1, C]`` for one more token of each branch, whose state joins ``own``."""
        probe = _Probe(prefix, state_only=False, own=own, kind=self.kind)
        return cast(torch.Tensor, self._layer(layer, hidden_B1C, positions, probe))

    @torch.no_grad()
    def block_state(
        self, layer: int, hidden_BSC: torch.Tensor, positions: Positions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return only a layer's new keys and values ``[B, K, S, D]``; the rest of the layer does not run."""
        probe = _Probe(cast(Prefix, None), state_only=True)
        self._layer(layer, hidden_BSC, positions, probe)
        return probe.state()

    def block_backward(
        self,
        layer: int,
        hidden_BSC: torch.Tensor,
        positions: Positions,
        prefix: Prefix,
        d_out_BSC: torch.Tensor | None,
        d_state: tuple[torch.Tensor, torch.Tensor] | None,
        results: AttentionResults | None = None,
    ) -> torch.Tensor:
        """Recompute a layer with autograd, pull the cotangents back, and return that of its input ``[B, S, C]``.

        ``d_out_BSC`` is None where nothing but the layer's state is used (then the rest of the layer does not run),
        ``d_state`` where no later token sees the state. Attention is not computed again where ``results`` recall it.
        """
        probe = _Probe(prefix, state_only=d_out_BSC is None, results=results, kind=self.kind)
        with torch.enable_grad():
            entry = hidden_BSC.detach().requires_grad_()
            out = self._layer(layer, entry, positions, probe)
            outputs = [] if out is None else [out]
            if d_state is not None:
                outputs += probe.state()
        probe.key = probe.value = out = None  # or they would outlive the backward
        torch.autograd.backward(outputs, [*([] if d_out_BSC is None else [d_out_BSC]), *(d_state or ())])
        return cast(torch.Tensor, entry.grad)

    def is_recurrent(self, layer: int) -> bool:
        """Return whether a layer's state is a boundary (`models.gated_delta`) and not keys and values."""
        return gated_delta.is_recurrent(self.body.layers[layer])

    @torch.no_grad()
    def recurrent_forward(
        self, layer: int, hidden_BSC: torch.Tensor, before: Boundary | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a recurrent layer's output ``[B, S, C]`` and the two parts of its new boundary, without autograd."""
        out, after = gated_delta.run_layer(self.body.layers[layer], hidden_BSC, before)
        return out, *after

    @torch.no_grad()
    def recurrent_state(
        self, layer: int, hidden_BSC: torch.Tensor, before: Boundary | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return only the two parts of a recurrent layer's new boundary."""
        return gated_delta.run_state(self.body.layers[layer], hidden_BSC, before)

    def recurrent_backward(
        self,
        layer: int,
        hidden_BSC: torch.Tensor,
        before: Boundary | None,
        d_out_BSC: torch.Tensor | None,
        d_after: Boundary | None,
    ) -> tuple[torch.Tensor, ...]:
        """Recompute a recurrent layer with autograd and pull the cotangents back, as `block_backward` does.

        The result is the cotangent of the input ``[B, S, C]``, followed by the two of the boundary ``before``, if any.
        """
        found = gated_delta.layer_backward(self.body.layers[layer], hidden_BSC, before, d_out_BSC, d_after)
        return (found.hidden,) if found.boundary is None else (found.hidden, *found.boundary)

    def recurrent_decode(
        self, layer: int, hidden_B1C: torch.Tensor, before: Boundary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return a recurrent layer's output ``[B, 1, C]`` for one more token of each branch, and its new boundary."""
        out, after = gated_delta.decode_layer(self.body.layers[layer], hidden_B1C, before)
        return out, *after

    @torch.no_grad()
    def head_score(
        self, hidden_RC: torch.Tensor, targets_R: torch.Tensor, *, temperature: float, block_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probabilities and entropies of rows of the last layer's output, ``[R]`` each (`models.head`)."""
        normed = self.body.norm(hidden_RC)
        return head.score_rows(self.head, normed, targets_R, temperature=temperature, block_rows=block_rows)

    @torch.no_grad()
    def head_sample(
        self, hidden_RC: torch.Tensor, uniforms_R: torch.Tensor, *, temperature: float, greedy: bool, block_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a token for each row of the last layer's output and its log-probability (`models.head`)."""
        normed = self.body.norm(hidden_RC)
        return head.sample_rows(
            self.head, normed, uniforms_R, temperature=temperature, greedy=greedy, block_rows=block_rows
        )

    def head_backward(
        self,
        hidden_RC: torch.Tensor,
        targets_R: torch.Tensor,
        d_logps_R: torch.Tensor,
        d_entropies_R: torch.Tensor | None,
        *,
        temperature: float,
        block_rows: int,
    ) -> torch.Tensor:
        """Pull derivatives by log-probabilities and entropies back to rows of the last layer's output, ``[R, C]``."""
        with torch.enable_grad():
            entry = hidden_RC.detach().requires_grad_()
            normed = self.body.norm(entry)
        d_normed = head.backward_rows(
            self.head,
            normed.detach(),
            targets_R,
            d_logps_R,
            d_entropies_R,
            temperature=temperature,
            block_rows=block_rows,
            weight_gradient=self.gradients[HEAD_GRADIENT],
            bias_gradient=self.gradients.get("lm_head.bias"),
        )
        torch.autograd.backward([normed], [d_normed])
        return cast(torch.Tensor, entry.grad)

    @torch.no_grad()
    def embed_backward(self, ids_BS: torch.Tensor, d_hidden_BSC: torch.Tensor) -> None:
        """Add the embedding's gradient, for the rows used, in the order of their ids (stable, so deterministic).

        The padding token of the embedding gets none, as in torch's own embedding, also where it stands for a word.
        """
        ids = ids_BS.flatten()
        order = torch.argsort(ids, stable=True)
        ids = ids[order]
        rows = d_hidden_BSC.flatten(0, 1)[order].to(accumulation_dtype(self.dtype))
        if self.body.embed_tokens.padding_idx is not None:
            rows.masked_fill_((ids == self.body.embed_tokens.padding_idx)[:, None], 0)
        if self.lookup_ids is not None:
            ids = torch.searchsorted(self.lookup_ids, ids)
        self.gradients[EMBEDDING_GRADIENT].index_add_(0, ids, rows)
