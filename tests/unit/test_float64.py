"""Inside `lifted_casts` a float64 model computes nothing in less; outside, and for other dtypes, nothing changes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM

from models.float64 import accumulation_dtype, experts_implementation, lifted_casts
from models.gated_delta import layer_backward
from tests.helpers import FAMILIES, HYBRID_FAMILIES, tiny_config, tiny_hybrid_config


class NarrowFloats(TorchDispatchMode):
    """Notes the operators that return a float tensor narrower than float64."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for item in result if isinstance(result, tuple | list) else (result,):
            if isinstance(item, torch.Tensor) and item.is_floating_point() and item.dtype is not torch.float64:
                self.seen.add(str(func))
        return result


def forward_and_backward(family: str, attention: str, *, lift: bool) -> set[str]:
    """Run a float64 model and return the operators that computed in less."""
    narrow = NarrowFloats()
    with narrow, lifted_casts(torch.float64 if lift else torch.float32):
        hf = AutoModelForCausalLM.from_config(
            tiny_hybrid_config(family) if family in HYBRID_FAMILIES else tiny_config(family),
            dtype=torch.float64,
            attn_implementation=attention,
            experts_implementation=experts_implementation(torch.float64),
        )
        hf(torch.arange(9)[None], use_cache=False).logits.square().sum().backward()
    return narrow.seen


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", [*FAMILIES, *HYBRID_FAMILIES])
def test_a_float64_model_computes_nothing_in_float32(family: str, attention: str) -> None:
    assert forward_and_backward(family, attention, lift=True) == set()


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_nor_does_a_chunk_of_a_recurrent_layer(family: str, tokens: int) -> None:
    narrow = NarrowFloats()
    with narrow, lifted_casts(torch.float64):
        hf = AutoModelForCausalLM.from_config(
            tiny_hybrid_config(family),
            dtype=torch.float64,
            experts_implementation=experts_implementation(torch.float64),
        )
        layer, hidden = hf.model.layers[0], torch.ones(2, tokens, 32, dtype=torch.float64)
        layer_backward(layer, hidden, None, hidden, None)
    assert narrow.seen == set()


@pytest.mark.parametrize("family", ["llama", *HYBRID_FAMILIES])
def test_without_lifting_it_does(family: str) -> None:
    assert forward_and_backward(family, "eager", lift=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_for_other_dtypes_casts_stay_as_they_are(dtype: torch.dtype) -> None:
    with lifted_casts(dtype):
        assert torch.zeros(2, dtype=dtype).float().dtype is torch.float32
        assert torch.zeros(2, dtype=dtype).to(torch.float32).dtype is torch.float32


@pytest.mark.parametrize(
    "cast",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.to(dtype=torch.float32),
        lambda x: x.type(torch.float32),
        lambda x: torch.softmax(x, -1, dtype=torch.float32),
        lambda x: torch.zeros(2, dtype=torch.float32),
        lambda x: torch.ones_like(x, dtype=torch.float32),
        lambda x: torch.arange(3).float(),
    ],
)
def test_every_way_to_ask_for_float32_gives_float64(cast: Any) -> None:
    with lifted_casts(torch.float64):
        assert cast(torch.zeros(2, dtype=torch.float64)).dtype is torch.float64
    assert torch.zeros(2).float().dtype is torch.float32


def test_the_mode_ends_with_an_exception() -> None:
    with pytest.raises(ValueError, match="inside"), lifted_casts(torch.float64):
        raise ValueError("inside")
    assert torch.zeros(2, dtype=torch.float64).float().dtype is torch.float32


def test_routed_experts_have_an_implementation_in_float64_and_are_left_alone_otherwise() -> None:
    chosen = [experts_implementation(dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
    assert chosen == ["eager", None, None]


def test_sums_are_kept_in_float32_or_wider() -> None:
    kept = {dtype: accumulation_dtype(dtype) for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64)}
    assert kept == {
        torch.bfloat16: torch.float32,
        torch.float16: torch.float32,
        torch.float32: torch.float32,
        torch.float64: torch.float64,
    }
