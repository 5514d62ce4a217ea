"""Every attention kernel keeps one contract: that of the CPU's, which stands here for a softmax written out."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from engine.device_kind import CPU, DeviceKind, cuda_kind
from engine.memory import DEVICE, LiveBytes
from models import kernels
from models.attention import paged_attention
from models.kernels import CPU_FLASH, CUDA_FLASH, MATH, AttentionKernels, attention_kernels, fold
from tests.unit.test_attention import Layer, Pages

CASES = [(1, 4, 4, 9, 9), (2, 6, 2, 7, 7), (3, 4, 1, 5, 11), (1, 8, 2, 1, 13), (2, 4, 2, 1, 1)]
"""Branches, query heads, key heads, queries, keys."""
HEAD_DIM = 16
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}


def drawn(case: Sequence[int], dtype: torch.dtype, dim: int = HEAD_DIM) -> list[torch.Tensor]:
    """Return queries, keys, values and the output's gradient."""
    batch, heads, kv_heads, queries, keys = case
    torch.manual_seed(sum(case))
    shapes = ((batch, heads, queries, dim), *[(batch, kv_heads, keys, dim)] * 2, (batch, heads, queries, dim))
    return [torch.randn(shape, dtype=torch.float64).to(dtype) for shape in shapes]


def both_ways(chosen: AttentionKernels, made: list[torch.Tensor], causal: bool) -> list[torch.Tensor]:
    """Return output, log-sum-exp and the three gradients."""
    q, k, v, d_out = made
    out, lse = chosen.forward(q, k, v, causal, 0.3)
    return [out, lse, *chosen.backward(chosen.received(d_out), q, k, v, out, lse, causal, 0.3)]


