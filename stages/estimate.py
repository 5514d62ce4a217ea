"""Workspace of a stage, by running its real code on tensors without data.

Every Value of the stage is created on torch's meta device, the weights are a `models.tracing.TracedModel`, and the
stage's own function runs under the byte counter. What it reaches above its entry is its workspace. Chunks of one shape
have the same workspace, so results are remembered by the shape that the caller names.

For another kind of device than this machine's, the model calls that device's kernels, the counter rounds as its
allocator does, and adds what its kernels take inside (`models.workspaces`). What libraries keep for good
(``DeviceKind.kept_bytes``) is no stage's workspace and not counted here.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property

import torch

from engine.budget import Tier
from engine.device import CpuDevice
from engine.device_kind import CPU, DeviceKind
from engine.errors import StageFailedError, UnsupportedModelError
from engine.memory import DEVICE, LiveBytes
from engine.plan import Plan, Stage, TensorSpec
from engine.tensors import dtype_name
from engine.worker import TorchMachine
from models.float64 import accumulation_dtype
from models.policy import PolicySource
from models.support import walk_logits
from models.tracing import TracedModel
from models.workspaces import workspaces
from stages import names

_CHECK_FORWARDS = 4
# The check after loading runs the block walk and the model's own forward on a few tokens, and compares two rows of
# logits. The own forward can't be traced without data; with its mask and its cache-free layers it stays below this
# many times the walk. A recurrent layer takes far more than a mask, and the same in both: then nothing comes on top but
# rows of logits.
_ROWS_OF_LOGITS = 4


class Estimator:
    """Knows a policy's sizes and the workspaces of its stages on a ``kind`` of device; no weights are loaded.

    Raises:
        UnsupportedModelError: the policy's architecture is refused.
    """

    def __init__(self, policy: PolicySource, dtype: torch.dtype, kind: DeviceKind = CPU) -> None:
        self._policy, self._dtype, self._drawn = policy, dtype, policy.location is None
        self._kind = kind
        meter = self._meter()
        with meter:
            self._model = TracedModel(policy.sizes_only(dtype, kind))
        self._building_bytes = meter.peak[DEVICE] - meter.live[DEVICE]
        self._known: dict[Hashable, int] = {}

    def _meter(self) -> LiveBytes:
        return LiveBytes(kind=self._kind, inside=workspaces(self._kind))

    def parameters(self) -> dict[str, TensorSpec]:
        """Return the parameters' sizes by name; a tied one comes once."""
        return {name: _spec(tensor) for name, tensor in self._model.hf.named_parameters()}

    def buffers(self) -> dict[str, TensorSpec]:
        """Return the sizes of what the model keeps beside its parameters."""
        return {name: _spec(tensor) for name, tensor in self._model.hf.named_buffers()}

    @cached_property
    def load_workspace_bytes(self) -> int:
        """Device bytes that loading needs beyond the weights: building or converting, then the check."""
        largest = self._kind.rounded(max(spec.nbytes for spec in self.parameters().values()))
        meter = self._meter()
        with meter:
            meter.adopt(self._tensors)
            entry = meter.live[DEVICE]
            try:
                walk_logits(self._model.model)
            except Exception as error:  # whatever a layer of an unknown kind raises
                raise self._refusal(error) from error
        walk, head = meter.peak[DEVICE] - entry, self._model.model.head
        check = _CHECK_FORWARDS * walk
        if any(map(self._model.is_recurrent, range(self._model.num_layers))):
            check = walk + _ROWS_OF_LOGITS * self._kind.rounded(
                head.out_features * accumulation_dtype(self._dtype).itemsize
            )
        return max(self._building_bytes if self._drawn else largest, check)

    @cached_property
    def skeleton_workspace_bytes(self) -> int:
        """Device bytes that loading a model without its weights needs: one layer is, to check the architecture."""
        small = Estimator(self._policy.small(), self._dtype, self._kind)
        held = [*small.parameters().values(), *small.buffers().values()]
        return sum(self._kind.rounded(spec.nbytes) for spec in held) + small.load_workspace_bytes

    def _refusal(self, error: Exception) -> UnsupportedModelError:
        kind = self._model.hf.config.model_type
        return UnsupportedModelError(f"model type {kind!r} is refused: its layers don't run one by one ({error})")

    @cached_property
    def _tensors(self) -> list[torch.Tensor]:
        return [*self._model.hf.parameters(), *self._model.hf.buffers()]

    def known_workspace_bytes(self, shape: Hashable) -> int | None:
        """Return the device bytes of a stage of a shape that was traced before; None if none was."""
        return self._known.get(shape)

    def workspace_bytes(self, shape: Hashable, stage: Stage, plan: Plan) -> int:
        """Return the device bytes that ``stage`` needs beyond its Values and buffers.

        Raises:
            UnsupportedModelError: the stage can't be run with this architecture.
        """
        if shape not in self._known:
            self._known[shape] = self._trace(stage, plan)
        return self._known[shape]

    def _trace(self, stage: Stage, plan: Plan) -> int:
        meter = self._model.meter = self._meter()
        machine = TorchMachine(plan, meter=meter, store=None, directory=None, device=CpuDevice("meta"))
        with meter:
            for name in stage.used:
                machine.create(plan.values[name], Tier.DEVICE)
            machine.held[names.WEIGHTS].item = self._model
            meter.adopt(self._tensors)  # or their views would count as new
            entry = meter.live[DEVICE]
            meter.restart_peak()
            try:
                machine.run(stage)
            except StageFailedError as error:
                raise self._refusal(error) from error
            return meter.peak[DEVICE] - entry


def _spec(tensor: torch.Tensor) -> TensorSpec:
    return TensorSpec(shape=tuple(tensor.shape), dtype=dtype_name(tensor.dtype))
