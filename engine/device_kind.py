"""What planning has to know of the memory of a device: how much an allocation takes, and what kernels take inside.

On a CPU a tensor takes its bytes, and what kernels take inside is not counted (`engine.memory`). CUDA's caching
allocator hands out blocks of 512 bytes (PyTorch, c10/cuda/CUDACachingAllocator: ``kMinBlockSize``), never split more
coarsely with expandable segments, which the runtime asks for. Kernels take their workspaces from it, too: those that
stay for the life of the process are ``kept_bytes``, what a kernel takes for itself depends on its operands and on the
number of multiprocessors (`models.workspaces`).

A plan is made for one kind of device, since its stages' workspaces are those there. While a plan file runs, that is
`planned_kind`.

This module is pure: no I/O, no clock, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

CUDA_BLOCK_BYTES = 512
CUBLAS_WORKSPACE_CONFIG = ":4096:8"
CUBLAS_WORKSPACE_BYTES = 8 * 4096 * 1024
# Eight buffers of 4,096 KiB: one of the two settings with which cuBLAS gives the same bits every time (cuBLAS
# documentation, section "Results Reproducibility"). PyTorch takes them from its allocator at the first product.
CUBLAS_WORKSPACES = 2
# Each thread has a handle of its own, and autograd does the backward of a device in a thread of its own.

SMALL_TENSORS_BYTES = 1024 * 1024
# Room for what small tensors are rounded up by where a stage's workspace is a formula or what its author declared, and
# for temporary memory of kernels that no table has: two thousand blocks.


@dataclass(frozen=True, kw_only=True)
class DeviceKind:
    """A kind of device.

    Attributes:
        name: torch's name of the device's type.
        unit_bytes: an allocation takes a multiple of this.
        kept_bytes: what is added to every stage's workspace: what libraries keep allocated once they have run, and
            room for what can't be known to a byte.
        multiprocessors: how many there are; decides the workspace of some kernels.
        bounces: whether the CPU can't touch its memory, so that files pass a second buffer of the host's.
    """

    name: str
    unit_bytes: int = 1
    kept_bytes: int = 0
    multiprocessors: int = 0
    bounces: bool = False

    def rounded(self, nbytes: int) -> int:
        """Return the bytes that an allocation of ``nbytes`` takes."""
        return -(-nbytes // self.unit_bytes) * self.unit_bytes


CPU = DeviceKind(name="cpu")


def cuda_kind(multiprocessors: int) -> DeviceKind:
    """Return the kind of a CUDA device with so many multiprocessors."""
    return DeviceKind(
        name="cuda",
        unit_bytes=CUDA_BLOCK_BYTES,
        kept_bytes=CUBLAS_WORKSPACES * CUBLAS_WORKSPACE_BYTES + SMALL_TENSORS_BYTES,
        multiprocessors=multiprocessors,
        bounces=True,
    )


_planned: ContextVar[DeviceKind] = ContextVar("planned kind of device", default=CPU)


def planned_kind() -> DeviceKind:
    """Return the kind of device that plans are made for now: a CPU, unless `planning_for` says otherwise."""
    return _planned.get()


@contextmanager
def planning_for(kind: DeviceKind) -> Iterator[None]:
    """Make plans that are built within for a kind of device."""
    token = _planned.set(kind)
    try:
        yield
    finally:
        _planned.reset(token)
