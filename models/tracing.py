"""A model that measures itself: phases run once on tensors without data, then are replayed from memory.

The workspace of a stage is found by running the stage's real code on torch's meta device (sizes without data, any
model) under `engine.memory.LiveBytes`. A decoder's layers are alike, so each phase is run there once per signature;
after that it is replayed: outputs of the same sizes are allocated, the peak is raised by what the phase needed, and
nothing is computed. One page stands for the whole prefix: a page's temporaries are gone before the next page's begin,
and only the backward's depend on the page's length, so the longest page decides. (What CUDA's forward takes inside
depends on it, too, but is counted as the most at any length: `models.workspaces`.)

Invariant: for the same arguments a replayed phase leaves the same bytes live and reaches the same peak as the real
one. A test holds stages traced this way against stages measured on real tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch

from engine.memory import DEVICE, LiveBytes
from models.attention import AttentionResults, OwnState, Prefix
from models.dense import DenseModel, Positions
from models.gated_delta import Boundary


def longest_page(token_counts: Sequence[int]) -> tuple[int, ...]:
    """Return the index of the page that stands for all of a prefix: its longest; none for an empty prefix."""
    return (max(range(len(token_counts)), key=token_counts.__getitem__),) if token_counts else ()


class _Representative:
    """A prefix of the page that `longest_page` names. ``by_length``: whether its length matters for memory."""

    def __init__(self, prefix: Prefix, *, by_length: bool) -> None:
        self._prefix = prefix
        self._indices = longest_page(prefix.token_counts)
        self.signature = self.token_counts if by_length else bool(self._indices)

    @property
    def token_counts(self) -> tuple[int, ...]:
        return tuple(self._prefix.token_counts[index] for index in self._indices)

    def page(self, layer: int, index: int) -> torch.Tensor:
        return self._prefix.page(layer, self._indices[index])

    def add_cotangent(self, layer: int, index: int, d_key: torch.Tensor, d_value: torch.Tensor) -> None:
        self._prefix.add_cotangent(layer, self._indices[index], d_key, d_value)


@dataclass(frozen=True)
class _Phase:
    """What one phase did: the peak above its entry, and its outputs' shapes and dtypes (None: no output)."""

    peak_bytes: int
    outputs: tuple[tuple[tuple[int, ...], torch.dtype], ...]
    single: bool


def _signature(argument: object) -> object:
    if isinstance(argument, torch.Tensor):
        return (tuple(argument.shape), argument.dtype)
    if isinstance(argument, tuple):
        return tuple(_signature(item) for item in argument)
    if isinstance(argument, _Representative):
        return argument.signature
    return argument


