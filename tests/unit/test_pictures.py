"""Pictures are readable whatever the plan's size, exact where they promise it, and inert whatever names are in them."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.budget import UNLIMITED_BYTES, Budget, Tier
from engine.errors import UsageError
from engine.hardware import PROFILES
from engine.pictures import image, page
from engine.pictures.collapse import OTHERS, Picture, alike, collapse, pattern
from engine.pictures.colours import PALETTE, colours_of
from engine.pictures.drawing import MOST_LETTERS, short_label
from engine.pictures.image import UNDATED, check_image, draw_image
from engine.pictures.layout import LAYERS_A_LINE, lay_out
from engine.pictures.page import check_report_packages, report_page
from engine.pictures.series import bars, residents_by_name, stage_times, step_line
from engine.pictures.terminal import draw_text
from engine.plan import Cost, Plan, Stage, Stream, TensorSpec, Value, ValueKind
from engine.planner import Forecast, forecast
from engine.trace import Lane, Span
from engine.units import MIB

PAGE = TensorSpec(shape=(4, 1000), dtype="uint8")
VISIBLE_PAGES = 10
MOST_REPORT_BYTES = 10 * 10**6


def nothing(context: Any) -> None:
    """Stand in for a stage's work."""


def stage(name: str, **changes: Any) -> Stage:
    return Stage(**{"name": name, "kind": name.split()[0].split("/")[-1], "run": nothing, **changes})


def grpo(num_steps: int = 2, num_groups: int = 2, num_chunks: int = 4) -> Plan:
    """A plan with the shape and the names of a GRPO run: prefill, score, loss, sweep, update, step after step."""
    plan = Plan(name="grpo", choices={"chunk_tokens": 512})
    plan.value(Value(name="weights", tensors={"t": PAGE}, kind=ValueKind.ORDERED, tiers=(Tier.DEVICE,)))
    plan.add(stage("load", writes=("weights",)))
    for step in range(num_steps):
        add_step(plan, f"step{step}/", num_groups, num_chunks)
    plan.add(stage("checkpoint", reads=("weights",)))
    return plan


def add_step(plan: Plan, step: str, num_groups: int, num_chunks: int) -> None:
    gradients, groups = f"{step}gradients", [f"{step}group{group}" for group in range(num_groups)]
    plan.value(Value(name=gradients, tensors={"t": PAGE}, kind=ValueKind.ACCUMULATOR, tiers=(Tier.DEVICE,)))
    for group in groups:
        for chunk in range(num_chunks):
            plan.value(Value(name=f"{group}/prompt/state{chunk}", tensors={"t": PAGE}, kind=ValueKind.ORDERED))
            add_chunk(plan, "prefill", group, chunk, Cost(flops=1e9), updates_state=True)
    for group in groups:
        for chunk in reversed(range(num_chunks)):
            add_chunk(plan, "sweep", group, chunk, Cost(flops=3e9), updates=(gradients,))
    plan.add(stage(f"{step}adamw", reads=(gradients,), updates=("weights",)))


def add_chunk(
    plan: Plan,
    kind: str,
    group: str,
    chunk: int,
    cost: Cost,
    updates: tuple[str, ...] = (),
    updates_state: bool = False,
) -> None:
    before = tuple(f"{group}/prompt/state{index}" for index in range(max(0, chunk - VISIBLE_PAGES), chunk))
    own = Stream(values=(f"{group}/prompt/state{chunk}",), updates=updates_state, buffered=not updates_state)
    streams = (Stream(values=before), own) if before else (own,)
    name = f"{kind} {group}/prompt/tokens{512 * chunk}-{512 * chunk + 512}"
    plan.add(stage(name, reads=("weights",), updates=updates, streams=streams, cost=cost, workspace_bytes=2000))


def planned(plan: Plan, device_bytes: int = 60_000) -> Forecast:
    budget = Budget(device_bytes=device_bytes, host_bytes=UNLIMITED_BYTES, disk_bytes=0)
    return forecast(plan, budget, PROFILES["cpu"])


@pytest.fixture(scope="module")
def large() -> Forecast:
    """A plan of more than ten thousand stages, simulated; its state spills to the host."""
    return planned(grpo(num_steps=25, num_groups=2, num_chunks=101))


# Alike stages


@pytest.mark.parametrize(
    ("level", "expected"),
    [
        (0, "prefill step3/epoch1/group2/prompt/tokens0-512"),
        (1, "prefill step3/epoch1/group2/prompt/tokens*"),
        (2, "prefill step3/epoch1/group*/prompt/tokens*"),
        (3, "prefill step3/epoch*/group*/prompt/tokens*"),
        (4, "prefill step*/epoch*/group*/prompt/tokens*"),
    ],
)
def test_each_level_lets_more_numbers_of_a_name_differ_and_those_of_the_step_last(level: int, expected: str) -> None:
    assert pattern("prefill step3/epoch1/group2/prompt/tokens0-512", level) == expected


