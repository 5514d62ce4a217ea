"""What runs when a stage of a person's own runs: a plain function between the Values that it reads and writes.

The function gets tensors on the device in place of Values. What it returns is held against what was declared (how many,
shape, dtype, device) and copied into the Values; a function with ``out`` fills them itself. Before the stage counts as
done, three more things are checked: what it only reads is unchanged, what it reports is plain data under a new name,
and no tensor that it made is still alive, since nothing planned for it after the stage.

torch is imported when a stage runs, not before.
"""

from __future__ import annotations

import gc
import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack

from engine.errors import StageFailedError
from engine.origin import at
from engine.parts import TensorSpec, Value
from engine.units import format_bytes

if TYPE_CHECKING:
    import torch

    from engine.context import StageContext

REPORTED = "reported"
FRESH = "reported since the last line of metrics"
# Where a run's results keep what stages reported, whatever other stages make of its metrics.
MOST_REPORT_BYTES = 16 * 1024
# All results of a run are one record of its journal, which is capped; a report is a figure, not a table.
OWN_NUMBERS = ("step", "epoch", "loss", "grad_norm", "learning_rate")


def values_in(argument: object) -> Iterator[Value]:
    """Yield the Values in an argument, also those in lists, tuples and dicts."""
    if isinstance(argument, Value):
        yield argument
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from values_in(item)
    elif isinstance(argument, dict):
        for item in argument.values():
            yield from values_in(item)


def replace_values(argument: Any, replace: Callable[[Value], object]) -> Any:
    """Return a copy of an argument with other things in place of its Values."""
    if isinstance(argument, Value):
        return replace(argument)
    if isinstance(argument, list | tuple):
        items = [replace_values(item, replace) for item in argument]
        return items if isinstance(argument, list) else tuple(items)
    if isinstance(argument, dict):
        return {key: replace_values(item, replace) for key, item in argument.items()}
    return argument


@dataclass(frozen=True, kw_only=True)
class OwnStage:
    """The run function of a stage that `engine.authoring.stage` made. ``outputs`` are its Values by output."""

    function: Callable[..., Any]
    signature: inspect.Signature
    arguments: Mapping[str, Any]
    outputs: Mapping[str, str]
    several: bool
    updated: frozenset[str]
    fills: bool
    origin: str

    def __call__(self, context: StageContext) -> None:
        entry_bytes = context.live_bytes
        versions = [(name, tensor, tensor._version) for name, tensor in self._only_read(context)]
        returned = self._call(context)
        self._keep(context, returned)
        del returned
        for name in (*self.updated, *self.outputs.values()):
            for tensor in self._tensors(context, name).values():
                if tensor.requires_grad:  # nobody differentiates through a Value
                    tensor.detach_()
        for name, tensor, version in versions:
            if tensor._version != version:
                raise self._error(
                    context,
                    f"changed {name} in place, which it only reads; change a copy, or name its parameter in updates=",
                )
        self._check_left(context, entry_bytes)

    def _error(self, context: StageContext, message: str) -> StageFailedError:
        return StageFailedError(f"stage {context.stage.name} {message}{at(self.origin)}")

    def _tensors(self, context: StageContext, name: str) -> Mapping[str, torch.Tensor]:
        return {} if context.is_provided(name) else context.tensors(name)

    def _only_read(self, context: StageContext) -> Iterator[tuple[str, torch.Tensor]]:
        for value in values_in(dict(self.arguments)):
            if value.name not in self.updated:
                tensors = self._tensors(context, value.name).values()
                yield from ((value.name, tensor) for tensor in (*tensors, *context.handed_over(value.name)))

    # The call

    def _call(self, context: StageContext) -> Any:
        def given(value: Value) -> object:
            if context.is_provided(value.name):
                return context.item(value.name)
            return _one_or_all(context.tensors(value.name))

        arguments = {key: replace_values(argument, given) for key, argument in self.arguments.items()}
        if self.fills:
            filled = {key: _one_or_all(context.tensors(name)) for key, name in self.outputs.items()}
            arguments["out"] = filled if self.several else next(iter(filled.values()))
        if "report" in self.signature.parameters:
            arguments["report"] = _Reporter(context, self)
        in_order = {key: arguments[key] for key in self.signature.parameters if key in arguments}
        bound = inspect.BoundArguments(self.signature, OrderedDict(in_order))
        return self.function(*bound.args, **bound.kwargs)

    # What comes back

    def _keep(self, context: StageContext, returned: Any) -> None:
        """Copy what the function returned into the Values."""
        if self.fills or not self.outputs:
            if returned is not None:
                raise self._error(context, self._unexpected(returned))
            return
        results = self._results(context, returned)
        for key, name in self.outputs.items():
            (target,) = context.tensors(name).values()
            spec = TensorSpec(shape=tuple(target.shape), dtype=_dtype(target))
            self._check(context, key, results[key], spec)
            target.copy_(results[key].detach())

    def _unexpected(self, returned: Any) -> str:
        if self.fills:
            return f"returned {_shown(returned)}; it has a parameter 'out', so it fills that and returns nothing"
        advice = "return nothing"
        if _is_tensor(returned):
            shape, dtype = tuple(returned.shape), _dtype(returned)
            advice = f'declare it with writes=TensorSpec(shape={shape}, dtype="{dtype}"), or return nothing'
        return f"returned {_shown(returned)}, but it declares nothing that it writes, so no bytes are planned; {advice}"

    def _results(self, context: StageContext, returned: Any) -> Mapping[str, Any]:
        if not self.several:
            return dict.fromkeys(self.outputs, returned)
        names = list(self.outputs)
        if isinstance(returned, tuple | list) and len(returned) == len(names):
            return dict(zip(names, returned, strict=True))
        if isinstance(returned, Mapping) and sorted(returned) == sorted(names):
            return returned
        raise self._error(context, f"returned {_shown(returned)}, but it writes {', '.join(names)}: return one of each")

    def _check(self, context: StageContext, key: str, result: Any, spec: TensorSpec) -> None:
        declared = f"declares a {spec.dtype} tensor of shape {spec.shape}"
        what = f" for {key!r}" if self.several else ""
        if not _is_tensor(result):
            raise self._error(context, f"returned {_shown(result)}{what}, but {declared}; return a torch tensor")
        if tuple(result.shape) != spec.shape or _dtype(result) != spec.dtype:
            raise self._error(
                context, f"returned {_shown(result)}{what}, but {declared}; make one of them like the other"
            )
        if result.device != context.device:
            raise self._error(
                context, f"returned a tensor on {result.device}{what}, but runs on {context.device}; move it there"
            )

    def _check_left(self, context: StageContext, entry_bytes: int) -> None:
        if context.live_bytes <= entry_bytes:
            return
        gc.collect()  # cycles are no fault
        left = context.live_bytes - entry_bytes
        if left > 0:
            raise self._error(
                context,
                f"keeps {format_bytes(left)} ({left} bytes) of tensors alive after its end, which nothing is planned "
                "for; return them as outputs, and keep none in globals or caches",
            )


