"""What the search of `engine.windows` finds for a plan: how it begins, and on which rungs.

A *rung* is a device size between the least and everything. The search climbs them from the smallest up and no further
than is asked for; what it has found on a rung is remembered. Rungs depend on the plan alone, so what is found for a
budget does not depend on those that were asked for before.

The search takes a Value's home to be the nearest that it may have: the host, or else the disk.

This module is pure: no I/O, no clock, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from engine.budget import Tier
from engine.clock import Clock
from engine.needs import Window
from engine.placement import Placement
from engine.windows import Item, Search, Visit

MOST_STAGES_OF_SEARCH, MOST_USES_OF_SEARCH = 64, 1000
# Of a plan that is searched: that takes up to some seconds.

RUNGS_A_VALUE, LEAST_RUNGS, CROWDING = 3, 24, 1.5
# Rungs of the search; they are closer to each other near the least, where a byte counts most.

RUNGS_ABOVE = 2
# Rungs above a budget that are looked at for it.

ROUNDS_A_VALUE = 10
# Of a search on every rung: with three, small plans of residents and streams are 2 % slower in the mean.

MOST_EFFORT, EFFORT_OF_ONE_OF_MANY = (64, 100), (12, 20)
# Rungs, and rounds on each, at most. A plan that is one of many choices is searched for each of them, so for less long.


@dataclass(frozen=True, kw_only=True)
class Searched:
    """Searches for windows of a plan's movable Values, which it takes in an ``order``.

    ``least_windows`` are theirs where they are on the device nowhere but where they must be.
    """

    clock: Clock
    order: Sequence[int]
    least_windows: Mapping[int, tuple[Window, ...]]
    _rungs_found: list[tuple[int, Placement]] = field(default_factory=list, repr=False)

    @cached_property
    def is_small(self) -> bool:
        """Whether the plan is one to be searched for."""
        needs = self.clock.needs
        num_uses = sum(len(needs.used_at[number]) for number in needs.movable)
        return needs.num_stages <= MOST_STAGES_OF_SEARCH and num_uses <= MOST_USES_OF_SEARCH

    def rough_s(self, device_bytes: int) -> float:
        """Return about the time of the plan within ``device_bytes``, with room on the host.

        It is what one pass of the search finds.
        """
        search = self.begun(device_bytes)
        search.double_where_there_is_room(range(self.clock.needs.num_stages))
        search.improve_each()
        return search.seconds()

    def up_to(self, device_bytes: int) -> Iterator[Placement]:
        """Yield what the search finds for ``device_bytes``, the best first: on the rungs up to it, and on a few above.

        What is found on a rung may need less than that, and is there for all budgets that it fits.
        """
        needs, least = self.clock.needs, self.clock.needs.floor[0]
        if device_bytes < least:
            return
        num_values = len(self.order)
        most_rungs, most_rounds = MOST_EFFORT if needs.plan.space is None else EFFORT_OF_ONE_OF_MANY
        num_rungs = min(most_rungs, max(LEAST_RUNGS, RUNGS_A_VALUE * num_values))
        spread = needs.everything_bytes - least
        rungs = [least + int(spread * (rung / num_rungs) ** CROWDING) for rung in range(num_rungs)]
        num_looked_at = min(num_rungs, RUNGS_ABOVE + sum(rung <= device_bytes for rung in rungs))
        while len(self._rungs_found) < num_looked_at:
            search = self._search
            search.cap_bytes = rungs[len(self._rungs_found)]
            search.double_where_there_is_room(range(needs.num_stages))
            search.improve_each()
            search.improve(min(most_rounds, ROUNDS_A_VALUE * num_values))
            self._rungs_found.append((max(search.load), search.placement()))
        yield from (found for need, found in reversed(self._rungs_found[:num_looked_at]) if need <= device_bytes)

    @cached_property
    def _search(self) -> Search:
        return self.begun(self.clock.needs.floor[0])

    def begun(self, cap_bytes: int) -> Search:
        """Return a search that begins with nothing on the device but what must be there."""
        needs = self.clock.needs
        streamed: dict[tuple[int, int], float] = {}
        load = (needs.least_bytes(1) - needs.buffer_bytes).tolist()
        streamed_s = [0.0] * needs.num_stages
        for index, key in enumerate(zip(needs.streams.stages.tolist(), needs.streams.values.tolist(), strict=True)):
            stage, number = key
            seconds = float(self.clock.streamed_s(self._nearest(number))[index])
            if Tier.DEVICE in needs.values[number].tiers:
                streamed[key] = streamed.get(key, 0.0) + seconds
            else:
                streamed_s[stage] += seconds
        piece_bytes: list[int] = []
        away: list[int] = []
        buffers: list[list[int]] = []
        through: dict[tuple[int, str], list[int]] = {}
        for number, stage in enumerate(needs.stages):
            buffers.append([])
            for stream in (stream for stream in stage.streams if stream.buffered):
                buffers[-1].append(len(away))
                for name in stream.values:
                    through.setdefault((number, name), []).append(len(away))
                piece_bytes.append(needs.plan.buffer_bytes(stream))
                away.append(sum(Tier.DEVICE not in needs.plan.values[name].tiers for name in stream.values))
                load[number] += piece_bytes[-1] if away[-1] else 0
        return Search(
            needs=needs,
            compute_s=self.clock.compute_s.tolist(),
            overlap=self.clock.profile.overlap,
            items=[self._item(number, streamed, through) for number in self.order],
            buffers=buffers,
            piece_bytes=piece_bytes,
            away=away,
            load=load,
            streamed_s=streamed_s,
            cap_bytes=cap_bytes,
            windows={number: self.least_windows.get(number, ()) for number in self.order},
        )

    def _nearest(self, number: int) -> Tier:
        return Tier.HOST if Tier.HOST in self.clock.needs.values[number].tiers else Tier.DISK

    def _item(
        self, number: int, streamed: Mapping[tuple[int, int], float], through: Mapping[tuple[int, str], list[int]]
    ) -> Item:
        needs, home = self.clock.needs, self._nearest(number)
        changed, resident = set(needs.changed_at[number]), set(needs.resident_at[number])
        fetch_s, store_s = self.clock.trip_s(number, home)
        visits = tuple(
            Visit(
                stage,
                stage in resident,
                stage in changed,
                0.0 if stage in resident else streamed.get((stage, number), 0.0),
                () if stage in resident else tuple(through.get((stage, needs.names[number]), ())),
            )
            for stage in needs.used_at[number]
        )
        return Item(
            number=number,
            nbytes=int(needs.nbytes[number]),
            fetch_s=fetch_s,
            store_s=store_s,
            keep=needs.values[number].keep,
            visits=visits,
            streamed=tuple(visit for visit in visits if not visit.resident),
            used=frozenset(visit.stage for visit in visits),
            resident=frozenset(visit.stage for visit in visits if visit.resident),
        )
