"""What is written shard by shard: the checkpoint of a cut model, and any model's gradients on request.

A safetensors file for every shard, written a piece at a time, with an index beside them, is a checkpoint that
``from_pretrained`` loads. The format (8 bytes of little-endian header length, a JSON header, the data) is that of
https://github.com/huggingface/safetensors#format, the index that of transformers.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from engine.atomic import atomic_file
from engine.chunkfile import as_bytes
from engine.context import StageContext
from engine.full_disk import full_disk_explained
from engine.plan import ITEM_BYTES
from engine.tensors import dtype_name
from stages import names
from stages.checkpoint import new_checkpoint
from stages.shard_layout import ShardLayout

_CODES = {"float64": "F64", "float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_LENGTH_BYTES = 8

INDEX_BYTES_A_TENSOR = 110
# What the index takes for each tensor, about: its name and its file's.


def save_checkpoint(
    context: StageContext, tokenizer: Any, dtype: torch.dtype, name: str, shards: Mapping[str, ShardLayout]
) -> None:
    """Write the weights of all shards as the checkpoint ``name`` in ``dtype`` and report its path."""
    hf = context.item(names.WEIGHTS).hf
    with new_checkpoint(context, tokenizer, name) as directory:
        files: dict[str, str] = {}
        for number, (shard, layout) in enumerate(shards.items(), start=1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            _write(context, directory / file, {names.shard_weights(shard): layout}, dtype)
            files |= dict.fromkeys(layout.parameters, file)
        total = sum(layout.num_elements for layout in shards.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": files}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")
        _save_configuration(hf, dtype, directory)


def _save_configuration(hf: Any, dtype: torch.dtype, directory: Path) -> None:
    config = copy.deepcopy(hf.config)
    config.dtype, config.architectures = dtype, [type(hf).__name__]
    config.save_pretrained(directory)
    if getattr(hf, "generation_config", None) is not None:
        hf.generation_config.save_pretrained(directory)


def save_gradients(context: StageContext, path: str, gradients: Mapping[str, ShardLayout]) -> None:
    """Write merged gradients, Values with their shards, to a safetensors file; it appears complete or not at all.

    They are in the accumulators' dtype, under the names of ``named_parameters()``.
    """
    target, dtype = Path(path).absolute(), next(iter(gradients.values())).wide
    needed_bytes = sum(layout.num_elements for layout in gradients.values()) * dtype.itemsize
    with full_disk_explained(target.parent, needed_bytes, f"the gradients {path}"), atomic_file(target) as partial:
        _write(context, Path(partial), gradients, dtype)


def _write(context: StageContext, path: Path, values: Mapping[str, ShardLayout], dtype: torch.dtype) -> None:
    """Write weights or gradients of shards to a safetensors file in ``dtype``, converted a part at a time."""
    with open(path, "wb") as file:
        file.write(_header(values.values(), dtype_name(dtype)))
        for value, layout in values.items():
            for piece in layout.numbers(context, value):
                for tensor in piece:
                    file.write(as_bytes(tensor.to(dtype).cpu().view(torch.uint8).numpy()))


def _header(layouts: Iterable[ShardLayout], dtype: str) -> bytes:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for layout in layouts:
        for name, spec in layout.parameters.items():
            stop = start + spec.num_elements * ITEM_BYTES[dtype]
            header[name] = {"dtype": _CODES[dtype], "shape": list(spec.shape), "data_offsets": [start, stop]}
            start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _LENGTH_BYTES)
    return len(text).to_bytes(_LENGTH_BYTES, "little") + text
