"""Attention kernels: what computes the attention of queries to one page, forward and backward, on which device.

Shapes: B branches, H query heads, K key/value heads (K divides H; query head h reads key head h // (H / K)), S query
tokens, T tokens of keys and values, D head dimension.

All kernels have one contract (`AttentionKernels`). ``forward`` returns the output and the natural logarithm of the sum
of exponentials of the scaled scores. ``backward`` takes output and log-sum-exp from outside, so that those *merged*
over several pages may be given: the probabilities P = exp(scores - lse) of a page depend on the others only through
the merged log-sum-exp, and dS = P * (dP - rowsum(dO * O)) only through the merged output (FlashAttention, arXiv
2205.14135, appendix B, algorithm 4). ``causal`` is for S equal T only: where they differ, kernels disagree on which
corner the mask starts from, so nobody asks for it.

Which kernels there are (`attention_kernels` chooses):

* `CPU_FLASH`: ``aten::_scaled_dot_product_flash_attention_for_cpu``, in every dtype.
* `CUDA_FLASH`: ``aten::_scaled_dot_product_flash_attention``, which is FlashAttention 2, for 16-bit numbers and head
  dimensions up to 256 that are a multiple of 8. It reads grouped key heads as they are (PyTorch,
  aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp, ``mha_fwd`` and ``mha_bwd``: "Number of heads in
  key/value must divide number of heads in query"). The padding to a multiple of 8 is done by the caller of these
  operators, so they must not be asked for it. Its backward gives the same bits every time only under
  ``torch.use_deterministic_algorithms(True)`` without ``warn_only``, which is seen to here
  (aten/src/ATen/native/transformers/cuda/attention_backward.cu, ``_flash_attention_backward``). The package
  flash-attn has kernels of the same contract (``_flash_attn_forward``, ``_flash_attn_backward``; ``[B, S, H, D]``):
  they would be one more class here, chosen before `CUDA_FLASH` where the package can be imported.
* `MATH`: written out in torch, for all else (float32 and float64 on CUDA, wide heads). It runs on any device; its
  scores are made for a block of query rows at a time, at most `MOST_SCORES` of them.

CUDA_FLASH was read from PyTorch's sources and traced on the meta device. It was not run on a GPU, and neither was MATH
on one: tests/gpu does both where there is one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Protocol, cast

import torch

from engine.device_kind import CPU, DeviceKind
from models.float64 import accumulation_dtype

MOST_SCORES = 2**24
# Of `MATH` at a time: 64 MiB in float32. Small beside the activations of a layer whose heads are large enough to need
# it, and enough rows for a matrix product to run at full speed. One row's scores are made together, however many.

FLASH_HEAD_DIM, FLASH_HEAD_MULTIPLE = 256, 8
FLASH_DTYPES = (torch.bfloat16, torch.float16)
_FLASH_CAPABILITY = (8, 0)
# What FlashAttention 2 is written for (flash_api.cpp: "only supports Ampere GPUs or newer", "only support fp16 and
# bf16 data type", "at most 256", "must be a multiple of 8").

_cpu_forward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_cuda_forward = torch.ops.aten._scaled_dot_product_flash_attention.default
_cuda_backward = torch.ops.aten._scaled_dot_product_flash_attention_backward.default

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class AttentionKernels(Protocol):
    """The attention of queries to one page. Stateless."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the output ``[B, H, S, D]`` in the queries' dtype, and the log-sum-exp ``[B, H, S]``.

        ``q`` is ``[B, H, S, D]``, ``k`` and ``v`` are ``[B, K, T, D]``, all of one dtype, with D innermost in memory.
        The log-sum-exp is in the accumulation dtype.
        """

    def backward(
        self,
        d_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
    ) -> Gradients:
        """Return the gradients of ``q [B, H, S, D]``, ``k`` and ``v [B, K, T, D]`` in their dtype.

        ``d_out`` and ``out`` are like ``q``; ``lse`` is ``[B, H, S]`` in the accumulation dtype. ``out`` and ``lse``
        are those of `forward`, or those merged over this page and others.
        """

    def received(self, d_out: torch.Tensor) -> torch.Tensor:
        """Return the output's gradient ``[B, H, S, D]``, as autograd has it, as `backward` may be given it."""

    def folded(self, x_BHSD: torch.Tensor) -> torch.Tensor:
        """Put the branches into the query axis, ``[1, H, B*S, D]``, laid out so that no call copies it again."""


