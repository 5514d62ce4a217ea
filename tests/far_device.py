"""A device whose memory the CPU must not touch, in the CPU's memory: what a GPU is to the machine, as far as can be.

It has an allocator that rounds, libraries that keep memory, a bounce buffer, and moments. It refuses copies that a GPU
could not do: within one side, before their moment, or by numpy in its own memory.
"""

from __future__ import annotations

from itertools import count
from weakref import finalize

import torch

from engine.device import Bouncing, Moment
from engine.device_kind import DeviceKind
from engine.memory import LiveBytes

FAR = DeviceKind(name="cpu", unit_bytes=64, kept_bytes=16384, bounces=True)


class FarDevice(Bouncing):
    """See the module's text. ``num_copies`` are those between the two sides."""

    kind, profile, name = FAR, "cpu", "far"

    def __init__(self) -> None:
        super().__init__()
        self.torch_device = torch.device("cpu")
        self.caps: list[int | None] = []
        self.num_copies = self.num_finished = 0
        self._moments = count()
        self._last_moment = -1
        self._near: set[int] = set()

    def meter(self) -> LiveBytes:
        return LiveBytes(kind=FAR)

    def free_bytes(self) -> int | None:
        return None

    def cap(self, nbytes: int | None) -> None:
        self.caps.append(nbytes)

    def moment(self) -> Moment:
        self._last_moment = next(self._moments)
        return self._last_moment

    def finish(self) -> None:
        self.num_finished += 1

    def copy(self, target: torch.Tensor, source: torch.Tensor, after: Moment) -> None:
        assert self.is_far(target) != self.is_far(source), "a copy between the sides has one on each"
        assert 0 <= after <= self._last_moment, "a copy has to wait for what was asked for before"
        assert (target.shape, target.dtype) == (source.shape, source.dtype)
        target.copy_(source)
        self.num_copies += 1

    def fill_zero(self, target: torch.Tensor, after: Moment) -> None:
        assert 0 <= after <= self._last_moment
        target.zero_()

    def host_tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(shape, dtype=dtype)
        address = tensor.untyped_storage().data_ptr()
        self._near.add(address)
        finalize(tensor.untyped_storage(), self._near.discard, address)
        return tensor

    def is_far(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() not in self._near
