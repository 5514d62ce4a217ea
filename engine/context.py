"""What a stage's function sees: its Values, streams of pieces, and where results go.

Invariant: a stage cannot tell where a streamed Value lives, nor how many buffers its streams have; a piece that was
never written reads as zero. How pieces travel is in `engine.streams`.

Life cycle: one context a stage, entered before the stage runs. Leaving it waits until everything written is where it
belongs; after an error, only until nothing is under way any more.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch

from engine.atomic import atomic_write_bytes
from engine.budget import Tier
from engine.errors import EngineError
from engine.memory import DEVICE
from engine.plan import Stage
from engine.run import data_checksum
from engine.streams import PieceStream, Place, Porter, Slot, tensor_of
from engine.tensors import piece_of

if TYPE_CHECKING:
    from engine.worker import TorchMachine

TOKEN_AXIS = -2
# Pieces of paged state are [..., tokens, head dimension].


class StageContext:
    """What a stage's function sees: its Values, streams of pages, and where results go.

    Streamed Values have one tensor each; a *piece* is its slice along the first axis (one layer's page).
    """

    def __init__(self, machine: TorchMachine, stage: Stage, slots: int = 1) -> None:
        self._machine, self.stage = machine, stage
        away = {
            name for stream in stage.streams for name in stream.values if machine.held[name].tier is not Tier.DEVICE
        }
        self._porter = Porter(machine, threaded=slots > 1 and bool(away))
        self._streams: dict[str, PieceStream] = {}
        for stream in stage.streams:
            if stream.buffered and not away.isdisjoint(stream.values):
                nbytes = machine.plan.buffer_bytes(stream)
                buffers = [
                    torch.empty(nbytes, dtype=torch.uint8, device=machine.device.torch_device) for _ in range(slots)
                ]
                pieces = PieceStream(machine, self._porter, stream.values, [Slot(buffer) for buffer in buffers])
                self._streams |= {name: pieces for name in stream.values if name not in self._streams}
        self._staging: Slot | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self._porter.finish()
                self._machine.note_disk()
        finally:
            self._porter.close()

    @property
    def device(self) -> torch.device:
        """Torch's device that the stage runs on."""
        return self._machine.device.torch_device

    @property
    def live_bytes(self) -> int:
        """Device bytes that are live now."""
        return self._machine.meter.live[DEVICE]

    def is_provided(self, name: str) -> bool:
        """Return whether a Value is an object of its writer's making (`item`) instead of tensors."""
        return self._machine.plan.values[name].provided

    def planned_bytes(self, name: str) -> int:
        """Return the bytes that were planned for a Value."""
        return self._machine.plan.values[name].nbytes

    @property
    def results(self) -> dict[str, Any]:
        """Plain data that the run reports (loss, metrics, ...)."""
        return self._machine.results

    @property
    def directory(self) -> Path:
        """The directory that results go to."""
        if self._machine.directory is None:
            raise EngineError(f"stage {self.stage.name} writes files, but this run has no directory")
        return self._machine.directory

    def tensors(self, name: str) -> Mapping[str, torch.Tensor]:
        """Return a resident Value's tensors; change them in place only if the stage writes or updates it."""
        held = self._machine.held[name]
        if held.tier is not Tier.DEVICE:
            raise EngineError(f"stage {self.stage.name} needs {name} on the device, but it is on {held.tier}")
        return held.tensors

    def provide(self, name: str, tensors: Iterable[torch.Tensor] = (), item: Any = None, disk_bytes: int = 0) -> None:
        """Hand over a provided Value: its tensors are counted from now on, ``item`` is what readers get."""
        held = self._machine.held[name]
        held.item, held.handed_over = item, tuple(tensors)
        self._machine.meter.adopt(held.handed_over)
        self._machine.note_disk(disk_bytes)

    def keep_file(self, path: str, data: bytes) -> None:
        """Write a file in the results, whole and synced, that a resumed run finds again: what must not be made twice.

        Its checksum is in the journal before it is written, so there is no moment in which it is whole and unknown.
        """
        self._machine.announce(path, *data_checksum(data))
        atomic_write_bytes(self.directory / path, data)

    def handed_over(self, name: str) -> tuple[torch.Tensor, ...]:
        """Return the tensors that the writer of a provided Value handed over."""
        return self._machine.held[name].handed_over

    def item(self, name: str) -> Any:
        """Return what the writer of a provided Value handed over."""
        return self._machine.held[name].item

    def index(self, values: Sequence[int] | Sequence[Sequence[int]]) -> torch.Tensor:
        """Return whole numbers as an int64 tensor on the device, counted there."""
        tensor = torch.tensor(values, dtype=torch.int64, device=self.device)
        self._machine.meter.adopt([tensor])
        return tensor

    # Streams

    def _stream(self, name: str) -> PieceStream:
        stream = self._streams.get(name)
        if stream is None:
            raise EngineError(f"stage {self.stage.name} reads {name}, but its stream is declared as written only")
        return stream

    def _in_place(self, name: str, index: int) -> torch.Tensor | None:
        """Return a piece of a Value that is on the device."""
        held = self._machine.held[name]
        key, spec = tensor_of(self._machine, name)
        return piece_of(held.tensors[key], spec, index) if held.tier is Tier.DEVICE else None

    def piece(self, name: str, index: int, then: Place | None = None) -> torch.Tensor:
        """Return a piece on the device, to read; good until the next piece of the same stream.

        ``then`` announces the piece of the same stream that will be wanted next, where the stage knows it.
        """
        piece = self._in_place(name, index)
        return self._stream(name).use((name, index), then) if piece is None else piece

    @contextmanager
    def changing(self, name: str, index: int, then: Place | None = None) -> Iterator[torch.Tensor]:
        """Yield a piece on the device to change in place; at the end it is what the Value holds, wherever it lives.

        No other piece of the same stream may be used meanwhile. After an error the piece off the device is as it was.
        """
        piece = self._in_place(name, index)
        if piece is not None:
            yield piece
            return
        if self._staging is not None and self._staging.place == (name, index):
            self._staging.place = None
        with self._stream(name).changing((name, index), then) as piece:
            yield piece
        self._machine.note_disk()

    def add_rows(
        self, name: str, index: int, start: int, parts: Iterable[torch.Tensor], then: Place | None = None
    ) -> None:
        """Add ``parts`` (stacked along the piece's first axis) to a piece's tokens from ``start`` on, in place."""
        with self.changing(name, index, then) as piece:
            for part_index, part in enumerate(parts):
                piece[part_index].narrow(TOKEN_AXIS, start, part.shape[TOKEN_AXIS]).add_(part)

    def write_rows(self, name: str, index: int, start: int, parts: Sequence[torch.Tensor]) -> None:
        """Write ``parts`` (stacked along the piece's first axis) to a piece's tokens from ``start`` on."""
        held, place = self._machine.held[name], (name, index)
        key, spec = tensor_of(self._machine, name)
        if held.tier is not Tier.DEVICE and name in self._streams:
            self._streams[name].forget(place)
        if held.tier is Tier.DISK:
            whole = len(parts) == spec.piece_shape[0] and parts[0].shape[TOKEN_AXIS] == spec.piece_shape[TOKEN_AXIS]
            piece = self._staged(place, whole=whole)
        else:
            self._porter.settle(place)
            piece = piece_of(held.tensors[key], spec, index)
        for part_index, part in enumerate(parts):
            piece[part_index].narrow(TOKEN_AXIS, start, part.shape[TOKEN_AXIS]).copy_(part)
        if held.tier is Tier.DISK and self._staging is not None:
            self._staging.place, self._staging.job = place, self._porter.store(place, piece)
            self._machine.note_disk()

    def _staged(self, place: Place, *, whole: bool) -> torch.Tensor:
        """Return the staging buffer with what a piece on the disk holds, or anything where all of it is replaced."""
        slot = self._staging = self._staging or Slot(self._machine.staging())
        slot.wait()
        piece = slot.view(tensor_of(self._machine, place[0])[1])
        if slot.place != place and not whole:
            slot.expect(place, self._porter.fetch(place, piece))
            slot.wait()
        slot.place = None  # until it is what the stage writes
        return piece
