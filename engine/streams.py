"""Pieces on their way between where a Value lives and the buffers of a stage.

Nouns: a *slot* is a device buffer that holds one piece. A *piece stream* has one slot or two. A *porter* carries
pieces, one after another in the order in which it was asked; with a thread of its own it does so beside the stage.

With two slots the next piece comes into the one while the stage uses the other, and a changed piece goes back while
the stage is at the next. What comes next is announced by the stage, or guessed where the last two pieces followed
each other; a wrong guess costs time and nothing else.

Invariants:

- One side touches a slot at a time: whoever wants it waits for the slot's last job first.
- A piece is never read stale: jobs are done in order, so that what is fetched after a piece was given to be written is
  what was written; who touches a Value around the porter waits for the piece's last write (`Porter.settle`).
- An error of the porter is raised in the stage, as what it is, at the latest when the stage ends.
- The thread begins with the first job of a stage and ends with the stage, whichever way that ends.

Buffers and Values are allocated by the stage's thread; the porter's thread copies as the device does (`engine.device`),
which allocates no tensors. A slot keeps the views of its buffer: every new one is seen by the counter
of bytes, which takes longer than making it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from engine.budget import Tier
from engine.plan import TensorSpec
from engine.tensors import piece_of, torch_dtype

if TYPE_CHECKING:
    from engine.worker import TorchMachine

Place = tuple[str, int]
"""A piece of a Value that is streamed: the Value's name, and the piece's index in its one tensor."""
Job = Future[None]

THREAD_NAME = "longstraw pieces"


def tensor_of(machine: TorchMachine, name: str) -> tuple[str, TensorSpec]:
    """Return the key and the spec of a streamed Value's tensor."""
    return next(iter(machine.plan.values[name].tensors.items()))


class Porter:
    """Carries pieces between buffers and the host or the disk; see the module's text."""

    def __init__(self, machine: TorchMachine, *, threaded: bool) -> None:
        self._machine = machine
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=THREAD_NAME) if threaded else None
        self._writes: dict[Place, Job] = {}

    def fetch(self, place: Place, target: torch.Tensor) -> Job:
        """Fill ``target`` with a piece; one that was never written to the disk is zero."""
        machine, (name, index) = self._machine, place
        held, (key, spec) = machine.held[name], tensor_of(machine, name)
        after = machine.device.moment()
        if held.tier is Tier.HOST:
            source = piece_of(held.tensors[key], spec, index)
            return self._submit(lambda: machine.device.copy(target, source, after))
        exists = (key, index) in held.written
        return self._submit(lambda: machine.read_piece(name, key, index, target, after, exists=exists))

    def store(self, place: Place, source: torch.Tensor) -> Job:
        """Make ``source`` what a piece holds from now on; it must not change before the job is done."""
        self._raise_what_failed()
        machine, (name, index) = self._machine, place
        held, (key, spec) = machine.held[name], tensor_of(machine, name)
        after = machine.device.moment()
        if held.tier is Tier.HOST:
            target = piece_of(held.tensors[key], spec, index)
            job = self._submit(lambda: machine.device.copy(target, source, after))
        else:
            held.written.add((key, index))
            job = self._submit(lambda: machine.write_piece(name, key, index, source, after))
        self._writes[place] = job
        return job

    def settle(self, place: Place) -> None:
        """Wait until what was given to be written to a piece is there."""
        job = self._writes.pop(place, None)
        if job is not None:
            job.result()

    def finish(self) -> None:
        """Wait for every write.

        Raises:
            StoreFullError: the disk has no room for a piece that was to be written.
        """
        for place in list(self._writes):
            self.settle(place)

    def close(self) -> None:
        """End the thread, after the job in hand; what waits is not done any more."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)

    def _submit(self, work: Callable[[], None]) -> Job:
        if self._executor is not None:
            return self._executor.submit(work)
        done: Job = Future()
        work()
        done.set_result(None)
        return done

    def _raise_what_failed(self) -> None:
        """Raise the error of a write that is done; forget those that went well."""
        for place in [place for place, job in self._writes.items() if job.done()]:
            self.settle(place)


@dataclass(eq=False)
class Slot:
    """A buffer of bytes with the piece that it holds, or will hold once its job is done."""

    buffer: torch.Tensor
    place: Place | None = None
    job: Job | None = None
    fetching: bool = False
    _views: dict[tuple[str, tuple[int, ...]], torch.Tensor] = field(default_factory=dict)

    def view(self, spec: TensorSpec) -> torch.Tensor:
        """Return the buffer as one piece of a tensor like ``spec``."""
        kind = spec.dtype, spec.piece_shape
        if kind not in self._views:
            flat = self.buffer[: spec.piece_bytes].view(torch_dtype(spec.dtype))
            self._views[kind] = flat.view(spec.piece_shape)
        return self._views[kind]

    def expect(self, place: Place, job: Job) -> None:
        self.place, self.job, self.fetching = place, job, True

    def wait(self) -> None:
        """Wait for the slot's job; what a failed one was to bring is not there."""
        job, self.job = self.job, None
        if job is not None:
            try:
                job.result()
            except BaseException:
                self.place = None
                raise

    def give_up(self) -> None:
        """Forget the piece. A fetch of it that has not begun will not."""
        if self.fetching and self.job is not None:
            self.job.cancel()
        self.place = None


