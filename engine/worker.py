"""The real machine: carries out instructions with torch tensors.

Nouns: *Held* is what exists of a Value on one tier: tensors on device or host, chunks of zarr arrays on disk, or an
object with its tensors for Values that a stage provides. A Value has a home, a copy on the device, or both
(`engine.placement`). `StageContext` is what a stage's function sees.

Invariants: a piece (slice along the first axis) that was never written reads as zero, on every tier; a stage cannot
tell where a streamed Value lives; copies between tiers are real copies. On disk, a piece is one chunk file of a zarr
array; its checksum is kept by the store.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.budget import Tier
from engine.context import StageContext
from engine.device import CpuDevice, Device, Moment
from engine.errors import EngineError, RunDirectoryError, StageFailedError, UnsupportedModelError, one_line
from engine.full_disk import what_to_do
from engine.memory import LiveBytes
from engine.origin import at, error_origin
from engine.plan import Plan, Stage, TensorSpec, Value
from engine.store import Store
from engine.tensors import as_numpy, as_rows, chunk_index, piece_of, torch_dtype

COPIES_THREAD_NAME = "longstraw copies"

Taps = Mapping[str, Sequence[tuple[Callable[..., None], str]]]
"""What is called with the context and a path after a stage, by the stage's name."""
Announce = Callable[[str, int, int], None]
"""Is told path, bytes and CRC32C of a file that is to be kept, before it is written."""


def _tell_nobody(path: str, nbytes: int, crc32c: int) -> None:
    """Announce a kept file where there is no run to keep it."""


@dataclass
class Held:
    """What exists of a Value; ``handed_over`` are the tensors of one that its stage provided."""

    tier: Tier
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    item: Any = None
    handed_over: tuple[torch.Tensor, ...] = ()
    written: set[tuple[str, int]] = field(default_factory=set)  # pieces that exist on disk


