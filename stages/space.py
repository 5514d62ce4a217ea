"""The plans that one GRPO run could be: `GrpoSpace` is what the planner chooses from, and lowers a choice.

Choices, all of which can be fixed by hand: ``chunk_tokens`` (what one stage evaluates), ``branches_at_once``
(responses batched into one wave, also when they are sampled), ``head_rows`` (rows scored per block),
``stored_inputs`` (how much a chunk's forward keeps for its backward, `stages.kept`), ``layer_spans`` (in how many parts
the model is on the device, `stages.spans`). Smaller ones of the first three need less workspace and more time; storing
less takes more arithmetic and fewer bytes, though none fewer of the device. ``page_tokens`` is a constant of the plan.
What a choice is made into is in `stages.build`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from engine.device_kind import DeviceKind, planned_kind
from engine.errors import UsageError
from engine.origin import at
from engine.plan import Choices, Cost, Plan, Stage, TensorSpec
from models.dense import HEAD_GRADIENT
from models.gated_delta import recurrent_layers
from models.geometry import Geometry, geometry
from models.policy import PolicySource
from stages import names
from stages.build import RunBuilder
from stages.costs import ChunkCosts, StepCosts
from stages.estimate import Estimator
from stages.groups import StepGroup
from stages.kept import STORED_INPUTS_LADDER
from stages.lookup import LookupIds, lookup_ids
from stages.loss_stage import LossStage
from stages.optimizer import OptimizerState
from stages.optimizer_file import read_optimizer_file
from stages.run_groups import RunGroups
from stages.settings import GrpoSettings, RolloutSettings
from stages.spans import Cut, cut_model
from stages.step_record import SampledSizes
from stages.tree import Node

SMALLEST_CHUNK_TOKENS = 64
LARGEST_CHUNK_TOKENS = 8192
# Below 64 tokens a chunk wastes arithmetic on any hardware; above 8,192 it buys next to no time: what it saves is the
# merging of partial attention over pages of its own tokens, and matrices are large enough for any device long before.

HEAD_ROWS_LADDER = (256, 64, 16)

MOST_SPANS_OF_CHUNKS = 2**11
# Pairs of a layer span and a chunk, each of which is some stages: a plan of so many is made in some seconds.

CHUNK_KINDS = ("prefill", "score", "replay", "sweep")
"""Stages that evaluate a chunk."""

_LEVERS = {
    "prefill": ("chunk_tokens", "stored_inputs", "layer_spans"),
    "sweep": ("chunk_tokens", "stored_inputs", "layer_spans"),
    "score": ("head_rows", "branches_at_once", "chunk_tokens", "stored_inputs", "layer_spans"),
    "replay": ("head_rows", "branches_at_once", "chunk_tokens", "stored_inputs", "layer_spans"),
    "rollout": ("branches_at_once", "head_rows"),
}
# What changes the bytes that a stage of a kind needs; other kinds are asked for all.


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is found once and is true of a run under all choices, and of its outlines.

    ``lookups`` are the ids that every step's backward looks up. ``has_few_lookups`` says whether they are few in every
    step of the run, so that stages of all steps are alike.
    """

    estimator: Estimator
    lookups: tuple[LookupIds, ...]
    has_few_lookups: bool

    def of_steps(self, steps: Sequence[int]) -> Facts:
        """Return the facts of a run that has only some of the steps."""
        return replace(self, lookups=tuple(self.lookups[step] for step in steps))


