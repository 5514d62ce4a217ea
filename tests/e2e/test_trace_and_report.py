"""Traces and reports as users get them: by flags, from simulated and real runs, read by Perfetto and by a browser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine.journal import StageCommit, read_journal
from engine.trace import TID_STRIDE as LANES
from tests.browser import Browser, Page, running_browser
from tests.e2e.test_cli import CONSOLE_SCRIPT, engine
from tests.perfetto import TraceProcessor, trace_processor

# Pages that are streamed from the host or the disk, a Value that is fetched back, and a stage that ``hook`` can break.
SPILLING = """
    import torch

    from engine import Plan, Stage, Stream, TensorSpec, Value, ValueKind
    from engine.plan import Cost


    def spilling(hook: str = "", marker: str = "") -> Plan:
        plan = Plan(name="spilling" + marker, settings={"hook": hook}, choices={"pages": 3})
        for index in range(3):
            spec = TensorSpec(shape=(4, 1, 8, 64), dtype="float32")
            plan.value(Value(name=f"step0/page{index}", tensors={"pages": spec}, kind=ValueKind.ORDERED))
        plan.value(Value(name="sum", tensors={"t": TensorSpec(shape=(3000,), dtype="float32")}))

        def fill(context, name):
            ones = torch.ones(8, 64)
            for piece in range(4):
                context.add_rows(name, piece, 0, [ones])

        def first(context):
            context.tensors("sum")["t"].add_(1)

        def report(context):
            exec(hook)
            context.results["loss"] = float(context.tensors("sum")["t"][0])

        def named(name, kind, run, workspace_bytes=9000, **uses):
            cost = Cost(num_kernels=100)
            plan.add(Stage(name=name + marker, kind=kind, run=run, workspace_bytes=workspace_bytes, cost=cost, **uses))

        named("step0/first", "first", first, writes=("sum",))
        for index in range(3):
            name = f"step0/page{index}"
            run = lambda context, name=name: fill(context, name)
            named(f"fill {name}", "fill", run, 15000, streams=(Stream(values=(name,), updates=True),))
        named("report", "report", report, reads=("sum",), streams=(Stream(values=("step0/page0",)),))
        return plan
"""
HOSTILE = "</script><img src=x onerror=alert(1)>"
TIERS = ("device", "host", "disk")
LIVE = """
    select c.value as bytes, c.ts as ts from counter c join process_counter_track t on c.track_id = t.id
    join process p using (upid) where p.name = '{process}' and t.name = '{tier} bytes' order by c.id
"""
SPANS = """
    select s.name as name, t.name as lane, s.ts as ts, s.dur as dur, s.depth as depth, s.category as kind
    from slice s join thread_track k on s.track_id = k.id join thread t using (utid) join process p using (upid)
    where p.name = '{process}' order by s.ts, s.id