def fold(x_BHSD: torch.Tensor) -> torch.Tensor:
    """Put the branches into the query axis: ``[B, H, S, ...]`` to ``[1, H, B*S, ...]``."""
    batch, heads, tokens = x_BHSD.shape[:3]
    if batch == 1:
        return x_BHSD
    return x_BHSD.transpose(0, 1).reshape(1, heads, batch * tokens, *x_BHSD.shape[3:])


@contextmanager
def _no_mere_warnings() -> Iterator[None]:
    """Where deterministic kernels are asked for, ask in earnest: with ``warn_only`` this one would not be."""
    enabled = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(enabled)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(enabled, warn_only=warns)


class _CpuFlash:
    """The kernels of torch's CPU backend; see `AttentionKernels`."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return cast(tuple[torch.Tensor, torch.Tensor], _cpu_forward(q, k, v, 0.0, causal, scale=scale))

    def backward(
        self,
        d_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
    ) -> Gradients:
        return cast(Gradients, _cpu_backward(d_out, q, k, v, out, lse, 0.0, causal, scale=scale))

    def received(self, d_out: torch.Tensor) -> torch.Tensor:
        return d_out.contiguous()

    def folded(self, x_BHSD: torch.Tensor) -> torch.Tensor:
        return fold(x_BHSD)


class _CudaFlash:
    """FlashAttention 2 as PyTorch has it for CUDA; see `AttentionKernels`.

    The kernels are written for ``[B, S, H, D]``: their operators transpose what they get, and the backward copies
    output and gradient unless they lie that way. What torch and Hugging Face's modules hand over does lie that way.
    """

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse, *_ = _cuda_forward(q, k, v, 0.0, causal, False, scale=scale)
        return out, lse

    def backward(
        self,
        d_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
    ) -> Gradients:
        # The kernel reads the log-sum-exp as if it were contiguous, without a check. No lengths of packed sequences
        # (None: all are equally long) and no state of a random generator (None: there is no dropout).
        lengths, packed, state = (q.shape[2], k.shape[2]), (None, None), (None, None)
        with _no_mere_warnings():
            found = _cuda_backward(
                d_out, q, k, v, out, lse.contiguous(), *packed, *lengths, 0.0, causal, *state, scale=scale
            )
        return cast(Gradients, found)

    def received(self, d_out: torch.Tensor) -> torch.Tensor:
        return d_out

    def folded(self, x_BHSD: torch.Tensor) -> torch.Tensor:
        batch, heads, tokens, dim = x_BHSD.shape
        return x_BHSD.transpose(1, 2).reshape(1, batch * tokens, heads, dim).contiguous().transpose(1, 2)


class _Math:
    """Attention written out; see `AttentionKernels`. Sums are in the accumulation dtype, in one fixed order."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        wide = accumulation_dtype(q.dtype)
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        lse = torch.empty(q.shape[:3], dtype=wide, device=q.device)
        k_wide, v_wide = k.to(wide), v.to(wide)
        for rows in _row_blocks(q, k):
            seen = slice(rows.stop if causal else k.shape[2])
            scores = _scores(_grouped(q, k, rows), k_wide[:, :, seen], rows if causal else None, scale)
            top = scores.amax(-1, keepdim=True)
            sums = scores.sub_(top).exp_().sum(-1, keepdim=True)
            out[:, :, rows] = _by_head(scores @ v_wide[:, :, seen], q).div_(_by_head(sums, q))
            lse[:, :, rows] = _by_head(sums.log_().add_(top), q).squeeze(-1)
            del scores, top, sums  # or the next block's would stand beside these
        return out, lse

    def backward(
        self,
        d_out: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        causal: bool,
        scale: float,
    ) -> Gradients:
        wide = accumulation_dtype(q.dtype)
        d_q = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        d_k = torch.zeros(k.shape, dtype=wide, device=k.device)
        d_v = torch.zeros(v.shape, dtype=wide, device=v.device)
        k_wide, v_wide = k.to(wide), v.to(wide)
        for rows in _row_blocks(q, k):
            seen = slice(rows.stop if causal else k.shape[2])
            q_rows, d_rows = _grouped(q, k, rows), _grouped(d_out, k, rows)
            probs = _scores(q_rows, k_wide[:, :, seen], rows if causal else None, scale)
            probs.sub_(_grouped(lse.unsqueeze(-1), k, rows)).exp_()
            d_v[:, :, seen] += probs.transpose(-1, -2) @ d_rows
            means = (d_rows * _grouped(out, k, rows)).sum(-1, keepdim=True)
            d_scores = (d_rows @ v_wide[:, :, seen].transpose(-1, -2)).sub_(means).mul_(probs).mul_(scale)
            del probs, means
            d_q[:, :, rows] = _by_head(d_scores @ k_wide[:, :, seen], q)
            d_k[:, :, seen] += d_scores.transpose(-1, -2) @ q_rows
            del d_scores, q_rows, d_rows
        return d_q, d_k.to(k.dtype), d_v.to(v.dtype)

    def received(self, d_out: torch.Tensor) -> torch.Tensor:
        return d_out

    def folded(self, x_BHSD: torch.Tensor) -> torch.Tensor:
        return fold(x_BHSD)


