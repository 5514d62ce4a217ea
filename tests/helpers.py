"""What tests of numbers share: tiny models whose every parameter is random, groups of random tokens, runs of a plan.

A policy here is a checkpoint directory: written by Hugging Face's own ``save_pretrained`` from a model whose every
parameter was replaced by random numbers, norms and biases too, so that no gradient is zero or symmetric by accident.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from engine.budget import UNLIMITED_BYTES, Budget
from engine.device import Device
from engine.hardware import load_profile
from engine.plan import Plan
from engine.planner import Forecast, forecast
from engine.runtime import Outcome, execute
from models.policy import find_policy
from stages import Group, GrpoSettings, GrpoSpace, parse_group

FAMILIES = ("llama", "qwen3", "mistral", "qwen2", "qwen3_5_text")
HYBRID_FAMILIES = ("qwen3_5_text", "qwen3_next", "qwen3_5_moe_text")
VOCABULARY = 61

Gradients = dict[str, torch.Tensor]


LAYER_TYPES = ("linear_attention", "full_attention", "linear_attention", "linear_attention")
"""Of a tiny hybrid's layers, over and over."""


def tiny_config(family: str = "llama", **changes: Any) -> PreTrainedConfig:
    """Return a configuration of hidden size 32 with grouped queries; ``changes`` override."""
    if family in HYBRID_FAMILIES:
        return tiny_hybrid_config(family, **{"num_hidden_layers": 2, **changes})
    return _tiny(family, **changes)


def _tiny(family: str, **changes: Any) -> PreTrainedConfig:
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1 << 16,
        "tie_word_embeddings": False,
        "sliding_window": None,
    }
    config: PreTrainedConfig = AutoConfig.for_model(family, **{**options, **changes})
    return config


def tiny_hybrid_config(family: str, **changes: Any) -> PreTrainedConfig:
    """Return a configuration of hidden size 32 with recurrent layers and one of full attention; ``changes`` override.

    Key heads are shared by value heads, key and value dimensions differ, and experts are few and routed.
    """
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    options: dict[str, Any] = {
        "head_dim": 16,
        "num_hidden_layers": 4,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
        "rope_parameters": rope,
    }
    if family != "qwen3_next":
        rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    if family != "qwen3_5_text":
        options |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        options |= {"shared_expert_intermediate_size": 24}
    options |= changes
    options.setdefault("layer_types", [LAYER_TYPES[n % len(LAYER_TYPES)] for n in range(options["num_hidden_layers"])])
    return _tiny(family, **options)


@torch.no_grad()
def randomise(hf: Any, seed: int) -> None:
    """Replace every parameter: vectors by numbers around their old value, matrices by numbers of a trained size."""
    numbers = torch.Generator().manual_seed(seed)
    for parameter in hf.parameters():
        noise = torch.randn(parameter.shape, generator=numbers, dtype=torch.float64)
        scale = 0.3 if parameter.dim() == 1 else 1.5 * parameter.shape[-1] ** -0.5
        centre = parameter.double() if parameter.dim() == 1 else torch.zeros_like(noise)
        parameter.copy_(centre + scale * noise)


def save_policy(
    directory: Path, config: PreTrainedConfig, *, seed: int = 0, dtype: torch.dtype = torch.float32
) -> Path:
    """Write a random checkpoint to ``directory`` and return it."""
    hf = AutoModelForCausalLM.from_config(config, dtype=dtype)
    randomise(hf, seed)
    hf.save_pretrained(directory)
    return directory


def random_ids(numbers: random.Random, count: int, vocabulary: int = VOCABULARY) -> list[int]:
    """Return token ids drawn from the whole vocabulary."""
    return [numbers.randrange(vocabulary) for _ in range(count)]


def make_group(record: Mapping[str, Any], vocabulary: int = VOCABULARY) -> Group:
    """Return the group of a rollouts record of token ids."""
    return parse_group(record, where="test", tokenizer=None, vocab_size=vocabulary)


def random_group(
    seed: int, prompt_tokens: int, response_tokens: Sequence[int], vocabulary: int = VOCABULARY, **columns: Any
) -> Group:
    """Return a group of random tokens with random rewards; ``columns`` are further keys of the record."""
    numbers = random.Random(seed)
    record = {
        "prompt": random_ids(numbers, prompt_tokens, vocabulary),
        "responses": [random_ids(numbers, count, vocabulary) for count in response_tokens],
        "rewards": [numbers.uniform(-1, 1) for _ in response_tokens],
    }
    return make_group({**record, **columns}, vocabulary)


def budget(device: int = UNLIMITED_BYTES, host: int = UNLIMITED_BYTES, disk: int = UNLIMITED_BYTES) -> Budget:
    """Return a budget whose tiers are unlimited unless given in bytes."""
    return Budget(device_bytes=device, host_bytes=host, disk_bytes=disk)


def step_space(policy: Path | PreTrainedConfig | str, groups: Sequence[Group], settings: GrpoSettings) -> GrpoSpace:
    """Return the plans of one step."""
    return GrpoSpace(name="test", policy=find_policy(policy), steps=(tuple(groups),), settings=settings)


@dataclass(frozen=True, kw_only=True)
class Done:
    """A finished run: what was planned, what was reported, the merged gradients, the run directory."""

    planned: Forecast
    outcome: Outcome
    gradients: Gradients
    run: Path

    @property
    def checkpoint(self) -> Path:
        return Path(self.outcome.results["checkpoint"])


def run_step(space: GrpoSpace, run: Path, within: Budget | None = None) -> Done:
    """Plan within a budget, execute in the new directory ``run``, and return everything."""
    return run_plan(space.lower(space.first()), run, within)


def run_plan(plan: Plan, run: Path, within: Budget | None = None, device: Device | None = None) -> Done:
    """See `run_step`; on the CPU unless ``device`` is given."""
    planned = forecast(plan, within or budget(), load_profile("cpu"))
    file = run.with_name(f"{run.name}.gradients.safetensors")
    outcome = execute(planned, run, wanted={"gradients": str(file)}, device=device)
    return Done(planned=planned, outcome=outcome, gradients=load_file(file), run=run)


def checkpoint_tensors(directory: Path) -> Gradients:
    """Return every tensor of a checkpoint's safetensors files."""
    found: Gradients = {}
    for file in sorted(directory.glob("*.safetensors")):
        found.update(load_file(file))
    return found


def same_bits(left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]) -> bool:
    """Return whether two sets of tensors have the same names, dtypes and bits."""
    return left.keys() == right.keys() and all(
        left[name].dtype is right[name].dtype
        and torch.equal(left[name].contiguous().view(torch.uint8), right[name].contiguous().view(torch.uint8))
        for name in left
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch on one thread, as bits depend on the number of threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
