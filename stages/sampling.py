"""The stages that sample responses: a wave of one group's responses is decoded from the captured state of its prompt.

The prompt's pages are those that prefill wrote; nothing of the prompt is evaluated again. Its last token opens every
response, as it opens every branch that is scored. A response ends behind its stop token, which belongs to it, or at
``max_response_tokens``. Sampling is from the full softmax at ``temperature``.

Random numbers come from a counter, not from a sequence: `uniform` is a function of seed, step, group, response and
the token's place in its response. So a token depends on neither the responses decoded beside it, nor on the waves,
nor on what was drawn before, and a wave that runs again draws the same tokens.

Invariant: between steps, row r of the batch is response ``_Wave.responses[r]``; what is drawn is written by response.
What `SampleWork.rehearse` allocates is what `SampleWork.run` has at its peak, which is any step with the whole wave.

Shapes: G responses of the group, R tokens of the longest response.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import torch

from engine.context import StageContext
from engine.errors import StageFailedError, UsageError
from engine.plan import Plan, Stage, Stream, TensorSpec, Value, ValueKind
from engine.tensors import dtype_name, torch_dtype
from models.decode import Tail, decode_step
from models.float64 import accumulation_dtype, lifted_casts
from models.geometry import Geometry, StateLayout
from stages import names
from stages.boundary import ChunkEdges, Edge, StageBoundaries
from stages.checks import check_count, check_seed
from stages.estimate import Estimator
from stages.sampled import VECTOR_TIERS
from stages.spans import Span
from stages.state import PagedPrefix, Visible, num_pages, page_runs

UNIFORM_BITS = 53
# As many as a float64 holds exactly, so that every uniform number is one below 1.


def random_bits(seed: int, step: int, group: int, response: int, position: int) -> int:
    """Return `UNIFORM_BITS` random bits for one token of one response.

    They are the upper bits of the first word of Philox 4x64-10 (Salmon et al., "Parallel random numbers: as easy as
    1, 2, 3", 2011), as numpy has it, with the key (seed, step) and the counter (position, response, group, 0).
    """
    key = np.array([seed, step], dtype=np.uint64)
    counter = np.array([position, response, group, 0], dtype=np.uint64)
    return int(np.random.Philox(key=key, counter=counter).random_raw()) >> (64 - UNIFORM_BITS)


def uniform(seed: int, step: int, group: int, response: int, position: int) -> float:
    """Return the number in [0, 1) that decides the token at ``position`` of a response (0 is its first)."""
    return random_bits(seed, step, group, response, position) * 2.0**-UNIFORM_BITS


@dataclass(frozen=True, kw_only=True)
class SamplingOptions:
    """How responses are drawn. ``greedy`` takes the likeliest token; its log-probability is still at ``temperature``.

    Raises:
        UsageError: a number out of its range.
    """

    max_response_tokens: int
    temperature: float = 1.0
    stop_token_ids: tuple[int, ...] = ()
    greedy: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        check_count("max_response_tokens", self.max_response_tokens)
        if not 0 < self.temperature < math.inf:
            raise UsageError(f"temperature={self.temperature!r} must be a positive number; for greedy set greedy=True")
        check_seed(self.seed)
        if any(token < 0 for token in self.stop_token_ids):
            raise UsageError(f"stop_token_ids={self.stop_token_ids!r} must be token ids, which are at least 0")


def rollout_value(name: str, group_size: int, options: SamplingOptions, dtype: str) -> Value:
    """Return the Value of a group's responses: ``token_ids`` and ``logprobs`` ``[G, R]``, ``lengths`` ``[G]``.

    Behind a response's end, ids and log-probabilities are 0. ``dtype`` is the compute dtype's name; log-probabilities
    are in its accumulation dtype. Waves write their own rows.
    """
    shape = (group_size, options.max_response_tokens)
    wide = dtype_name(accumulation_dtype(torch_dtype(dtype)))
    return Value(
        name=name,
        tensors={
            "token_ids": TensorSpec(shape=shape, dtype="int64"),
            "lengths": TensorSpec(shape=(group_size,), dtype="int64"),
            "logprobs": TensorSpec(shape=shape, dtype=wide),
        },
        kind=ValueKind.ORDERED,
        tiers=VECTOR_TIERS,
    )


@dataclass(frozen=True, kw_only=True)
class SampleWork:
    """One wave: the ``responses`` (rows of the Value ``rollout``) of a group that are decoded together, to their ends.

    ``opening_id`` is the prompt's last token, at ``first_position``; ``visible`` are the columns of all tokens before
    it, none for a prompt of one token, and ``edge`` is the one behind them. ``span`` is the whole model. ``head_rows``
    are the rows that meet the head at a time.
    """

    name: str
    rollout: str
    opening_id: int
    first_position: int
    visible: Visible
    responses: tuple[int, ...]
    step: int
    group: int
    options: SamplingOptions
    layout: StateLayout
    span: Span
    head_rows: int
    edge: Edge | None = None

    def run(self, context: StageContext) -> None:
        """Decode the wave and write its rows of the rollout.

        Raises:
            StageFailedError: the model's logits are not finite.
        """
        model = context.item(names.WEIGHTS)
        with lifted_casts(model.dtype):
            wave = _Wave(self, context, model)
            wave.clear()
            lengths = dict.fromkeys(self.responses, self.options.max_response_tokens)
            inputs = [self.opening_id] * len(self.responses)
            for position in range(self.options.max_response_tokens):
                inputs = wave.read(*wave.draw(inputs, position), position)
                for row in self._ended(inputs):
                    lengths[wave.responses[row]] = position + 1
                    wave.leave(row, inputs)
                if not inputs:
                    break
            wave.write_lengths([lengths[response] for response in self.responses])

    def rehearse(self, context: StageContext) -> None:
        """Allocate what `run` does at its peak; nothing here depends on what is drawn (for tensors without data)."""
        model = context.item(names.WEIGHTS)
        with lifted_casts(model.dtype):
            _Wave(self, context, model).draw([self.opening_id] * len(self.responses), 0)

    def _ended(self, drawn: Sequence[int]) -> list[int]:
        """Return the rows that drew a stop token, the last one first: a row that leaves moves the last row only."""
        return [row for row in reversed(range(len(drawn))) if drawn[row] in self.options.stop_token_ids]

    def config(self) -> dict[str, object]:
        """Return what decides the result beside weights and state, as plain data."""
        return {
            "opening": self.opening_id,
            "position": self.first_position,
            "visible": page_runs(self.visible),
            "responses": list(self.responses),
            "step": self.step,
            "group": self.group,
            "options": asdict(self.options),
            "head_rows": self.head_rows,
        }

    @property
    def edges(self) -> ChunkEdges:
        """The edge that responses begin at."""
        return ChunkEdges(before=self.edge, after=None, rows=self.span.recurrent_rows)

    def stage(self, sizes: Geometry) -> Stage:
        """Return the stage ``rollout NAME``; its workspace is still to be measured (see `add_rollout`).

        The cost is that of all responses at their longest. Every step reads every page of the prompt again.
        """
        states = tuple(column.state for column, _ in self.visible)
        streams = [Stream(values=states, passes=self.options.max_response_tokens)] if states else []
        return Stage(
            name=f"rollout {self.name}",
            kind="rollout",
            run=self.run,
            config=self.config(),
            reads=(names.WEIGHTS,),
            updates=(self.rollout,),
            streams=(*streams, *self.edges.forward_streams()),
            cost=sizes.decode_cost(
                branches=len(self.responses),
                steps=self.options.max_response_tokens,
                prefix_tokens=sum(tokens for _, tokens in self.visible),
                pages=num_pages(self.visible),
            ),
        )


def add_rollout(
    plan: Plan,
    work: SampleWork,
    *,
    sizes: Geometry,
    estimator: Estimator,
    run: Callable[[StageContext], None] | None = None,
) -> Stage:
    """Add a wave's stage, with its workspace, to a plan that has declared its Values; return it.

    ``run`` replaces the work's own function.
    """
    stage = work.stage(sizes)
    shape = (stage.kind, len(work.responses), bool(work.visible), work.edge is None, work.head_rows, work.options)
    workspace = estimator.workspace_bytes(shape, replace(stage, run=work.rehearse), plan)
    return plan.add(replace(stage, run=run or work.run, workspace_bytes=workspace))


class _Wave:
    """A running wave. ``responses`` are those still decoded, by row of the batch."""

    def __init__(self, work: SampleWork, context: StageContext, model: Any) -> None:
        self._work, self._context, self._model = work, context, model
        self._out = context.tensors(work.rollout)
        self._prefix = PagedPrefix(context, work.visible, work.span.attention_rows)
        self.responses = list(work.responses)
        self._tail = Tail(
            rows=work.span.attention_rows,
            branches=len(work.responses),
            heads=work.layout.heads,
            tokens=work.options.max_response_tokens,
            head_dim=work.layout.head_dim,
            dtype=torch_dtype(work.layout.dtype),
            device=context.device,
        )
        if work.layout.boundary is not None:
            boundaries = StageBoundaries(context, work.edges, work.layout.boundary)
            for layer in work.span.recurrent:
                self._tail.begin(layer, boundaries.before(layer), work.layout.boundary)

    def clear(self) -> None:
        """Put 0 into the wave's rows: what was there decides nothing."""
        rows = self._context.index(self._work.responses)
        for tensor in self._out.values():
            tensor.index_fill_(0, rows, 0)

    def draw(self, inputs: Sequence[int], position: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Evaluate each row's last token, draw its token at ``position``, and write down what `head_sample` returns."""
        hidden_BC = decode_step(
            self._model,
            self._context.index(inputs)[:, None],
            position=self._work.first_position + position,
            prefix=self._prefix,
            tail=self._tail,
        )
        options = self._work.options
        ids_B, logprobs_B = self._model.head_sample(
            hidden_BC,
            self._uniforms(position),
            temperature=options.temperature,
            greedy=options.greedy,
            block_rows=self._work.head_rows,
        )
        rows = self._context.index(self.responses)
        self._out["token_ids"][:, position].index_copy_(0, rows, ids_B)
        self._out["logprobs"][:, position].index_copy_(0, rows, logprobs_B)
        return ids_B, logprobs_B

    def _uniforms(self, position: int) -> torch.Tensor:
        """Return `uniform` of every row, float64."""
        work = self._work
        bits = [random_bits(work.options.seed, work.step, work.group, one, position) for one in self.responses]
        return self._context.index(bits).to(torch.float64).mul_(2.0**-UNIFORM_BITS)

    def read(self, ids_B: torch.Tensor, logprobs_B: torch.Tensor, position: int) -> list[int]:
        """Return the ids that were drawn as numbers. Raises StageFailedError where there was nothing to draw from."""
        for response, logprob in zip(self.responses, logprobs_B.tolist(), strict=True):
            if not math.isfinite(logprob):
                raise StageFailedError(
                    f"response {response} of rollout {self._work.name}: the model's logits for token {position} are "
                    "not finite; check the weights and the dtype"
                )
        ids: list[int] = ids_B.tolist()
        return ids

    def leave(self, row: int, drawn: list[int]) -> None:
        """Let a row go, here and in what was ``drawn``; the last row takes its place in both."""
        self._tail.leave(row)
        for rows in (self.responses, drawn):
            rows[row] = rows[-1]
            rows.pop()

    def write_lengths(self, lengths: Sequence[int]) -> None:
        rows = self._context.index(self._work.responses)
        self._out["lengths"].index_copy_(0, rows, self._context.index(lengths))
