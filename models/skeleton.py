"""A model without its weights, and weights without a model: what a policy is loaded from in parts.

A *skeleton* has its modules and their buffers; its parameters are empty until they are pointed at tensors
(`models.dense.DenseModel.attach`). Weights are read by their names in ``named_parameters()`` from a checkpoint's
safetensors, or drawn.

Invariant: what is drawn for a parameter depends on the seed and on its module's name alone, not on what else is drawn,
so a model that is drawn in parts has the bits of one that is drawn at once.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from engine.errors import StageFailedError, UnsupportedModelError
from models.dense import HEAD_GRADIENT

_SMALL_VOCABULARY = 16
_SEED_BITS = 63
_TEXT_MODEL = "model.language_model."
# How the names of the text model begin in files of models with other parts.


def strip(hf: PreTrainedModel) -> None:
    """Turn a model on the meta device into a skeleton. Raises UnsupportedModelError for buffers of an unknown kind."""
    body = cast(Any, hf).model
    with torch.device("cpu"):
        body.rotary_emb = type(body.rotary_emb)(config=hf.config)
    if unknown := [name for name, buffer in hf.named_buffers() if buffer.is_meta]:
        raise UnsupportedModelError(
            f"{type(hf).__name__} keeps {unknown[0]} beside its parameters, so it can't run by layer spans"
        )
    empty: dict[nn.Parameter, nn.Parameter] = {}
    for module in hf.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter not in empty:
                empty[parameter] = nn.Parameter(torch.empty(0, dtype=parameter.dtype))
            setattr(module, name, empty[parameter])


@torch.no_grad()
def draw(hf: PreTrainedModel, parameters: Collection[str], seed: int) -> None:
    """Draw the parameters of those names, as the model's own code initialises their modules."""
    with torch.random.fork_rng(devices=[]):
        for name in dict.fromkeys(parameter.rpartition(".")[0] for parameter in parameters):
            number = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
            seed_bits = int.from_bytes(number, "little") >> (64 - _SEED_BITS)
            module = hf.get_submodule(name)
            with _on_cpu(module):
                torch.default_generator.manual_seed(seed_bits)
                cast(Any, hf)._init_weights(module)


@contextmanager
def _on_cpu(module: nn.Module) -> Iterator[None]:
    """Have a module's own parameters on the CPU meanwhile: another device would draw other numbers."""
    there = [
        (parameter, parameter.data)
        for parameter in module.parameters(recurse=False)
        if parameter.device.type not in ("cpu", "meta")
    ]
    for parameter, data in there:
        parameter.data = torch.empty_like(data, device="cpu")
    yield
    for parameter, data in there:
        data.copy_(parameter.data)
        parameter.data = data


def small_config(config: PreTrainedConfig) -> PreTrainedConfig:
    """Return the configuration with one layer of each kind and few words: the same architecture in little memory."""
    small = copy.deepcopy(config)
    kinds = list(dict.fromkeys(getattr(small, "layer_types", None) or ()))
    small.num_hidden_layers, small.vocab_size = max(1, len(kinds)), _SMALL_VOCABULARY
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    if kinds:
        small.layer_types = kinds
    return small


def why_not_in_parts(files: Sequence[Path], parameters: Mapping[str, tuple[int, ...]]) -> str | None:
    """Return why a checkpoint's files can't be read by these parameters' names; None if they can."""
    try:
        found = {_own_name(name): shape for path in files for name, shape in _shapes(path).items()}
    except (OSError, SafetensorError) as error:
        return f"its files can't be read: {error}"
    wrong = [name for name, shape in parameters.items() if found.get(name) != shape]
    if wrong:
        return f"its files have no {wrong[0]} of the model's shape"
    if HEAD_GRADIENT in found and HEAD_GRADIENT not in parameters:
        return f"its files have {HEAD_GRADIENT}, which its configuration ties to the embedding"
    return None


def _own_name(name: str) -> str:
    """Return the name that a model of text alone has for a tensor of a file that may be a multimodal one's."""
    return name.replace(_TEXT_MODEL, "model.", 1) if name.startswith(_TEXT_MODEL) else name


def _shapes(path: Path) -> dict[str, tuple[int, ...]]:
    with safe_open(path, framework="pt") as file:
        return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118


@torch.no_grad()
def read(files: Sequence[Path], targets: Mapping[str, torch.Tensor]) -> None:
    """Read parameters by name into ``targets``, rounded to their dtype. Raises StageFailedError if one has gone."""
    missing = dict(targets)
    for path in files:
        with safe_open(path, framework="pt") as file:
            for name in [name for name in file.keys() if _own_name(name) in missing]:  # noqa: SIM118
                missing.pop(_own_name(name)).copy_(file.get_tensor(name))
    if missing:
        raise StageFailedError(f"the policy's files have lost {next(iter(missing))} since the run was planned")