"""


@dataclass(kw_only=True)
class Made:
    """One execution: its folder, its JSON object, and what it wrote."""

    folder: Path
    data: dict[str, Any]
    trace: Path
    report: Path


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "spilling.py").write_text(textwrap.dedent(SPILLING))
    return tmp_path


@pytest.fixture(scope="module")
def executed(tmp_path_factory: pytest.TempPathFactory) -> Made:
    """A run that uses every tier, with both files."""
    folder = tmp_path_factory.mktemp("executed")
    (folder / "spilling.py").write_text(textwrap.dedent(SPILLING))
    files = {name: folder / name for name in ("t.json", "r.html")}
    result = engine(
        "execute", folder / "spilling.py", "--run", folder / "run", "--budget", "device=24000,host=10300", "--json",
        "--trace", files["t.json"], "--report", files["r.html"],
    )  # fmt: skip
    assert result.code == 0, result.err
    assert all(result.data()["peak_bytes"][tier] for tier in TIERS), "the plan is meant to use every tier"
    return Made(folder=folder, data=result.data(), trace=files["t.json"], report=files["r.html"])


def events(trace: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    return found


def written_values(trace: Path, pid: int, name: str) -> list[int]:
    return [e["args"]["bytes"] for e in events(trace) if (e["ph"], e["pid"], e["name"]) == ("C", pid, name)]


def stages_of(trace: Path, pid: int) -> dict[str, dict[str, Any]]:
    """Return what the trace says of each stage, from the first lane of a process."""
    return {e["name"]: e["args"] for e in events(trace) if (e["ph"], e.get("tid")) == ("X", LANES * pid)}


# The trace


def test_a_run_always_leaves_its_trace_and_the_one_asked_for_is_the_same(executed: Made) -> None:
    assert (executed.folder / "run" / "trace.json").read_bytes() == executed.trace.read_bytes()


def test_the_peaks_of_the_counters_are_those_of_the_json_object_predicted_and_measured(executed: Made) -> None:
    for pid in (1, 2):
        for tier in TIERS:
            assert max(written_values(executed.trace, pid, tier)) == executed.data["peak_bytes"][tier]
    for tier in ("device", "host"):
        measured = max(written_values(executed.trace, 2, f"{tier} measured"))
        assert measured <= executed.data["measured_peak_bytes"][tier] <= executed.data["peak_bytes"][tier]


def test_predicted_and_measured_have_the_same_spans_in_the_same_order_and_the_same_counters(executed: Made) -> None:
    def spans(pid: int) -> list[tuple[object, ...]]:
        return [
            (e["name"], e["cat"], e["tid"] - LANES * pid, e["args"]["planned_device_bytes"], e["args"].get("bytes"))
            for e in events(executed.trace)
            if e["ph"] == "X" and e["pid"] == pid
        ]

    assert spans(1) == spans(2) != []
    assert len({span[2] for span in spans(1)}) > 1, "the plan is meant to move Values"
    for tier in TIERS:
        assert written_values(executed.trace, 1, tier) == written_values(executed.trace, 2, tier)


def test_the_measured_bytes_of_every_stage_stand_beside_the_planned_ones_and_in_the_journal(executed: Made) -> None:
    records, _ = read_journal(executed.folder / "run" / "journal.msgpack")
    commits = {item.stage: item.measured_peak_bytes for item in records if isinstance(item, StageCommit)}
    spans = stages_of(executed.trace, 2)
    assert spans.keys() == commits.keys()
    for name, arguments in spans.items():
        assert arguments["measured_device_bytes"] == commits[name]["device"] <= arguments["planned_device_bytes"]


def test_a_simulation_writes_the_predicted_half_of_what_a_run_writes(executed: Made) -> None:
    budget = ",".join(f"{tier}={nbytes}" for tier, nbytes in executed.data["budget_bytes"].items())
    result = engine("simulate", "spilling.py", "--budget", budget, "--trace", "t.json")
    assert result.code == 0, result.err
    assert result.out.splitlines()[-1] == "trace: t.json"
    assert events(Path("t.json")) == [event for event in events(executed.trace) if event["pid"] == 1]


@pytest.mark.parametrize(("hook", "code"), [("1 / 0", 5), ("raise KeyboardInterrupt", 130)])
def test_a_run_that_failed_or_was_interrupted_leaves_its_trace_as_far_as_it_came(hook: str, code: int) -> None:
    assert engine("execute", "spilling.py", "--set", f"hook={hook}", "--run", "run", "--trace", "t.json").code == code
    ran = [event for event in events(Path("run/trace.json")) if event["ph"] == "X" and event["pid"] == 2]
    assert ran[-1]["name"] == "report"
    assert [event["args"].get("unfinished", False) for event in ran] == [False] * (len(ran) - 1) + [True]
    assert Path("t.json").read_bytes() == Path("run/trace.json").read_bytes()


def test_a_resumed_run_writes_what_was_asked_for_when_it_was_started_and_what_is_asked_for_now(
    own_folder: Path,
) -> None:
    hook = "import pathlib; p = pathlib.Path('flag'); first = not p.exists(); p.touch(); first and 1 / 0"
    started = ["--set", f"hook={hook}", "--run", "run", "--report", "r.html"]
    assert engine("execute", "spilling.py", *started).code == 5
    assert not Path("r.html").exists()
    result = engine("resume", "run", "--trace", "t.json", "--json")
    assert result.code == 0, result.err
    assert not [event for event in events(Path("t.json")) if event.get("args", {}).get("unfinished")]
    assert '"wall_s"' in Path("r.html").read_text()


# Perfetto


@pytest.fixture(scope="module")
def perfetto(executed: Made) -> Iterator[TraceProcessor]:
    with trace_processor(executed.trace.read_bytes()) as processor:
        yield processor


def test_perfetto_loads_the_trace_without_a_complaint(perfetto: TraceProcessor) -> None:
    assert perfetto.query("select name, value from stats where severity in ('error', 'data_loss') and value > 0") == []


@pytest.mark.parametrize("tier", TIERS)
def test_the_counters_that_perfetto_shows_are_the_ledgers(perfetto: TraceProcessor, executed: Made, tier: str) -> None:
    for pid, process in enumerate(("predicted", "measured"), start=1):
        rows = perfetto.query(LIVE.format(process=process, tier=tier))
        assert [int(row["bytes"]) for row in rows] == written_values(executed.trace, pid, tier)
        assert [row["ts"] for row in rows] == sorted(row["ts"] for row in rows)
        assert max(row["bytes"] for row in rows) == executed.data["peak_bytes"][tier]


def test_the_lanes_that_perfetto_shows_have_every_stage_and_move_side_by_side(
    perfetto: TraceProcessor, executed: Made
) -> None:
    shown = {process: perfetto.query(SPANS.format(process=process)) for process in ("predicted", "measured")}
    names = [[(row["name"], row["lane"], row["kind"]) for row in rows] for rows in shown.values()]
    assert names[0] == names[1]
    assert [name for name, lane, _ in names[0] if lane == "worker 0"] == [
        "step0/first", *(f"fill step0/page{index}" for index in range(3)), "report",
    ]  # fmt: skip
    assert len(names[0]) == sum(event["ph"] == "X" and event["pid"] == 1 for event in events(executed.trace))
    assert {row["depth"] for rows in shown.values() for row in rows} == {0}


# The report in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with running_browser() as found:
        yield found


def opened(browser: Browser, report: Path) -> Page:
    page = browser.new_page()
    page.open(report.absolute().as_uri())
    page.wait_for("document.documentElement.dataset.drawn === 'yes'")
    return page


def assert_quiet(page: Page, report: Path) -> None:
    assert page.problems == []
    assert page.requests == [report.absolute().as_uri()], "the report may ask for nothing but itself"


def test_the_report_of_a_run_draws_every_figure_and_asks_for_nothing(browser: Browser, executed: Made) -> None:
    page = opened(browser, executed.report)
    drawn = page.evaluate(
        "Object.fromEntries([...document.querySelectorAll('.js-plotly-plot')].map("
        "plot => [plot.id, [plot.querySelectorAll('.scatterlayer .js-line').length,"
        " plot.querySelectorAll('.barlayer .point path').length]]))"
    )
    assert drawn.keys() == {"bytes-device", "bytes-host", "bytes-disk", "timeline"}
    for tier in TIERS:  # predicted, and planned and measured over the run's own time
        assert drawn[f"bytes-{tier}"][0] == 3
    assert drawn["timeline"][1] == sum(event["ph"] == "X" for event in events(executed.trace))
    assert page.evaluate("document.querySelectorAll('#graph g.node').length") == 5 - 2
    assert_quiet(page, executed.report)


def test_every_number_that_the_report_shows_is_the_json_objects(browser: Browser, executed: Made) -> None:
    page = opened(browser, executed.report)
    assert page.evaluate("JSON.parse(document.getElementById('data').textContent)") == executed.data
    shown = page.evaluate(
        "[...document.querySelectorAll('[data-key]')].map(cell => [cell.dataset.key, cell.dataset.value])"
    )
    assert {f"{kind}.{tier}" for kind in ("budget_bytes", "peak_bytes", "measured_peak_bytes") for tier in TIERS} <= {
        key for key, _ in shown
    }
    for key, text in shown:
        value: Any = executed.data
        for part in key.split("."):
            value = value[part]
        assert json.loads(text) == value, key


@pytest.mark.parametrize("tier", TIERS)
def test_the_curves_that_the_browser_draws_reach_the_peaks_of_the_json_object(
    browser: Browser, executed: Made, tier: str
) -> None:
    page = opened(browser, executed.report)
    tops = page.evaluate(
        f"document.getElementById('bytes-{tier}').calcdata.map(line => "
        "[line[0].trace.name, Math.max(...line.map(point => point.data ?? line[0].trace.customdata[point.i]))])"
    )
    assert {top for name, top in tops if name in ("planned", "peak")} == {executed.data["peak_bytes"][tier]}
    for name, top in tops:
        if name == "measured":
            assert top == max(written_values(executed.trace, 2, f"{tier} measured"))


def test_hostile_names_are_shown_as_text_and_run_nothing(browser: Browser) -> None:
    result = engine("simulate", "spilling.py", "--set", f"marker={HOSTILE}", "--report", "r.html")
    assert result.code == 0, result.err
    page = opened(browser, Path("r.html"))
    assert page.evaluate("document.querySelectorAll('img').length") == 0
    assert HOSTILE in page.evaluate("document.querySelector('h1').textContent")
    assert HOSTILE in page.evaluate("document.querySelector('#slowest').textContent")
    assert HOSTILE in page.evaluate("document.querySelector('#graph title').textContent")
    assert_quiet(page, Path("r.html"))


def test_the_report_is_drawn_in_the_dark_too(browser: Browser, executed: Made) -> None:
    page = browser.new_page()
    page.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    page.open(executed.report.as_uri())
    page.wait_for("document.documentElement.dataset.drawn === 'yes'")
    text, body = (
        page.evaluate(f"getComputedStyle(document.querySelector({selector!r})).{name}")
        for selector, name in (("#bytes-device .xtitle", "fill"), ("body", "color"))
    )
    assert text == body == "rgb(255, 255, 255)"


# Usage


@pytest.mark.parametrize("command", ["simulate", "execute"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--trace", "no/such/t.json"], "can't write 'no/such/t.json': its folder does not exist"),
        (["--report", "folder"], "can't write 'folder': it is no regular file"),
        (["--trace", "a", "--report", "./a"], "--report names './a', which is --trace's file"),
    ],
)
def test_files_that_can_not_be_written_are_told_before_anything_is_done(
    command: str, flags: list[str], message: str, own_folder: Path
) -> None:
    Path("folder").mkdir()
    result = engine(command, "spilling.py", *flags)
    assert (result.code, result.out) == (2, "")
    assert message in result.err
    assert sorted(path.name for path in own_folder.iterdir()) == ["folder", "spilling.py"]


def test_a_missing_report_extra_is_told_without_loading_torch() -> None:
    program = """
        import importlib.util, sys
        from engine.__main__ import main
        found = importlib.util.find_spec
        importlib.util.find_spec = lambda name, *rest: None if name == "plotly" else found(name, *rest)
        code = main(["simulate", "spilling.py", "--report", "r.html"])
        print(code, "torch" in sys.modules)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.split() == ["2", "False"]
    assert "--report needs plotly; install it with: pip install 'longstraw[report]'" in done.stderr


