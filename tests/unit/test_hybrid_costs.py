"""Costs of layers with a recurrence: they count what real chunks do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from transformers import PreTrainedConfig

from engine.plan import Cost
from models.attention import EmptyPrefix
from models.chunk import backward_chunk, forward_chunk
from models.dense import DenseModel
from models.gated_delta import Boundary
from models.geometry import Geometry, geometry
from models.policy import find_policy
from tests.helpers import tiny_hybrid_config
from tests.unit.test_geometry import Counted

RECURRENT, ATTENTION = "linear_attention", "full_attention"


class CountedWithBatches(Counted):
    """Counts the FLOPs of batched products, too, which the recurrence is made of."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if func.name() == "aten::bmm":
            left, right = args[:2]
            self.flops += 2 * left.shape[0] * left.shape[1] * left.shape[2] * right.shape[2]
        return result


class SomeBoundaries:
    """The same boundary and cotangent everywhere."""

    def __init__(self, sizes: Geometry) -> None:
        assert sizes.boundary is not None
        self._boundary = sizes.boundary.zeros(1, "cpu")

    def before(self, layer: int) -> Boundary | None:
        return self._boundary

    def keep(self, layer: int, after: Boundary) -> None: ...

    def cotangent(self, layer: int) -> Boundary | None:
        return self._boundary

    def add_cotangent(self, layer: int, d_before: Boundary) -> None: ...


def config_of(last: str) -> PreTrainedConfig:
    kinds = [RECURRENT, ATTENTION, RECURRENT, last]
    return tiny_hybrid_config(
        "qwen3_5_text", layer_types=kinds, num_hidden_layers=4, hidden_size=64, intermediate_size=160
    )


def loaded(config: PreTrainedConfig) -> tuple[DenseModel, Geometry]:
    model = find_policy(config).load(torch.float32, seed=0)
    model.accumulate_into({name: torch.zeros_like(item) for name, item in model.hf.named_parameters()})
    parameters = sum(item.numel() for item in model.body.layers.parameters())
    return model, geometry(config, layer_parameters=parameters, dtype=torch.float32)


@pytest.mark.parametrize("through_last", [True, False], ids=["through the last layer", "up to the last state"])
@pytest.mark.parametrize("tokens", [96, 640])
@pytest.mark.parametrize("last", [RECURRENT, ATTENTION])
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_costs_count_what_a_real_chunk_of_a_hybrid_does(
    backward: bool, last: str, tokens: int, through_last: bool
) -> None:
    config = config_of(last)
    model, sizes = loaded(config)
    ids = torch.arange(tokens)[None] % config.vocab_size
    state = torch.ones(1, config.num_key_value_heads, tokens, config.head_dim)
    with CountedWithBatches() as real:
        if backward:
            backward_chunk(
                model,
                ids,
                first_position=0,
                prefix=EmptyPrefix(),
                boundaries=SomeBoundaries(sizes),
                state_cotangent=None if through_last else lambda layer: (state, state),
                head_backward=torch.ones_like if through_last else None,
            )
        else:
            forward_chunk(
                model,
                ids,
                first_position=0,
                prefix=EmptyPrefix(),
                boundaries=SomeBoundaries(sizes),
                keep_state=None,
                want_hidden=through_last,
            )
    again = config.num_hidden_layers - (not through_last)
    kept_nothing = partial(sizes.backward_cost, again=again, recalls_attention=False)
    cost: Callable[..., Cost] = kept_nothing if backward else sizes.forward_cost
    found = cost(rows=tokens, tokens=tokens, prefix_tokens=0, pages=0, through_last=through_last)
    assert found.flops == pytest.approx(real.flops, rel=0.06)
    assert found.num_kernels == pytest.approx(real.num_kernels, rel=0.08)
    assert found.moved_bytes + found.weight_bytes == pytest.approx(real.moved_bytes, rel=0.2)
