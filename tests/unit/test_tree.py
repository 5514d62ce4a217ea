"""The token tree holds every trainable token once, and chunks and waves cut it without losing or reordering one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stages import Group, Prompt, Response
from stages.tree import Chunk, Node, Tokens, chunks_of, group_tree, sampled_tree, waves_of

IDS = st.integers(1, 50)


@st.composite
def groups(draw: st.DrawFn) -> list[Group]:
    made = []
    for _ in range(draw(st.integers(1, 3))):
        responses = []
        for _ in range(draw(st.integers(1, 4))):
            ids = draw(st.lists(IDS, max_size=8))
            mask = draw(st.lists(st.booleans(), min_size=len(ids), max_size=len(ids)))
            responses.append(Response(token_ids=tuple(ids), mask=tuple(mask), reward=0.0))
        prompt = draw(st.lists(IDS, min_size=1, max_size=9))
        made.append(Group(prompt_ids=tuple(prompt), responses=tuple(responses), source="test"))
    return made


def leaf(name: str, tokens: int) -> Node:
    """Return a leaf whose every row is scored, with inputs counted from 100."""
    every = tuple(range(tokens))
    content = Tokens(inputs=tuple(range(100, 100 + tokens)), rows=every, targets=every)
    return Node(name=name, content=content, first_position=5, response=0)


def trees_of(groups: list[Group]) -> list[Node]:
    """Return the trees of the groups, with responses numbered through."""
    firsts = [sum(len(group.responses) for group in groups[:index]) for index in range(len(groups))]
    return [
        group_tree(group, name=f"g{first}", first_response=first) for group, first in zip(groups, firsts, strict=True)
    ]


def tokens_of(node: Node) -> Tokens:
    assert isinstance(node.content, Tokens)
    return node.content


@given(groups())
def test_the_rows_of_all_leaves_are_the_trainable_tokens_in_canonical_order(given_groups: list[Group]) -> None:
    expected: dict[tuple[int, int], tuple[tuple[int, ...], int]] = {}
    for number, (group, response) in enumerate((g, r) for g in given_groups for r in g.responses):
        whole = group.prompt_ids + response.token_ids
        trainable = [len(group.prompt_ids) + position for position, bit in enumerate(response.mask) if bit]
        expected.update({(number, rank): (whole[:index], whole[index]) for rank, index in enumerate(trainable)})
    found = {}
    for tree in trees_of(given_groups):
        for node in tree.children:
            (chunk,) = chunks_of((node,), 64)
            for row, target, response_number, rank in chunk.resolve({}).scored():
                before = tokens_of(tree).inputs + tokens_of(node).inputs[: row + 1]
                found[response_number, rank] = (before, target)
    assert found == expected


@given(groups())
def test_leaves_end_at_their_last_trainable_token_and_open_with_the_last_of_the_prompt(
    given_groups: list[Group],
) -> None:
    for group in given_groups:
        tree = group_tree(group, name="g")
        trainable = [response for response in group.responses if any(response.mask)]
        assert (tokens_of(tree).inputs, tree.first_position) == (group.prompt_ids[:-1], 0)
        assert [node.first_position for node in tree.children] == [tree.max_inputs] * len(trainable)
        for node, response in zip(tree.children, trainable, strict=True):
            last = max(position for position, bit in enumerate(response.mask) if bit)
            assert tokens_of(node).inputs == group.prompt_ids[-1:] + response.token_ids[:last]


@given(tokens=st.integers(0, 20), chunk_tokens=st.integers(1, 25))
def test_chunks_cover_a_node_once_and_are_of_the_chosen_length_but_for_the_last(tokens: int, chunk_tokens: int) -> None:
    chunks = chunks_of((leaf("a", tokens),), chunk_tokens)
    batches = [chunk.resolve({}) for chunk in chunks]
    assert [id_ for batch in batches for id_ in batch.padded_ids[0]] == list(range(100, 100 + tokens))
    assert all(chunk.max_tokens == chunk_tokens for chunk in chunks[:-1])
    assert [chunk.first_position for chunk in chunks] == [5 + chunk.start for chunk in chunks]
    assert [rank for batch in batches for _, _, _, rank in batch.scored()] == list(range(tokens))
    assert all(row == rank - batch.chunk.start for batch in batches for row, _, _, rank in batch.scored())


@given(lengths=st.lists(st.integers(1, 12), min_size=2, max_size=4))
def test_a_wave_is_one_chunk_padded_on_the_right_whose_padding_is_never_scored(lengths: list[int]) -> None:
    (chunk,) = chunks_of(tuple(leaf(str(number), tokens) for number, tokens in enumerate(lengths)), 64)
    batch = chunk.resolve({})
    assert {len(row) for row in batch.padded_ids} == {max(lengths)} == {chunk.max_tokens}
    flat = [id_ for row in batch.padded_ids for id_ in row]
    assert [flat[row] for row, _, _, _ in batch.scored()] == [100 + row for tokens in lengths for row in range(tokens)]


@given(
    lengths=st.lists(st.integers(1, 12), max_size=7),
    chunk_tokens=st.integers(1, 12),
    branches_at_once=st.integers(1, 4),
)
def test_waves_keep_the_order_of_branches_and_hold_only_those_that_fit_into_a_chunk(
    lengths: list[int], chunk_tokens: int, branches_at_once: int
) -> None:
    leaves = [leaf(str(number), tokens) for number, tokens in enumerate(lengths)]
    waves = waves_of(leaves, chunk_tokens=chunk_tokens, branches_at_once=branches_at_once)
    assert [node for wave in waves for node in wave] == leaves
    for wave in waves:
        assert 1 <= len(wave) <= branches_at_once
        assert len(wave) == 1 or max(node.max_inputs for node in wave) <= chunk_tokens
    fits = [len(wave) == 1 and wave[0].max_inputs > chunk_tokens for wave in waves]
    for before, alone, after in zip(waves, fits, fits[1:], strict=False):
        assert alone or after or len(before) == branches_at_once  # no wave is cut short without a reason


def test_inner_nodes_go_alone() -> None:
    inner = Node(name="inner", content=Tokens(inputs=(1,)), first_position=0, children=(leaf("below", 1),))
    leaves = [leaf("a", 1), inner, leaf("b", 1), leaf("c", 1)]
    waves = waves_of(leaves, chunk_tokens=8, branches_at_once=4)
    assert [[node.name for node in wave] for wave in waves] == [["a"], ["inner"], ["b", "c"]]


@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    chunk_tokens=st.integers(1, 10),
    branches_at_once=st.integers(1, 4),
)
def test_sampled_leaves_are_cut_for_their_longest_and_hold_what_was_sampled(
    lengths: list[int], chunk_tokens: int, branches_at_once: int
) -> None:
    tree = sampled_tree(
        Prompt(token_ids=(7, 8, 9)), name="g", rollout="r", group_size=len(lengths), max_tokens=9, first_response=3
    )
    sampled = [[100 * number + position for position in range(count)] for number, count in enumerate(lengths)]
    found: dict[tuple[int, int], tuple[int, int]] = {}
    for wave in waves_of(tree.children, chunk_tokens=chunk_tokens, branches_at_once=branches_at_once):
        chunks: list[Chunk] = chunks_of(wave, chunk_tokens)
        assert chunks[-1].stop == 9
        for chunk in chunks:
            batch = chunk.resolve({"r": sampled})
            rows = list(batch.scored())
            assert len(rows) <= chunk.max_rows
            assert {len(ids) for ids in batch.padded_ids} == {batch.num_tokens}
            flat = [id_ for ids in batch.padded_ids for id_ in ids]
            found.update({(response, rank): (flat[row], target) for row, target, response, rank in rows})
    assert found == {
        (3 + number, rank): (ids[rank - 1] if rank else 9, target)
        for number, ids in enumerate(sampled)
        for rank, target in enumerate(ids)
    }
