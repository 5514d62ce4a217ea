"""The look-up's share of a tied embedding's gradient, as rows of the ids that occur.

A tied embedding has two contributors, kept apart until the merge. The head's share is a whole matrix,
``[vocabulary, hidden]``; the look-up's has rows that are not zero only for ids that are looked up. Where those are few,
its accumulator is ``[ids, hidden]``, beside a Value with the ids in ascending order; `models.dense` finds an id's row
there, and the merge adds the rows to the whole matrix, which the head's share has been going into.

Invariant: the same numbers are added in the same order as with two whole matrices, so the bits are the same.

Padding has the id 0, which finds the first row, and adds zero there.

Where responses are sampled, there is room for as many ids as there can be; what is left over repeats the last id, and
its rows stay zero.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from engine.budget import Tier
from engine.context import StageContext
from engine.parts import ITEM_BYTES, Cost, Stage, TensorSpec, Value, ValueKind
from engine.recipe import digest
from stages import names
from stages.sampled import VECTOR_TIERS, read_responses
from stages.tree import Node, Sampled

LARGEST_SHARE = 0.25
# Of the vocabulary: beyond, rows save too little for a stage and a search of their own.


@dataclass(frozen=True, kw_only=True)
class LookupIds:
    """The ids that a step's backward looks up: those known when it is planned, and those of sampled responses.

    ``num_sampled`` is how many ids the responses of ``rollouts`` add at most.
    """

    known: tuple[int, ...]
    rollouts: tuple[str, ...]
    num_sampled: int
    vocab: int

    @cached_property
    def most(self) -> int:
        """The number of ids, at most."""
        return min(self.vocab, len(self.known) + self.num_sampled)

    @property
    def is_few(self) -> bool:
        """Whether rows of their own are worth it."""
        return self.most <= LARGEST_SHARE * self.vocab

    def values(self, update: str, *, hidden: int, dtype: str) -> tuple[Value, Value]:
        """Return the Values of an update: the accumulator's rows, in ``dtype``, and their ids."""
        rows = TensorSpec(shape=(self.most, hidden), dtype=dtype)
        ids = TensorSpec(shape=(self.most,), dtype="int64")
        return (
            Value(name=names.lookup(update), tensors={"rows": rows}, kind=ValueKind.ACCUMULATOR, tiers=(Tier.DEVICE,)),
            Value(name=names.lookup_ids(update), tensors={"ids": ids}, tiers=VECTOR_TIERS),
        )

    def stage(self, update: str) -> Stage:
        """Return the stage that writes the ids."""

        def run(context: StageContext) -> None:
            sampled = (row[:-1] for name in self.rollouts for row in read_responses(context, name))
            ids = sorted(set(chain(self.known, *sampled)))
            ids += ids[-1:] * (self.most - len(ids))
            context.tensors(names.lookup_ids(update))["ids"].copy_(context.index(ids))

        return Stage(
            name=f"lookup {update.rstrip('/')}",
            kind="lookup",
            run=run,
            config={"ids": digest(list(self.known))},
            reads=self.rollouts,
            writes=(names.lookup_ids(update),),
            workspace_bytes=self.most * ITEM_BYTES["int64"],
            cost=Cost(num_kernels=2),
        )


def lookup_ids(trees: Sequence[Node], *, vocab: int, exact: bool) -> LookupIds:
    """Return the ids that the backward of ``trees`` looks up; with ``exact`` false the roots have none."""
    contents = [node.content for tree in trees for node in _nodes(tree, with_root=exact)]
    sampled = [content for content in contents if isinstance(content, Sampled)]
    known = {content.opening_id for content in sampled}
    known.update(*(content.inputs for content in contents if not isinstance(content, Sampled)))
    return LookupIds(
        known=tuple(sorted(known)),
        rollouts=tuple(dict.fromkeys(content.rollout for content in sampled)),
        num_sampled=sum(content.max_tokens - 1 for content in sampled),
        vocab=vocab,
    )


def _nodes(tree: Node, *, with_root: bool) -> Iterator[Node]:
    if with_root:
        yield tree
    for child in tree.children:
        yield from _nodes(child, with_root=True)
