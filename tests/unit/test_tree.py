"""The token tree holds every trainable token once, and chunks and waves cut it without losing or reordering one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from stages import Group, Response
from stages.tree import Node, chunks_of, group_tree, step_trees, waves_of

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
    return Node(
        name=name, inputs=tuple(range(100, 100 + tokens)), first_position=5, rows=every, targets=every, order=every
    )


@given(groups())
def test_the_rows_of_all_leaves_are_the_trainable_tokens_in_canonical_order(given_groups: list[Group]) -> None:
    expected: dict[int, tuple[tuple[int, ...], int]] = {}
    for group in given_groups:
        for response in group.responses:
            for position, trainable in enumerate(response.mask):
                if trainable:
                    whole = group.prompt_ids + response.token_ids
                    index = len(group.prompt_ids) + position
                    expected[len(expected)] = (whole[:index], whole[index])
    found = {}
    for tree in step_trees(given_groups):
        for node in tree.children:
            for row, target, place in zip(node.rows, node.targets, node.order, strict=True):
                found[place] = (tree.inputs + node.inputs[: row + 1], target)
    assert found == expected


@given(groups())
def test_leaves_end_at_their_last_trainable_token_and_open_with_the_last_of_the_prompt(
    given_groups: list[Group],
) -> None:
    for group in given_groups:
        tree = group_tree(group, name="g", first_row=0)
        trainable = [response for response in group.responses if any(response.mask)]
        assert (tree.inputs, tree.first_position) == (group.prompt_ids[:-1], 0)
        assert [node.first_position for node in tree.children] == [len(tree.inputs)] * len(trainable)
        for node, response in zip(tree.children, trainable, strict=True):
            last = max(position for position, bit in enumerate(response.mask) if bit)
            assert node.inputs == group.prompt_ids[-1:] + response.token_ids[:last]


@given(groups())
def test_groups_without_anything_to_train_on_are_left_out_and_the_longest_prompt_comes_first(
    given_groups: list[Group],
) -> None:
    trees = step_trees(given_groups)
    assert len(trees) == sum(any(any(r.mask) for r in group.responses) for group in given_groups)
    lengths = [len(tree.inputs) for tree in trees]
    assert lengths == sorted(lengths, reverse=True)


@given(tokens=st.integers(0, 20), chunk_tokens=st.integers(1, 25))
def test_chunks_cover_a_node_once_and_are_of_the_chosen_length_but_for_the_last(tokens: int, chunk_tokens: int) -> None:
    chunks = chunks_of((leaf("a", tokens),), chunk_tokens)
    assert [id_ for chunk in chunks for id_ in chunk.padded_ids[0]] == list(range(100, 100 + tokens))
    assert all(chunk.tokens == chunk_tokens for chunk in chunks[:-1])
    assert [chunk.first_position for chunk in chunks] == [5 + chunk.start for chunk in chunks]
    assert [place for chunk in chunks for _, _, place in chunk.scored()] == list(range(tokens))
    assert all(row == place - chunk.start for chunk in chunks for row, _, place in chunk.scored())


@given(lengths=st.lists(st.integers(1, 12), min_size=2, max_size=4))
def test_a_wave_is_one_chunk_padded_on_the_right_whose_padding_is_never_scored(lengths: list[int]) -> None:
    (chunk,) = chunks_of(tuple(leaf(str(number), tokens) for number, tokens in enumerate(lengths)), 64)
    assert {len(row) for row in chunk.padded_ids} == {max(lengths)} == {chunk.tokens}
    flat = [id_ for row in chunk.padded_ids for id_ in row]
    assert [flat[row] for row, _, _ in chunk.scored()] == [100 + row for tokens in lengths for row in range(tokens)]


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
        assert len(wave) == 1 or max(len(node.inputs) for node in wave) <= chunk_tokens
    fits = [len(wave) == 1 and len(wave[0].inputs) > chunk_tokens for wave in waves]
    for before, alone, after in zip(waves, fits, fits[1:], strict=False):
        assert alone or after or len(before) == branches_at_once  # no wave is cut short without a reason


def test_inner_nodes_go_alone() -> None:
    inner = Node(name="inner", inputs=(1,), first_position=0, children=(leaf("below", 1),))
    leaves = [leaf("a", 1), inner, leaf("b", 1), leaf("c", 1)]
    waves = waves_of(leaves, chunk_tokens=8, branches_at_once=4)
    assert [[node.name for node in wave] for wave in waves] == [["a"], ["inner"], ["b", "c"]]
