"""A recurrent layer's boundary has the shapes that its configuration says; what can't be exact is refused by name."""

from __future__ import annotations

import gc
import sys
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet

from engine.errors import UnsupportedModelError
from models import gated_delta
from models.gated_delta import (
    Boundary,
    boundary_layout,
    check_recurrent_config,
    check_recurrent_layer,
    decode_layer,
    is_recurrent,
    layer_backward,
    recurrent_layers,
    run_layer,
    run_state,
)
from tests.helpers import HYBRID_FAMILIES, tiny_config, tiny_hybrid_config
from tests.unit.test_geometry import Counted

MIB = 2**20


def build(family: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    return AutoModelForCausalLM.from_config(tiny_hybrid_config(family, **changes), dtype=dtype).eval()


def layer_of(family: str = "qwen3_5_text") -> Any:
    return build(family).model.layers[0]


# The layout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_a_boundary_has_the_shapes_dtypes_and_bytes_of_its_layout(family: str, dtype: torch.dtype) -> None:
    hf, layout = build(family, dtype), boundary_layout(tiny_hybrid_config(family), dtype)
    with torch.no_grad():
        found = run_layer(hf.model.layers[0], torch.ones(3, 5, 32, dtype=dtype), None)[1]
    assert found.conv.shape == (3, *layout.conv_shape)
    assert found.recurrent.shape == (3, *layout.recurrent_shape)
    assert (found.conv.dtype, found.recurrent.dtype) == (layout.conv_dtype, layout.recurrent_dtype)
    assert sum(tensor.untyped_storage().nbytes() for tensor in found) == 3 * layout.nbytes
    assert layout.nbytes == layout.conv_bytes + layout.recurrent_bytes


def test_of_float64_the_recurrent_part_is_float64_and_of_less_float32() -> None:
    config = tiny_hybrid_config("qwen3_5_text")
    kept = {dtype: boundary_layout(config, dtype).recurrent_dtype for dtype in (torch.float64, torch.bfloat16)}
    assert kept == {torch.float64: torch.float64, torch.bfloat16: torch.float32}


def test_layers_run_without_data_for_planning() -> None:
    with torch.device("meta"):
        layer, hidden = build("qwen3_5_text").model.layers[0], torch.empty(2, 70, 32)
    layout = boundary_layout(tiny_hybrid_config("qwen3_5_text"), torch.float32)
    entry = layout.zeros(1, "meta")
    cotangents = layer_backward(layer, hidden, entry, hidden, entry)
    assert cotangents.hidden.shape == hidden.shape
    assert cotangents.boundary is not None
    assert [tensor.shape for tensor in cotangents.boundary] == [tensor.shape for tensor in entry]


def large_config(**text: Any) -> PreTrainedConfig:
    """Return the geometry of a 27B model with 48 recurrent layers of 64, inside a multimodal configuration."""
    sizes = {"num_hidden_layers": 64, "hidden_size": 5120, "linear_num_value_heads": 48, "linear_num_key_heads": 16}
    config: PreTrainedConfig = AutoConfig.for_model("qwen3_5", text_config={**sizes, **text})
    return config


def test_a_27b_models_boundary_is_147_mib() -> None:
    layout = boundary_layout(large_config(), torch.bfloat16)
    assert (layout.recurrent_bytes, layout.conv_bytes) == (3_145_728, 61_440)
    assert len(recurrent_layers(large_config())) * layout.nbytes == pytest.approx(146.8 * MIB, rel=1e-3)


def test_recurrent_layers_are_those_of_the_configuration() -> None:
    assert recurrent_layers(tiny_hybrid_config("qwen3_next")) == (0, 2, 3)
    assert recurrent_layers(large_config()) == tuple(index for index in range(64) if index % 4 != 3)
    assert recurrent_layers(tiny_config("llama")) == ()
    assert [is_recurrent(layer) for layer in build("qwen3_next").model.layers] == [True, False, True, True]


# Evaluation


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_one_token_of_a_chunk_never_meets_the_rule_token_by_token_and_a_decoded_one_does(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, hidden = layer_of(family), torch.ones(2, 1, 32)
    called = []

    def token_rule(*_: Any, **__: Any) -> Any:
        called.append(True)
        raise NotImplementedError("no backward")

    module = sys.modules[type(layer).__module__]
    gated_delta._with_own_rules.cache_clear()
    monkeypatch.setattr(module, "torch_recurrent_gated_delta_rule", token_rule)
    _, after = run_layer(layer, hidden, None)
    run_state(layer, hidden, after)
    layer_backward(layer, hidden, after, hidden, after)
    assert not called
    with pytest.raises(NotImplementedError, match="no backward"):
        decode_layer(layer, hidden, after)


@pytest.fixture(autouse=True)
def _fresh_rules() -> Iterator[None]:
    yield
    gated_delta._with_own_rules.cache_clear()  # what a test replaced in a module


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("tokens", [1, 64, 511, 512, 513, 1100])
def test_the_rule_in_pieces_gives_the_bits_of_the_rule_at_once(tokens: int, dtype: torch.dtype) -> None:
    rule: Any = sys.modules[Qwen3_5GatedDeltaNet.__module__].torch_chunk_gated_delta_rule
    torch.manual_seed(0)
    query, key = torch.randn(2, tokens, 2, 8).to(dtype), torch.randn(2, tokens, 2, 8).to(dtype)
    arguments: dict[str, Any] = {
        "g": -torch.rand(2, tokens, 4),
        "beta": torch.rand(2, tokens, 4).to(dtype),
        "initial_state": torch.randn(2, 4, 8, 12),
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": True,
    }
    value = torch.randn(2, tokens, 4, 12).to(dtype)
    expected = rule(query, key, value, **arguments)
    found = gated_delta._in_pieces(rule)(query, key, value, **arguments)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_backward_takes_operands_in_proportion_to_the_tokens() -> None:
    layer, moved = layer_of(), []
    for tokens in (1024, 4096):
        hidden = torch.randn(1, tokens, 32)
        with Counted() as counted:
            layer_backward(layer, hidden, None, hidden, None)
        moved.append(counted.moved_bytes)
    assert moved[1] <= 4.2 * moved[0]


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_for_a_boundary_alone_nothing_behind_the_recurrence_runs(family: str, tokens: int) -> None:
    layer = layer_of(family)
    ran: list[str] = []
    for name, module in layer.named_modules():
        module.register_forward_hook(lambda *_, name=name: ran.append(name))
    run_state(layer, torch.ones(1, tokens, 32), None)
    assert "input_layernorm" in ran
    assert not [name for name in ran if name.startswith(("mlp", "post_", "linear_attn.norm", "linear_attn.out_proj"))]


def test_a_layer_that_has_run_one_token_is_let_go_at_once() -> None:
    layer = layer_of()
    run_layer(layer, torch.ones(1, 1, 32), None)
    alive = weakref.ref(layer)
    gc.disable()
    try:
        del layer
        assert alive() is None
    finally:
        gc.enable()


def wrong_boundaries() -> dict[str, Boundary]:
    right = boundary_layout(tiny_hybrid_config("qwen3_5_text"), torch.float32).zeros(2, "cpu")
    return {
        "conv is \\(2, 80, 4\\)": right._replace(conv=torch.zeros(2, 80, 4)),
        "conv is .* in torch.bfloat16": right._replace(conv=right.conv.bfloat16()),
        "recurrent is \\(3, 4, 8, 12\\)": right._replace(recurrent=torch.zeros(3, 4, 8, 12)),
        "recurrent is .* in torch.float64": right._replace(recurrent=right.recurrent.double()),
    }


@pytest.mark.parametrize("message", wrong_boundaries())
def test_a_boundary_of_another_layout_is_refused_with_what_is_needed(message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        run_layer(layer_of(), torch.ones(2, 5, 32), wrong_boundaries()[message])
    assert "or batch one" in str(caught.value)


def test_calls_that_mean_nothing_are_refused() -> None:
    layer, hidden = layer_of(), torch.ones(2, 2, 32)
    with pytest.raises(ValueError, match="both d_out_BSC and d_boundary are None"):
        layer_backward(layer, hidden, None, None, None)
    with pytest.raises(ValueError, match="one token of each branch, and here are 2"):
        decode_layer(layer, hidden, wrong_boundaries()["conv is \\(2, 80, 4\\)"])


def test_a_mixer_that_does_not_hand_over_its_boundary_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of()
    monkeypatch.setattr(gated_delta._StandIn, "update_recurrent_state", lambda self, state, layer_idx: state)
    with pytest.raises(RuntimeError, match="did not update its boundary"):
        run_layer(layer, torch.ones(2, 5, 32), None)


def test_a_float64_layer_that_computes_in_less_is_an_error() -> None:
    layer, hidden = build("qwen3_5_text", torch.float64).model.layers[0], torch.ones(1, 5, 32, dtype=torch.float64)
    with pytest.raises(RuntimeError, match=r"went out as torch\.float32; evaluate a float64 model under"):
        run_layer(layer, hidden, None)


# Support


@pytest.mark.parametrize("family", HYBRID_FAMILIES)
def test_the_families_that_are_held_against_dense_autograd_are_accepted(family: str) -> None:
    check_recurrent_config(tiny_hybrid_config(family), torch.bfloat16)
    for layer in build(family).model.layers:
        if is_recurrent(layer):
            check_recurrent_layer(layer)


def config_refusal(config: PreTrainedConfig, dtype: torch.dtype = torch.bfloat16) -> str:
    with pytest.raises(UnsupportedModelError) as caught:
        check_recurrent_config(config, dtype)
    return str(caught.value)


def test_other_configurations_are_refused_by_name() -> None:
    assert "'llama' is refused: its recurrent layers are unknown here" in config_refusal(tiny_config("llama"))
    narrow = tiny_hybrid_config("qwen3_next", linear_conv_kernel_dim=1)
    assert "'qwen3_next' is refused: its convolution is 1 wide" in config_refusal(narrow)
    uneven = tiny_hybrid_config("qwen3_5_text", linear_num_value_heads=3)
    assert "3 value heads can't share 2 key heads" in config_refusal(uneven)


def pretend(monkeypatch: pytest.MonkeyPatch, *packages: str) -> None:
    monkeypatch.setattr(gated_delta, "_importable", lambda package: package in packages)


def test_kernels_that_forget_are_refused_unless_they_are_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    config = tiny_hybrid_config("qwen3_5_text")
    for name in ("FLA_FLASH_QLA", "FLA_DISABLE_BACKEND_DISPATCH"):
        monkeypatch.delenv(name, raising=False)
    pretend(monkeypatch, "flash_qla")
    check_recurrent_config(config, torch.bfloat16)
    pretend(monkeypatch, "fla")
    check_recurrent_config(config, torch.bfloat16)
    pretend(monkeypatch, "fla", "flash_qla")
    assert "set FLA_FLASH_QLA=0" in config_refusal(config)
    monkeypatch.setenv("FLA_FLASH_QLA", "1")
    assert "set FLA_FLASH_QLA=0" in config_refusal(config)
    monkeypatch.setenv("FLA_FLASH_QLA", "0")
    check_recurrent_config(config, torch.bfloat16)
    monkeypatch.delenv("FLA_FLASH_QLA")
    monkeypatch.setenv("FLA_DISABLE_BACKEND_DISPATCH", "1")
    check_recurrent_config(config, torch.bfloat16)


def test_kernels_that_know_no_float64_are_refused_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "fla")
    assert "compute float64 in less" in config_refusal(tiny_hybrid_config("qwen3_5_text"), torch.float64)


def test_layers_whose_code_is_another_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    hf = build("qwen3_5_text")
    with pytest.raises(UnsupportedModelError, match="'Qwen3_5DecoderLayer' is refused: its mixer is a NoneType"):
        check_recurrent_layer(hf.model.layers[1])
    layer = hf.model.layers[0]
    layer.linear_attn.forward = layer.linear_attn.forward
    with pytest.raises(UnsupportedModelError, match="its forward was replaced"):
        check_recurrent_layer(layer)
    del layer.linear_attn.forward
    monkeypatch.delattr(sys.modules[type(layer).__module__], "torch_recurrent_gated_delta_rule")
    with pytest.raises(UnsupportedModelError, match="no longer has torch_recurrent_gated_delta_rule"):
        check_recurrent_layer(layer)