class TracedModel:
    """Has the phases of `DenseModel`, measured by ``meter`` and remembered. Use on the meta device.

    ``meter`` is replaced for every stage that is traced; what is remembered stays.
    """

    def __init__(self, model: DenseModel) -> None:
        self.model, self.hf, self.dtype = model, model.hf, model.dtype
        self.num_layers = model.num_layers
        self.meter = LiveBytes()
        self._phases: dict[object, _Phase] = {}

    def attach(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Do nothing: this model has all of its parameters, in their sizes."""

    def detach(self) -> None:
        """Do nothing, as `attach`."""

    def accumulate_into(self, gradients: dict[str, torch.Tensor], lookup_ids: torch.Tensor | None = None) -> None:
        """See `DenseModel.accumulate_into`. Either all stages of a model have ``lookup_ids`` or none."""
        self.model.accumulate_into(gradients, lookup_ids)

    def _phase(self, name: str, run: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        key = (name, _signature(arguments), tuple(sorted(options.items())))
        known = self._phases.get(key)
        if known is None:
            return self._observe(key, run, arguments, options)
        self.meter.bump(known.peak_bytes)
        outputs = tuple(torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in known.outputs)
        return outputs[0] if known.single else (outputs or None)

    def _observe(self, key: object, run: Callable[..., Any], arguments: Any, options: Any) -> Any:
        meter = self.meter
        peak, entry = meter.peak[DEVICE], meter.live[DEVICE]
        meter.restart_peak()
        result = run(*arguments, **options)
        outputs = (result,) if isinstance(result, torch.Tensor) else tuple(result or ())
        self._phases[key] = _Phase(
            peak_bytes=meter.peak[DEVICE] - entry,
            outputs=tuple((tuple(item.shape), item.dtype) for item in outputs),
            single=isinstance(result, torch.Tensor),
        )
        meter.peak[DEVICE] = max(peak, meter.peak[DEVICE])
        return result

    # Phases: see `DenseModel`

    def embed(self, ids_BS: torch.Tensor) -> torch.Tensor:
        return cast(torch.Tensor, self._phase("embed", self.model.embed, ids_BS))

    def positions(self, hidden_BSC: torch.Tensor, first: int) -> Positions:
        def run(hidden: torch.Tensor) -> Any:
            return self.model.positions(hidden, first)

        return cast(Positions, self._phase("positions", run, hidden_BSC))

    def block_forward(
        self,
        layer: int,
        hidden_BSC: torch.Tensor,
        positions: Positions,
        prefix: Prefix,
        results: AttentionResults | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See `DenseModel`. What is kept of attention's results is copied away: that needs no memory here."""

        def run(hidden: torch.Tensor, positions: Positions, prefix: Prefix) -> Any:
            return self.model.block_forward(layer, hidden, positions, prefix, results)

        result = self._phase("block_forward", run, hidden_BSC, positions, _Representative(prefix, by_length=False))
        return cast(tuple[torch.Tensor, torch.Tensor, torch.Tensor], result)

    def block_decode(
        self, layer: int, hidden_B1C: torch.Tensor, positions: Positions, prefix: Prefix, own: OwnState
    ) -> torch.Tensor:
        """See `DenseModel`. The own state is written in place and read as it lies, so its length decides nothing."""

        def run(hidden: torch.Tensor, positions: Positions, prefix: Prefix) -> Any:
            return self.model.block_decode(layer, hidden, positions, prefix, own)

        page = _Representative(prefix, by_length=False)
        return cast(torch.Tensor, self._phase("block_decode", run, hidden_B1C, positions, page))

    def block_state(
        self, layer: int, hidden_BSC: torch.Tensor, positions: Positions
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def run(hidden: torch.Tensor, positions: Positions) -> Any:
            return self.model.block_state(layer, hidden, positions)

        return cast(tuple[torch.Tensor, torch.Tensor], self._phase("block_state", run, hidden_BSC, positions))

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
        """See `DenseModel`. Results that are recalled are views of what lies elsewhere."""

        def run(
            hidden: torch.Tensor, positions: Positions, prefix: Prefix, d_out: Any, d_state: Any, recalled: bool
        ) -> Any:
            return self.model.block_backward(layer, hidden, positions, prefix, d_out, d_state, results)

        page, recalled = _Representative(prefix, by_length=True), results is not None
        arguments = (hidden_BSC, positions, page, d_out_BSC, d_state, recalled)
        return cast(torch.Tensor, self._phase("block_backward", run, *arguments))

    def is_recurrent(self, layer: int) -> bool:
        return self.model.is_recurrent(layer)

    def recurrent_forward(
        self, layer: int, hidden_BSC: torch.Tensor, before: Boundary | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        def run(hidden: torch.Tensor, before: Boundary | None) -> Any:
            return self.model.recurrent_forward(layer, hidden, before)

        result = self._phase("recurrent_forward", run, hidden_BSC, before)
        return cast(tuple[torch.Tensor, torch.Tensor, torch.Tensor], result)

    def recurrent_state(
        self, layer: int, hidden_BSC: torch.Tensor, before: Boundary | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        def run(hidden: torch.Tensor, before: Boundary | None) -> Any:
            return self.model.recurrent_state(layer, hidden, before)

        return cast(tuple[torch.Tensor, torch.Tensor], self._phase("recurrent_state", run, hidden_BSC, before))

    def recurrent_backward(
        self,
        layer: int,
        hidden_BSC: torch.Tensor,
        before: Boundary | None,
        d_out_BSC: torch.Tensor | None,
        d_after: Boundary | None,
    ) -> tuple[torch.Tensor, ...]:
        def run(hidden: torch.Tensor, before: Boundary | None, d_out: Any, d_after: Boundary | None) -> Any:
            return self.model.recurrent_backward(layer, hidden, before, d_out, d_after)

        result = self._phase("recurrent_backward", run, hidden_BSC, before, d_out_BSC, d_after)
        return cast(tuple[torch.Tensor, ...], result)

    def recurrent_decode(
        self, layer: int, hidden_B1C: torch.Tensor, before: Boundary
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        def run(hidden: torch.Tensor, before: Boundary) -> Any:
            return self.model.recurrent_decode(layer, hidden, before)

        result = self._phase("recurrent_decode", run, hidden_B1C, before)
        return cast(tuple[torch.Tensor, torch.Tensor, torch.Tensor], result)

    def head_score(
        self, hidden_RC: torch.Tensor, targets_R: torch.Tensor, *, temperature: float, block_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        score = self.model.head_score
        result = self._phase("head_score", score, hidden_RC, targets_R, temperature=temperature, block_rows=block_rows)
        return cast(tuple[torch.Tensor, torch.Tensor], result)

    def head_sample(
        self, hidden_RC: torch.Tensor, uniforms_R: torch.Tensor, *, temperature: float, greedy: bool, block_rows: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        result = self._phase(
            "head_sample",
            self.model.head_sample,
            hidden_RC,
            uniforms_R,
            temperature=temperature,
            greedy=greedy,
            block_rows=block_rows,
        )
        return cast(tuple[torch.Tensor, torch.Tensor], result)

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
        result = self._phase(
            "head_backward",
            self.model.head_backward,
            hidden_RC,
            targets_R,
            d_logps_R,
            d_entropies_R,
            temperature=temperature,
            block_rows=block_rows,
        )
        return cast(torch.Tensor, result)

    def embed_backward(self, ids_BS: torch.Tensor, d_hidden_BSC: torch.Tensor) -> None:
        self._phase("embed_backward", self.model.embed_backward, ids_BS, d_hidden_BSC)
