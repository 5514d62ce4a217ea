"""Float64 that is float64 all the way.

Hugging Face's modules hard-code float32 in norms, rotary embeddings and softmax, so a float64 model silently
computes parts of itself in float32 and no comparison below 1e-7 means anything. Inside ``lifted_casts`` every request
for float32 is a request for float64. The oracle and the engine run under the same mode.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Float64Mode(TorchFunctionMode):
    """Replaces float32 by float64 in the arguments of every torch function."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.Tensor.float:
            return torch.Tensor.double(*args)
        args = tuple(torch.float64 if arg is torch.float32 else arg for arg in args)
        kwargs = {name: torch.float64 if arg is torch.float32 else arg for name, arg in (kwargs or {}).items()}
        return func(*args, **kwargs)


@contextmanager
def lifted_casts(dtype: torch.dtype) -> Iterator[None]:
    """While active and ``dtype`` is float64, casts to float32 are casts to float64; otherwise nothing changes."""
    if dtype is not torch.float64:
        yield
        return
    with _Float64Mode():
        yield


def experts_implementation(dtype: torch.dtype) -> str | None:
    """Return which of transformers' implementations of routed experts computes in ``dtype``; None leaves it the choice.

    Torch's grouped matrix product, its usual choice, takes no float64; the plain loop over experts does.
    """
    return "eager" if dtype is torch.float64 else None


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that sums over many terms are kept in: float32, or the compute dtype where that is wider."""
    return torch.float64 if dtype is torch.float64 else torch.float32