# show


def test_show_draws_the_graph_before_the_table_and_into_a_file() -> None:
    result = engine("show", "spilling.py", "--image", "plan.png")
    assert result.code == 0, result.err
    lines = result.out.splitlines()
    assert "fill step0 x3" in result.out[: result.out.index("workspace")]
    assert all(any(line.startswith(f"fill step0/page{index} ") for line in lines) for index in range(3))
    assert lines[-1] == "image: plan.png"
    assert Path("plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("target", "message"),
    [("plan.gif", "its name must end in one of"), ("no/plan.png", "its folder does not exist")],
)
def test_an_image_that_can_not_be_drawn_exits_2(target: str, message: str) -> None:
    result = engine("show", "spilling.py", "--image", target)
    assert (result.code, result.out) == (2, "")
    assert message in result.err


def test_an_image_of_a_run_is_refused_with_what_to_draw_instead(executed: Made) -> None:
    result = engine("show", executed.folder / "run", "--image", "run.png")
    assert result.code == 2
    assert "name its plan.py" in result.err


LARGE = """
    from engine import Plan, Stage

    def large(steps: int = 40, chunks: int = 10) -> Plan:
        plan = Plan(name="large")
        for step in range(steps):
            for chunk in range(chunks):
                run = lambda context: None
                plan.add(Stage(name=f"work step{step}/tokens{chunk}", kind="work", run=run, workspace_bytes=chunk))
        return plan
"""


