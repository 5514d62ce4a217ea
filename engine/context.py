"""What a stage's function sees: its Values, streams of pieces, and where results go.

Invariant: a stage cannot tell where a streamed Value lives; a piece that was never written reads as zero.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from engine.budget import Tier
from engine.errors import EngineError
from engine.memory import DEVICE
from engine.plan import Stage, TensorSpec
from engine.run import atomic_write_bytes, data_checksum
from engine.tensors import piece_of, torch_dtype

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
        self._stream_of: dict[str, int] = {}
        for buffered in (True, False):
            for index, stream in enumerate(stage.streams):
                for name in stream.values if stream.buffered is buffered else ():
                    self._stream_of.setdefault(name, index)
        self._buffers = {
            index: torch.empty(machine.plan.buffer_bytes(stream), dtype=torch.uint8, device=machine.device)
            for index, stream in enumerate(stage.streams)
            if stream.buffered and any(machine.held[name].tier is not Tier.DEVICE for name in stream.values)
        }

    @property
    def device(self) -> torch.device:
        """Torch's device that the stage runs on."""
        return self._machine.device

    @property
    def live_bytes(self) -> int:
        """Device bytes that are live now."""
        return self._machine.meter.live[DEVICE]

    def is_provided(self, name: str) -> bool:
        """Return whether a Value is an object of its writer's making (`item`) instead of tensors."""
        return self._machine.plan.values[name].provided

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

    def _spec(self, name: str) -> tuple[str, TensorSpec]:
        return next(iter(self._machine.plan.values[name].tensors.items()))

    def _buffer(self, name: str, spec: TensorSpec) -> torch.Tensor:
        buffer = self._buffers.get(self._stream_of[name])
        if buffer is None:
            raise EngineError(f"stage {self.stage.name} reads {name}, but its stream is declared as written only")
        return buffer[: spec.piece_bytes].view(torch_dtype(spec.dtype)).view(spec.piece_shape)

    def piece(self, name: str, index: int) -> torch.Tensor:
        """Return a piece on the device, to read; good until the next piece of the same stream."""
        machine, held = self._machine, self._machine.held[name]
        key, spec = self._spec(name)
        if held.tier is Tier.DEVICE:
            return piece_of(held.tensors[key], spec, index)
        buffer = self._buffer(name, spec)
        if held.tier is Tier.HOST:
            return buffer.copy_(piece_of(held.tensors[key], spec, index))
        if (key, index) not in held.written:
            return buffer.zero_()
        return buffer.copy_(machine._from_disk(name, key, index, spec))

    @contextmanager
    def changing(self, name: str, index: int) -> Iterator[torch.Tensor]:
        """Yield a piece on the device to change in place; at the end it is what the Value holds, wherever it lives.

        No other piece of the same stream may be used meanwhile. After an error the piece off the device is as it was.
        """
        piece = self.piece(name, index)
        yield piece
        self._write_back(name, index, piece)

    def add_rows(self, name: str, index: int, start: int, parts: Iterable[torch.Tensor]) -> None:
        """Add ``parts`` (stacked along the piece's first axis) to a piece's tokens from ``start`` on, in place."""
        with self.changing(name, index) as piece:
            for part_index, part in enumerate(parts):
                piece[part_index].narrow(TOKEN_AXIS, start, part.shape[TOKEN_AXIS]).add_(part)

    def write_rows(self, name: str, index: int, start: int, parts: Iterable[torch.Tensor]) -> None:
        """Write ``parts`` (stacked along the piece's first axis) to a piece's tokens from ``start`` on."""
        held = self._machine.held[name]
        key, spec = self._spec(name)
        if held.tier is Tier.DISK:
            piece = self._machine._staged(spec)
            if (key, index) in held.written:
                self._machine._from_disk(name, key, index, spec)
            else:
                piece.zero_()
        else:
            piece = piece_of(held.tensors[key], spec, index)
        for part_index, part in enumerate(parts):
            piece[part_index].narrow(TOKEN_AXIS, start, part.shape[TOKEN_AXIS]).copy_(part)
        if held.tier is Tier.DISK:
            self._write_back(name, index, piece)

    def _write_back(self, name: str, index: int, piece: torch.Tensor) -> None:
        held = self._machine.held[name]
        key, spec = self._spec(name)
        if held.tier is Tier.HOST:
            piece_of(held.tensors[key], spec, index).copy_(piece)
        elif held.tier is Tier.DISK:
            self._machine._to_disk(name, key, index, piece)
            held.written.add((key, index))