def test_a_name_without_a_step_or_without_a_number_has_a_pattern_too() -> None:
    assert [pattern(name, 1) for name in ("add 3", "loss", "group0/part1")] == ["add *", "loss", "group0/part*"]
    assert pattern("footstep0/part1", 2) == "footstep*/part*"
    assert [pattern("loss step3", level) for level in (1, 2, 3, 4)] == ["loss step3"] * 3 + ["loss step*"]
    assert pattern("merge step3/epoch1", 3) == "merge step3/epoch*"


def test_names_are_joined_as_little_as_the_number_of_groups_allows() -> None:
    names = [f"group{group}/page{index}" for group in range(3) for index in range(5)]
    assert {label: len(members) for label, members in alike(names, 3).items()} == {
        f"group{group}/page*": 5 for group in range(3)
    }
    assert list(alike(names, 2)) == ["group*/page*"]
    assert alike(["only1"], 5) == {"only1": ["only1"]}


def test_a_small_plan_is_drawn_by_groups_and_a_large_one_by_steps() -> None:
    small = collapse(grpo(), 30)
    assert [node.title for node in small.nodes][:4] == [
        "load", "prefill step0/group0/prompt x4", "prefill step0/group1/prompt x4", "sweep step0/group0/prompt x4",
    ]  # fmt: skip
    assert small.num_back == 0
    large = collapse(grpo(num_steps=40), 30)
    assert [node.title for node in large.nodes] == [
        "load", "prefill step*/group*/prompt x320", "sweep step*/group*/prompt x320", "step*/adamw x40", "checkpoint",
    ]  # fmt: skip
    assert large.num_back > 0  # the next step begins where the last one ended


def test_two_groups_are_never_called_the_same() -> None:
    plan = Plan(name="p")
    for name in ("work", "work 1", "work 2"):
        plan.add(stage(name))
    assert [node.title for node in collapse(plan, 3).nodes] == ["work", "work * x2"]


@given(st.data())
def test_a_collapsed_graph_is_acyclic_small_and_holds_every_stage_once(data: st.DataObject) -> None:
    names = st.builds(
        lambda step, group, part: f"step{step}/group{group}/part{part}",
        st.integers(0, 3), st.integers(0, 3), st.integers(0, 9),
    )  # fmt: skip
    chosen = data.draw(st.lists(names, min_size=1, max_size=25, unique=True))
    plan = Plan(name="random")
    for index, name in enumerate(chosen):
        plan.value(Value(name=f"v{index}", tensors={"t": PAGE}))
        reads = data.draw(st.sets(st.integers(0, max(0, index - 1)), max_size=3)) if index else set()
        kind = data.draw(st.sampled_from(["a", "b", "c", "d"]))
        plan.add(stage(name, kind=kind, writes=(f"v{index}",), reads=tuple(f"v{item}" for item in sorted(reads))))
    most = data.draw(st.integers(2, 30))
    picture = collapse(plan, most)
    assert len(picture.nodes) <= most
    assert nx.is_directed_acyclic_graph(picture.graph())
    assert sorted(name for node in picture.nodes for name in node.stages) == sorted(chosen)
    node_of = {name: index for index, node in enumerate(picture.nodes) for name in node.stages}
    closure = nx.transitive_closure(picture.graph())
    for before, after in plan.graph().edges:
        first, second = node_of[before], node_of[after]
        assert first >= second or closure.has_edge(first, second)


def test_names_that_have_nothing_in_common_are_joined_by_kind_and_the_rest_as_others() -> None:
    plan = Plan(name="p")
    for index, letter in enumerate("abcdefgh"):
        plan.add(stage(letter, kind=f"kind {index % 4}"))
    picture = collapse(plan, 3)
    assert [(node.label, len(node.stages)) for node in picture.nodes] == [("kind 0", 2), ("kind 1", 2), (OTHERS, 4)]


# Text


def test_the_graph_in_a_terminal_stays_readable_for_ten_thousand_stages(large: Forecast) -> None:
    text = draw_text(collapse(large.plan, 30))
    assert len(text.splitlines()) <= 12
    assert f"prefill step*/group*/prompt x{25 * 2 * 101}" in text
    assert "arrows that lead back" in text


def test_the_graph_in_a_terminal_names_what_a_stage_waits_for() -> None:
    lines = draw_text(collapse(grpo(num_steps=1), 30)).splitlines()
    assert lines[0] == "╙── load"
    assert any("sweep step0/group1/prompt x4 ╾ prefill step0/group1/prompt x4" in line for line in lines), lines


# Places


