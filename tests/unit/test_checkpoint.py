"""What comes out is what came in with other numbers: names, dtype, ties, tokenizer; and gradients under their names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from engine.budget import UNLIMITED_BYTES
from stages import AdamWOptions, GrpoSettings, find_policy, grpo_step
from tests.helpers import (
    FAMILIES,
    Done,
    checkpoint_tensors,
    random_group,
    run_plan,
    same_bits,
    save_policy,
    tiny_config,
)


def word_tokenizer() -> Any:
    """Return a tokenizer of a few words with a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<s>", "</s>", "a", "b", "c"]
    backend = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="</s>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    make: Any = PreTrainedTokenizerFast
    return make(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", chat_template="{{ messages[0].content }}")


def step(policy: Any, run: Path, dtype: torch.dtype = torch.float32, *, learning_rate: float = 1e-3) -> Done:
    source = find_policy(policy)
    chosen = {"chunk_tokens": 16, "branches_at_once": 2, "head_rows": 16}
    settings = GrpoSettings(dtype=dtype, optimizer=AdamWOptions(learning_rate=learning_rate), fixed=chosen)
    group = random_group(0, 6, [4, 5])
    return run_plan(
        grpo_step(name="test", policy=source, groups=[group], settings=settings, tokenizer=source.tokenizer()), run
    )


@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("family", FAMILIES)
def test_from_pretrained_loads_it_with_every_name_and_no_other(family: str, tied: bool, tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config(family, tie_word_embeddings=tied))
    done = step(policy, tmp_path / "run")
    before, after = checkpoint_tensors(policy), checkpoint_tensors(done.checkpoint)
    assert {name: (t.shape, t.dtype) for name, t in after.items()} == {n: (t.shape, t.dtype) for n, t in before.items()}

    loaded: Any = AutoModelForCausalLM.from_pretrained(done.checkpoint, output_loading_info=True)
    hf, info = loaded
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert same_bits({name: dict(hf.state_dict())[name] for name in after}, after)
    assert type(hf) is type(AutoModelForCausalLM.from_pretrained(policy))
    assert hf(torch.arange(5)[None]).logits.isfinite().all()
    assert (hf.lm_head.weight.data_ptr() == hf.model.embed_tokens.weight.data_ptr()) is tied
    assert ("lm_head.weight" in after) is not tied


@pytest.mark.parametrize("compute", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_the_dtype_is_that_of_the_policy_whatever_the_step_computes_in(
    stored: torch.dtype, compute: torch.dtype, tmp_path: Path
) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config(), dtype=stored)
    done = step(policy, tmp_path / "run", compute)
    assert {tensor.dtype for tensor in checkpoint_tensors(done.checkpoint).values()} == {stored}
    assert json.loads((done.checkpoint / "config.json").read_text())["dtype"] == str(stored).removeprefix("torch.")
    assert AutoModelForCausalLM.from_pretrained(done.checkpoint, dtype="auto").dtype is stored


def test_at_learning_rate_zero_a_wider_compute_dtype_gives_the_policys_bits_back(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config("qwen2"), dtype=torch.bfloat16)
    done = step(policy, tmp_path / "run", torch.float32, learning_rate=0.0)
    assert same_bits(checkpoint_tensors(done.checkpoint), checkpoint_tensors(policy))


def test_random_weights_are_saved_in_the_dtype_of_the_step(tmp_path: Path) -> None:
    done = step(tiny_config(), tmp_path / "run", torch.bfloat16)
    assert {tensor.dtype for tensor in checkpoint_tensors(done.checkpoint).values()} == {torch.bfloat16}


def test_the_configuration_is_the_policys_and_says_nothing_of_the_engines_attention(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config("qwen3", rope_theta=5e5))
    done = step(policy, tmp_path / "run")
    before, after = (json.loads((path / "config.json").read_text()) for path in (policy, done.checkpoint))
    assert after == before
    assert "longstraw" not in (done.checkpoint / "config.json").read_text()


def test_tokenizer_chat_template_and_generation_settings_go_along(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config())
    word_tokenizer().save_pretrained(policy)
    GenerationConfig(do_sample=True, temperature=0.6, top_k=7, eos_token_id=[1, 2]).save_pretrained(policy)
    done = step(policy, tmp_path / "run")
    tokenizer = AutoTokenizer.from_pretrained(done.checkpoint)
    assert tokenizer("a c b")["input_ids"] == [2, 4, 3]
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    kept = GenerationConfig.from_pretrained(done.checkpoint)
    assert (kept.do_sample, kept.temperature, kept.top_k, kept.eos_token_id) == (True, 0.6, 7, [1, 2])


def test_a_checkpoint_can_be_the_next_steps_policy(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config("mistral"))
    first = step(policy, tmp_path / "first")
    second = step(first.checkpoint, tmp_path / "second")
    assert not same_bits(checkpoint_tensors(first.checkpoint), checkpoint_tensors(second.checkpoint))


def test_it_takes_no_more_of_the_disk_than_planned_and_nothing_partial_stays(tmp_path: Path) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config())
    done = step(policy, tmp_path / "run")
    planned = done.planned.plan.values["checkpoint"].nbytes
    assert 0 < done.outcome.measured_peak_bytes["disk"] <= planned <= UNLIMITED_BYTES
    assert not [path for path in done.run.rglob("*") if "partial" in path.name]


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
    ids=str,
)
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_gradients_are_saved_under_the_names_of_parameters_in_float32_or_wider(
    tied: bool, dtype: torch.dtype, kept: torch.dtype, tmp_path: Path
) -> None:
    policy = save_policy(tmp_path / "policy", tiny_config("qwen2", tie_word_embeddings=tied))
    done = step(policy, tmp_path / "run", dtype)
    parameters = dict(AutoModelForCausalLM.from_pretrained(policy).named_parameters())
    assert {name: tensor.shape for name, tensor in done.gradients.items()} == {
        n: p.shape for n, p in parameters.items()
    }
    assert {tensor.dtype for tensor in done.gradients.values()} == {kept}
    saved = load_file(done.run.with_name("run.gradients.safetensors"))
    assert all(tensor.abs().max() > 0 for tensor in saved.values())
