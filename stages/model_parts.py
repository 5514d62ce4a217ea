"""How a model's weights come in and go out: all at once, or shard by shard.

What a run does to weights, gradients and optimizer state it does to every shard of the model's cut, and a whole model
is the case of one shard (`stages.spans`). Two things are done in two ways, and a `ModelParts` is who knows how:

==========  =======================================  =============================================
            `WholeModel`                             `CutModel`
==========  =======================================  =============================================
load        by transformers; then the model's walk   a skeleton, whose architecture is checked on
            is checked against its own forward       one layer; then shard by shard
checkpoint  by transformers, in files and under      a file a shard, a piece at a time, under the
            names as the architecture wants them     names of ``named_parameters()``
==========  =======================================  =============================================

Invariant: both load the same bits and write the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from engine.budget import Tier
from engine.context import StageContext
from engine.plan import Cost, Stage, TensorSpec, Value, ValueKind
from engine.tensors import dtype_name
from models.policy import PolicySource
from stages import checkpoint, names, shard_files
from stages.estimate import Estimator
from stages.files import file_value
from stages.shard_layout import ShardLayout, looked_at
from stages.spans import flat_value

_CHECKPOINT_OPERATORS = 450
# What a checkpoint takes beside its bytes, in operators: transformers writes its configurations, copied and compared.
_DRAW_PASSES = 40
# Drawing a random number takes as long as reading or writing so many (14 ns, measured on one core).


class ModelParts(Protocol):
    """Brings a model's weights to their Values, and writes them as a checkpoint."""

    def load(self) -> Iterator[tuple[Value, Stage]]:
        """Return the Values of the weights, each with the stage that loads it, in order."""

    def checkpoint(self, name: str, dtype: torch.dtype, tokenizer: Any) -> tuple[Value, Stage]:
        """Return the Value of a checkpoint in ``dtype`` and the stage that writes it; both have its name."""


@dataclass(frozen=True, kw_only=True)
class _Parts:
    """What both need: the policy, the seed of its weights if they are random, and the shards that it is computed in."""

    policy: PolicySource
    seed: int
    shards: Mapping[str, ShardLayout]
    estimator: Estimator

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that the model is computed in."""
        return next(iter(self.shards.values())).dtype

    def _config(self) -> dict[str, object]:
        return {"policy": self.policy.fingerprint, "dtype": dtype_name(self.dtype), "seed": self.seed}

    def _model_value(self, tensors: Mapping[str, TensorSpec]) -> Value:
        """Return the Value ``weights``, which is the model object with ``tensors``."""
        tiers = (Tier.DEVICE,)
        return Value(name=names.WEIGHTS, tensors=tensors, kind=ValueKind.ORDERED, tiers=tiers, provided=True)

    def _load_cost(self, nbytes: int) -> Cost:
        """Return the cost of bringing weights of ``nbytes`` to the device: drawn, or read from a file."""
        is_drawn = self.policy.location is None
        return Cost(moved_bytes=float(_DRAW_PASSES * nbytes)) if is_drawn else Cost(read_bytes=float(nbytes))

    def _checkpoint_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a checkpoint of the whole model, of which an outline's shards are a part."""
        return checkpoint.checkpoint_bytes(self.estimator.parameters(), self.policy, dtype.itemsize)

    def _written(
        self, name: str, dtype: torch.dtype, run: Callable[[StageContext], None], *, nbytes: int, copied_elements: int
    ) -> tuple[Value, Stage]:
        """Return a checkpoint of ``nbytes``; where dtypes differ, ``copied_elements`` are converted at a time."""
        reads, streams = looked_at({names.shard_weights(shard): layout for shard, layout in self.shards.items()})
        stage = Stage(
            name=name,
            kind="checkpoint",
            run=run,
            config={"dtype": dtype_name(dtype)},
            reads=tuple(dict.fromkeys((names.WEIGHTS, *reads))),
            writes=(name,),
            streams=streams,
            workspace_bytes=0 if dtype is self.dtype else copied_elements * dtype.itemsize,
            cost=Cost(written_bytes=float(nbytes), num_kernels=_CHECKPOINT_OPERATORS),
            durable=True,
        )
        return file_value(name, nbytes), stage


class WholeModel(_Parts):
    """A model whose one shard is all of it: ``weights`` is the model with its parameters."""

    def load(self) -> Iterator[tuple[Value, Stage]]:
        """See `ModelParts.load`."""
        value = self._model_value({**self.estimator.parameters(), **self.estimator.buffers()})
        policy, dtype, seed = self.policy, self.dtype, self.seed
        yield (
            value,
            Stage(
                name="load",
                kind="load",
                run=lambda context: checkpoint.load(context, policy, dtype, seed),
                config=self._config(),
                writes=(value.name,),
                workspace_bytes=self.estimator.load_workspace_bytes,
                cost=self._load_cost(value.nbytes),
            ),
        )

    def checkpoint(self, name: str, dtype: torch.dtype, tokenizer: Any) -> tuple[Value, Stage]:
        """See `ModelParts.checkpoint`."""
        return self._written(
            name,
            dtype,
            lambda context: checkpoint.save(context, tokenizer, dtype, name),
            nbytes=self._checkpoint_bytes(dtype),
            copied_elements=sum(layout.num_elements for layout in self.shards.values()),
        )


class CutModel(_Parts):
    """A model in several shards: ``weights`` is its skeleton, and every shard has flat weights of its own."""

    def load(self) -> Iterator[tuple[Value, Stage]]:
        """See `ModelParts.load`."""
        skeleton = self._model_value(self.estimator.buffers())
        policy, dtype = self.policy, self.dtype
        yield (
            skeleton,
            Stage(
                name="load",
                kind="load",
                run=lambda context: checkpoint.load_skeleton(context, policy, dtype),
                config=self._config(),
                writes=(skeleton.name,),
                workspace_bytes=self.estimator.skeleton_workspace_bytes,
            ),
        )
        for layout in self.shards.values():
            yield self._loaded_shard(layout)

    def _loaded_shard(self, layout: ShardLayout) -> tuple[Value, Stage]:
        policy, seed, shard = self.policy, self.seed, layout.shard
        value = flat_value(names.shard_weights(shard), layout, dtype_name(self.dtype), ValueKind.ORDERED)
        largest = max(spec.num_elements for spec in layout.parameters.values())
        stage = Stage(
            name=f"load {shard}",
            kind="load",
            run=lambda context: checkpoint.load_shard(context, policy, seed, shard, layout),
            config={**self._config(), "shard": shard},
            reads=(names.WEIGHTS,),
            writes=(value.name,),
            workspace_bytes=largest * max(self.dtype.itemsize, policy.default_dtype().itemsize),
            cost=self._load_cost(value.nbytes),
        )
        return value, stage

    def checkpoint(self, name: str, dtype: torch.dtype, tokenizer: Any) -> tuple[Value, Stage]:
        """See `ModelParts.checkpoint`."""
        shards = self.shards
        index_bytes = shard_files.INDEX_BYTES_A_TENSOR * len(self.estimator.parameters())
        return self._written(
            name,
            dtype,
            lambda context: shard_files.save_checkpoint(context, tokenizer, dtype, name, shards),
            nbytes=self._checkpoint_bytes(dtype) + index_bytes,
            copied_elements=max(layout.piece_elements for layout in shards.values()),
        )
