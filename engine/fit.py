"""What fits a budget: the largest value of a plan's parameter, and the smallest budget of a tier.

A `Fitter` makes plan after plan with a plan function, asks a `Planner` about each, and narrows the question down with
`engine.search`. A value that the plan function refuses (no text is that long) counts as one that does not fit.

Whether a plan fits is told from few of its choices: its fastest, those that the last one fitted with, and the leanest
of its `ChoiceSpace`. What does not fit under the leanest is refused without a look at all others: they need no fewer
device bytes, and what they keep elsewhere is no less. Time and choices of the value that is found are the `Planner`'s,
as ``engine simulate`` shows them.

Bounds: no value above `LARGEST_VALUE` is tried, and none is doubled that took longer to plan than `PATIENCE_S`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from engine.budget import UNLIMITED_BYTES, Budget, Tier, merge_budget
from engine.errors import DoesNotFitError, UsageError
from engine.hardware import HardwareProfile
from engine.loader import PlanFile
from engine.plan import Choices, Plan
from engine.planner import Forecast, Planner
from engine.search import Bracket, largest_that, smallest_that
from engine.units import format_bytes, format_seconds

USUAL_PARAMETERS = ("prompt_tokens", "group_size")
# Asked about where a person names none, if the plan has them.

LARGEST_VALUE = 2**24
# 16.8 million tokens: more than any model reads, and what still can be planned at all.

PATIENCE_S = 60.0
# A plan of twice as many tokens takes up to four times as long to make.


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """The answer for one parameter or tier: its best ``value``, None where none fits, and why there is no better.

    ``forecast`` is that of the plan at the value. ``next_value`` is the nearest worse-fitting one that was tried (a
    count, or bytes), None where there is none; ``binding_stage`` is where that one does not fit, if it is known.
    """

    name: str
    value: int | None
    forecast: Forecast | None
    limit: str
    next_value: int | None
    binding_stage: str | None

    def as_dict(self) -> dict[str, object]:
        """Return the entry of ``engine fit --json``."""
        data: dict[str, object] = {"value": self.value}
        if self.forecast is not None:
            data |= {
                "makespan_s": self.forecast.makespan_s,
                "choices": dict(self.forecast.plan.choices),
                "peak_bytes": {str(tier): nbytes for tier, nbytes in self.forecast.peak_bytes.items()},
            }
        return data | {"limit": self.limit, "next_value": self.next_value, "binding_stage": self.binding_stage}


class Trial:
    """One plan on given hardware, which is asked whether it fits one budget or several."""

    def __init__(self, plan: Plan, profile: HardwareProfile) -> None:
        self.planner = Planner(plan=plan, profile=profile)
        self._fixed: dict[tuple[tuple[str, int], ...], Planner] = {}

    def forecast(self, budget: Budget, hint: Choices) -> Forecast:
        """Return a forecast within ``budget`` under the first of few choices that fits.

        Raises:
            DoesNotFitError: none of them does; the refusal of those choices that need the fewest device bytes, or of
                the last, which is the leanest, where the device is not what is too small.
        """
        refusals: list[DoesNotFitError] = []
        for choices in self._few_choices(hint):
            try:
                return self._with(choices).forecast(budget)
            except DoesNotFitError as error:
                refusals.append(error)
        raise min(reversed(refusals), key=lambda error: max(budget.device_bytes, _needed_device_bytes(error)))

    def _few_choices(self, hint: Choices) -> Iterator[Choices]:
        plan, space = self.planner.plan, self.planner.plan.space
        yield plan.choices
        if space is not None:
            if hint and all(value in plan.ladders.get(name, ()) for name, value in hint.items()):
                yield hint
            yield from space.leanest()

    def _with(self, choices: Choices) -> Planner:
        key = tuple((name, choices[name]) for name in self.planner.plan.ladders)
        if key not in self._fixed:
            self._fixed[key] = replace(self.planner, fixed=dict(key))
        return self._fixed[key]


def _needed_device_bytes(error: DoesNotFitError) -> int:
    nbytes = error.report.get("smallest_device_bytes")
    return nbytes if isinstance(nbytes, int) else UNLIMITED_BYTES


@dataclass(kw_only=True)
class Fitter:
    """Answers for one plan function: what fits ``budget``, the ``settings`` being as given.

    ``say`` gets a line for every value that is tried.
    """

    file: PlanFile
    settings: Mapping[str, str]
    budget: Budget
    profile: HardwareProfile
    plan: Plan
    say: Callable[[str], None]
    clock: Callable[[], float] = time.monotonic
    _base: Trial = field(init=False)

    def __post_init__(self) -> None:
        self._base = Trial(self.plan, self.profile)

    def usual_names(self) -> list[str]:
        """Return what is answered where a person asks for nothing in particular."""
        return [*(name for name in USUAL_PARAMETERS if name in self._parameters), *Tier]

    def check(self, names: Sequence[str]) -> None:
        """Raise UsageError for a name that is neither a tier nor a parameter that is a whole number."""
        for name in names:
            if name not in self._parameters and name not in list(Tier):
                known = ", ".join([*self._parameters, *Tier])
                why = "is not a whole number" if name in self.file.parameters else "is not known"
                raise UsageError(f"--vary {name}: {why} in plan {self.file.name}; what can be varied is {known}")

    def answer(self, name: str) -> Fitted:
        """Return the largest value of a parameter that fits, or the smallest budget of a tier that works."""
        return self._smallest(Tier(name)) if name in list(Tier) else self._largest(name)

    @cached_property
    def _parameters(self) -> dict[str, int | None]:
        return self.file.whole_numbers(self.settings)

    # The largest value of a parameter

    def _largest(self, name: str) -> Fitted:
        start = self._parameters[name]
        trials = {} if start is None else {start: self._base}
        probe = _Probe(fitter=self, name=name, trial=lambda value: trials.get(value) or self._trial(name, value))
        first = self._first_accepted(probe) if start is None else max(start, 0)
        most = max(LARGEST_VALUE, first)
        found = largest_that(probe.fits, first, most=most, go_on=lambda: probe.last_s <= PATIENCE_S)
        return probe.fitted(found, self._limit(name, probe, found, most))

    def _trial(self, name: str, value: int) -> Trial:
        return Trial(self.file.plan({**self.settings, name: str(value)}, self.profile.kind), self.profile)

    def _first_accepted(self, probe: _Probe) -> int:
        """Return the first power of two that a parameter without a default may be."""
        powers = (1 << exponent for exponent in range(LARGEST_VALUE.bit_length()))
        return next((value for value in powers if probe.accepts(value)), 1)

    def _limit(self, name: str, probe: _Probe, found: Bracket, most: int) -> str:
        if found.bad is not None:
            return f"at {name}={found.bad}: {probe.refusals[found.bad]}"
        if found.good == most:
            return f"no larger value than {most} is tried"
        return (
            f"larger values were not tried: making the plan at {found.good} took {format_seconds(probe.last_s)}; "
            "with choices fixed by hand (--set chunk_tokens=...) it takes less"
        )

    # The smallest budget of a tier

    def _smallest(self, tier: Tier) -> Fitted:
        probe = _Probe(fitter=self, name=str(tier), trial=lambda nbytes: self._base, tier=tier)
        if not probe.fits(UNLIMITED_BYTES):
            return probe.fitted(Bracket(good=None, bad=UNLIMITED_BYTES), str(probe.refusals[UNLIMITED_BYTES]))
        planner = self._base.planner
        least = planner.smallest[1] if tier is Tier.DEVICE else 0
        most = probe.peak_bytes(UNLIMITED_BYTES)
        found = smallest_that(probe.fits, least=least, most=max(least, most))
        if found.good is None:
            found = smallest_that(probe.fits, least=most, most=UNLIMITED_BYTES)
        if found.good is not None and found.bad is not None and probe.fits(used := probe.peak_bytes(found.good)):
            found = replace(found, good=used)
        if found.bad is not None:
            limit = f"with {found.bad} bytes: {probe.refusals[found.bad]}"
        elif tier is Tier.DEVICE:
            limit = f"stage {planner.smallest_stage.name} needs it under all choices"
        else:
            limit = "none is needed"
        return probe.fitted(found, limit)


@dataclass(kw_only=True)
class _Probe:
    """Asks about one value after another of a parameter or of a tier's budget, and remembers every answer."""

    fitter: Fitter
    name: str
    trial: Callable[[int], Trial]
    tier: Tier | None = None
    refusals: dict[int, DoesNotFitError | UsageError] = field(default_factory=dict)
    last_s: float = 0.0
    _forecasts: dict[int, Forecast] = field(default_factory=dict)
    _trials: dict[int, Trial] = field(default_factory=dict)
    _hint: Choices = field(default_factory=dict)

    def fits(self, value: int) -> bool:
        """Say whether a value fits; remember the forecast, or why not."""
        if value not in self._forecasts and value not in self.refusals:
            began = self.fitter.clock()
            try:
                self._ask(value)
                answer = f"fits, about {format_seconds(self._forecasts[value].makespan_s)}"
            except DoesNotFitError as error:
                self.refusals[value], answer = error, "does not fit"
            except UsageError as error:
                self.refusals[value], answer = error, f"is refused: {error}"
            self.last_s = self.fitter.clock() - began
            self.fitter.say(f"{self.name} {self._shown(value)}: {answer}")
        return value in self._forecasts

    def accepts(self, value: int) -> bool:
        """Say whether the plan function takes a value."""
        try:
            self.trial(value)
        except UsageError:
            return False
        return True

    def peak_bytes(self, nbytes: int) -> int:
        """Return what is used of a budget of the tier that fits."""
        assert self.tier is not None
        return self._forecasts[nbytes].peak_bytes[self.tier]

    def fitted(self, found: Bracket, limit: str) -> Fitted:
        """Return the answer, with the fastest choices that a planner finds for it."""
        good = found.good
        forecast = None if good is None else self._trials[good].planner.forecast(self._budget(good))
        report = {} if found.bad is None else getattr(self.refusals[found.bad], "report", {})
        return Fitted(
            name=self.name,
            value=good,
            forecast=forecast,
            limit=limit,
            next_value=found.bad,
            binding_stage=report.get("binding_stage") or None,
        )

    def _ask(self, value: int) -> None:
        trial = self.trial(value)
        forecast = trial.forecast(self._budget(value), self._hint)
        self._forecasts[value], self._trials[value] = forecast, trial
        ladders = trial.planner.plan.ladders
        self._hint = {name: choice for name, choice in forecast.plan.choices.items() if name in ladders}

    def _budget(self, value: int) -> Budget:
        budget = self.fitter.budget
        return budget if self.tier is None else merge_budget({str(self.tier): value}, budget)

    def _shown(self, value: int) -> str:
        if self.tier is None:
            return str(value)
        return "unlimited" if value == UNLIMITED_BYTES else format_bytes(value)