def overlaps(picture: Picture) -> list[tuple[int, int]]:
    places = lay_out(picture).places
    return [
        (a, b)
        for a, b in itertools.combinations(range(len(places)), 2)
        if abs(places[a][0] - places[b][0]) < 1 and abs(places[a][1] - places[b][1]) < 1
    ]


@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_no_two_boxes_overlap_and_all_are_inside_the_picture(num_steps: int) -> None:
    picture = collapse(grpo(num_steps=num_steps, num_groups=3), 60)
    layout = lay_out(picture)
    assert overlaps(picture) == []
    assert all(0 < x < layout.num_columns and 0 < y < layout.num_rows for x, y in layout.places)
    assert all(0 <= x <= layout.num_columns and 0 <= y <= layout.num_rows for route in layout.routes for x, y in route)
    assert layout.num_columns <= LAYERS_A_LINE


def test_an_arrow_goes_to_the_right_or_on_to_a_later_line() -> None:
    picture = collapse(grpo(num_steps=3), 60)
    layout = lay_out(picture)
    for before, after in picture.edges:
        (x1, y1), (x2, y2) = layout.places[before], layout.places[after]
        assert x1 < x2 or y1 < y2


def test_a_long_name_is_shortened_in_its_middle() -> None:
    node = collapse(grpo(), 3).nodes[0]
    assert short_label(node) == "load"
    plan = Plan(name="p")
    plan.add(stage("work " + "x" * 30 + "y" * 30, kind="work"))
    short = short_label(collapse(plan, 3).nodes[0])
    assert len(short) <= MOST_LETTERS
    assert re.fullmatch("x+…y+", short)


# Images


@pytest.mark.parametrize(
    ("suffix", "magic"), [(".png", b"\x89PNG"), (".svg", b"<?xml"), (".pdf", b"%PDF"), (".PNG", b"\x89PNG")]
)
def test_an_image_has_the_format_that_its_name_says_and_the_same_plan_gives_the_same_bytes(
    suffix: str, magic: bytes
) -> None:
    drawn = [draw_image(collapse(grpo(), 60), "grpo", suffix) for _ in range(2)]
    assert drawn[0].startswith(magic)
    assert drawn[0] == drawn[1]


def test_an_svg_image_has_every_box_and_a_name_with_dollars_is_no_mathematics() -> None:
    plan = grpo(num_steps=1)
    plan.add(stage(r"pay $\notatexcommand{ </text><script>"))
    text = draw_image(collapse(plan, 60), "title $x", ".svg").decode()
    assert "prefill x4" in text
    assert "title $x" in text
    assert r"$\notatexc" in text
    assert "<script>" not in text


def test_an_image_of_a_format_that_is_not_known_or_without_matplotlib_is_refused_with_advice(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(UsageError, match=r"can't draw 'plan.bmp': its name must end in one of .png, .svg, .pdf"):
        check_image("plan.bmp")
    for suffix in UNDATED:
        check_image(f"plan{suffix}")
    monkeypatch.setattr(image, "find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match=r"--image needs matplotlib; install it with: pip install 'longstraw\[report\]'"
    ):
        check_image("plan.png")


def test_kinds_have_colours_of_their_own_as_far_as_there_are_some() -> None:
    colours = colours_of(["a", "b", "a", "spill"])
    assert colours["a"] != colours["b"] != colours["spill"]
    assert colours_of([f"k{index}" for index in range(20)])["k8"] == PALETTE[0]


# Curves and bars


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=400), st.integers(8, 60))
def test_a_thinned_line_keeps_its_peak_and_its_moment_its_floor_and_its_ends(heights: list[int], most: int) -> None:
    steps = [(index / 7, height) for index, height in enumerate(heights)]
    line = step_line(steps, most)
    drawn = list(zip(line.seconds, line.nbytes, strict=True))
    assert len(drawn) <= most
    assert set(drawn) <= set(steps)
    assert drawn == sorted(drawn)
    assert (drawn[0], drawn[-1]) == (steps[0], steps[-1])
    assert (max(line.nbytes), min(line.nbytes)) == (max(heights), min(heights))
    peak = next(step for step in steps if step[1] == max(heights))
    assert peak in drawn
    assert line.is_thinned == (len(steps) > len(drawn))


def test_steps_that_all_happen_at_once_are_thinned_too() -> None:
    line = step_line([(0.0, height) for height in (3, 1, 9, 2) * 30], 20)
    assert len(line.seconds) <= 20
    assert max(line.nbytes) == 9


def spans(kinds: str) -> list[Span]:
    return [
        Span(lane=Lane.WORKER, name=f"{kind}{i}", kind=kind, begin_s=i, end_s=i + 1, planned_bytes={})
        for i, kind in enumerate(kinds)
    ]