def _row_blocks(q: torch.Tensor, k: torch.Tensor) -> Iterator[slice]:
    """Yield the blocks of query rows whose scores are made together, in order."""
    batch, heads, tokens = q.shape[:3]
    step = max(1, MOST_SCORES // (batch * heads * k.shape[2]))
    return (slice(start, min(start + step, tokens)) for start in range(0, tokens, step))


def _grouped(x_BHSD: torch.Tensor, k: torch.Tensor, rows: slice) -> torch.Tensor:
    """Return rows in the accumulation dtype by key head, ``[B, K, (H / K) * R, D]``: R rows of each query head."""
    part = x_BHSD[:, :, rows].to(accumulation_dtype(x_BHSD.dtype))
    return part.reshape(part.shape[0], k.shape[1], -1, part.shape[3])


def _by_head(x_BKRD: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Undo `_grouped`'s grouping: ``[B, H, R, D]``."""
    return x_BKRD.reshape(q.shape[0], q.shape[1], -1, x_BKRD.shape[3])


def _scores(q_BKRD: torch.Tensor, k_BKTD: torch.Tensor, rows: slice | None, scale: float) -> torch.Tensor:
    """Return scaled scores ``[B, K, R, T]``; with ``rows``, those of keys behind a query are minus infinity."""
    scores = (q_BKRD @ k_BKTD.transpose(-1, -2)).mul_(scale)
    if rows is not None:
        count = rows.stop - rows.start
        hidden = torch.ones(count, k_BKTD.shape[2], dtype=torch.bool, device=scores.device).triu_(rows.start + 1)
        scores.view(*scores.shape[:2], -1, count, k_BKTD.shape[2]).masked_fill_(hidden, -torch.inf)
    return scores


CPU_FLASH: AttentionKernels = _CpuFlash()
CUDA_FLASH: AttentionKernels = _CudaFlash()
MATH: AttentionKernels = _Math()


@cache
def _has_flash(device: torch.device) -> bool:
    """Return whether a CUDA device is new enough for FlashAttention 2."""
    return torch.cuda.get_device_capability(device) >= _FLASH_CAPABILITY


def attention_kernels(q: torch.Tensor, kind: DeviceKind | None = None) -> AttentionKernels:
    """Return the kernels for queries ``[B, H, S, D]`` and keys and values like them: by device, dtype and D.

    Tensors without data (meta) stand for those of the ``kind`` of device that is planned for, a CPU unless given;
    others are where they are, and ``kind`` is ignored. Planned devices are taken to be new enough for CUDA_FLASH.
    Nothing is refused: what no fused kernel does is done by MATH.
    """
    device = q.device.type
    if device == "meta":
        device = (kind or CPU).name
    if device == "cpu":
        return CPU_FLASH
    dim = q.shape[-1]
    fits = q.dtype in FLASH_DTYPES and dim <= FLASH_HEAD_DIM and not dim % FLASH_HEAD_MULTIPLE
    if device == "cuda" and fits and (q.is_meta or _has_flash(q.device)):
        return CUDA_FLASH
    return MATH
