"""Stages of one's own: a decorated Python function becomes a stage, its calls build the graph.

    @stage(writes=lambda left, right: TensorSpec(shape=(left.shape[0], right.shape[1]), dtype="float32"))
    def product(left, right):
        return left @ right

    c = product(plan, a, b)

A call in a plan function takes the plan and then the function's own arguments. A Value among them (also inside a list,
tuple or dict) is *read*, or *updated* where the decorator names its parameter; everything else is configuration, which
goes into the recipe key together with the function's source. What the function returns is copied into the Values that
``writes`` declares; a function with a parameter ``out`` fills those itself. A parameter ``report`` gets a function that
reports plain data to the run.

Sizes, bytes and costs are numbers, or functions of the stage's arguments by name, in which a Value stands as its
`TensorSpec` (a dict of them by name where it has several tensors).

Nothing here imports torch: building and simulating a plan needs none. `engine.own_stage` is what runs.
"""

from __future__ import annotations

import inspect
import keyword
from collections import namedtuple
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar, cast, overload

from engine.budget import Tier
from engine.errors import EngineError, PlanError, one_line
from engine.origin import at, caller_origin
from engine.own_stage import OwnStage, replace_values, values_in
from engine.parts import Cost, Stage, TensorSpec, Value, ValueKind
from engine.plan import ONE_TENSOR, Plan, movable
from engine.recipe import digest
from engine.source import source_digest

__all__ = ["StageFunction", "source_digest", "stage"]

Result = TypeVar("Result")
Function = Callable[..., Any]
Number = float | Callable[..., float]
"""A number, or a function of the stage's arguments."""

OneSpec = TensorSpec | Callable[..., TensorSpec]
ManySpecs = Mapping[str, TensorSpec] | Callable[..., Mapping[str, TensorSpec]]

_GIVEN = ("out", "report")
# Parameters that the engine fills.
_TAKEN = ("name",)
# Parameters of the call itself.
_ONE_OUTPUT = "out"
_NO_PLAN = cast(Plan, None)


@dataclass(frozen=True, kw_only=True, eq=False)
class StageFunction(Generic[Result]):
    """A function that becomes a stage when it is called with a plan. ``function`` is the plain function."""

    function: Function
    writes: OneSpec | ManySpecs | None
    updates: tuple[str, ...]
    workspace_bytes: Number
    flops: Number
    moved_bytes: Number | None
    origin: str

    def __post_init__(self) -> None:
        name, where = getattr(self.function, "__name__", repr(self.function)), at(self.origin)
        if inspect.iscoroutinefunction(self.function) or inspect.isgeneratorfunction(self.function):
            raise PlanError(f"stage function {name} is a coroutine or a generator; a stage is a plain function{where}")
        if not name.isidentifier():
            raise PlanError(f"@stage needs a function with a name, not {name}; define it with def{where}")
        parameters = self._signature.parameters
        if taken := [item for item in _TAKEN if item in parameters]:
            raise PlanError(
                f"stage function {name} has a parameter {taken[0]!r}, which a call uses to name the stage; "
                f"call it something else{where}"
            )
        if unknown := [item for item in self.updates if item not in parameters]:
            raise PlanError(
                f"stage function {name}: updates names {unknown[0]!r}, which is none of its parameters "
                f"({', '.join(parameters) or 'none'}){where}"
            )
        if "out" in parameters and self.writes is None:
            raise PlanError(
                f"stage function {name} has a parameter 'out' but declares no output to fill; say its size with "
                f'writes=TensorSpec(shape=(...), dtype="..."){where}'
            )

    def __call__(self, plan: Plan = _NO_PLAN, /, *args: Any, name: str | None = None, **kwargs: Any) -> Result:
        """Add a stage to ``plan`` and return the Value that it writes; a named tuple of them where it writes several.

        ``name`` names the stage; else it is named after the function, with a number from the second one on.

        Raises:
            PlanError: wrong arguments, a Value of another plan, a size that is not known.
        """
        return cast(Result, _Call(self, plan, args, kwargs, name).add())

    @cached_property
    def _signature(self) -> inspect.Signature:
        return inspect.signature(self.function)


@overload
def stage(function: Function, /) -> StageFunction[None]: ...


@overload
def stage(
    *,
    updates: Sequence[str] = ...,
    workspace_bytes: Number = ...,
    flops: Number = ...,
    moved_bytes: Number | None = ...,
) -> Callable[[Function], StageFunction[None]]: ...


@overload
def stage(
    *,
    writes: OneSpec,
    updates: Sequence[str] = ...,
    workspace_bytes: Number = ...,
    flops: Number = ...,
    moved_bytes: Number | None = ...,
) -> Callable[[Function], StageFunction[Value]]: ...


@overload
def stage(
    *,
    writes: ManySpecs,
    updates: Sequence[str] = ...,
    workspace_bytes: Number = ...,
    flops: Number = ...,
    moved_bytes: Number | None = ...,
) -> Callable[[Function], StageFunction[Any]]: ...