class _Reporter:
    """What a function's ``report`` parameter gets: ``report(name, value)``."""

    def __init__(self, context: StageContext, stage: OwnStage) -> None:
        self._context, self._stage = context, stage

    def __call__(self, name: str, value: Any) -> None:
        """Report plain data; a tensor of one number counts as that. A name may come once in a line of metrics."""
        if hasattr(value, "item") and hasattr(value, "reshape") and value.reshape(-1).shape[0] == 1:
            value = value.item()  # a tensor or a numpy scalar
        results = self._context.results
        if name in OWN_NUMBERS:
            raise self._stage._error(self._context, f"reports {name!r}, a name that a line of metrics has; use another")
        if name in results.setdefault(FRESH, []):
            raise self._stage._error(self._context, f"reports {name!r}, which was reported before; use another name")
        if (nbytes := _packed_bytes({name: value})) is not None and nbytes > MOST_REPORT_BYTES:
            raise self._stage._error(
                self._context,
                f"reports {name!r} with {nbytes} bytes, more than the {MOST_REPORT_BYTES} that a journal takes; report "
                "a summary, and return the rest as an output",
            )
        if nbytes is None:
            raise self._stage._error(
                self._context, f"reports {name!r} as {_shown(value)}; report numbers, text, lists and dicts of them"
            )
        results.setdefault(REPORTED, {})[name] = value
        results[FRESH].append(name)


def take_reports(results: dict[str, Any]) -> dict[str, Any]:
    """Return what was reported since the last call, for a line of metrics."""
    return {name: results[REPORTED][name] for name in results.pop(FRESH, [])}


def merge_reports(results: dict[str, Any]) -> None:
    """Put what was reported among a finished run's metrics, where another stage may have begun them anew."""
    results.pop(FRESH, None)
    if REPORTED in results:
        results["metrics"] = {**results.get("metrics", {}), **results[REPORTED]}


def _one_or_all(tensors: Mapping[str, torch.Tensor]) -> object:
    return next(iter(tensors.values())) if len(tensors) == 1 else dict(tensors)


def _is_tensor(item: object) -> bool:
    import torch

    return isinstance(item, torch.Tensor)


def _packed_bytes(report: dict[str, Any]) -> int | None:
    """Return the size of a report in the journal; None if it is not plain data, or can't be written as it is."""
    try:
        data = msgpack.packb(report, strict_types=True)
        return len(data) if msgpack.packb(msgpack.unpackb(data)) == data else None
    except (TypeError, ValueError, OverflowError, RecursionError):
        return None


def _dtype(tensor: torch.Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _shown(item: Any) -> str:
    """Say what an object is, in a few words."""
    if _is_tensor(item):
        return f"a {_dtype(item)} tensor of shape {tuple(item.shape)}"
    if isinstance(item, tuple | list | dict):
        return f"a {type(item).__name__} of {len(item)}"
    return f"{type(item).__name__} {item!r}" if isinstance(item, int | float | str) else f"a {type(item).__name__}"
