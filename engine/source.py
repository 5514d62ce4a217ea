"""What decides a function's result beside its arguments, as a hash for recipe keys.

Its source, without decorators, comments and layout; the plain data that it takes from outside, from a closure or from
its module; and, in the same way, the functions and classes of the person's own files that it calls. What it takes from
elsewhere (installed packages, files, objects with state) is not seen.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import textwrap
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from engine.origin import is_users
from engine.recipe import digest

_NOTHING = object()
_LARGEST_ITEMS = 10_000
# Collections that are longer count by their length alone: to hash them at every call would cost more than it saves.


def source_digest(function: Callable[..., Any]) -> str:
    """Return a hash that changes when the function, or what of a person's own files it uses, is changed."""
    return digest(_describe(function, seen=set()))


def _describe(function: object, seen: set[int]) -> object:
    """Return the function as plain data; one that was met before as nothing."""
    if id(function) in seen:
        return None
    seen.add(id(function))
    if isinstance(function, functools.partial):
        parts = [function.func, *function.args, *(item for pair in sorted(function.keywords.items()) for item in pair)]
        return [_outside(part, seen) for part in parts]
    if isinstance(function, types.MethodType):
        return [_describe(function.__func__, seen), _outside(function.__self__, seen)]
    if isinstance(function, types.FunctionType):
        code = function.__code__
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        used = {name: _outside(item, seen) for name, item in _used(function)}
        return [_source(code), [_outside(item, seen) for item in defaults], used]
    if isinstance(function, type):
        return _class_source(function)
    kind: Any = type(function)
    return [_class_source(kind), _outside(vars(function) if hasattr(function, "__dict__") else None, seen)]


def _outside(item: object, seen: set[int]) -> object:
    """Return what a function takes from outside as plain data: data as it is, own code described, the rest by type."""
    if item is None or isinstance(item, str | bool | int | float | bytes):
        return item if not isinstance(item, int) or item.bit_length() < 64 else str(item)
    if isinstance(item, list | tuple | dict | set | frozenset) and len(item) > _LARGEST_ITEMS:
        return [type(item).__name__, len(item)]
    if isinstance(item, re.Pattern):
        return [str(item.pattern), item.flags]
    if isinstance(item, list | tuple):
        return [_outside(part, seen) for part in item]
    if isinstance(item, dict):
        return [[str(key), _outside(part, seen)] for key, part in item.items()]
    if isinstance(item, set | frozenset):
        return sorted(repr(part) for part in item)
    if type(item).__module__ == "engine.authoring":
        item = getattr(item, "function", None)  # a stage function stands for the function in it
    if isinstance(item, types.FunctionType):
        return _describe(item, seen) if is_users(item.__code__.co_filename) else item.__qualname__
    if isinstance(item, functools.partial | types.MethodType | type):
        return _describe(item, seen)
    return type(item).__qualname__


def _used(function: types.FunctionType) -> Iterator[tuple[str, object]]:
    """Yield what the function takes from its closure and its module, by name."""
    for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
        try:
            yield name, cell.cell_contents
        except ValueError:  # not filled yet
            continue
    names = sorted(_names(function.__code__))
    for name in names:
        item = function.__globals__.get(name, _NOTHING)
        if isinstance(item, types.ModuleType):
            yield from _used_of(item, names)
        elif item is not _NOTHING:
            yield name, item


def _used_of(module: types.ModuleType, names: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield what of a person's own module may be used by a function that knows these names."""
    file = getattr(module, "__file__", None)
    if file is not None and is_users(file):
        for name in names:
            if name in vars(module) and not isinstance(vars(module)[name], types.ModuleType):
                yield f"{module.__name__}.{name}", vars(module)[name]


def _names(code: types.CodeType) -> set[str]:
    inner = (item for item in code.co_consts if isinstance(item, types.CodeType))
    return set(code.co_names).union(*(_names(item) for item in inner))


@functools.lru_cache(maxsize=4096)
def _source(code: types.CodeType) -> object:
    """Return a function's source without decorators and layout, or its compiled form where there is no source."""
    try:
        parsed = ast.parse(textwrap.dedent(inspect.getsource(code))).body[0]
    except (OSError, TypeError, SyntaxError, IndexError):
        return _compiled(code)
    if not isinstance(parsed, ast.FunctionDef | ast.AsyncFunctionDef) or parsed.name != code.co_name:
        return _compiled(code)  # a lambda, whose lines hold more than itself
    parsed.decorator_list = []
    return ast.unparse(parsed)


def _compiled(code: types.CodeType) -> object:
    constants = [
        _compiled(item)
        if isinstance(item, types.CodeType)
        else sorted(map(repr, item))
        if isinstance(item, frozenset)
        else repr(item)
        for item in code.co_consts
    ]
    return [code.co_code, constants, list(code.co_names), list(code.co_varnames)]


@functools.lru_cache(maxsize=1024)
def _class_source(kind: type) -> str:
    """Return the source of a class of the person's own, the name of any other."""
    name = f"{kind.__module__}.{kind.__qualname__}"
    try:
        file = inspect.getsourcefile(kind)
        return inspect.getsource(kind) if file is not None and is_users(file) else name
    except (OSError, TypeError):
        return kind.__qualname__  # made by a call, such as a named tuple: its module's name follows the file's
