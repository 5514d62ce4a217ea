"""What CUDA kernels of PyTorch allocate inside one operator, as arithmetic on shapes, dtypes and strides.

A byte counter sees what operators return (`engine.memory`). What one takes from the allocator and gives back before it
returns is seen by nobody, and is part of the peak all the same: the accumulator of flash attention's backward alone can
be larger than all of a chunk's activations. `KERNEL_WORKSPACES` maps operators to a function of a call's arguments that
returns the most of such bytes that are allocated together, each rounded as the allocator does. Operators that are not
in it take nothing that was found: pointwise ones, products (cuBLAS keeps its workspace, `engine.device_kind`), gather,
searchsorted, index, masked_fill, cat, and the fused AdamW.

Written from the sources of PyTorch 2.13 and, where those were not at hand, of the closest version that was: paths below
are in its repository. None of it was run on a GPU; tests/gpu holds each entry against the allocator where there is one.
Three things make an entry a bound instead of the number itself: flash attention's forward is counted as the most that
it takes for any number of keys, so that the length of a page or of a branch decides nothing; radix sorts, whose tiles
depend on the architecture (`_radix_sort`); and reductions of 16-bit numbers, which may read other vectors than is
assumed here (`_reduction`).

All assume ``torch.use_deterministic_algorithms(True)``, as runs on a GPU need it for their bits; without it, flash
attention's backward has one accumulator, and scatters and index_add take nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from engine.device_kind import DeviceKind
from engine.memory import Workspaces

_aten = torch.ops.aten
_LONG_BYTES, _FLOAT_BYTES, _INT_BYTES = 8, 4, 4

_MOST_SPLITS, _SPLIT_QUERIES = 128, 64
# flash_api.cpp, set_params_splitkv.
_MOST_KEY_BLOCKS = 2048
# Of a page: 131,072 tokens where heads are wide, and more where they are not.
_FLASH_ROWS = 128
# flash_api.cpp, mha_bwd: queries are rounded up to these.

_SMALL_SORT = 4096
# aten/src/ATen/native/cuda/Sort.h, should_use_small_sort: up to here a row is sorted in place, in shared memory.
_RADIX_BITS, _RADIX_TILE = 8, 1024
# CUB's DeviceRadixSort: digits of 8 bits; a tile has at least these many items in its policies for 4 and 8 byte keys.
_CUB_ALIGNMENT = 256

_WARP, _REDUCE_THREADS, _REDUCE_VECTOR = 32, 512, 4
_FEW_VALUES, _MANY_VALUES = 16, 256
_THREADS_A_MULTIPROCESSOR = 2048
# aten/src/ATen/native/cuda/Reduce.cuh, setReduceConfig; the last one is the device's: 2,048 on those for data centres.


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def _argument(args: tuple[Any, ...], kwargs: Mapping[str, Any], index: int, name: str, default: Any = None) -> Any:
    return args[index] if index < len(args) else kwargs.get(name, default)


def _copy_if_strided(x_BHSD: torch.Tensor, kind: DeviceKind) -> int:
    """Return the bytes of the copy that makes ``[B, S, H, D]`` contiguous; none where it is."""
    return 0 if x_BHSD.transpose(1, 2).is_contiguous() else kind.rounded(x_BHSD.numel() * x_BHSD.itemsize)


# Flash attention


def num_splits(blocks: int, multiprocessors: int, key_blocks: int) -> int:
    """Return in how many parts flash attention's forward cuts the keys, so that few queries fill the device.

    ``blocks`` are those of 64 queries of all heads and branches, ``key_blocks`` those of 256 keys, of 128 from a head
    dimension of 72 on and of 64 from one of 136 on. See flash_api.cpp, num_splits_heuristic: the fewest
    parts whose occupancy is 85 % of the best one's, in single precision as there.
    """
    places = 2 * multiprocessors  # set_params_splitkv passes twice their number
    if np.float32(blocks) >= np.float32(0.8) * np.float32(places):
        return 1
    parts = np.arange(1, min(_MOST_SPLITS, places, key_blocks) + 1)
    waves = (blocks * parts).astype(np.float32) / np.float32(places)
    efficiencies = waves / np.ceil(waves)
    longest = -(-key_blocks // parts)
    efficiencies[1:][longest[1:] == longest[:-1]] = 0  # one part less would be as good
    return int(parts[np.argmax(efficiencies.astype(np.float64) >= 0.85 * float(efficiencies.max()))])


@cache
def most_splits(blocks: int, multiprocessors: int) -> int:
    """Return the most parts of `num_splits` for any number of blocks of keys."""
    return max(num_splits(blocks, multiprocessors, key_blocks) for key_blocks in range(1, _MOST_KEY_BLOCKS + 1))


def _rounded_dim(dim: int) -> int:
    step = 32 if dim <= 128 else 64
    return _ceil_div(dim, step) * step


def flash_forward_bytes(args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: DeviceKind) -> int:
    """Bytes inside ``_scaled_dot_product_flash_attention(query, key, value, ...)``.

    flash_api.cpp, mha_fwd: partial outputs and log-sum-exps of every part of the keys, in as many parts as there can be
    for these queries: with fewer keys there may be fewer parts, and even with more. One query of grouped heads is
    turned into as many queries as share a key head, which copies it unless its heads lie behind each other.
    """
    query, key = args[0], args[1]
    batch, heads, queries, dim = query.shape
    kv_heads = key.shape[1]
    turned = 0
    if queries == 1 and heads > kv_heads:
        queries, heads = heads // kv_heads, kv_heads
        turned = _copy_if_strided(query, kind)
    parts = most_splits(batch * heads * _ceil_div(queries, _SPLIT_QUERIES), kind.multiprocessors)
    if parts == 1:
        return turned
    rows = parts * batch * heads * queries
    partial = kind.rounded(rows * _FLOAT_BYTES) + kind.rounded(rows * _rounded_dim(dim) * _FLOAT_BYTES)
    return partial + turned


def flash_backward_bytes(args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: DeviceKind) -> int:
    """Bytes inside ``_scaled_dot_product_flash_attention_backward(grad_out, query, key, value, out, ...)``.

    flash_api.cpp, mha_bwd: rowsum(dO * O); a float32 accumulator of the queries' gradient for each part of the device
    that works on one head, since sums have to have an order; gradients of keys and values by query head, where those
    are grouped. attention_backward.cu, _flash_attention_backward: contiguous copies of gradient and output.
    """
    d_out, query, key, _, out = args[:5]
    batch, heads, queries, dim = query.shape
    kv_heads, keys = key.shape[1], key.shape[2]
    rows = _ceil_div(queries, _FLASH_ROWS) * _FLASH_ROWS
    parts = _ceil_div(kind.multiprocessors, batch * heads)
    taken = _copy_if_strided(d_out, kind) + _copy_if_strided(out, kind)
    taken += kind.rounded(batch * heads * rows * _FLOAT_BYTES)
    taken += kind.rounded(parts * batch * rows * heads * _rounded_dim(dim) * _FLOAT_BYTES)
    if heads != kv_heads:
        taken += 2 * kind.rounded(batch * keys * heads * dim * query.itemsize)
    return taken


# Sorting, and what is added in the order of sorted indices


def _radix_sort(count: int, key_bytes: int, value_bytes: int, kind: DeviceKind, bits: int = 0) -> int:
    """Return a bound of CUB's temporary storage for sorting pairs by so many ``bits`` of the key (0: all).

    cub/device/dispatch/dispatch_radix_sort.cuh, InvokeOnesweep: histograms, look-back of every tile, a second buffer
    for keys and values where there is more than one pass, and counters. Tiles are larger than is assumed here.
    """
    passes = _ceil_div(bits or 8 * key_bytes, _RADIX_BITS)
    digits = 2**_RADIX_BITS
    second = (count * key_bytes, count * value_bytes) if passes > 1 else (0, 0)
    areas = (passes * digits * _INT_BYTES, _ceil_div(count, _RADIX_TILE) * digits * _INT_BYTES, *second, passes * 4)
    return kind.rounded(sum(_ceil_div(area, _CUB_ALIGNMENT) * _CUB_ALIGNMENT for area in areas))


def sort_bytes(args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: DeviceKind) -> int:
    """Bytes inside ``sort.stable(self, *, stable, dim, descending)`` of one row; argsort is made of it.

    Sort.cpp, sort_cuda_kernel: short rows get their indices from a temporary range. SortStable.cu,
    segmented_sort_large_segments: long ones too, beside the radix sort's storage. Several rows are not sorted by
    anything here, and are counted as one long one.
    """
    count = args[0].numel()
    numbers = kind.rounded(count * _LONG_BYTES)
    if count <= _SMALL_SORT:
        return numbers
    return numbers + _radix_sort(count, args[0].itemsize, _LONG_BYTES, kind)


def _index_put(self: torch.Tensor, num_indices: int, kind: DeviceKind, *, dims: int = 1, slice_elements: int) -> int:
    """Return the bytes inside ``index_put_`` by sorting, of ``num_indices`` rows of ``slice_elements``.

    Indexing.cu, index_put_with_sort_kernel: linear, sorted and original indices, a range, and the radix sort. With
    indices of ``dims`` dimensions, linear ones are summed up before (computeLinearIndex), beside which nothing else
    stands yet.
    """
    one = kind.rounded(num_indices * _LONG_BYTES)
    bits = max(1, ((self.numel() - 1) // max(slice_elements, 1)).bit_length())
    sorting = 4 * one + _radix_sort(num_indices, _LONG_BYTES, _LONG_BYTES, kind, bits)
    return max(sorting, (2 + dims) * one)


def index_add_bytes(args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: DeviceKind) -> int:
    """Bytes inside ``index_add_(self, dim, index, source, *, alpha)``.

    Indexing.cu, index_add_cuda_impl: a scaled copy of the source, whatever the scale, and index_put_.
    """
    self, dim, index, source = args[:4]
    scaled = kind.rounded(source.numel() * source.itemsize)
    rows = max(self.shape[dim] if self.dim() else 1, 1)
    return scaled + _index_put(self, index.numel(), kind, slice_elements=self.numel() // rows)


def index_copy_bytes(args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: DeviceKind) -> int:
    """Bytes inside ``index_copy_(self, dim, index, source)``: index_put_ (TensorAdvancedIndexing.cpp, index_copy)."""
    self, dim, index, source = args[:4]
    rows = max(self.shape[dim] if self.dim() else 1, 1)
    laid_out = 0 if self.is_contiguous() else kind.rounded(self.numel() * self.itemsize)
    values = 0 if source.is_contiguous() else kind.rounded(source.numel() * source.itemsize)
    return laid_out + values + _index_put(self, index.numel(), kind, slice_elements=self.numel() // rows)


def scatter_add_bytes(args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: DeviceKind) -> int:
    """Bytes inside ``scatter_add_(self, dim, index, src)``.

    TensorAdvancedIndexing.cpp, _scatter_via_index_put: a range for every other dimension, expanded, and index_put_ of
    single numbers.
    """
    self, dim, index, source = args[:4]
    dim %= max(self.dim(), 1)
    ranges = sum(kind.rounded(size * _LONG_BYTES) for d, size in enumerate(index.shape) if d != dim)
    values = 0 if source.is_contiguous() else kind.rounded(index.numel() * source.itemsize)
    laid_out = 0 if self.is_contiguous() else kind.rounded(self.numel() * self.itemsize)
    dims = self.dim()
    return ranges + values + laid_out + _index_put(self, index.numel(), kind, dims=dims, slice_elements=1)


# Reductions and scans


def _merged(dims: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return (size, stride) of dimensions from the innermost on, those of size 1 left out and neighbours merged."""
    merged: list[tuple[int, int]] = []
    for size, stride in sorted((dim for dim in dims if dim[0] != 1), key=lambda dim: dim[1]):
        if merged and stride == merged[-1][0] * merged[-1][1]:
            merged[-1] = (merged[-1][0] * size, merged[-1][1])
        else:
            merged.append((size, stride))
    return merged


