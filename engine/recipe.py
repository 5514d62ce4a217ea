"""Recipe keys: hashes of all that decides what a stage computes, and what a whole plan does.

Equal keys mean equal results, on the same machine; no content is hashed. This module is pure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgpack

import engine

if TYPE_CHECKING:
    from engine.parts import Stage
    from engine.plan import Plan

_PLAIN = frozenset({str, int, float, bool, bytes, type(None)})


def digest(data: object) -> str:
    """Return a short stable hash of plain data (dicts with string keys, lists, numbers, strings)."""
    return hashlib.blake2b(msgpack.packb(_canonical(data)), digest_size=16).hexdigest()


def _canonical(data: object) -> object:
    if isinstance(data, Mapping):
        return [[key, _canonical(data[key])] for key in sorted(data)]
    if isinstance(data, list | tuple):
        if _PLAIN.issuperset(map(type, data)):  # token ids by the million
            return list(data)
        return [_canonical(item) for item in data]
    if isinstance(data, str | int | float | bool | bytes | None):
        return data
    raise TypeError(f"only plain data goes into a recipe, not {type(data).__name__}: {data!r}")


def recipe_keys(stages: Iterable[Stage], code_version: str) -> dict[str, str]:
    """Return a key per stage: kind, code version, configuration and the keys of what it reads.

    Equal keys mean equal results; no content is hashed.
    """
    made_by: dict[str, str] = {}
    keys: dict[str, str] = {}
    for stage in stages:
        inputs = [[name, made_by.get(name, "")] for name in stage.used]
        keys[stage.name] = digest([stage.kind, code_version, stage.config, inputs])
        made_by.update(dict.fromkeys(stage.changed, keys[stage.name]))
    return keys


@dataclass(frozen=True, kw_only=True)
class PlanKeys:
    """The recipe keys of a plan's stages by name, and its ``fingerprint``: a hash of all that decides its results."""

    by_stage: Mapping[str, str]
    fingerprint: str


def plan_keys(plan: Plan) -> PlanKeys:
    """Return the keys of a plan: of its stages, which are the same in any order that it may run in, and of all of it.

    The latter has settings, choices and stages.
    """
    stages = plan.ordered()
    keys = recipe_keys(stages, engine.CODE_VERSION)
    parts = [plan.name, dict(plan.settings), dict(plan.choices), [keys[stage.name] for stage in stages]]
    return PlanKeys(by_stage=keys, fingerprint=digest(parts))
