"""The device that stages run on, as the machine uses it: memory for tensors, and copies between it and the host.

A copy is complete when its call returns, and may be done by a thread of its own. What the device still has to do by
then with the memory it touches was asked for by the stage's thread: that takes a *moment* first, which the copy waits
for.

On a CPU both tiers are memory of the process: a copy is numpy's, which neither allocates tensors nor starts threads,
and disk files are read into the device's memory itself. With CUDA, copies go through a stream of their own, beside the
stage's; host tensors of some size are page-locked, so that they do; and files pass a *bounce buffer*. What a stage
writes row by row to the host (`engine.context.StageContext.write_rows`) goes on the stage's own stream, which waits.
Nothing here has run on a GPU.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import AbstractContextManager, contextmanager
from threading import Lock
from typing import Any, Protocol
from weakref import finalize

import numpy as np
import torch

from engine.device_kind import CPU, CUBLAS_WORKSPACE_CONFIG, DeviceKind, cuda_kind
from engine.errors import EngineError, UsageError
from engine.memory import DEVICE, HOST, LiveBytes
from engine.tensors import as_numpy
from engine.units import MIB, format_bytes

Moment = Any
"""A point in what a device has been asked to do; None where it does everything at once."""

LOCKED_BYTES = 32 * MIB
# Host tensors of this size and more are page-locked: they are mapped each by itself (`engine.memory`), so that no page
# has anything else in it.
ALLOCATOR_SETTINGS = "expandable_segments:True"
SEGMENT_BYTES, _FRAGMENTED = 22 * MIB, 0.05
# Allowances of the cap, which is on what the allocator has reserved: it maps 2 MiB at a time for small tensors and 20
# MiB for large ones (PyTorch, CUDACachingAllocator: ``kSmallBuffer``, ``kLargeBuffer``), and there may be holes between
# what is allocated, for which a share of the budget is a guess.
_CUBLAS_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_LEAST_CAPABILITY = (8, 0)
# That of FlashAttention, which plans count on.

_PROFILES = {"H200": "h200-sxm", "H100": "h100-sxm", "H20": "h20", "A100": "a100-sxm", "4090": "rtx-4090"}
# Built-in hardware profiles by a part of the device's name, as the driver says it.


class Device(Protocol):
    """What a machine asks of its device."""

    torch_device: torch.device
    kind: DeviceKind

    def meter(self) -> LiveBytes:
        """Return a new counter of the bytes that are live on the device and the host."""

    @property
    def profile(self) -> str:
        """The name of the hardware profile that is nearest to it."""

    def free_bytes(self) -> int | None:
        """Return what is free of the device's own memory; None if it has none."""

    @property
    def name(self) -> str:
        """What the device calls itself; bits are the same on devices of one name."""

    def cap(self, nbytes: int | None) -> None:
        """Have allocations far beyond ``nbytes`` in all fail, where the device can; None lifts that."""

    def moment(self) -> Moment:
        """Return what all that was asked for so far is done at."""

    def finish(self) -> None:
        """Wait until all that was asked for is done, and raise what went wrong with it."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Moment) -> None:
        """Copy between device and host, after a moment."""

    def fill_zero(self, target: torch.Tensor, after: Moment) -> None:
        """Make a tensor of the device zero, after a moment."""

    def filling(self, target: torch.Tensor, after: Moment) -> AbstractContextManager[torch.Tensor]:
        """Yield memory of the CPU; what it holds in the end is what ``target`` does."""

    def reading(self, source: torch.Tensor, after: Moment) -> AbstractContextManager[torch.Tensor]:
        """Yield memory of the CPU that holds what ``source`` does."""

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a new tensor of the host's, not filled."""

    def reserve_bounce(self, nbytes: int) -> None:
        """Make the bounce buffer, for pieces of up to ``nbytes``, where the device needs one."""