def _last_power(number: int) -> int:
    return 1 << (max(number, 1).bit_length() - 1)


def reduction_bytes(x: torch.Tensor, dims: Sequence[int], number_bytes: int, kind: DeviceKind) -> int:
    """Return the bytes inside a reduction of ``x`` over ``dims`` (none: all) that keeps numbers of ``number_bytes``.

    Reduce.cuh, setReduceConfig and gpu_reduce_kernel: where one output has so many inputs that several thread blocks
    share it, their partial results go through global memory, beside a semaphore for every column of blocks.
    """
    reduced = {dim % max(x.dim(), 1) for dim in dims} or set(range(x.dim()))
    inner = _merged([(x.shape[d], x.stride(d)) for d in range(x.dim()) if d in reduced])
    outer = _merged([(x.shape[d], x.stride(d)) for d in range(x.dim()) if d not in reduced])
    inputs, outputs = math.prod(size for size, _ in inner), math.prod(size for size, _ in outer)
    if not inputs * outputs:
        return 0
    is_inner_fastest = not outer or (bool(inner) and inner[0][1] < outer[0][1])
    width, height = (inputs, outputs) if is_inner_fastest else (outputs, inputs)
    vector = 1
    if is_inner_fastest and inner and inner[0][1] == 1 and width >= 128 and len(inner) == 1:
        width //= _REDUCE_VECTOR
    elif not is_inner_fastest and outer[0][1] == 1:
        vector = _output_vector(outer[0][0], [stride for _, stride in (*inner, *outer[1:])])
        width //= vector
    most = _REDUCE_THREADS // vector
    width, height = min(_last_power(width), most), min(_last_power(height), most)
    block_x = min(width, _WARP)
    block_y = min(height, most // block_x)
    block_x = min(width, most // block_y)
    step_input, step_output = (block_x, 1) if is_inner_fastest else (1, block_x)
    if _ceil_div(inputs, step_input) < min(block_y * 16, _MANY_VALUES):
        return 0  # a thread block has enough of it
    step_input *= block_y
    values = _ceil_div(inputs, step_input)
    grid = _ceil_div(outputs // vector, step_output)
    target = kind.multiprocessors * (_THREADS_A_MULTIPROCESSOR // (block_x * block_y))
    if values < _MANY_VALUES or grid > target:
        return 0
    ctas = max(min(_ceil_div(target, grid), _ceil_div(values, _FEW_VALUES)), _ceil_div(values, _MANY_VALUES))
    if ctas == 1:
        return 0
    partial = number_bytes * outputs * ctas * (1 if is_inner_fastest else block_x * vector)
    return kind.rounded(partial) + kind.rounded(_INT_BYTES * grid)


def _output_vector(size: int, strides: Sequence[int]) -> int:
    vector = _REDUCE_VECTOR
    for number in (size, *strides):
        while number % vector:
            vector //= 2
    return vector


def _accumulated(x: torch.Tensor) -> int:
    return max(x.itemsize, _FLOAT_BYTES) if x.is_floating_point() else _LONG_BYTES


def _own(x: torch.Tensor) -> int:
    return x.itemsize


def _with_index(x: torch.Tensor) -> int:
    return 2 * _LONG_BYTES


def _dims(found: Any) -> tuple[int, ...]:
    return () if found is None else (found,) if isinstance(found, int) else tuple(found)


def _reduction(position: int, number_bytes: Callable[[torch.Tensor], int]) -> Callable[..., int]:
    """Return the bytes of an operator that reduces its first argument over the dimensions at a position."""

    def inside(args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: DeviceKind) -> int:
        dims = _dims(_argument(args, kwargs, position, "dim")) if position else ()
        return reduction_bytes(args[0], dims, number_bytes(args[0]), kind)

    return inside


def logsumexp_bytes(args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: DeviceKind) -> int:
    """Bytes inside ``logsumexp(self, dim, keepdim)``: exponentials of all, and the maxima (ReduceOps.cpp)."""
    x = args[0]
    reduced = {dim % max(x.dim(), 1) for dim in _dims(args[1])} or set(range(x.dim()))
    kept = math.prod(size for d, size in enumerate(x.shape) if d not in reduced)
    return kind.rounded(x.numel() * x.itemsize) + kind.rounded(kept * x.itemsize)


_SCAN_ITEMS = 16


def cumsum_bytes(args: tuple[Any, ...], kwargs: Mapping[str, Any], kind: DeviceKind) -> int:
    """Bytes inside ``cumsum_(self, dim)`` of floating point: sums of blocks where all is one row, else none.

    ScanUtils.cuh, scan_dim, and cub.cuh, inclusive_deterministic_scan; rows of their own are scanned in place.
    """
    x, dim = args[0], args[1]
    if not x.dim() or x.numel() != x.shape[dim]:
        return 0
    threads = 256 if x.itemsize >= _LONG_BYTES else 512
    return kind.rounded(min(kind.multiprocessors, _ceil_div(x.numel(), threads * _SCAN_ITEMS)) * x.itemsize)


KERNEL_WORKSPACES: Workspaces = MappingProxyType(
    {
        _aten._scaled_dot_product_flash_attention.default: flash_forward_bytes,
        _aten._scaled_dot_product_flash_attention_backward.default: flash_backward_bytes,
        _aten.sort.stable: sort_bytes,
        _aten.index_add_.default: index_add_bytes,
        _aten.index_copy_.default: index_copy_bytes,
        _aten.scatter_add_.default: scatter_add_bytes,
        _aten.cumsum_.default: cumsum_bytes,
        _aten.logsumexp.default: logsumexp_bytes,
        _aten.sum.default: _reduction(0, _accumulated),
        _aten.sum.dim_IntList: _reduction(1, _accumulated),
        _aten.mean.dim: _reduction(1, _accumulated),
        _aten.amax.default: _reduction(1, _own),
        _aten.argmax.default: _reduction(1, _with_index),
        _aten.linalg_vector_norm.default: _reduction(2, _accumulated),
    }
)
"""What operators take inside on CUDA; see the module."""


def workspaces(kind: DeviceKind) -> Workspaces:
    """Return what operators take inside on a kind of device; nothing is counted where that is a CPU."""
    return KERNEL_WORKSPACES if kind.name == "cuda" else {}
