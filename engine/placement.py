"""Where every Value of a plan lives, and what follows for its copies.

A movable Value *stays* on the device for life, or has a *home* on the host or the disk. One with a home is streamed
from there, and has a *copy* on the device while a stage uses it as a resident. Between two such stages lies a *gap*;
a copy that is *kept* through a gap need be neither stored nor fetched again. A fetch may run *ahead*, alongside the
stage before the one that needs it, and a store *behind*, alongside the stage after; the copy is there that much longer.

Invariants: a home is there from the first time that something is put into it until the Value dies; a copy is stored
before it goes if it was changed and the Value lives on; what a stage uses as a resident has a copy on the device.

This module is pure: no I/O, no clock, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from engine.budget import Tier
from engine.needs import Needs, Use

BEFORE_FIRST = -1
"""The gap before the first stage that uses a Value as a resident."""


class Event(Enum):
    """What happens to a copy of a Value."""

    CREATE = "create"
    FETCH = "fetch"
    STORE = "store"
    DROP = "drop"


class Step(NamedTuple):
    """An event of a Value, before or after a stage; ``tier`` is where a copy comes to be, is stored or goes.

    With ``alongside``, a fetch or a store runs while the stage does.
    """

    stage: int
    before: bool
    event: Event
    value: int
    tier: Tier
    alongside: bool = False


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where everything lives; Values and stages by number (`engine.needs`).

    Attributes:
        slots: buffers of each stream.
        stays: the Values that stay on the device.
        kept: gaps, as (Value, the last stage before it that uses it as a resident).
        ahead: fetches, as (Value, the stage that needs it).
        behind: stores, as (Value, the stage that used it last).
        homes: of all others.
        staging_bytes: host bytes through which Values pass to the disk and back; 0 where nothing is there.
    """

    slots: int
    stays: frozenset[int]
    kept: frozenset[tuple[int, int]] = frozenset()
    ahead: frozenset[tuple[int, int]] = frozenset()
    behind: frozenset[tuple[int, int]] = frozenset()
    homes: dict[int, Tier] = field(default_factory=dict)
    staging_bytes: int = 0

    def steps_of(self, needs: Needs, number: int) -> Iterator[Step]:
        """Yield what happens to a Value, in order."""
        value, uses = needs.values[number], needs.uses[number]
        if number not in self.stays and not value.pinned:
            yield from self._coming_and_going(uses, number, self.homes.get(number, Tier.HOST), keep=value.keep)
            return
        yield Step(uses[0].stage, True, Event.CREATE, number, Tier.DEVICE)
        if not value.keep:
            yield Step(uses[-1].stage, False, Event.DROP, number, Tier.DEVICE)

    def _coming_and_going(self, uses: Sequence[Use], number: int, home: Tier, *, keep: bool) -> Iterator[Step]:
        here = at_home = changed = False
        last_resident = BEFORE_FIRST
        for use, following in zip(uses, [*uses[1:], None], strict=True):
            if not here and (use.resident or (number, last_resident) in self.kept):
                here = True
                ahead = (number, use.stage) in self.ahead
                event = Event.FETCH if at_home else Event.CREATE
                yield Step(use.stage - ahead, True, event, number, Tier.DEVICE, ahead)
            elif not here and not at_home:
                at_home = True
                yield Step(use.stage, True, Event.CREATE, number, home)
            last_resident = use.stage if use.resident else last_resident
            changed = changed or (use.changes and here)
            if not here or self._remains(number, last_resident, use, following):
                continue
            behind = 0
            if (following is not None or keep) and (changed or not at_home):
                behind = int((number, use.stage) in self.behind)
                yield Step(use.stage + behind, bool(behind), Event.STORE, number, home, bool(behind))
                at_home, changed = True, False
            here = False
            yield Step(use.stage + behind, False, Event.DROP, number, Tier.DEVICE)
        if at_home and not keep:
            yield Step(uses[-1].stage, False, Event.DROP, number, home)

    def _remains(self, number: int, last_resident: int, use: Use, following: Use | None) -> bool:
        """Return whether the copy is still there when the next stage that uses the Value begins."""
        if following is None:
            return False
        return (number, last_resident) in self.kept or (following.resident and following.stage == use.stage + 1)
