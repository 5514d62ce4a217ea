"""Bytes of live tensors, counted as they come and go.

Nouns: a *storage* is what a tensor's bytes live in; views share one. `LiveBytes` is a dispatch mode: it sees
every operator's outputs, counts each storage once when it first appears and uncounts it when it dies.

Invariant: ``live[tier]`` is the sum of the sizes of the storages that are alive and were first seen on that tier.
On a machine without accelerator the device tier is every storage that was not allocated inside ``on_host()``;
bytes that kernels and libraries allocate inside one operator are not seen. The same class works on tensors
of the meta device, which is how a stage's workspace is known before it runs. There it can count as another kind of
device would: sizes as its allocator rounds them, and what its kernels take inside, from a table.
"""

from __future__ import annotations

import ctypes
import os
import resource
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from engine.device_kind import CPU, DeviceKind
from engine.units import MIB

DEVICE, HOST = "device", "host"

Workspaces = Mapping[Any, Callable[[tuple[Any, ...], dict[str, Any], DeviceKind], int]]
"""Maps operators (torch's OpOverload) to a function of a call's arguments that returns the bytes it takes inside."""

MMAP_THRESHOLD_BYTES = 32 * MIB
# Smaller blocks stay in the heap when they are freed, and larger ones are mapped and unmapped each by itself. A block
# that is mapped anew is paid for in page faults: with a threshold of 1 MiB a layer's arithmetic takes a fifth longer.
_M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -3, -1


class _Entry:
    """A storage that is counted: where, and with how many bytes."""

    __slots__ = ("nbytes", "storage", "tier")

    def __init__(self, tier: str) -> None:
        self.tier, self.nbytes = tier, 0
        self.storage: weakref.ref[torch.UntypedStorage] | None = None


class LiveBytes(TorchDispatchMode):
    """Dispatch mode that counts the bytes of live tensor storages per tier, and their peak.

    ``live`` and ``peak`` map a tier's name to bytes. ``adopt`` counts tensors that were made elsewhere (in another
    thread, or before the mode was entered).

    ``kind`` is the kind of device whose allocator is imitated: a storage on the device tier counts as what it takes
    there. ``inside`` says what operators take inside: after one, the peak is raised by that, beside what it was given
    and what it returned.
    """

    def __init__(self, *, kind: DeviceKind = CPU, inside: Workspaces | None = None) -> None:
        super().__init__()
        self._kind, self._inside, self._is_rounded = kind, inside, kind.unit_bytes > 1
        self.live: MutableMapping[str, int] = {DEVICE: 0, HOST: 0}
        self.peak: MutableMapping[str, int] = {DEVICE: 0, HOST: 0}
        self._tier = DEVICE
        self._known: dict[int, _Entry] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Tell torch not to wrap the handler against being compiled, which takes longer than the handler itself."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            self._see(result)
        elif isinstance(result, tuple | list):
            for item in result:
                if isinstance(item, torch.Tensor):
                    self._see(item)
        if self._inside:
            self._see_inside(func, args, kwargs or {})
        return result

    def _see_inside(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        taken = (self._inside or {}).get(func)
        if taken is not None and self._tier == DEVICE:
            self.bump(taken(args, kwargs, self._kind))

    def _see(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        key, nbytes = storage._cdata, storage.nbytes()
        entry = self._known.get(key)
        if entry is None:
            entry = self._known[key] = _Entry(self._tier)
            entry.storage = weakref.ref(storage, self._forgetter(key, entry))
        if self._is_rounded and entry.tier == DEVICE:
            nbytes = self._kind.rounded(nbytes)
        if entry.nbytes != nbytes:  # new, or resized in place
            self.live[entry.tier] += nbytes - entry.nbytes
            entry.nbytes = nbytes
            self.peak[entry.tier] = max(self.peak[entry.tier], self.live[entry.tier])

    def _forgetter(self, key: int, entry: _Entry) -> Callable[[object], None]:
        live, known = self.live, self._known

        def forget(_: object) -> None:
            live[entry.tier] -= entry.nbytes
            known.pop(key, None)

        return forget

    def adopt(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count ``tensors`` on the device tier, unless they are known."""
        for tensor in tensors:
            self._see(tensor)

    @contextmanager
    def on_host(self) -> Iterator[None]:
        """Storages that first appear inside belong to the host tier."""
        before, self._tier = self._tier, HOST
        try:
            yield
        finally:
            self._tier = before

    def restart_peak(self) -> None:
        """Forget the peak so far: it starts again from what is live now."""
        self.peak = dict(self.live)

    def bump(self, nbytes: int, tier: str = DEVICE) -> None:
        """Raise the peak as if ``nbytes`` more had been live for a moment."""
        self.peak[tier] = max(self.peak[tier], self.live[tier] + nbytes)


def keep_freed_memory() -> bool:
    """Make the C allocator keep freed blocks until `return_freed_memory`; False where that can't be set (no glibc)."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
        mallopt.argtypes = [ctypes.c_int, ctypes.c_long]
        return bool(mallopt(_M_MMAP_THRESHOLD, MMAP_THRESHOLD_BYTES)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
    except (OSError, AttributeError):
        return False


def return_freed_memory() -> None:
    """Give pages of freed blocks back to the operating system, so that the resident set is what is alive."""
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


def peak_rss_bytes() -> int:
    """Return the largest resident set of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def rss_bytes() -> int:
    """Return the resident set of this process now, in some 10 us; the page cache is not in it.

    Where there is no /proc, return the largest so far.
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return peak_rss_bytes()
