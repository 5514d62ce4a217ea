"""From a plan file and ``--set`` to a Plan.

A plan file is ordinary Python with one function that returns a `Plan` (annotated so, or named ``plan``). Its keyword
arguments are what ``--set`` overrides; values are read by the arguments' annotations. A plan's own folder goes behind
everything else on the import path, so that a user's ``models/`` never shadows ours.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import inspect
import sys
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.device_kind import CPU, DeviceKind, planning_for
from engine.errors import EngineError, PlanError, UsageError, one_line
from engine.origin import at, error_origin
from engine.plan import Plan


@dataclass(frozen=True, kw_only=True)
class PlanFile:
    """A plan function with where it came from."""

    path: Path
    build: Callable[..., Plan]

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def measured(self) -> Sequence[Mapping[str, str]]:
        """The settings with which a plan is there to be measured: what its file declares as ``MEASURED``."""
        declared: Sequence[Mapping[str, str]] = self.build.__globals__.get("MEASURED", ())
        return declared

    def plan(self, settings: Mapping[str, str], kind: DeviceKind = CPU) -> Plan:
        """Call the plan function with ``settings``, given as text, and return its plan for a kind of device.

        Raises:
            UsageError: an unknown name, or a value that its annotation does not allow.
        """
        arguments = self._arguments(settings)
        try:
            with planning_for(kind):
                plan = self.build(**arguments)
        except PlanError as error:
            raise _located(error) from error
        except EngineError:
            raise
        except (Exception, SystemExit) as error:
            if error.__traceback__ is not None and error.__traceback__.tb_next is None:  # the call itself
                raise UsageError(f"{self.path}: {self.build.__name__}() can't be called: {error}") from error
            line = _line_in(self.path, error)
            raise UsageError(f"plan {self.path} failed: {one_line(error)}{line}") from error
        if not isinstance(plan, Plan):
            raise UsageError(f"{self.path}: {self.build.__name__}() returned {type(plan).__name__}, not a Plan")
        return plan

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The plan function's arguments by name."""
        return inspect.signature(self.build).parameters

    def whole_numbers(self, settings: Mapping[str, str]) -> dict[str, int | None]:
        """Return those arguments that are whole numbers, as ``settings`` or the defaults have them, None for none.

        Raises:
            UsageError: as `plan` does for its settings.
        """
        given = self._arguments(settings)
        found: dict[str, int | None] = {}
        for name, parameter in self.parameters.items():
            value = given.get(name, parameter.default)
            hint = _hint(self.build, name)
            union = typing.get_origin(hint) in (typing.Union, types.UnionType)
            if hint is int or (union and int in typing.get_args(hint)):
                found[name] = value if type(value) is int else None
        return found

    def _arguments(self, settings: Mapping[str, str]) -> dict[str, object]:
        parameters = self.parameters
        unknown = [name for name in settings if name not in parameters]
        if unknown:
            raise UsageError(
                f"--set {unknown[0]}: plan {self.name} has no such name; it knows {', '.join(parameters) or 'none'}"
            )
        return {name: _convert(name, text, _hint(self.build, name)) for name, text in settings.items()}


def _hint(function: Callable[..., Any], name: str) -> Any:
    """Return the annotation of an argument as a type; text where there is none."""
    annotation = inspect.signature(function).parameters[name].annotation
    if annotation is inspect.Parameter.empty:
        return str
    try:
        return typing.get_type_hints(
            types.SimpleNamespace(__annotations__={name: annotation}), vars(sys.modules[function.__module__])
        )[name]
    except NameError as error:
        raise UsageError(f"--set {name}: its annotation {annotation!r} can't be read: {error}") from error


def parse_settings(items: Sequence[str]) -> dict[str, str]:
    """Return ``NAME=VALUE`` items as a dict. Raises UsageError for an item without ``=`` or a repeated name."""
    settings: dict[str, str] = {}
    for item in items:
        name, equals, text = item.partition("=")
        if not equals or not name.isidentifier():
            raise UsageError(f"--set {item!r}: write name=value")
        if name in settings:
            raise UsageError(f"--set {name} is given twice: {settings[name]!r} and {text!r}")
        settings[name] = text
    return settings


