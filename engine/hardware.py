"""Hardware profiles: what a stage's cost means in seconds.

The model is a price list. Every kind of work in a `Cost` has a rate, every operator and every stage a fixed price, and
the time of a stage is their sum: kernels run one after another, each limited by arithmetic or by memory. Small matrix
products are slow without further ado, since the weights that they read are traffic: R rows reach half of the peak
where R = flops_per_s * item_bytes / (2 * weight_bytes_per_s). That rate is below the memory's where a library packs
weights anew for every product, as those for CPUs do. Transfers between tiers take bytes over bandwidth and a price for
each piece; of what a stage transfers while it computes, the part ``overlap`` is hidden. An array on the disk is made
before its first piece and removed in the end, which has a price of its own. A whole Value that is copied to the device
or the host takes memory there anew, which has a rate of its own, too: on a CPU that of page faults. Files that a stage
reads by itself cross disk and link as pieces do; those that it writes are durable before it ends, at a rate of its own.

The sum makes times monotone (more work never takes less) and rates measurable: a least-squares fit of stages that
were run gives them (`engine.calibrate`). Rates are those that programs reach, in the dtype that is usual on the
machine (bfloat16 on accelerators, float32 on a CPU). A profile is a JSON object with the field names of
`HardwareProfile`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypeVar

import numpy.typing as npt

from engine.budget import Tier
from engine.device_kind import CPU, DeviceKind, cuda_kind
from engine.errors import UsageError
from engine.plan import Cost
from engine.units import LARGEST_BYTES, shortened

Amount = TypeVar("Amount", float, npt.NDArray[Any])

_SLOWEST, _FASTEST = 1.0, 1e21
# Of rates a second: less or more is a mistake, and the time of anything stays a finite number that can be read.
_LONGEST_S = 3600.0
# Of one operator, stage or piece. More is a mistake, and infinity none of these numbers.
_WHOLE_NUMBERS = {"multiprocessors": 10_000, "device_bytes": LARGEST_BYTES}
# Fields that are, from 0 to these.
_LONGEST_NAME = 255
# That of a file.


@dataclass(frozen=True, kw_only=True)
class HardwareProfile:
    """Rates per second, prices in seconds, and ``overlap``, a fraction.

    Attributes:
        device: torch's name of the device's type, ``cpu`` or ``cuda``.
        multiprocessors: of a device with CUDA.
        device_bytes: of a device's own memory: the budget where none is given; 0 where it has none.
        weight_bytes_per_s: of weights that matrix products read.
        kernel_s: price of an operator, ``stage_s`` of a stage.
        host_link_bytes_per_s: between device and host, in either direction.
        fresh_bytes_per_s: of memory that a copy takes anew, on the device or the host.
        copy_s: price of a piece that moves between device and host, ``file_s`` of one that moves to or from disk.
        array_s: price of an array that comes to be on the disk, and goes: a tensor of a Value with its home there.
        saved_bytes_per_s: of files that stages write themselves, with all that makes them durable.
        overlap: how much of the shorter of compute and transfer is hidden behind the longer, from 0 to 1.
    """

    name: str
    device: str = CPU.name
    multiprocessors: int = 0
    device_bytes: int = 0
    flops_per_s: float
    attention_flops_per_s: float
    attention_backward_flops_per_s: float
    attention_scores_per_s: float
    memory_bytes_per_s: float
    weight_bytes_per_s: float
    kernel_s: float
    stage_s: float
    host_link_bytes_per_s: float
    fresh_bytes_per_s: float
    copy_s: float
    disk_read_bytes_per_s: float
    disk_write_bytes_per_s: float
    file_s: float
    array_s: float
    saved_bytes_per_s: float
    overlap: float

    @property
    def kind(self) -> DeviceKind:
        """The kind of device that the profile is of."""
        return CPU if self.device == CPU.name else cuda_kind(self.multiprocessors)

    def prices(self) -> dict[str, float]:
        """Return the seconds of one unit of every kind of `Cost`."""
        return {
            "flops": 1.0 / self.flops_per_s,
            "attention_flops": 1.0 / self.attention_flops_per_s,
            "attention_backward_flops": 1.0 / self.attention_backward_flops_per_s,
            "attention_scores": 1.0 / self.attention_scores_per_s,
            "moved_bytes": 1.0 / self.memory_bytes_per_s,
            "weight_bytes": 1.0 / self.weight_bytes_per_s,
            "read_bytes": 1.0 / self.disk_read_bytes_per_s + 1.0 / self.host_link_bytes_per_s,
            "written_bytes": 1.0 / self.saved_bytes_per_s,
            "num_kernels": self.kernel_s,
        }

    def seconds(self, cost: Cost) -> float:
        """Return the time of a stage of this cost, without transfers."""
        prices = self.prices()
        return self.stage_s + sum(number * prices[kind] for kind, number in cost.by_kind().items())

    def transfer_s(self, source: Tier, target: Tier, nbytes: Amount, num_pieces: Amount) -> Amount:
        """Return the time that ``nbytes`` in ``num_pieces`` pieces take from one tier to another; of arrays, each."""
        seconds = 0.0 * nbytes
        if Tier.DEVICE in (source, target):
            seconds = seconds + nbytes / self.host_link_bytes_per_s + num_pieces * self.copy_s
        if source is Tier.DISK:
            seconds = seconds + nbytes / self.disk_read_bytes_per_s + num_pieces * self.file_s
        if target is Tier.DISK:
            seconds = seconds + nbytes / self.disk_write_bytes_per_s + num_pieces * self.file_s
        return seconds

    def together_s(self, compute_s: float, hidden_s: float, waited_s: float) -> float:
        """Return the time of a stage: compute, transfers hidden behind it as far as can be, transfers it waits for."""
        return max(compute_s, hidden_s) + (1.0 - self.overlap) * min(compute_s, hidden_s) + waited_s

    def to_json(self) -> str:
        """Return the text of a hardware file, which `load_profile` reads."""
        return json.dumps(asdict(self), indent=2) + "\n"


_MATMUL, _ATTENTION, _ATTENTION_BACKWARD, _MEMORY, _LINK = 0.7, 0.65, 0.5, 0.8, 0.8
# Fractions of the vendor's peak that good kernels reach on large operands: assumptions, not measured. FlashAttention-3
# (arXiv 2407.08608) reports 0.75 of an H100's peak in its forward at best, 0.5 to 0.6 in its backward.
_OPERATOR_S = 1e-5
# An operator dispatched from Python by eager PyTorch: a few microseconds, and as many for counting its bytes.
_ARRAY_S = 1e-3
# Declared and removed with its files on a local file system, mostly in calls of the operating system: 1 to 2 ms on the
# machine of the cpu profile, and nothing about accelerators.
_EXPONENTIALS_A_CYCLE = 16
# Of a multiprocessor, on every architecture below (CUDA C++ Programming Guide, arithmetic instructions).


def _accelerator(
    name: str, *, peak_flops_per_s: float, memory_gb: int, memory_bytes_per_s: float, link_bytes_per_s: float,
    multiprocessors: int, clock_hz: float,
) -> HardwareProfile:  # fmt: skip
    """Return the profile of a GPU from data-sheet figures: dense bfloat16, one direction of the link, boost clock."""
    return HardwareProfile(
        name=name,
        device="cuda",
        multiprocessors=multiprocessors,
        device_bytes=memory_gb * 10**9,
        flops_per_s=_MATMUL * peak_flops_per_s,
        attention_flops_per_s=_ATTENTION * peak_flops_per_s,
        attention_backward_flops_per_s=_ATTENTION_BACKWARD * peak_flops_per_s,
        attention_scores_per_s=_EXPONENTIALS_A_CYCLE * multiprocessors * clock_hz,
        memory_bytes_per_s=_MEMORY * memory_bytes_per_s,
        weight_bytes_per_s=_MEMORY * memory_bytes_per_s,
        kernel_s=_OPERATOR_S,
        stage_s=5e-4,
        host_link_bytes_per_s=_LINK * link_bytes_per_s,
        fresh_bytes_per_s=_MEMORY * memory_bytes_per_s,
        copy_s=2e-5,
        disk_read_bytes_per_s=5e9,  # assumed: one good NVMe drive
        disk_write_bytes_per_s=3e9,
        file_s=2e-4,
        array_s=_ARRAY_S,
        saved_bytes_per_s=1e9,
        overlap=0.9,  # copy engines work beside the multiprocessors, and share their memory's bandwidth
    )


PROFILES = {
    profile.name: profile
    for profile in (
        # Two server cores, float32: rounded from what engine calibrate measured on an AMD EPYC (Zen 4), a virtual
        # machine, with files in the operating system's cache.
        HardwareProfile(
            name="cpu", flops_per_s=1.5e11, attention_flops_per_s=1.6e11, attention_backward_flops_per_s=2.5e11,
            attention_scores_per_s=4e9, memory_bytes_per_s=1e10, weight_bytes_per_s=8e9, kernel_s=1.1e-5, stage_s=6e-4,
            host_link_bytes_per_s=1.8e10, fresh_bytes_per_s=2e9, copy_s=2.7e-5, disk_read_bytes_per_s=1e10,
            disk_write_bytes_per_s=4e9, file_s=5e-5, array_s=_ARRAY_S, saved_bytes_per_s=5e8, overlap=0.5,
        ),
        # NVIDIA A100 80GB data sheet: 312 TFLOP/s, 2,039 GB/s, PCIe 4.0 x16 (32 GB/s a direction).
        _accelerator(
            "a100-sxm", peak_flops_per_s=3.12e14, memory_gb=80, memory_bytes_per_s=2.039e12, link_bytes_per_s=3.2e10,
            multiprocessors=108, clock_hz=1.41e9,
        ),
        # NVIDIA Ada GPU architecture whitepaper, appendix A: 165.2 TFLOP/s accumulated in float32, 24 GB,
        # 1,008 GB/s.
        _accelerator(
            "rtx-4090", peak_flops_per_s=1.652e14, memory_gb=24, memory_bytes_per_s=1.008e12, link_bytes_per_s=3.2e10,
            multiprocessors=128, clock_hz=2.52e9,
        ),
        # NVIDIA H20 as resellers list it (no public data sheet): 148 TFLOP/s, 96 GB, 4.0 TB/s, PCIe 5.0
        # x16, 78 SMs.
        _accelerator(
            "h20", peak_flops_per_s=1.48e14, memory_gb=96, memory_bytes_per_s=4.0e12, link_bytes_per_s=6.4e10,
            multiprocessors=78, clock_hz=1.98e9,
        ),
        # NVIDIA H100 SXM data sheet: 989 TFLOP/s, 80 GB, 3.35 TB/s, PCIe 5.0 x16 (64 GB/s a direction).
        _accelerator(
            "h100-sxm", peak_flops_per_s=9.89e14, memory_gb=80, memory_bytes_per_s=3.35e12, link_bytes_per_s=6.4e10,
            multiprocessors=132, clock_hz=1.83e9,
        ),
        # NVIDIA H200 data sheet: as H100, 141 GB, 4.8 TB/s.
        _accelerator(
            "h200-sxm", peak_flops_per_s=9.89e14, memory_gb=141, memory_bytes_per_s=4.8e12, link_bytes_per_s=6.4e10,
            multiprocessors=132, clock_hz=1.83e9,
        ),
    )
}  # fmt: skip


def load_profile(name: str) -> HardwareProfile:
    """Return a built-in profile, or one read from a JSON file.

    Raises:
        UsageError: no such profile or file, or the file lacks a field, has an unknown one or a number out of its range.
    """
    if name in PROFILES:
        return PROFILES[name]
    path = Path(name)
    if not os.path.isfile(path):  # also False for what can't be a path
        known = ", ".join(sorted(PROFILES))
        raise UsageError(f"no hardware profile {shortened(name)!r}; known: {known}, or give a JSON file")
    data = _parsed(path)
    _check_fields(path, data)
    return HardwareProfile(**data)


def _parsed(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"hardware profile {path} can't be read: {error.strerror}") from error
    except RecursionError as error:
        raise UsageError(f"hardware profile {path} is JSON that is nested too deeply") from error
    except ValueError as error:
        raise UsageError(f"hardware profile {path} is not JSON: {error}") from error


def _check_fields(path: Path, data: object) -> None:
    names = {item.name for item in fields(HardwareProfile)}
    needed = {item.name for item in fields(HardwareProfile) if item.default is MISSING}
    if not isinstance(data, Mapping):
        raise UsageError(f"hardware profile {path} must be one JSON object with the fields {', '.join(sorted(names))}")
    missing, unknown = sorted(needed - set(data)), sorted(set(data) - names)
    if missing or unknown:
        raise UsageError(
            f"hardware profile {path}: missing fields: {', '.join(missing) or 'none'}; unknown fields: "
            f"{shortened(', '.join(map(ascii, unknown))) or 'none'}; engine calibrate writes a whole one"
        )
    bad = [f"{key!r}: {_shown(value)}" for key, value in data.items() if not _in_range(key, value)]
    if bad:
        raise UsageError(
            f"hardware profile {path}: out of range: {{{', '.join(bad)}}}; name is a line of text, device is cpu or "
            f"cuda, {' and '.join(_WHOLE_NUMBERS)} are whole numbers of at least 0, rates (..._per_s) are numbers "
            f"from {_SLOWEST:g} to {_FASTEST:g}, seconds (..._s) from 0 to {_LONGEST_S:g}, overlap is from 0 to 1"
        )


def _shown(value: object) -> str:
    return shortened(repr(value)) if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"


def _in_range(key: str, value: object) -> bool:
    if key == "name":
        return isinstance(value, str) and value.isprintable() and len(value) <= _LONGEST_NAME
    if key == "device":
        return value in ("cpu", "cuda")
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    if key in _WHOLE_NUMBERS:
        return isinstance(value, int) and 0 <= value <= _WHOLE_NUMBERS[key]
    if key.endswith("_per_s"):
        return _SLOWEST <= value <= _FASTEST
    return 0 <= value <= (1 if key == "overlap" else _LONGEST_S)
