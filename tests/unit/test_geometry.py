"""Costs of a dense decoder: they count what real chunks do, and grow with the work."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from engine.hardware import PROFILES
from engine.plan import Cost
from models.chunk import backward_chunk, forward_chunk
from models.dense import DenseModel
from models.geometry import Geometry, geometry
from models.policy import find_policy
from tests.helpers import tiny_config

LAYERS, TOKENS, PAGE_TOKENS = 4, 96, 64
CONFIG = tiny_config(num_hidden_layers=LAYERS, hidden_size=64, intermediate_size=160, head_dim=16)
PRODUCTS = ("aten::mm", "aten::addmm_")


class Counted(TorchDispatchMode):
    """Counts operators, the bytes of their operands, and the FLOPs of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.num_kernels, self.moved_bytes, self.flops = 0, 0, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.num_kernels += 1
        results = result if isinstance(result, tuple | list) else (result,)
        tensors = [item for item in (*args, *results) if isinstance(item, torch.Tensor)]
        if not func.is_view and "_unsafe_view" not in func.name():
            self.moved_bytes += sum(item.numel() * item.element_size() for item in tensors)
        if func.name() in PRODUCTS:
            left, right = tensors[-3:-1]
            self.flops += 2 * left.shape[0] * left.shape[1] * right.shape[1]
        return result


class Pages:
    """A prefix of full pages."""

    def __init__(self, num_pages: int) -> None:
        self.token_counts = (PAGE_TOKENS,) * num_pages
        self._state = torch.randn(2, CONFIG.num_key_value_heads, PAGE_TOKENS, CONFIG.head_dim)
        self._cotangent = torch.zeros_like(self._state)

    def page(self, layer: int, index: int) -> torch.Tensor:
        return self._state[:]

    def add_cotangent(self, layer: int, index: int, d_key: torch.Tensor, d_value: torch.Tensor) -> None:
        self._cotangent[0].add_(d_key[0])
        self._cotangent[1].add_(d_value[0])


def sizes() -> Geometry:
    model = find_policy(CONFIG).sizes_only(torch.float32)
    parameters = sum(item.numel() for item in model.body.layers.parameters())
    return geometry(CONFIG, layer_parameters=parameters, dtype=torch.float32)


def loaded() -> DenseModel:
    model = find_policy(CONFIG).load(torch.float32, seed=0)
    model.accumulate_into({name: torch.zeros_like(item) for name, item in model.hf.named_parameters()})
    return model


def forward(model: DenseModel, num_pages: int, *, through_last: bool) -> None:
    ids = torch.arange(TOKENS)[None] % CONFIG.vocab_size
    forward_chunk(
        model, ids, first_position=0, prefix=Pages(num_pages), keep_state=None, want_hidden=through_last
    )  # fmt: skip


def backward(model: DenseModel, num_pages: int, *, through_last: bool) -> None:
    ids = torch.arange(TOKENS)[None] % CONFIG.vocab_size
    state = torch.ones(1, CONFIG.num_key_value_heads, TOKENS, CONFIG.head_dim)
    backward_chunk(
        model,
        ids,
        first_position=0,
        prefix=Pages(num_pages),
        state_cotangent=None if through_last else lambda layer: (state, state),
        head_backward=torch.ones_like if through_last else None,
    )


def counted(run: Callable[..., None], num_pages: int, *, through_last: bool) -> Counted:
    model, count = loaded(), Counted()
    with count:
        run(model, num_pages, through_last=through_last)
    return count


@pytest.mark.parametrize("through_last", [True, False], ids=["through the last layer", "up to the last state"])
@pytest.mark.parametrize("num_pages", [0, 3])
@pytest.mark.parametrize("run", [forward, backward])
def test_costs_count_what_a_real_chunk_does(run: Callable[..., None], num_pages: int, through_last: bool) -> None:
    real = counted(run, num_pages, through_last=through_last)
    again = CONFIG.num_hidden_layers - (not through_last)
    kept_nothing = partial(sizes().backward_cost, again=again, recalls_attention=False)
    cost: Callable[..., Cost] = kept_nothing if run is backward else sizes().forward_cost
    found = cost(
        rows=TOKENS,
        tokens=TOKENS,
        prefix_tokens=num_pages * PAGE_TOKENS,
        pages=num_pages,
        through_last=through_last,
    )
    assert found.flops == pytest.approx(real.flops, rel=0.02)  # norms are parameters, too, but no products
    assert found.num_kernels == pytest.approx(real.num_kernels, rel=0.05)
    assert found.moved_bytes + found.weight_bytes == pytest.approx(real.moved_bytes, rel=0.15)


WORK = {
    "rows": st.integers(1, 4096),
    "tokens": st.integers(1, 4096),
    "prefix_tokens": st.integers(0, 1 << 21),
    "pages": st.integers(0, 4096),
}


def no_less(more: Cost, less: Cost) -> bool:
    return all(more.by_kind()[kind] >= number for kind, number in less.by_kind().items())


@given(work=st.fixed_dictionaries(WORK), through_last=st.booleans())
def test_what_was_kept_never_costs_time_again(work: dict[str, int], through_last: bool) -> None:
    def cost(again: int, recalls_attention: bool) -> Cost:
        return sizes().backward_cost(
            rows=work["rows"],
            tokens=work["tokens"],
            prefix_tokens=work["prefix_tokens"],
            pages=work["pages"],
            through_last=through_last,
            again=again,
            recalls_attention=recalls_attention,
        )

    assert no_less(cost(2, False), cost(0, False))
    assert no_less(cost(0, False), cost(0, True))


@given(work=st.fixed_dictionaries(WORK), name=st.sampled_from(sorted(WORK)), times=st.integers(2, 4))
def test_more_of_anything_never_costs_less(work: dict[str, int], name: str, times: int) -> None:
    costs: list[Callable[..., Cost]] = [sizes().forward_cost]
    costs.append(partial(sizes().backward_cost, again=1, recalls_attention=False))
    for at_least in costs:
        assert no_less(at_least(**{**work, name: times * work[name]}), at_least(**work))


def test_one_long_chunk_takes_less_time_than_many_short_ones() -> None:
    def seconds(chunk_tokens: int) -> float:
        costs = [
            sizes().forward_cost(
                rows=chunk_tokens, tokens=chunk_tokens, prefix_tokens=start, pages=-(-start // PAGE_TOKENS)
            )
            for start in range(0, 4096, chunk_tokens)
        ]
        return sum(PROFILES["cpu"].seconds(cost) for cost in costs)

    assert seconds(4096) < seconds(512) < seconds(64)


def test_smaller_blocks_of_rows_at_the_head_read_its_weights_more_often() -> None:
    whole, cut = (sizes().head_cost(rows=300, backward=True, block_rows=rows) for rows in (None, 64))
    assert cut.flops == whole.flops
    assert cut.weight_bytes > whole.weight_bytes
    assert cut.moved_bytes > whole.moved_bytes  # and adds to their gradient