def test_bars_are_stages_where_they_are_few_then_runs_of_a_kind_then_anything_in_a_row() -> None:
    assert [bar.title for bar in bars(spans("aab"), 3)] == ["a0", "a1", "b2"]
    joined = bars(spans("aab"), 2)
    assert [(bar.kind, bar.begin_s, bar.end_s, len(bar.spans)) for bar in joined] == [("a", 0, 2, 2), ("b", 2, 3, 1)]
    mixed = bars(spans("abaab" * 10), 5)
    assert len(mixed) <= 5
    assert (mixed[0].begin_s, mixed[-1].end_s) == (0, 50)
    assert sum(len(bar.spans) for bar in mixed) == 50
    assert mixed[0].title.endswith("most time in a")


def test_residents_are_joined_by_name_largest_first_and_the_rest_is_summed() -> None:
    residents = {f"group{g}/page{i}": 10 for g in range(2) for i in range(5)} | {"weights": 60, "clip": 1}
    assert residents_by_name(residents, 4) == [
        ("weights", 1, 60), ("group0/page*", 5, 50), ("group1/page*", 5, 50), ("clip", 1, 1),
    ]  # fmt: skip
    assert residents_by_name({letter: 2**i for i, letter in enumerate("abcdef")}, 3) == [
        ("f", 1, 32), ("e", 1, 16), ("4 others", 4, 15),
    ]  # fmt: skip


def test_a_stage_that_did_not_run_has_no_measured_time() -> None:
    found = planned(grpo(num_steps=1))
    times = stage_times(found.recording, None)
    assert [item.predicted.name for item in times] == [item.name for item in found.plan.ordered()]
    assert {item.measured for item in times} == {None}
    assert sum(item.seconds for item in times) == pytest.approx(sum(found.stage_s.values()))


# The report, as far as no browser is needed


def data_in(report: str) -> Any:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', report)
    assert found is not None
    return json.loads(found.group(1))


def test_a_report_holds_the_json_object_and_every_figure_it_shows_says_which_of_them_it_is() -> None:
    found = planned(grpo())
    report = report_page(found.as_dict(), found)
    data = data_in(report)
    assert data == json.loads(json.dumps(found.as_dict()))
    shown = re.findall(r'data-key="([^"]+)" data-value="([^"]+)"', report)
    assert {"budget_bytes.device", "peak_bytes.device", "peak_bytes.host", "makespan_s"} <= {key for key, _ in shown}
    for key, text in shown:
        value = data
        for part in key.split("."):
            value = value[part]
        assert json.loads(text) == value, key


def test_the_report_of_ten_thousand_stages_stays_small(large: Forecast) -> None:
    assert len(large.schedule.stages) > 10_000
    report = report_page(large.as_dict(), large)
    assert len(report.encode()) < MOST_REPORT_BYTES
    assert report.count('<g class="node"') <= page.MOST_NODES
    assert "so peaks are exact" in report
    assert "Neighbours are joined" in report


def test_names_in_a_report_are_text_and_nothing_else() -> None:
    evil = "</script><img src=x onerror=alert(1)><b>"
    plan = Plan(name=evil, notes=[evil], choices={evil: 1})
    plan.value(Value(name="v", tensors={"t": PAGE}, kind=ValueKind.ACCUMULATOR))
    plan.add(stage(evil, kind=evil, updates=("v",)))
    found = planned(plan)
    report = report_page({**found.as_dict(), "run": evil, "metrics": {evil: evil}}, found)
    plotly = max(re.findall(r"<script>(.*?)</script>", report, re.DOTALL), key=len)
    ours = report.replace(plotly, "")
    assert "<img" not in ours
    assert "<b>" not in ours
    assert ours.count("</script>") == 4
    assert data_in(report)["notes"] == [evil]


def test_a_report_without_plotly_is_refused_with_the_extra_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    check_report_packages()
    monkeypatch.setattr(page, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"--report needs plotly; install it with: pip install 'longstraw\[report\]'"):
        check_report_packages()


def test_a_budget_far_above_the_peak_does_not_flatten_the_curve() -> None:
    near, far = (planned(grpo(num_steps=1), device_bytes=size) for size in (30_000, 100 * MIB))
    assert "is dashed" in report_page(near.as_dict(), near)
    assert "the budget of 100.00 MiB is above what is drawn" in report_page(far.as_dict(), far)


def test_pictures_import_their_libraries_only_when_they_draw() -> None:
    import subprocess
    import sys

    program = """if True:
        import sys
        import engine.pictures.image, engine.pictures.page
        sys.exit(bool({"plotly", "matplotlib", "torch"} & set(sys.modules)))
    """
    root = Path(__file__).resolve().parents[2]
    assert subprocess.run([sys.executable, "-c", program], cwd=root, check=False).returncode == 0
