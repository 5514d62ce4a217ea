"""Small facts about torch tensors that the engine's torch side shares: dtypes by name, pieces, numpy views.

A *piece* is a slice of a tensor along its first axis, ``piece_rows`` rows long (`engine.parts.TensorSpec`): what a
stream moves at a time, and what is a chunk file on disk.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch

from engine.plan import TensorSpec


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of that name (``float32``, ``bfloat16``, ...)."""
    return cast(torch.dtype, getattr(torch, name))


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a torch dtype, as `engine.plan.TensorSpec` wants it."""
    return str(dtype).removeprefix("torch.")


def piece_of(tensor: torch.Tensor, spec: TensorSpec, index: int) -> torch.Tensor:
    """Return a slice along the first axis; a tensor without axes is its own only piece."""
    if not tensor.dim():
        return tensor
    return tensor[index] if spec.piece_rows == 1 else tensor.narrow(0, index * spec.piece_rows, spec.piece_rows)


def as_rows(piece: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    """View a piece with the first axis of its tensor, as a chunk has it."""
    return piece.view((spec.piece_rows, *spec.shape[1:]))


def chunk_index(spec: TensorSpec, index: int) -> tuple[int, ...]:
    """Return where a piece lies in the grid of chunks of its array."""
    return (index,) + (0,) * (len(spec.shape) - 1)


def as_numpy(tensor: torch.Tensor) -> Any:
    """View a CPU tensor as numpy; bfloat16, which numpy lacks, as uint16."""
    return (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()


@contextmanager
def filled_as_numpy(tensor: torch.Tensor) -> Iterator[Any]:
    """Yield numpy's view of a tensor to fill, or memory that is copied to the tensor where that is on another device.

    (No bfloat16.)
    """
    if tensor.device.type == "cpu":
        yield tensor.numpy()
        return
    memory = torch.empty(tensor.shape, dtype=tensor.dtype)
    yield memory.numpy()
    tensor.copy_(memory)
