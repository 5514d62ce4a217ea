"""Files that stages write, as Values: their bytes are planned on the disk tier, and they outlive the run."""

from __future__ import annotations

from engine.budget import Tier
from engine.plan import TensorSpec, Value, ValueKind


def file_value(name: str, nbytes: int, *, kind: ValueKind = ValueKind.IMMUTABLE) -> Value:
    """Return the Value of a file, or of a folder of files, of ``nbytes``; ordered if several stages write it."""
    return Value(
        name=name,
        tensors={"file": TensorSpec(shape=(nbytes,), dtype="uint8")},
        kind=kind,
        tiers=(Tier.DISK,),
        provided=True,
        keep=True,
    )
