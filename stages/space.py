"""The plans that one GRPO step could be: `GrpoSpace` is what the planner chooses from, and lowers a choice.

The stages, in order: load the weights; forward every group (prefill, score); the loss; backward every group (replay,
sweep), last group first, whose state is most likely still at hand; merge; clip; AdamW; checkpoint.

Choices, all of which can be fixed by hand: ``chunk_tokens`` (what one stage evaluates), ``branches_at_once``
(responses batched into one wave), ``head_rows`` (rows scored per block). Smaller ones need less workspace and more
time. ``page_tokens`` is a constant of the plan.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from functools import cached_property
from itertools import pairwise
from typing import Any

from engine.budget import Tier
from engine.errors import UsageError
from engine.plan import Choices, Cost, Plan, Stage, Tap, TensorSpec, Value, ValueKind, digest
from engine.worker import dtype_name
from models.dense import HEAD_GRADIENT
from models.float64 import accumulation_dtype
from models.geometry import geometry, state_layout
from models.policy import PolicySource
from stages import checkpoint, names, update
from stages.advantages import GroupAdvantages, group_advantages
from stages.compute import HeadOptions
from stages.estimate import Estimator
from stages.groups import Group
from stages.loss_stage import LossStage
from stages.lower import VECTOR_TIERS, Lowering
from stages.settings import GrpoSettings
from stages.tree import Node, step_trees

SMALLEST_CHUNK_TOKENS = 64
LARGEST_CHUNK_TOKENS = 1024
# Below 64 tokens a chunk wastes arithmetic on any hardware; above 1,024 it buys next to no time.

HEAD_ROWS_LADDER = (256, 64, 16)


@dataclass(kw_only=True)
class GrpoSpace:
    """The plans of one GRPO step under all choices; see `engine.plan.ChoiceSpace`."""

    name: str
    policy: PolicySource
    groups: tuple[Group, ...]
    settings: GrpoSettings
    tokenizer: Any = None
    _lowered: dict[tuple[tuple[str, int], ...], Plan] = field(default_factory=dict)

    @cached_property
    def estimator(self) -> Estimator:
        return Estimator(self.policy, self.settings.dtype)

    @cached_property
    def load_workspace_bytes(self) -> int:
        return self.estimator.load_workspace_bytes()

    @cached_property
    def trees(self) -> list[Node]:
        return step_trees(self.groups)

    @cached_property
    def advantages(self) -> list[GroupAdvantages]:
        settings = self.settings
        return [
            group_advantages(group, scale=settings.loss.scale_advantages, baseline=settings.baseline)
            for group in self.groups
        ]

    @cached_property
    def ladders(self) -> dict[str, tuple[int, ...]]:
        """Every choice's values from the fastest to the leanest."""
        longest = max(len(node.inputs) for tree in self.trees for node in (tree, *tree.children))
        chunks = [LARGEST_CHUNK_TOKENS]
        while chunks[-1] > SMALLEST_CHUNK_TOKENS:
            chunks.append(chunks[-1] // 2)
        branches = [max(len(tree.children) for tree in self.trees)]
        while branches[-1] > 1:
            branches.append((branches[-1] + 1) // 2)
        rows = max(sum(len(leaf.rows) for leaf in tree.children) for tree in self.trees)
        ladders = {
            "chunk_tokens": tuple(c for c in chunks if c < 2 * longest or c == chunks[-1]),
            "branches_at_once": tuple(branches),
            "head_rows": tuple(r for r in HEAD_ROWS_LADDER if r < 4 * rows or r == HEAD_ROWS_LADDER[-1]),
        }
        unknown = set(self.settings.fixed) - set(ladders)
        if unknown:
            raise UsageError(f"no such choice: {', '.join(sorted(unknown))}; known are {', '.join(ladders)}")
        return {key: (self.settings.fixed[key],) if key in self.settings.fixed else ladders[key] for key in ladders}

    def first(self) -> Choices:
        return {key: ladder[0] for key, ladder in self.ladders.items()}

    def leanest(self) -> list[Choices]:
        """Everything at its leanest, and longer chunks as far as they cut fewer responses.

        Fewer branches, fewer rows and shorter chunks never need more, but for one case: a response that is cut has
        state of its own between its parts.
        """
        leanest = {key: ladder[-1] for key, ladder in self.ladders.items()}
        longest_leaf = max(len(leaf.inputs) for tree in self.trees for leaf in tree.children)
        chunks = self.ladders["chunk_tokens"][::-1]
        kept = [tokens for shorter, tokens in pairwise(chunks) if longest_leaf > shorter]
        return [{**leanest, "chunk_tokens": tokens} for tokens in (chunks[0], *kept)]

    def leaner(self, choices: Choices, binding_stage: Stage) -> Choices | None:
        order = ["head_rows", "branches_at_once", "chunk_tokens"]
        if binding_stage.kind in ("prefill", "sweep"):
            order.reverse()
        for key in order:
            ladder = self.ladders[key]
            position = ladder.index(choices[key])
            if position + 1 < len(ladder):
                return {**choices, key: ladder[position + 1]}
        return None

    def lower(self, choices: Choices) -> Plan:
        key = tuple(sorted(choices.items()))
        if key not in self._lowered:
            self._lowered[key] = _StepBuilder(self, choices).build()
        return self._lowered[key]


class _StepBuilder:
    """Lowers one step under given choices."""

    def __init__(self, space: GrpoSpace, choices: Choices) -> None:
        self.space, self.settings, self.policy = space, space.settings, space.policy
        self.parameters = space.estimator.parameters()
        self.tied = HEAD_GRADIENT not in self.parameters
        self.wide = accumulation_dtype(self.settings.dtype)
        self.plan = Plan(
            name=space.name,
            choices={**choices, "page_tokens": self.settings.page_tokens},
            settings=self._fingerprint(),
            space=space,
            notes=[*self._weights_notes(), *(note for entry in space.advantages for note in entry.notes)],
        )
        self.sizes = geometry(
            self.policy.config,
            layer_parameters=sum(spec.num_elements for name, spec in self.parameters.items() if ".layers." in name),
            dtype=self.settings.dtype,
        )
        self.lowering = Lowering(
            plan=self.plan,
            sizes=self.sizes,
            layout=state_layout(self.sizes, dtype=self.settings.dtype, page_tokens=self.settings.page_tokens),
            head=HeadOptions(
                temperature=float(self.settings.temperature),
                block_rows=choices["head_rows"],
                uses_entropies=bool(self.settings.loss.entropy_bonus),
            ),
            estimator=space.estimator,
            chunk_tokens=choices["chunk_tokens"],
            branches_at_once=choices["branches_at_once"],
            exact=self.settings.gradient == "exact",
            tied_head=self.tied,
        )

    def build(self) -> Plan:
        self._declare_values()
        self._add_load()
        for tree in self.space.trees:
            self.lowering.forward((tree,))
        self._add_loss()
        for tree in reversed(self.space.trees):
            self.lowering.backward((tree,))
        self._add_merge()
        if self.settings.update_weights:
            self._add_update()
        self.plan.taps["gradients"] = Tap(after="merge", run=checkpoint.save_gradients)
        return self.plan

    def _fingerprint(self) -> dict[str, object]:
        settings = self.settings
        return {
            "policy": self.policy.fingerprint,
            "rollouts": digest([_group_data(group) for group in self.space.groups]),
            "gradient": settings.gradient,
            "loss": asdict(settings.loss),
            "optimizer": asdict(settings.optimizer),
            "dtype": dtype_name(settings.dtype),
            "temperature": float(settings.temperature),
            "seed": settings.seed,
            "baseline": settings.baseline,
        }

    def _weights_notes(self) -> list[str]:
        stored, computed = self.policy.default_dtype(), self.settings.dtype
        if self.policy.location is None:
            return [
                f"the policy is a configuration alone: its weights are random, drawn from seed {self.settings.seed}"
            ]
        if computed.itemsize >= stored.itemsize:
            return []
        return [
            f"the policy is in {dtype_name(stored)} and is computed in {dtype_name(computed)}: its weights are rounded "
            "when they are loaded, and the new checkpoint holds the rounded ones"
        ]

    def _declare_values(self) -> None:
        wide = dtype_name(self.wide)
        gradients = {name: TensorSpec(shape=spec.shape, dtype=wide) for name, spec in self.parameters.items()}
        on_device = (Tier.DEVICE,)
        self.plan.value(
            Value(
                name=names.WEIGHTS,
                tensors={**self.parameters, **self.space.estimator.buffers()},
                kind=ValueKind.ORDERED,
                tiers=on_device,
                provided=True,
            )
        )
        self.plan.value(Value(name=names.GRADIENTS, tensors=gradients, kind=ValueKind.ACCUMULATOR, tiers=on_device))
        if self.tied:
            shape = (self.sizes.vocab, self.sizes.hidden)
            head = {HEAD_GRADIENT: TensorSpec(shape=shape, dtype=wide)}
            self.plan.value(Value(name=names.HEAD_GRADIENTS, tensors=head, kind=ValueKind.ACCUMULATOR, tiers=on_device))

    def _add_load(self) -> None:
        policy, dtype, seed = self.policy, self.settings.dtype, self.settings.seed
        self.plan.add(
            Stage(
                name="load",
                kind="load",
                run=lambda context: checkpoint.load(context, policy, dtype, seed),
                config={"policy": policy.fingerprint, "dtype": dtype_name(dtype), "seed": seed},
                writes=(names.WEIGHTS,),
                workspace_bytes=self.space.load_workspace_bytes,
                cost=Cost(moved_bytes=float(self.plan.values[names.WEIGHTS].nbytes) * 3),
            )
        )

    def _add_loss(self) -> None:
        config = self.settings.loss
        loss = LossStage(
            config=config,
            groups=self.space.groups,
            advantages=tuple(self.space.advantages),
            dtype=self.wide,
            works=tuple(self.lowering.works),
        )
        self.plan.add(
            Stage(
                name="loss",
                kind="loss",
                run=loss.run,
                config={"loss": asdict(config), "rollouts": digest([_group_data(g) for g in self.space.groups])},
                reads=tuple(names.scores(work.name) for work in loss.works),
                writes=tuple(names.derivatives(work.name) for work in loss.works),
                workspace_bytes=loss.workspace_bytes(),
                cost=Cost(num_kernels=100),
            )
        )

    def _add_merge(self) -> None:
        reads = (names.HEAD_GRADIENTS,) if self.tied else ()
        updates = (names.GRADIENTS,)
        self.plan.add(Stage(name="merge", kind="merge", run=update.merge, reads=reads, updates=updates))

    def _add_update(self) -> None:
        options = self.settings.optimizer
        largest = max(spec.num_elements for spec in self.parameters.values())
        scale = {"scale": TensorSpec(shape=(1,), dtype=dtype_name(self.wide))}
        self.plan.value(Value(name=names.CLIP, tensors=scale, tiers=VECTOR_TIERS))
        gradient_bytes = float(self.plan.values[names.GRADIENTS].nbytes)
        self.plan.add(
            Stage(
                name="clip",
                kind="clip",
                run=lambda context: update.clip(context, options),
                config=asdict(options),
                reads=(names.GRADIENTS,),
                writes=(names.CLIP,),
                workspace_bytes=update.SCALARS_BYTES,
                cost=Cost(moved_bytes=gradient_bytes),
            )
        )
        self.plan.add(
            Stage(
                name="adamw",
                kind="adamw",
                run=lambda context: update.adamw_step(context, options),
                config=asdict(options),
                reads=(names.GRADIENTS, names.CLIP),
                updates=(names.WEIGHTS,),
                workspace_bytes=update.adamw_workspace_bytes(largest, self.settings.dtype),
                cost=Cost(moved_bytes=gradient_bytes * 7),
            )
        )
        self._add_checkpoint()

    def _add_checkpoint(self) -> None:
        policy, tokenizer = self.policy, self.space.tokenizer
        dtype = policy.default_dtype() if policy.location is not None else self.settings.dtype
        nbytes = checkpoint.checkpoint_bytes(self.parameters, policy, dtype.itemsize)
        copied = sum(spec.num_elements for spec in self.parameters.values()) * dtype.itemsize
        self.plan.value(
            Value(
                name=names.CHECKPOINT,
                tensors={"files": TensorSpec(shape=(nbytes,), dtype="uint8")},
                tiers=(Tier.DISK,),
                provided=True,
                keep=True,
            )
        )
        self.plan.add(
            Stage(
                name="checkpoint",
                kind="checkpoint",
                run=lambda context: checkpoint.save(context, policy, tokenizer, dtype),
                config={"dtype": dtype_name(dtype)},
                reads=(names.WEIGHTS,),
                writes=(names.CHECKPOINT,),
                workspace_bytes=0 if dtype is self.settings.dtype else copied,
                cost=Cost(moved_bytes=float(nbytes)),
            )
        )


def _group_data(group: Group) -> list[object]:
    return [list(group.prompt_ids), [list(asdict(response).values()) for response in group.responses]]