def test_a_large_plan_and_its_run_are_shown_in_few_rows_and_all_stages_on_request(own_folder: Path) -> None:
    (own_folder / "large.py").write_text(textwrap.dedent(LARGE))
    text = engine("show", "large.py").out
    assert len(text.splitlines()) < 90
    assert "engine show --all lists each" in text
    everything = engine("show", "large.py", "--all").out
    assert all(f"work step{step}/tokens9" in everything for step in range(40))
    assert engine("execute", "large.py", "--run", "run").code == 0
    shown = engine("show", "run").out.splitlines()
    assert len(shown) == 2 + 40
    assert shown[2].split()[:4] == ["work", "step0/tokens*", "10", shown[2].split()[3]]


# Standard output


def test_with_json_nothing_that_a_library_or_its_child_writes_gets_between(own_folder: Path) -> None:
    noise = "import os, ctypes; os.write(1, b'raw'); os.system('echo child'); ctypes.CDLL(None).puts(b'from C')"
    done = subprocess.run(
        [CONSOLE_SCRIPT, "execute", "spilling.py", "--set", f"hook={noise}", "--run", "run", "--json"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["loss"] == 1.0
    assert all(word in done.stderr for word in ("raw", "child", "from C"))


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_a_reader_that_goes_away_ends_the_command_quietly(flags: list[str]) -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    try:
        done = subprocess.run(
            [CONSOLE_SCRIPT, "show", "spilling.py", *flags], stdout=write_fd, stderr=subprocess.PIPE, text=True,
            timeout=120, check=False,
        )  # fmt: skip
    finally:
        os.close(write_fd)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_run_goes_on_when_nobody_reads_its_progress() -> None:
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    try:
        done = subprocess.run(
            [CONSOLE_SCRIPT, "execute", "spilling.py", "--run", "run", "--json"], stdout=subprocess.PIPE,
            stderr=write_fd, text=True, timeout=120, check=False,
        )  # fmt: skip
    finally:
        os.close(write_fd)
    assert done.returncode == 0
    assert json.loads(done.stdout)["loss"] == 1.0