@pytest.mark.parametrize("most_scores", [kernels.MOST_SCORES, 40], ids=["one block", "blocks of rows"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("case", "causal"), [(case, causal) for case in CASES for causal in {False, case[3] == case[4]}], ids=str
)
def test_what_is_written_out_equals_the_flash_kernel(
    case: Sequence[int], causal: bool, dtype: torch.dtype, most_scores: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "MOST_SCORES", most_scores)
    made = drawn(case, dtype)
    for ours, theirs in zip(both_ways(MATH, made, causal), both_ways(CPU_FLASH, made, causal), strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_narrow_numbers_are_summed_in_float32(dtype: torch.dtype) -> None:
    made = drawn((2, 6, 2, 33, 33), dtype)
    truth = both_ways(MATH, [tensor.double() for tensor in made], True)
    found = both_ways(MATH, made, True)
    assert [tensor.dtype for tensor in found] == [dtype, torch.float32, dtype, dtype, dtype]
    flash = both_ways(CPU_FLASH, made, True)
    for ours, theirs, exact in zip(found, flash, truth, strict=True):
        assert (ours - exact).norm() <= 1.1 * (theirs - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.parametrize("chosen", [MATH, CPU_FLASH], ids=["math", "flash"])
def test_a_page_is_differentiated_through_merged_results(chosen: AttentionKernels) -> None:
    q, k, v, d_out = drawn((1, 6, 2, 5, 12), torch.float64)
    out, lse = chosen.forward(q, k, v, False, 0.3)
    whole = chosen.backward(d_out, q, k, v, out, lse, False, 0.3)
    pages = [slice(0, 5), slice(5, 6), slice(6, 12)]
    parts = [chosen.backward(d_out, q, k[:, :, p], v[:, :, p], out, lse, False, 0.3) for p in pages]
    summed = [sum(part[0] for part in parts), *(torch.cat([part[i] for part in parts], 2) for i in (1, 2))]
    for ours, theirs in zip(summed, whole, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_attention_over_pages_is_the_same_by_all_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, d_out = drawn((3, 4, 2, 6, 6), torch.float64)
    prefix = torch.randn(2, 2, 17, HEAD_DIM, dtype=torch.float64)

    def found(chosen: AttentionKernels) -> list[torch.Tensor]:
        monkeypatch.setattr("models.attention.attention_kernels", lambda query, kind: chosen)
        query, key, value = (tensor.clone().requires_grad_() for tensor in (q, k, v))
        pages = Pages(prefix.split([7, 1, 9], 2))
        out = paged_attention(Layer(), query, key, value, None, prefix=pages)[0]
        out.backward(d_out.transpose(1, 2))
        return [out.detach(), *(x.grad for x in (query, key, value) if x.grad is not None), *pages.cotangents]

    for ours, theirs in zip(found(MATH), found(CPU_FLASH), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_scores_are_bounded_by_blocks_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = drawn((1, 4, 2, 512, 512), torch.float32)
    all_scores = 4 * 512 * 512

    def peak(most_scores: int) -> int:
        monkeypatch.setattr(kernels, "MOST_SCORES", most_scores)
        with LiveBytes() as meter:
            meter.adopt(made)
            before = meter.live[DEVICE]
            both_ways(MATH, made, False)
            return int(meter.peak[DEVICE] - before)

    few, many = peak(all_scores // 64), peak(all_scores)
    assert few < 2 * all_scores < 8 * all_scores < many  # bytes: two matrices of scores stand together


@pytest.mark.parametrize(
    ("dtype", "dim", "kind", "expected"),
    [
        (torch.bfloat16, 128, CPU, CPU_FLASH),
        (torch.float64, 512, CPU, CPU_FLASH),
        (torch.bfloat16, 128, None, CPU_FLASH),
        (torch.bfloat16, 128, cuda_kind(132), CUDA_FLASH),
        (torch.float16, 256, cuda_kind(132), CUDA_FLASH),
        (torch.float16, 264, cuda_kind(132), MATH),
        (torch.bfloat16, 12, cuda_kind(132), MATH),
        (torch.float32, 128, cuda_kind(132), MATH),
        (torch.float64, 128, cuda_kind(132), MATH),
        (torch.bfloat16, 128, DeviceKind(name="xpu"), MATH),
    ],
)
def test_kernels_are_chosen_by_device_dtype_and_head_dimension(
    dtype: torch.dtype, dim: int, kind: DeviceKind | None, expected: AttentionKernels
) -> None:
    assert attention_kernels(torch.empty(1, 2, 3, dim, dtype=dtype, device="meta"), kind) is expected


def test_tensors_with_data_are_computed_where_they_are() -> None:
    assert attention_kernels(torch.empty(1, 2, 3, 64), cuda_kind(132)) is CPU_FLASH


def test_the_flash_operators_of_cuda_give_sizes_and_grouped_gradients_without_data() -> None:
    q = torch.empty(1, 8, 5, 64, dtype=torch.bfloat16, device="meta")
    page = torch.empty(1, 2, 32, 64, dtype=torch.bfloat16, device="meta")
    out, lse = CUDA_FLASH.forward(q, page, page, False, 0.1)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == (q.shape, q.dtype, q.shape[:3], torch.float32)
    d_q, d_k, d_v = CUDA_FLASH.backward(out, q, page, page, out, lse, False, 0.1)
    assert (d_q.shape, d_k.shape, d_v.shape) == (q.shape, page.shape, page.shape)


@pytest.mark.parametrize("batch", [1, 3])
def test_branches_are_folded_in_the_layout_of_the_kernel_without_a_copy_where_they_lie_so(batch: int) -> None:
    as_autograd_has_it = torch.randn(batch, 5, 4, 8).transpose(1, 2)
    contiguous = as_autograd_has_it.contiguous()
    for x, is_copied in ((as_autograd_has_it, False), (contiguous, True)):
        folded = CUDA_FLASH.folded(x)
        assert torch.equal(folded, fold(contiguous))
        assert folded.transpose(1, 2).is_contiguous()
        assert (folded.data_ptr() != x.data_ptr()) == is_copied
    assert CUDA_FLASH.received(as_autograd_has_it) is as_autograd_has_it
    assert CPU_FLASH.received(as_autograd_has_it).is_contiguous()