def find_plan(name: str) -> PlanFile:
    """Return the plan function of a file, or of a shipped plan where no such file exists.

    Raises:
        UsageError: no such file or plan, the file can't be imported, or it has no single plan function.
    """
    path = Path(name)
    if not path.is_file():
        path = _shipped(name)
    return PlanFile(path=path.absolute(), build=_plan_function(_import(path.absolute())))


def _shipped(name: str) -> Path:
    spec = importlib.util.find_spec("plans")
    folders = list(spec.submodule_search_locations or ()) if spec else []
    for folder in folders:
        path = Path(folder) / f"{name}.py"
        if name.isidentifier() and path.is_file():
            return path
    known = sorted(
        path.stem for folder in folders for path in Path(folder).glob("*.py") if "-> Plan" in path.read_text()
    )
    raise UsageError(f"no plan file {name!r} here, and no shipped plan of that name; shipped are {', '.join(known)}")


def _import(path: Path) -> types.ModuleType:
    for folder in (Path(__file__).parents[1], path.parent):  # ours first, also where only an import hook finds it
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    name = f"plan_file_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path, loader=_FromSource(name, str(path)))
    if spec is None or spec.loader is None or path.suffix not in importlib.machinery.SOURCE_SUFFIXES:
        raise UsageError(f"{path} is not a Python file; a plan ends in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except PlanError as error:
        raise _located(error) from error
    except EngineError:
        raise
    except (Exception, SystemExit) as error:
        line = _line_in(path, error)
        raise UsageError(f"plan {path} can't be imported: {one_line(error)}{line}") from error
    return module


class _FromSource(importlib.machinery.SourceFileLoader):
    """Compiles a plan file each time. Bytecode beside it would be taken for its own after a change within a second."""

    def get_code(self, fullname: str) -> types.CodeType:
        """Return the code of the file as it is now."""
        return self.source_to_code(self.get_data(self.path), self.path)


def _located(error: PlanError) -> PlanError:
    """Return an error with the line of the plan file that led to it, unless the message names one already."""
    where = error_origin(error)
    file = where.partition(" line ")[0]
    return PlanError(str(error) if f"{file} line " in str(error) else f"{error}{at(where)}")


def _line_in(path: Path, error: BaseException) -> str:
    """Return `` (line N)`` for the innermost frame of ``error`` in the plan file."""
    line = getattr(error, "lineno", None) if isinstance(error, SyntaxError) else None
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(path):
            line = trace.tb_lineno
        trace = trace.tb_next
    return f" (line {line})" if line else ""


def _plan_function(module: types.ModuleType) -> Callable[..., Plan]:
    own = {
        name: function
        for name, function in vars(module).items()
        if inspect.isfunction(function) and function.__module__ == module.__name__ and not name.startswith("_")
    }
    found = [name for name, function in own.items() if _returns_plan(function)]
    if len(found) != 1 and "plan" in own:
        found = ["plan"]
    if len(found) != 1:
        have = f"it has {', '.join(found)}" if found else "it has none"
        raise UsageError(f"{module.__file__} must have one function that returns a Plan ('-> Plan'); {have}")
    return own[found[0]]


def _returns_plan(function: Callable[..., Any]) -> bool:
    annotation = inspect.signature(function).return_annotation
    return annotation is Plan or (isinstance(annotation, str) and annotation.split(".")[-1] == "Plan")


def _convert(name: str, text: str, hint: Any) -> object:
    """Read ``text`` as a value of type ``hint``."""
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        if type(None) in options and text.lower() == "none":
            return None
        return _convert_any(name, text, [option for option in options if option is not type(None)])
    if origin is typing.Literal:
        by_text = {str(option): option for option in options}
        if text not in by_text:
            raise UsageError(f"--set {name}={text!r}: choose one of {', '.join(by_text)}")
        return by_text[text]
    if hint is bool:
        if text.lower() not in ("true", "false"):
            raise UsageError(f"--set {name}={text!r}: write true or false")
        return text.lower() == "true"
    if hint in (int, float, str, Path):
        try:
            return hint(text)
        except ValueError:
            kind = "a whole number" if hint is int else "a number"
            raise UsageError(f"--set {name}={text!r}: not {kind}") from None
    raise UsageError(f"--set {name}: an argument of type {hint} can't be set from the command line")


def _convert_any(name: str, text: str, hints: Sequence[Any]) -> object:
    for hint in hints[:-1]:
        try:
            return _convert(name, text, hint)
        except UsageError:
            continue
    return _convert(name, text, hints[-1])
