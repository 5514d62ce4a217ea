"""Weights in, weights out: what the load stages and the checkpoint stage of a whole model do.

A checkpoint is a Hugging Face directory that ``from_pretrained`` and inference servers load: configuration,
tokenizer, generation settings and safetensors in the dtype of the policy that came in. It appears complete or not at
all.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from engine.atomic import atomic_directory
from engine.context import StageContext
from engine.full_disk import full_disk_explained
from engine.plan import TensorSpec
from engine.run import disk_usage_bytes
from models.policy import PolicySource, quiet
from stages import names
from stages.shard_layout import ShardLayout
from stages.spans import attached

_HEADER_BYTES_A_TENSOR = 110
_FIXED_BYTES = 2048
# What safetensors and the small JSON files take beside the weights.


def load(context: StageContext, policy: PolicySource, dtype: torch.dtype, seed: int) -> None:
    """Bring the policy's weights to the device."""
    model = policy.load(dtype, seed=seed)
    model.hf.to(context.device)
    tensors = [*model.hf.parameters(), *model.hf.buffers()]
    context.provide(names.WEIGHTS, tensors=(tensor.detach() for tensor in tensors), item=model)


def load_skeleton(context: StageContext, policy: PolicySource, dtype: torch.dtype) -> None:
    """Bring the model without its weights to the device."""
    model = policy.skeleton(dtype)
    model.hf.to(context.device)
    context.provide(names.WEIGHTS, tensors=model.hf.buffers(), item=model)


def load_shard(context: StageContext, policy: PolicySource, seed: int, shard: str, layout: ShardLayout) -> None:
    """Bring a shard's weights to its Value."""
    model = context.item(names.WEIGHTS)
    with attached(context, model, {shard: layout}):
        policy.load_part(model, layout.of_value(context, names.shard_weights(shard)), seed=seed)


def save(context: StageContext, tokenizer: Any, dtype: torch.dtype, name: str) -> None:
    """Write the weights as the checkpoint ``name`` in ``dtype`` and report its path."""
    hf = context.item(names.WEIGHTS).hf
    with new_checkpoint(context, tokenizer, name) as directory:
        hf.save_pretrained(directory, state_dict=None if hf.dtype is dtype else _converted(hf.state_dict(), dtype))
        config = copy.deepcopy(hf.config)
        config.dtype = dtype  # transformers writes the dtype that the model is computed in
        config.save_pretrained(directory)


@contextmanager
def new_checkpoint(context: StageContext, tokenizer: Any, name: str) -> Iterator[Path]:
    """Yield the directory of the checkpoint ``name`` to fill; the tokenizer joins it, and its path is reported."""
    target, needed_bytes = context.directory / name, context.planned_bytes(name)
    explained = full_disk_explained(context.directory, needed_bytes, f"the checkpoint {target}")
    with explained, atomic_directory(target, replace=True) as directory, quiet():
        yield directory
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)
        mode = (directory / "config.json").stat().st_mode
        for path in directory.iterdir():
            path.chmod(mode)  # safetensors are written readable by their owner only
    context.results["checkpoint"] = str(target)
    context.provide(name, disk_bytes=disk_usage_bytes(target))


def _converted(state: Mapping[str, torch.Tensor], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Return the tensors in ``dtype``; tied ones are converted once and stay tied."""
    converted: dict[int, torch.Tensor] = {}
    for tensor in state.values():
        if tensor.data_ptr() not in converted:
            converted[tensor.data_ptr()] = tensor.to(dtype)
    return {name: converted[tensor.data_ptr()] for name, tensor in state.items()}


def checkpoint_bytes(parameters: Mapping[str, TensorSpec], policy: PolicySource, item_bytes: int) -> int:
    """Return the size on disk of a checkpoint of these parameters at ``item_bytes`` an element, to a few KiB."""
    weights = sum(spec.num_elements * item_bytes + _HEADER_BYTES_A_TENSOR for spec in parameters.values())
    extra = 0
    if policy.location is not None and Path(policy.location).is_dir():
        kept = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")
        extra = sum(path.stat().st_size for name in kept if (path := Path(policy.location) / name).is_file())
    return weights + extra + len(policy.config.to_json_string()) + _FIXED_BYTES
