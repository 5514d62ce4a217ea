"""Columns of pages: every token of a node is in exactly one page, and long nodes have few columns."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from models.geometry import StateLayout
from stages.state import (
    MOST_COLUMNS,
    Column,
    before,
    between,
    column_values,
    make_columns,
    num_pages,
    page_runs,
    whole,
)


def layout(page_tokens: int) -> StateLayout:
    return StateLayout(
        layers=3, heads=2, head_dim=4, page_tokens=page_tokens, dtype="float32", cotangent_dtype="float32"
    )


def columns_of(tokens: int, page_tokens: int) -> tuple[Column, ...]:
    return make_columns("node", tokens, layout(page_tokens), with_cotangents=True)


@given(st.integers(0, 9000), st.integers(1, 40))
def test_columns_tile_a_node_and_are_never_many(tokens: int, page_tokens: int) -> None:
    columns = columns_of(tokens, page_tokens)
    assert [column.first for column in columns] == [
        sum(before.tokens for before in columns[:number]) for number in range(len(columns))
    ]
    assert sum(column.tokens for column in columns) == tokens
    assert len(columns) <= MOST_COLUMNS + 1
    assert all(column.page_tokens == page_tokens for column in columns[:-1])
    assert len({value.name for column in columns for value in column_values(column, layout(page_tokens))}) == 2 * len(
        columns
    )


@given(st.integers(1, 3000), st.integers(1, 5), st.data())
def test_the_pages_of_a_span_tile_it(tokens: int, page_tokens: int, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, tokens - 1))
    stop = data.draw(st.integers(start + 1, tokens))
    found: list[int] = []
    for column in columns_of(tokens, page_tokens):
        for page, low, high, offset in column.pages_of(start, stop):
            assert 0 <= page < column.pages
            assert 0 <= low < high <= column.page_tokens
            assert column.first + page * column.page_tokens + low == start + offset
            found += range(offset, offset + high - low)
    assert found == list(range(stop - start))


def test_a_column_has_one_page_where_pages_are_few() -> None:
    columns = columns_of(4 * MOST_COLUMNS, 4)
    assert {column.pages for column in columns} == {1}
    assert len(columns) == MOST_COLUMNS


def test_visible_tokens_are_described_by_runs_of_pages_however_columns_are_cut() -> None:
    columns = columns_of(1030 * 4 + 3, 4)
    assert columns[0].pages > 1
    visible = tuple((column, column.tokens) for column in columns)
    assert page_runs(visible) == [[4, 1030 * 4], [3, 3]]
    assert num_pages(visible) == 1031
    part = (*visible[:2], (columns[2], 5))
    assert page_runs(part) == [[4, columns[2].first + 5]]
    assert num_pages(part) == 2 * columns[0].pages + 2


@given(st.integers(1, 3000), st.integers(1, 5), st.data())
def test_what_lies_before_a_chunk_and_within_it_is_what_its_columns_overlap(
    tokens: int, page_tokens: int, data: st.DataObject
) -> None:
    start = data.draw(st.integers(0, tokens - 1))
    stop = data.draw(st.integers(start + 1, tokens + 9))
    columns = columns_of(tokens, page_tokens)
    seen = [(column, part[1]) for column in columns if (part := column.overlap(0, start)) is not None]
    assert before(whole(columns), start) == tuple(seen)
    assert between(whole(columns), start, stop) == tuple(c for c in columns if c.overlap(start, stop) is not None)
    assert between(whole(columns), tokens, tokens + 1) == ()