class TorchMachine:
    """Device, host and disk of one worker in this process.

    ``directory`` is the run directory's place for results; ``store`` holds the disk tier. ``device`` is the CPU unless
    given. ``taps`` are called after their stages, ``announce`` before a
    stage writes a file that is kept.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        meter: LiveBytes,
        store: Store | None,
        directory: Path | None,
        device: Device | None = None,
        taps: Taps | None = None,
        announce: Announce = _tell_nobody,
    ) -> None:
        self.plan, self.meter, self.store, self.directory = plan, meter, store, directory
        self.device: Device = CpuDevice() if device is None else device
        self.held: dict[str, Held] = {}  # what stages use: the copy on the device, or else the Value's home
        self._homes: dict[str, Held] = {}  # of Values that have a copy on the device as well
        self.results: dict[str, Any] = {}
        self.disk_peak_bytes = 0
        self.written: dict[str, dict[str, int]] = {}
        self.taps, self.announce = taps or {}, announce
        self._provided_disk_bytes = 0
        self._stage_disk_peak_bytes = 0
        self._staging: torch.Tensor | None = None
        self._alongside: list[Callable[[], None]] = []

    # Instructions

    def reserve(self, staging_bytes: int) -> None:
        with self.meter.on_host():
            nbytes = staging_bytes // (2 if self.device.kind.bounces else 1)
            self._staging = self.device.host_tensor((nbytes,), torch.uint8)
            self.device.reserve_bounce(nbytes)

    def create(self, value: Value, tier: Tier) -> None:
        self.held[value.name] = Held(tier) if value.provided else self._new(value, tier, zero=True)

    def copy(self, value: Value, source: Tier, target: Tier, *, alongside: bool) -> None:
        if target is Tier.DEVICE:
            home, copy = self.held[value.name], self._new(value, Tier.DEVICE)
            self._homes[value.name], self.held[value.name] = home, copy
            work = partial(self._fill, value, home, copy, self.device.moment())
        else:
            home = self._homes.get(value.name) or self._new(value, target)
            self._homes[value.name] = home
            work = partial(self._fill, value, self.held[value.name], home, self.device.moment())
        if alongside:
            self._alongside.append(work)
        else:
            work()
            self.note_disk()

    def _new(self, value: Value, tier: Tier, *, zero: bool = False) -> Held:
        """Make room for a Value on a tier; on the disk what was never written is zero in any case."""
        made = Held(tier)
        if tier is Tier.DISK:
            self._declare(value)
        else:
            made.tensors = {key: self._allocate(spec, tier) for key, spec in value.tensors.items()}
            if zero:
                for tensor in made.tensors.values():
                    tensor.zero_()
        return made

    def _fill(self, value: Value, source: Held, target: Held, after: Moment) -> None:
        """Copy all that a Value holds, without allocating a tensor: it may be done by a thread.

        Pieces that were never written to the disk are zero.
        """
        for key, spec in value.tensors.items():
            if Tier.DISK not in (source.tier, target.tier):
                self.device.copy(target.tensors[key], source.tensors[key], after)
                continue
            for index in range(spec.num_pieces):
                if target.tier is Tier.DISK:
                    self.write_piece(value.name, key, index, piece_of(source.tensors[key], spec, index), after)
                    target.written.add((key, index))
                else:
                    piece = piece_of(target.tensors[key], spec, index)
                    self.read_piece(value.name, key, index, piece, after, exists=(key, index) in source.written)

    @contextmanager
    def _copies_alongside(self) -> Iterator[None]:
        """Carry out the copies that were put off, in a thread, and wait for them at the end."""
        copies, self._alongside = self._alongside, []
        if not copies:
            yield
            return
        with ThreadPoolExecutor(1, thread_name_prefix=COPIES_THREAD_NAME) as executor:
            done = [executor.submit(copy) for copy in copies]
            yield
            for copy in done:
                copy.result()

    def run(self, stage: Stage, slots: int = 1) -> None:
        self._stage_disk_peak_bytes = self.disk_bytes  # what was there before, and is dropped now, is not the stage's
        try:
            with self._copies_alongside(), StageContext(self, stage, slots) as context:
                stage.run(context)
                for tap, path in self.taps.get(stage.name, ()):
                    tap(context, path)
                self.device.finish()  # so that a stage's time and failures are its own
            self.note_disk()  # with what copies alongside have written
        except (StageFailedError, RunDirectoryError, UnsupportedModelError):
            raise
        except EngineError as error:
            raise StageFailedError(f"stage {stage.name} failed: {error}{at(error_origin(error))}") from error
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # also what asyncio and others raise outside of Exception
            where = at(error_origin(error) or stage.origin)
            raise StageFailedError(f"stage {stage.name} failed: {one_line(error)}{what_to_do(error)}{where}") from error

    def drop(self, value: Value, tier: Tier) -> None:
        if value.name not in self._homes:
            del self.held[value.name]
        elif tier is Tier.DEVICE:
            self.held[value.name] = self._homes.pop(value.name)
        else:
            del self._homes[value.name]
        if value.provided:
            gc.collect()  # models are cyclic, and a budget can't wait for the collector
        elif tier is Tier.DISK:
            self.written.pop(value.name, None)
            self._forget(value)

    # Tiers

    def _allocate(self, spec: TensorSpec, tier: Tier) -> torch.Tensor:
        if tier is Tier.HOST:
            with self.meter.on_host():
                return self.device.host_tensor(spec.shape, torch_dtype(spec.dtype))
        return torch.empty(spec.shape, dtype=torch_dtype(spec.dtype), device=self.device.torch_device)

    @property
    def disk_bytes(self) -> int:
        """Bytes on disk now: chunks of the store, and files that stages wrote themselves."""
        return (self.store.nbytes if self.store is not None else 0) + self._provided_disk_bytes

    def note_disk(self, provided_bytes: int = 0) -> None:
        """Count files that a stage wrote itself, and raise the peak of the disk tier if need be."""
        self._provided_disk_bytes += provided_bytes
        self._stage_disk_peak_bytes = max(self._stage_disk_peak_bytes, self.disk_bytes)
        self.disk_peak_bytes = max(self.disk_peak_bytes, self.disk_bytes)

    @property
    def stage_disk_peak_bytes(self) -> int:
        """The most bytes that were on disk since the last stage began."""
        return self._stage_disk_peak_bytes

    def take_written(self) -> dict[str, dict[str, int]]:
        """Return the checksums of the chunks written to disk since the last call, by Value."""
        written, self.written = self.written, {}
        return written

    def sync(self, names: Iterable[str]) -> None:
        """Make Values that are on the disk durable there."""
        for name in names:
            for key in self.plan.values[name].tensors:
                self.disk().sync(f"{name}/{key}")

    def disk(self) -> Store:
        """Return the disk tier."""
        if self.store is None:
            raise EngineError("this run has no disk store, but its schedule uses the disk")
        return self.store

    def _declare(self, value: Value) -> None:
        for key, spec in value.tensors.items():
            half = spec.dtype == "bfloat16"
            self.disk().declare(
                f"{value.name}/{key}",
                shape=spec.shape or (1,),
                dtype="uint16" if half else spec.dtype,
                chunk_shape=(spec.piece_rows, *spec.shape[1:]),
                attributes={"torch_dtype": spec.dtype},
            )

    def _forget(self, value: Value) -> None:
        for key in value.tensors:
            self.disk().remove(f"{value.name}/{key}")

    def staging(self) -> torch.Tensor:
        """Return the bytes of the staging buffer."""
        if self._staging is None:
            raise EngineError("the schedule uses the disk but reserved no staging buffer")
        return self._staging

    def read_piece(self, name: str, key: str, index: int, piece: torch.Tensor, after: Moment, *, exists: bool) -> None:
        """Read a piece from its chunk; one that does ``not exist`` is zero. A thread may do so for stages."""
        if not exists:
            self.device.fill_zero(piece, after)
            return
        spec = self.plan.values[name].tensors[key]
        with self.device.filling(piece, after) as memory:
            self.disk().read_chunk(f"{name}/{key}", chunk_index(spec, index), as_numpy(as_rows(memory, spec)))

    def write_piece(self, name: str, key: str, index: int, piece: torch.Tensor, after: Moment) -> None:
        """Write a piece to its chunk. A thread may do so for stages."""
        spec, store, array = self.plan.values[name].tensors[key], self.disk(), f"{name}/{key}"
        chunk = chunk_index(spec, index)
        with self.device.reading(piece, after) as memory:
            crc = store.write_chunk(array, chunk, as_numpy(as_rows(memory, spec)), replace=True)
        self.written.setdefault(name, {})[store.spec(array).chunk_key(chunk)] = crc