def stage(
    function: Function | None = None,
    /,
    *,
    writes: OneSpec | ManySpecs | None = None,
    updates: Sequence[str] = (),
    workspace_bytes: Number = 0,
    flops: Number = 0,
    moved_bytes: Number | None = None,
) -> Any:
    """Make a function a stage.

    Args:
        writes: what the stage writes: a `TensorSpec`, or a dict of them by output; nothing where left out.
        updates: parameters whose Values are changed in place (`Plan.accumulator`, `Plan.variable`).
        workspace_bytes: device bytes that the function needs beyond its Values, at their peak. What it returns is
            added by the engine.
        flops: arithmetic, for the simulated time.
        moved_bytes: memory traffic, for the simulated time; the bytes of all its Values unless given.

    ``writes`` and the three numbers may be functions of the same arguments as the stage.
    """

    def decorate(function: Function) -> StageFunction[Any]:
        return StageFunction(
            function=function,
            writes=writes,
            updates=(updates,) if isinstance(updates, str) else tuple(updates),
            workspace_bytes=workspace_bytes,
            flops=flops,
            moved_bytes=moved_bytes,
            origin=caller_origin(),
        )

    return decorate if function is None else decorate(function)


class _Call:
    """One call of a stage function: checks what was given and adds the stage."""

    def __init__(
        self, made_by: StageFunction[Any], plan: Plan, args: Sequence[Any], kwargs: Mapping[str, Any], name: str | None
    ) -> None:
        self.made_by, self.origin = made_by, caller_origin()
        self.function_name = made_by.function.__name__
        given: object = plan
        if not isinstance(given, Plan):
            raise self._error(
                f"takes the plan first, as in {self.function_name}(plan, ...), not {type(given).__name__}; "
                f"{self.function_name}.function is the plain function"
            )
        self.plan = plan
        self.arguments = self._bind(args, kwargs)
        self.updated = {value.name for key in made_by.updates for value in values_in(self.arguments[key])}
        self.values = {value.name: value for value in values_in(self.arguments)}
        self.several = False
        self.name = plan.free_name(self.function_name) if name is None else name
        self._check_values()

    def add(self) -> object:
        sizes = self._sizes()
        specs = self._specs(sizes)
        outputs = {key: f"{self.name}/{key}" for key in specs}
        workspace = self._bytes(sizes)
        fills = "out" in self.made_by._signature.parameters
        config = self._config(specs)  # may refuse, so it comes before anything is declared
        values = [self._declare(outputs[key], spec) for key, spec in specs.items()]
        self.plan.add(
            Stage(
                name=self.name,
                kind=self.function_name,
                run=self._run(outputs, fills=fills),
                config=config,
                reads=tuple(name for name in self.values if name not in self.updated),
                writes=tuple(outputs.values()),
                updates=tuple(name for name in self.values if name in self.updated),
                workspace_bytes=workspace + (0 if fills else self._returned_bytes(specs)),
                declared_bytes=workspace,
                cost=self._cost(sizes, specs),
                origin=self.origin,
            )
        )
        return self._returned(values)

    def _returned_bytes(self, specs: Mapping[str, TensorSpec]) -> int:
        """Return the device bytes of the tensors that the function makes and returns, beside the Values they go to."""
        return sum(self.plan.kind.rounded(spec.nbytes) for spec in specs.values())

    def _error(self, message: str) -> PlanError:
        return PlanError(f"stage function {self.function_name} {message}{at(self.origin)}")

    # Arguments

    def _bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments by parameter, with defaults."""
        signature = self.made_by._signature
        own = [item for item in signature.parameters.values() if item.name not in _GIVEN]
        try:
            bound = signature.replace(parameters=own).bind(*args, **kwargs)
        except TypeError as error:
            shown = ", ".join(["plan", *(str(item) for item in own)])
            raise self._error(
                f"can't be called like this: {error}; its call is {self.function_name}({shown})"
            ) from None
        bound.apply_defaults()
        return bound.arguments

    def _check_values(self) -> None:
        for value in self.values.values():
            if self.plan.values.get(value.name) is not value:
                raise self._error(
                    f"got Value {value.name!r}{', made at ' + value.origin if value.origin else ''}, which is not of "
                    f"plan {self.plan.name!r}; pass the Values that calls with this plan returned"
                )
            if not value.provided and Tier.DEVICE not in value.tiers:
                raise self._error(
                    f"got Value {value.name!r}, which never is on the device as a whole; only a Stage with a Stream "
                    "can use it"
                )
        for key in self.made_by.updates:
            self._check_updated(key, self.arguments[key])

    def _check_updated(self, key: str, argument: object) -> None:
        values = list(values_in(argument))
        if not values:
            raise self._error(f"changes {key!r} in place, so it needs a Value there, not {argument!r}")
        for value in values:
            if value.kind is ValueKind.IMMUTABLE:
                raise self._error(
                    f"changes {key!r} in place, but Value {value.name!r} is written once; "
                    "make one that may change with plan.accumulator(name, spec) or plan.variable(name, spec)"
                )
        rest = {other: item for other, item in self.arguments.items() if other != key}
        if twice := [value.name for value in values_in(rest) if value.name in {item.name for item in values}]:
            raise self._error(
                f"got Value {twice[0]!r} for {key!r}, which it changes in place, and for another parameter"
            )

    def _config(self, specs: Mapping[str, TensorSpec]) -> dict[str, object]:
        config: dict[str, object] = {
            "function": source_digest(self.made_by.function),
            "arguments": replace_values(self.arguments, lambda value: {"value": value.name}),
            "writes": {key: [list(spec.shape), spec.dtype] for key, spec in specs.items()},
        }
        for key, argument in self.arguments.items():
            try:
                digest(replace_values(argument, lambda value: value.name))
            except (TypeError, ValueError, OverflowError) as error:
                raise self._error(
                    f"got {key}={argument!r}, which is neither a Value nor plain data "
                    f"(numbers, text, lists, dicts with text keys): {error}"
                ) from None
        return config

    # Sizes

    def _sizes(self) -> dict[str, Any]:
        """Return the arguments with the sizes of Values in place of the Values."""
        sized = {
            key: replace_values(argument, lambda value: _size_of(value)) for key, argument in self.arguments.items()
        }
        return self._by_name(sized)

    def _by_name(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments as keywords: what ``**kwargs`` took becomes names of its own."""
        named: dict[str, Any] = {}
        for key, argument in arguments.items():
            if self.made_by._signature.parameters[key].kind is inspect.Parameter.VAR_KEYWORD:
                named.update(argument)
            else:
                named[key] = argument
        return named

    def _evaluate(self, what: str, given: object, sizes: Mapping[str, Any]) -> Any:
        """Return a setting of the decorator, calling it with the arguments that it names if it is a function."""
        if not callable(given):
            return given
        wanted = inspect.signature(given).parameters
        takes_all = any(item.kind is inspect.Parameter.VAR_KEYWORD for item in wanted.values())
        try:
            return given(**{key: size for key, size in sizes.items() if takes_all or key in wanted})
        except EngineError as error:
            raise self._error(f"has no {what}: {error}") from error
        except Exception as error:
            raise self._error(
                f"has no {what}: its function failed with {one_line(error)}; "
                f"it gets {', '.join(sizes) or 'no arguments'}"
            ) from error

    def _specs(self, sizes: Mapping[str, Any]) -> dict[str, TensorSpec]:
        if self.made_by.writes is None:
            return {}
        found = self._evaluate("size for what it writes", self.made_by.writes, sizes)
        self.several = isinstance(found, Mapping)
        specs = dict(found) if isinstance(found, Mapping) else {_ONE_OUTPUT: found}
        for key, spec in specs.items():
            if not isinstance(spec, TensorSpec):
                raise self._error(
                    f"has no size for what it writes: {key!r} is {spec!r}; "
                    'writes gives a TensorSpec(shape=(...), dtype="..."), or a dict of them'
                )
            if not key.isidentifier() or keyword.iskeyword(key) or key.startswith("_"):
                raise self._error(f"calls an output {key!r}; outputs are fields of a named tuple, so use a plain name")
        return specs

    def _bytes(self, sizes: Mapping[str, Any]) -> int:
        nbytes = self._evaluate("workspace_bytes", self.made_by.workspace_bytes, sizes)
        if not isinstance(nbytes, int) or nbytes < 0:
            raise self._error(f"has workspace_bytes={nbytes!r}; give a whole number of bytes, 0 or more")
        return nbytes

    def _cost(self, sizes: Mapping[str, Any], specs: Mapping[str, TensorSpec]) -> Cost:
        all_bytes = sum(value.nbytes for value in self.values.values()) + sum(spec.nbytes for spec in specs.values())
        moved = self._evaluate("moved_bytes", self.made_by.moved_bytes, sizes)
        flops = self._evaluate("flops", self.made_by.flops, sizes)
        try:
            return Cost(flops=float(flops), moved_bytes=float(all_bytes if moved is None else moved), num_kernels=1.0)
        except (PlanError, TypeError, ValueError) as error:
            raise self._error(f"has a cost that is no number: {error}") from None

    # The stage

    def _declare(self, name: str, spec: TensorSpec) -> Value:
        return self.plan.value(movable(name, {ONE_TENSOR: spec}, origin=self.origin))

    def _run(self, outputs: Mapping[str, str], *, fills: bool) -> OwnStage:
        return OwnStage(
            function=self.made_by.function,
            signature=self.made_by._signature,
            arguments=self.arguments,
            outputs=outputs,
            several=self.several,
            updated=frozenset(self.updated),
            fills=fills,
            origin=self.origin,
        )

    def _returned(self, values: Sequence[Value]) -> object:
        if not values:
            return None
        if not self.several:
            return values[0]
        fields = [value.name.rsplit("/", 1)[1] for value in values]
        outputs: Any = namedtuple(self.function_name, fields)  # type: ignore[misc]
        return outputs(*values)


def _size_of(value: Value) -> TensorSpec | dict[str, TensorSpec]:
    """Return what size functions see of a Value."""
    return next(iter(value.tensors.values())) if len(value.tensors) == 1 else dict(value.tensors)