class PieceStream:
    """The slots of one stream, and which piece is in which."""

    def __init__(self, machine: TorchMachine, porter: Porter, names: Sequence[str], slots: Sequence[Slot]) -> None:
        self._machine, self._porter, self._slots = machine, porter, list(slots)
        away = [name for name in names if machine.held[name].tier is not Tier.DEVICE]
        self._next_name = dict(zip(away, [*away[1:], None], strict=True))
        self._last: Place | None = None

    def use(self, place: Place, then: Place | None = None) -> torch.Tensor:
        """Return a piece, good until the next call; ``then`` is the one that will be wanted next, if that is known."""
        slot = self._holding(place) or self._request(place)
        self._slots.remove(slot)
        self._slots.insert(0, slot)  # the one in use comes first
        slot.wait()
        following = then or self._guess(place)
        self._last = place
        if len(self._slots) > 1 and following and self._may_come(following):
            self._request(following)
        return slot.view(self._spec(place))

    @contextmanager
    def changing(self, place: Place, then: Place | None = None) -> Iterator[torch.Tensor]:
        """Yield a piece to change; it is written back at the end, and not after an error."""
        piece = self.use(place, then)
        slot = self._slots[0]
        try:
            yield piece
        except BaseException:
            slot.place = None
            raise
        slot.job, slot.fetching = self._porter.store(place, piece), False

    def forget(self, place: Place) -> None:
        """Let go of a piece that is about to change elsewhere."""
        slot = self._holding(place)
        if slot is not None:
            slot.give_up()

    def _spec(self, place: Place) -> TensorSpec:
        return tensor_of(self._machine, place[0])[1]

    def _holding(self, place: Place) -> Slot | None:
        return next((slot for slot in self._slots if slot.place == place), None)

    def _request(self, place: Place) -> Slot:
        """Have a piece come into the slot that is not in use, after what that holds was written back."""
        slot = self._slots[-1]
        slot.give_up()
        slot.expect(place, self._porter.fetch(place, slot.view(self._spec(place))))
        return slot

    def _may_come(self, place: Place) -> bool:
        name, index = place
        return name in self._next_name and index < self._spec(place).num_pieces and self._holding(place) is None

    def _guess(self, place: Place) -> Place | None:
        """Return what follows a piece in the stream, if this one has followed the last one."""
        return self._after(place) if self._last is not None and self._after(self._last) == place else None

    def _after(self, place: Place) -> Place | None:
        name, index = place
        if index + 1 < self._spec(place).num_pieces:
            return name, index + 1
        following = self._next_name[name]
        return None if following is None else (following, 0)