class CpuDevice:
    """A device in the process's own memory; also torch's ``meta``, on which nothing is copied."""

    kind, profile, name = CPU, "cpu", CPU.name

    def __init__(self, name: str = CPU.name) -> None:
        self.torch_device = torch.device(name)

    def meter(self) -> LiveBytes:
        return LiveBytes()

    def free_bytes(self) -> int | None:
        return None

    def cap(self, nbytes: int | None) -> None:
        """Nothing to do: the counter of bytes is what stops a stage."""

    def moment(self) -> Moment:
        return None

    def finish(self) -> None:
        """Nothing to do: everything is done at once."""

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Moment) -> None:
        np.copyto(as_numpy(target), as_numpy(source))

    def fill_zero(self, target: torch.Tensor, after: Moment) -> None:
        as_numpy(target).fill(0)

    @contextmanager
    def filling(self, target: torch.Tensor, after: Moment) -> Iterator[torch.Tensor]:
        yield target

    @contextmanager
    def reading(self, source: torch.Tensor, after: Moment) -> Iterator[torch.Tensor]:
        yield source

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype)

    def reserve_bounce(self, nbytes: int) -> None:
        """Nothing to do: files are read into the device's memory."""


class Bouncing(ABC):
    """A device whose memory the CPU can't touch, so that files pass a buffer on their way to it and back."""

    def __init__(self) -> None:
        self._bounce: torch.Tensor | None = None
        self._bounce_lock = Lock()

    @abstractmethod
    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Moment) -> None: ...

    @abstractmethod
    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor: ...

    def is_far(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is in the device's memory."""
        return tensor.device.type != CPU.name

    def reserve_bounce(self, nbytes: int) -> None:
        self._bounce = self.host_tensor((nbytes,), torch.uint8)

    def _bounce_for(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the bounce buffer's first bytes in the shape and dtype of ``tensor``."""
        if self._bounce is None or self._bounce.nbytes < tensor.nbytes:
            raise ValueError(f"a piece of {tensor.nbytes} bytes does not fit the bounce buffer")
        return self._bounce[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    @contextmanager
    def filling(self, target: torch.Tensor, after: Moment) -> Iterator[torch.Tensor]:
        if not self.is_far(target):
            yield target
            return
        with self._bounce_lock:
            memory = self._bounce_for(target)
            yield memory
            self.copy(target, memory, after)

    @contextmanager
    def reading(self, source: torch.Tensor, after: Moment) -> Iterator[torch.Tensor]:
        if not self.is_far(source):
            yield source
            return
        with self._bounce_lock:
            memory = self._bounce_for(source)
            self.copy(memory, source, after)
            yield memory


class CudaDevice(Bouncing):
    """The current CUDA device, set up so that the same work gives the same bits, and memory is as `DeviceKind` says."""

    def __init__(self) -> None:
        super().__init__()
        _set_up_cuda()
        self.torch_device = torch.device("cuda", torch.cuda.current_device())
        if (capability := torch.cuda.get_device_capability(self.torch_device)) < _LEAST_CAPABILITY:
            raise UsageError(
                f"{self.name} has compute capability {capability[0]}.{capability[1]}, and plans are made for 8.0 and "
                "newer; run with --device cpu"
            )
        self.kind = cuda_kind(torch.cuda.get_device_properties(self.torch_device).multi_processor_count)
        self._copies = torch.cuda.Stream(self.torch_device)

    def meter(self) -> LiveBytes:
        return CudaBytes()

    @property
    def name(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    @property
    def profile(self) -> str:
        """See `Device`; that of an H100 for one that has none of its own."""
        name = self.name.upper()
        return next((profile for part, profile in _PROFILES.items() if part in name), "h100-sxm")

    def free_bytes(self) -> int | None:
        return torch.cuda.mem_get_info(self.torch_device)[0]

    def cap(self, nbytes: int | None) -> None:
        total = torch.cuda.get_device_properties(self.torch_device).total_memory
        most = total if nbytes is None else nbytes * (1 + _FRAGMENTED) + SEGMENT_BYTES
        torch.cuda.set_per_process_memory_fraction(min(1.0, most / total), self.torch_device)

    def moment(self) -> Moment:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.torch_device))
        return event

    def finish(self) -> None:
        torch.cuda.synchronize(self.torch_device)

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Moment) -> None:
        self._beside(after, lambda: target.copy_(source, non_blocking=True))

    def fill_zero(self, target: torch.Tensor, after: Moment) -> None:
        self._beside(after, target.zero_)

    def _beside(self, after: Moment, work: Callable[[], object]) -> None:
        """Do ``work`` in the stream of copies after a moment, and wait until it is done."""
        with torch.cuda.stream(self._copies):
            self._copies.wait_event(after)
            work()
        done = torch.cuda.Event()
        done.record(self._copies)
        done.synchronize()

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        if tensor.nbytes >= LOCKED_BYTES:
            _lock_pages(tensor)
        return tensor


def _set_up_cuda() -> None:
    """Ask for deterministic kernels in full precision, and for an allocator whose blocks are as large as asked for."""
    if os.environ.setdefault(_CUBLAS_VARIABLE, CUBLAS_WORKSPACE_CONFIG) != CUBLAS_WORKSPACE_CONFIG:
        raise UsageError(
            f"{_CUBLAS_VARIABLE} is {os.environ[_CUBLAS_VARIABLE]!r} in the environment, but plans count on "
            f"{CUBLAS_WORKSPACE_CONFIG!r}; unset it"
        )
    torch._C._accelerator_setAllocatorSettings(ALLOCATOR_SETTINGS)
    torch.use_deterministic_algorithms(True, warn_only=True)  # a warning names what has none (see `models.kernels`)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False


def _lock_pages(tensor: torch.Tensor) -> None:
    """Page-lock a tensor's memory until it is freed.

    (torch's own pinned tensors are rounded to a power of two, which no budget of the host could be kept with.)

    Raises:
        EngineError: the driver refuses.
    """
    runtime, address = torch.cuda.cudart(), tensor.data_ptr()
    if (code := int(runtime.cudaHostRegister(address, tensor.nbytes, 0))) != 0:
        raise EngineError(
            f"the CUDA driver refuses to page-lock {format_bytes(tensor.nbytes)} of the host (error {code}); give "
            "less --budget host"
        )
    finalize(tensor.untyped_storage(), runtime.cudaHostUnregister, address)


class _WithAllocator(MutableMapping[str, int]):
    """Bytes by tier: those of the device are what the allocator says, whatever they are set to."""

    def __init__(self, counted: Mapping[str, int], allocator: Callable[[], int]) -> None:
        self._counted, self._allocator = dict(counted), allocator

    def __getitem__(self, tier: str) -> int:
        return self._allocator() if tier == DEVICE else self._counted[tier]

    def __setitem__(self, tier: str, nbytes: int) -> None:
        self._counted[tier] = nbytes

    def __delitem__(self, tier: str) -> None:
        del self._counted[tier]

    def __iter__(self) -> Iterator[str]:
        return iter(self._counted)

    def __len__(self) -> int:
        return len(self._counted)


class CudaBytes(LiveBytes):
    """Counts the device's bytes by CUDA's caching allocator, with what kernels take inside, and the host's as ever.

    The allocator's figures are those of the whole process.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = _WithAllocator(self.live, torch.cuda.memory_allocated)
        self.peak = _WithAllocator(self.peak, torch.cuda.max_memory_allocated)

    def _see(self, tensor: torch.Tensor) -> None:
        if tensor.device.type == CPU.name and self._tier != DEVICE:
            super()._see(tensor)

    def restart_peak(self) -> None:
        """Forget the peak so far: it starts again from what is live now."""
        torch.cuda.reset_peak_memory_stats()
        self.peak[HOST] = self.live[HOST]


def open_device(name: str | None) -> Device:
    """Return the device of that name, ``cpu`` or ``cuda``; with None a CUDA device if there is one.

    Raises:
        UsageError: there is none of that name, or one that plans can't be made for.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise UsageError("there is no CUDA device here, or this torch is built without CUDA; leave out --device cuda")
    return CudaDevice() if has_cuda and name != CPU.name else CpuDevice()