@dataclass(kw_only=True)
class GrpoSpace:
    """The plans of one GRPO run under all choices; see `engine.plan.ChoiceSpace`.

    ``steps`` are the groups of every step; ``rollout`` says how responses are made where a group is a `Prompt`;
    ``kind`` is the kind of device that the plans are made for.

    The declared choices are all combinations of the ladders' values but those of layer spans with chunks so short that
    there were more than `MOST_SPANS_OF_CHUNKS` pairs of both.
    """

    name: str
    policy: PolicySource
    steps: tuple[tuple[StepGroup, ...], ...]
    settings: GrpoSettings
    rollout: RolloutSettings | None = None
    tokenizer: Any = None
    kind: DeviceKind = field(default_factory=planned_kind)
    sampled: SampledSizes = field(default_factory=SampledSizes, init=False)
    _lowered: dict[Hashable, Plan] = field(default_factory=dict, init=False)
    _outlines: dict[int, GrpoSpace] = field(default_factory=dict, init=False)
    _optimizer: OptimizerState | None = field(default=None, init=False)
    _loss_bytes: dict[Hashable, int] = field(default_factory=dict, init=False)
    _cuts: dict[int, Cut] = field(default_factory=dict, init=False)
    _facts: Facts | None = field(default=None, init=False)
    _user_of_the_model: Stage | None = field(default=None, init=False)

    @cached_property
    def groups(self) -> RunGroups:
        """The groups of all steps."""
        return RunGroups(
            policy=self.policy,
            steps=self.steps,
            settings=self.settings,
            rollout=self.rollout,
            tokenizer=self.tokenizer,
        )

    @property
    def facts(self) -> Facts:
        if self._facts is None:
            self._facts = self._find_facts()
        return self._facts

    def _find_facts(self) -> Facts:
        estimator = Estimator(self.policy, self.settings.dtype, self.kind)
        vocab, exact = int(self.policy.config.vocab_size), self.settings.gradient == "exact"
        trees = ([tree for _, tree in self.groups.trees(step, "")] for step in range(len(self.steps)))
        lookups = tuple(lookup_ids(found, vocab=vocab, exact=exact) for found in trees)
        return Facts(
            estimator=estimator,
            lookups=lookups,
            has_few_lookups=all(ids.is_few for ids in lookups),
        )

    @property
    def estimator(self) -> Estimator:
        return self.facts.estimator

    @cached_property
    def why_whole(self) -> str | None:
        """Why the model can't run by layer spans; None if it can."""
        if self.groups.samples:
            return "responses are sampled, and every token would need every span"
        shapes = {name: spec.shape for name, spec in self.estimator.parameters().items()}
        return self.policy.why_not_in_parts(shapes)

    @cached_property
    def sizes(self) -> Geometry:
        """What planning knows of the model."""
        parameters = self.estimator.parameters()
        return geometry(
            self.policy.config,
            layer_parameters=sum(spec.num_elements for name, spec in parameters.items() if ".layers." in name),
            dtype=self.settings.dtype,
        )

    def cut(self, num_spans: int) -> Cut:
        """Return the model's cut into so many layer spans."""
        if num_spans not in self._cuts:
            parameters = self.estimator.parameters()
            layers, tied = int(self.policy.config.num_hidden_layers), HEAD_GRADIENT not in parameters
            recurrent = recurrent_layers(self.policy.config)
            self._cuts[num_spans] = cut_model(
                parameters, num_layers=layers, num_spans=num_spans, tied=tied, recurrent=recurrent
            )
        return self._cuts[num_spans]

    def chunk_costs(self, choices: Choices) -> ChunkCosts:
        """Return what chunks cost under ``choices``."""
        return ChunkCosts(
            sizes=self.sizes,
            head_rows=choices["head_rows"],
            stored_inputs=choices["stored_inputs"],
            page_tokens=self.settings.page_tokens,
        )

    def least_cost(self, choices: Choices) -> tuple[Cost, int]:
        """See `engine.plan.ChoiceSpace`. Stages without chunks cost no less than under the fastest choices."""
        costs = StepCosts(
            costs=self.chunk_costs(choices),
            spans=self.cut(choices["layer_spans"]).spans,
            chunk_tokens=choices["chunk_tokens"],
            branches_at_once=choices["branches_at_once"],
            page_tokens=self.settings.page_tokens,
            exact=self.settings.gradient == "exact",
        )
        total, number = self._other_cost
        for trees in self._unlike_trees:
            cost, stages = costs.total(trees)
            total += cost.times(self.settings.epochs_per_step)
            number += stages * self.settings.epochs_per_step
        return total, number

    @cached_property
    def _unlike_trees(self) -> list[list[Node]]:
        """The token trees of the steps of a sketch, which are asked for under all choices."""
        return [[tree for _, tree in self.groups.trees(step, "")] for step in self.groups.unlike_steps]

    @cached_property
    def _other_cost(self) -> tuple[Cost, int]:
        """The cost of the stages of a sketch that evaluate no chunk, under the fastest choices, and their number."""
        fastest = self.sketch(self.first())
        others = [stage.cost for stage in fastest.stages.values() if stage.kind not in CHUNK_KINDS]
        return sum(others, Cost()), len(others)

    def optimizer_state(self, parameters: Mapping[str, TensorSpec], *, kept: bool) -> OptimizerState:
        """Return the optimizer's state that the run keeps; its file is read once, for its sizes."""
        if self._optimizer is None:
            source = self.settings.optimizer_state
            self._optimizer = OptimizerState(
                parameters=parameters,
                dtype=self.settings.dtype,
                kept=kept,
                source=None if source is None else read_optimizer_file(Path(source)),
            )
        return self._optimizer

    def loss_workspace_bytes(self, loss: LossStage) -> int:
        """Return the device bytes of a loss stage; stages of sampled groups of the same sizes need the same."""
        key = loss.shape
        if key is None:
            return loss.workspace_bytes()
        if key not in self._loss_bytes:
            self._loss_bytes[key] = loss.workspace_bytes()
        return self._loss_bytes[key]

    @property
    def ladders(self) -> dict[str, tuple[int, ...]]:
        """Every choice's values from the fastest to the leanest."""
        if self._user_of_the_model is not None and "layer_spans" not in self.settings.fixed:
            return {**self._ladders, "layer_spans": (1,)}
        return self._ladders

    def note_added(self, stage: Stage) -> None:
        """See `engine.plan.ChoiceSpace`: one that uses the model or its gradients knows them whole."""
        if self._user_of_the_model is None and _uses_model(stage):
            self._user_of_the_model = stage

    @property
    def hindrance(self) -> str | None:
        """See `engine.plan.ChoiceSpace`: why the model can't be brought to the device in parts."""
        user = self._user_of_the_model
        if self._ladders["layer_spans"][-1] > 1 and user is not None:
            return f"stage {user.name} uses it or its gradients{at(user.origin)}"
        return self.why_whole

    @cached_property
    def _ladders(self) -> dict[str, tuple[int, ...]]:
        prompts, responses, most, rows = zip(*self.groups.shapes, strict=True)
        longest = max(*prompts, *responses)
        chunks = [LARGEST_CHUNK_TOKENS]
        while chunks[-1] > SMALLEST_CHUNK_TOKENS:
            chunks.append(chunks[-1] // 2)
        branches = [max(most)]
        while branches[-1] > 1:
            branches.append((branches[-1] + 1) // 2)
        ladders = {
            "chunk_tokens": tuple(c for c in chunks if c < 2 * longest or c == chunks[-1]),
            "branches_at_once": tuple(branches),
            "head_rows": tuple(r for r in HEAD_ROWS_LADDER if r < 4 * max(rows) or r == HEAD_ROWS_LADDER[-1]),
            "stored_inputs": STORED_INPUTS_LADDER,
            "layer_spans": self._span_ladder(),
        }
        unknown = set(self.settings.fixed) - set(ladders)
        if unknown:
            raise UsageError(f"no such choice: {', '.join(sorted(unknown))}; known are {', '.join(ladders)}")
        return {key: (self.settings.fixed[key],) if key in self.settings.fixed else ladders[key] for key in ladders}

    def _span_ladder(self) -> tuple[int, ...]:
        """The whole model, or a span for every layer: spans of several layers need more bytes for as much time."""
        layers = int(self.policy.config.num_hidden_layers)
        wanted = self.settings.fixed.get("layer_spans", 1)
        if wanted > layers:
            raise UsageError(f"layer_spans={wanted} is more than the {layers} layers of the policy")
        if wanted > 1 and self.why_whole is not None:
            raise UsageError(f"layer_spans={wanted} can't be: {self.why_whole}; set it to 1")
        return (1,) if self.why_whole is not None else tuple(dict.fromkeys((1, layers)))

    def declares(self, choices: Choices) -> bool:
        """Return whether choices from the ladders are among the declared ones."""
        spans, chunk_tokens = choices["layer_spans"], choices["chunk_tokens"]
        if spans == 1 or len(self.ladders["chunk_tokens"]) == 1:
            return True
        num_chunks = max(sum(-(-tokens // chunk_tokens) for tokens in nodes) for nodes in self.groups.node_tokens)
        return spans * num_chunks <= MOST_SPANS_OF_CHUNKS

    def first(self) -> Choices:
        return {key: ladder[0] for key, ladder in self.ladders.items()}

    def leanest(self) -> list[Choices]:
        """Everything at its leanest, longer chunks where they cut fewer responses, inputs stored or not, spans or not.

        Fewer branches, fewer rows and shorter chunks never need more, but for one case: a response that is cut has
        state of its own between its parts. Stored inputs take the place of workspace, at the price of a buffer. Spans
        need less where a layer is larger than the hidden state of a chunk, which they hand on.
        """
        leanest = {key: ladder[-1] for key, ladder in self.ladders.items()}
        return [
            {**leanest, "chunk_tokens": tokens, "stored_inputs": stored, "layer_spans": spans}
            for spans in self.ladders["layer_spans"]
            for tokens in self._leanest_chunks(spans)
            for stored in self.ladders["stored_inputs"]
        ]

    def _leanest_chunks(self, spans: int) -> list[int]:
        """Return the shortest chunks that are declared with so many spans, and longer ones that cut fewer responses."""
        longest_leaf = max(responses for _, responses, _, _ in self.groups.shapes)
        declared = [
            tokens
            for tokens in reversed(self.ladders["chunk_tokens"])
            if self.declares({"chunk_tokens": tokens, "layer_spans": spans})
        ]
        return declared[:1] + [tokens for shorter, tokens in pairwise(declared) if longest_leaf > shorter]

    def levers(self, stage: Stage) -> tuple[str, ...]:
        return _LEVERS.get(stage.kind, tuple(self.ladders))

    def lower(self, choices: Choices) -> Plan:
        return self._build(choices, range(len(self.steps)))

    @property
    def gradual(self) -> tuple[str, ...]:
        return ("head_rows", "branches_at_once", "chunk_tokens")

    def sketch(self, choices: Choices) -> Plan:
        return self._build(choices, self.groups.unlike_steps)

    def outline(self, choices: Choices) -> Plan:
        """See `engine.plan.ChoiceSpace`. Chunks in the middle of a prompt need what their neighbours do."""
        short = self._with_short_prompts(choices["chunk_tokens"])
        return short._build(choices, short.groups.unlike_steps, is_outline=True)

    def _with_short_prompts(self, chunk_tokens: int) -> GrpoSpace:
        """Return a run of each kind of step once, with prompts that end alike but have few chunks and pages."""
        if chunk_tokens not in self._outlines:
            period = math.lcm(chunk_tokens, self.settings.page_tokens)
            short = replace(self, steps=self.groups.with_short_prompts(period))
            short._facts = self.facts.of_steps(self.groups.unlike_steps)
            self._outlines[chunk_tokens] = short
        return self._outlines[chunk_tokens]

    def _build(self, choices: Choices, steps: Sequence[int], *, is_outline: bool = False) -> Plan:
        key = (tuple(sorted(choices.items())), len(steps), is_outline)
        if key not in self._lowered:
            self._lowered[key] = RunBuilder(self, choices, steps, is_outline=is_outline).build()
        return self._lowered[key]


def _uses_model(stage: Stage) -> bool:
    return any(name == names.WEIGHTS or "gradients" in name.split("/") for name in stage.used)
