"""Where a policy may come from, what is said when it can't, and what its fingerprint follows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from engine.errors import UsageError
from models.policy import find_policy
from tests.helpers import same_bits, save_policy, tiny_config


def test_a_directory_that_does_not_exist_is_refused_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no/such/checkpoint"):
        find_policy(str(tmp_path / "no/such/checkpoint"))


def test_a_name_that_no_hub_knows_is_refused_with_its_name() -> None:
    with pytest.raises(UsageError, match="'nobody/nothing' is neither a checkpoint directory here nor"):
        find_policy("nobody/nothing")


def test_a_directory_without_a_configuration_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no config\.json"):
        find_policy(tmp_path)


@pytest.mark.parametrize("text", ["{", "[]", "", '{"model_type": "nothing known"}', '{"hidden_size": 4}'])
@pytest.mark.parametrize("name", ["config.json", "model.json"])
def test_a_broken_configuration_is_refused(name: str, text: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=str(tmp_path)):
        find_policy(tmp_path if name == "config.json" else tmp_path / name)


def test_a_json_file_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.json"):
        find_policy(tmp_path / "none.json")


def test_a_checkpoint_whose_weights_are_damaged_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config())
    (policy / "model.safetensors").write_bytes(b"not a safetensors file")
    with pytest.raises(UsageError, match="can't be loaded"):
        find_policy(policy).load(torch.float32, seed=0)


def test_a_checkpoint_that_lacks_a_weight_is_refused_and_not_filled_with_random_numbers(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    policy = save_policy(tmp_path / "policy", tiny_config())
    tensors = load_file(policy / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, policy / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UsageError, match=r"model\.layers\.0\.mlp\.up_proj\.weight"):
        find_policy(policy).load(torch.float32, seed=0)


def test_a_checkpoint_whose_weights_have_other_shapes_is_refused(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config())
    config = json.loads((policy / "config.json").read_text())
    (policy / "config.json").write_text(json.dumps({**config, "intermediate_size": 56}))
    with pytest.raises(UsageError, match="mlp"):
        find_policy(policy).load(torch.float32, seed=0)


@pytest.mark.parametrize("form", ["object", "file", "directory"])
def test_a_configuration_alone_gives_random_weights_that_come_from_the_seed(form: str, tmp_path: Path) -> None:
    config = tiny_config("qwen3")
    config.save_pretrained(tmp_path)
    forms: dict[str, PreTrainedConfig | Path] = {
        "object": config,
        "file": tmp_path / "config.json",
        "directory": tmp_path,
    }
    source = find_policy(forms[form])
    assert source.location is None
    assert source.tokenizer() is None
    first, again, other = (dict(source.load(torch.float32, seed=seed).hf.named_parameters()) for seed in (1, 1, 2))
    assert same_bits(first, again)
    assert not same_bits(first, other)


def test_drawing_random_weights_leaves_the_callers_random_numbers_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    find_policy(tiny_config()).load(torch.float32, seed=0)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_default_dtype_is_the_checkpoints(dtype: torch.dtype, tmp_path: Path) -> None:
    assert find_policy(save_policy(tmp_path / "p", tiny_config(), dtype=dtype)).default_dtype() is dtype
    assert find_policy(tiny_config()).default_dtype() is torch.float32


def test_the_fingerprint_follows_configuration_and_weights_and_nothing_else(tmp_path: Path) -> None:
    first = find_policy(save_policy(tmp_path / "first", tiny_config())).fingerprint
    assert find_policy(save_policy(tmp_path / "again", tiny_config())).fingerprint == first
    assert find_policy(save_policy(tmp_path / "weights", tiny_config(), seed=1)).fingerprint != first
    changed = save_policy(tmp_path / "config", tiny_config())
    config = json.loads((changed / "config.json").read_text())
    (changed / "config.json").write_text(json.dumps({**config, "rms_norm_eps": 1e-5}))
    assert find_policy(changed).fingerprint != first


def test_sizes_are_known_without_weights(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config("qwen2", tie_word_embeddings=True))
    sizes = {name: p.shape for name, p in find_policy(policy).sizes_only(torch.float32).hf.named_parameters()}
    assert sizes == {name: p.shape for name, p in AutoModelForCausalLM.from_pretrained(policy).named_parameters()}
    assert all(p.is_meta for p in find_policy(policy).sizes_only(torch.bfloat16).hf.parameters())
