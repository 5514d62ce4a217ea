"""What each command of ``engine`` does, from parsed arguments to exit code."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.budget import Budget, default_budget, merge_budget, parse_budget
from engine.errors import DoesNotFitError, EngineError, RunDirectoryError, StageFailedError, UsageError
from engine.journal import Journal, PlanRecord, RunFinished, StageCommit, read_journal
from engine.loader import find_plan, parse_settings
from engine.output import discard, flush_or_discard, only_the_object
from engine.plain import finite, plain
from engine.plan import Choices, Plan
from engine.run import (
    RunDirectory,
    atomic_write_bytes,
    atomic_write_text,
    check_writable,
    default_run_path,
    disk_usage_bytes,
)
from engine.units import format_bytes

if TYPE_CHECKING:
    from engine.planner import Forecast
    from engine.trace import Recording

INTERRUPTED = 130
READER_LEFT = 141
# What a shell reports of a program that a closed pipe ended (128 + SIGPIPE).
OUT_OF_TOLERANCE = 1


def run_command(arguments: argparse.Namespace) -> int:
    """Run one command and return its exit code; ``arguments.out`` is where its results go."""
    with only_the_object(sys.stdout) if arguments.json else contextlib.nullcontext(sys.stdout) as arguments.out:
        try:
            code = _guarded(arguments)
            arguments.out.flush()
            return code
        except BrokenPipeError:  # `engine show ... | head`: nobody wants the rest, and nobody is left to be told
            discard(arguments.out)
            return READER_LEFT
        finally:
            flush_or_discard(sys.stderr)  # where nobody reads progress, the end of the process must not fail at it


def _guarded(arguments: argparse.Namespace) -> int:
    """Run one command; errors made on purpose become a message on standard error and their exit code."""
    try:
        return _COMMANDS[arguments.command](arguments)
    except BrokenPipeError:
        raise
    except KeyboardInterrupt:
        run = _started(arguments)
        advice = f"; engine resume {run} repeats it from its beginning; what was sampled is kept" if run else ""
        print(f"engine: interrupted{advice}", file=sys.stderr)
        return INTERRUPTED
    except EngineError as error:
        if arguments.json and isinstance(error, DoesNotFitError):
            print(json.dumps({**error.report, "feasible": False, "error": str(error)}), file=arguments.out)
        print(f"engine: error: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        run = _started(arguments)
        print(f"engine: error: {error}{f'; mend that, then engine resume {run}' if run else ''}", file=sys.stderr)
        return StageFailedError.exit_code if run else UsageError.exit_code
    except Exception as error:  # not foreseen: exit code 1 would say "audit out of tolerance"
        traceback.print_exc(file=sys.stderr)
        print(f"engine: internal error: {type(error).__name__}: {error}; please report it", file=sys.stderr)
        return StageFailedError.exit_code


def _started(arguments: argparse.Namespace) -> Path | None:
    """Return the directory of a run that was started and is not finished; one without a journal is none."""
    run: Path | None = getattr(arguments, "started_run", None)
    return run if run is not None and RunDirectory(path=run).journal_path.is_file() else None


def _emit(arguments: argparse.Namespace, data: Mapping[str, object], text: Callable[[], str]) -> None:
    if not arguments.json:
        print(text(), file=arguments.out)
        return
    print(json.dumps(finite(data), allow_nan=False), file=arguments.out)


def _load(arguments: argparse.Namespace) -> tuple[Plan, bytes]:
    file = find_plan(arguments.plan)
    return file.plan(parse_settings(arguments.settings)), file.path.read_bytes()


def _budget(arguments: argparse.Namespace, plan: Plan, directory: Path) -> Budget:
    """The command line's budget over the plan's own over the machine's."""
    return parse_budget(arguments.budget, merge_budget(plan.budget, default_budget(directory)))


def _check_pictures(arguments: argparse.Namespace, run: Path | None = None) -> None:
    """Say at once that an output can't be written, or would take the place of something else. Raises UsageError.

    ``run`` is the run directory, whose files are its own.
    """
    from engine.pictures.page import check_report_packages

    for path in (arguments.trace, arguments.report):
        if path is not None:
            check_writable(path)
    if arguments.report is not None:
        check_report_packages()
    outputs = {"--trace": arguments.trace, "--report": arguments.report}
    outputs["--save-gradients"] = getattr(arguments, "save_gradients", None)
    taken = {os.path.realpath(arguments.plan): "the plan"} if hasattr(arguments, "plan") else {}
    for flag, path in outputs.items():
        if path is not None:
            if run is not None and Path(os.path.realpath(path)).is_relative_to(os.path.realpath(run)):
                raise UsageError(f"{flag} names {path!r}, which is in the run directory {run}; name a place outside")
            other = taken.setdefault(os.path.realpath(path), flag)
            if other != flag:
                raise UsageError(f"{flag} names {path!r}, which is {other}'s file; give each a file of its own")


def _write_trace(arguments: argparse.Namespace, *recordings: Recording) -> None:
    from engine.trace import chrome_trace

    if arguments.trace is not None:
        atomic_write_text(Path(arguments.trace), chrome_trace(recordings))


def _write_report(
    arguments: argparse.Namespace, data: Mapping[str, Any], planned: Forecast, measured: Recording | None = None
) -> None:
    from engine.pictures.page import report_page

    if arguments.report is not None:
        atomic_write_text(Path(arguments.report), report_page(finite(data), planned, measured))


def _written(arguments: argparse.Namespace) -> str:
    """Return the closing lines that say where trace and report are."""
    found = {"trace": arguments.trace, "report": arguments.report}
    return "".join(f"\n{name}: {path}" for name, path in found.items() if path is not None)


def _simulate(arguments: argparse.Namespace) -> int:
    from engine.hardware import load_profile

    _check_pictures(arguments)
    profile = load_profile(arguments.hardware)
    parse_budget(arguments.budget, default_budget(Path()))  # a typing mistake is told before anything slow
    plan, _ = _load(arguments)
    from engine.planner import Planner
    from engine.report import describe_forecast  # torch comes with it

    planner, budget = Planner(plan=plan, profile=profile), _budget(arguments, plan, Path())
    result = planner.forecast(budget)
    offers = planner.offers(result)
    data = {**result.as_dict(), "pareto": [offer.as_dict() for offer in offers]}
    _write_trace(arguments, result.recording)
    _write_report(arguments, data, result)
    _emit(arguments, data, lambda: describe_forecast(result, offers) + _written(arguments))
    return 0


def _fit(arguments: argparse.Namespace) -> int:
    from engine.hardware import load_profile

    profile, settings = load_profile(arguments.hardware), parse_settings(arguments.settings)
    parse_budget(arguments.budget, default_budget(Path()))
    file = find_plan(arguments.plan)
    plan = file.plan(settings)
    from engine.fit import Fitter
    from engine.fit_report import describe_fit
    from engine.progress import say

    fitter = Fitter(
        file=file, settings=settings, budget=_budget(arguments, plan, Path()), profile=profile, plan=plan, say=say
    )
    names = list(dict.fromkeys(arguments.vary)) or fitter.usual_names()
    fitter.check(names)
    answers = [fitter.answer(name) for name in names]
    data = {
        "plan": plan.name,
        "feasible": any(answer.value is not None for answer in answers),
        "budget_bytes": fitter.budget.as_dict(),
        "vary": {answer.name: answer.as_dict() for answer in answers},
    }
    _emit(arguments, data, lambda: describe_fit(plan.name, fitter.budget, answers))
    return 0 if data["feasible"] else DoesNotFitError.exit_code


def _execute(arguments: argparse.Namespace) -> int:

    run = Path(arguments.run) if arguments.run else default_run_path(Path(arguments.plan).stem, datetime.now())
    _check_pictures(arguments, run)
    parse_budget(arguments.budget, default_budget(Path()))
    for text in (str(run.absolute()), arguments.plan, os.getcwd(), *arguments.settings):
        if not text.isascii() and text != text.encode("utf-8", "replace").decode():
            raise UsageError(f"{text!r} is not valid UTF-8, so a run could not record it; use another name")
    if (journal := RunDirectory(path=run).journal_path).is_file():
        Journal.check_free(journal)
    RunDirectory.check_new(run)
    plan, source = _load(arguments)
    wanted = {"gradients": arguments.save_gradients} if arguments.save_gradients else {}
    recipe = {
        "plan": arguments.plan,
        "set": arguments.settings,
        "hardware": arguments.hardware,
        "wanted": wanted,
        "trace": arguments.trace,
        "report": arguments.report,
        "cwd": os.getcwd(),
    }
    return _run_plan(arguments, plan, source, run, wanted, recipe)


def _run_plan(
    arguments: argparse.Namespace,
    plan: Plan,
    source: bytes,
    run: Path,
    wanted: Mapping[str, str],
    recipe: Mapping[str, Any],
    *,
    fixed: Choices | None = None,
) -> int:
    """Plan and run; ``fixed`` are the choices of an unfinished run in that directory, which begins again."""
    from engine.hardware import load_profile
    from engine.planner import Planner
    from engine.progress import Progress
    from engine.report import describe_outcome
    from engine.runtime import execute, new_recording

    planner = Planner(plan=plan, profile=load_profile(arguments.hardware), fixed=fixed or {})
    budget = _budget(arguments, plan, run)
    _note_disk(budget, run)
    planned = planner.forecast(budget)
    for note in plan.notes:
        print(f"note: {note}", file=sys.stderr)
    progress, recording = Progress(len(planned.schedule.stages)), new_recording(planned)
    arguments.started_run = run
    try:
        outcome = execute(
            planned, run, plan_source=source, wanted=wanted, recipe=recipe, again=fixed is not None,
            observers=[progress], recording=recording,
        )  # fmt: skip
    finally:
        progress.close()
        if recording.started:  # what failed or was interrupted has a trace, too
            _write_trace(arguments, planned.recording, recording)
    arguments.started_run = None
    comparison = _compare(plan, planned.budget)
    data = {**planned.as_dict(), **outcome.as_dict(), "run": str(run)}
    if comparison:
        data["comparison"] = {key: value for key, value in comparison.items() if key != "lines"}
    _write_report(arguments, data, planned, recording)
    _emit(arguments, data, lambda: describe_outcome(planned, outcome, str(run), comparison) + _written(arguments))
    return 0


def _note_disk(budget: Budget, run: Path) -> None:
    """Say before the planning that the disk has less room than the budget; what the run has there is room, too."""
    existing = next(path for path in (run.absolute(), *run.absolute().parents) if path.exists())
    room_bytes = shutil.disk_usage(existing).free + disk_usage_bytes(run)
    if budget.disk_bytes > room_bytes:
        print(
            f"note: the budget has {format_bytes(budget.disk_bytes)} of disk, but the disk of {existing} has only "
            f"{format_bytes(room_bytes)} free; the run stops where that is used up, and can be resumed",
            file=sys.stderr,
        )


def _compare(plan: Plan, budget: Budget) -> Mapping[str, Any]:
    """Call the plan's comparison, if it has one; to stop it does not undo the run, which is finished."""
    if "compare" not in plan.hooks:
        return {}
    print("measuring the alternative; the run itself is finished", file=sys.stderr)
    try:
        found: Mapping[str, Any] = plan.hooks["compare"](budget)
    except KeyboardInterrupt:
        return {"lines": ["the comparison was interrupted"]}
    return found


def _audit(arguments: argparse.Namespace) -> int:
    plan, _ = _load(arguments)
    from engine.report import describe_audit

    if "audit" not in plan.hooks:
        raise UsageError(f"plan {plan.name!r} can't be audited: it registers no audit")
    report = plan.hooks["audit"](_budget(arguments, plan, Path()))
    _emit(arguments, report, lambda: describe_audit(report))
    return 0 if report["passed"] else OUT_OF_TOLERANCE


def _calibrate(arguments: argparse.Namespace) -> int:
    """Measure this machine on the shipped plan that was made for it, and write the profile."""

    check_writable(arguments.output)
    from engine.calibrate import MEASURED, PLAN, ROUNDS, calibrate

    file = find_plan(PLAN)
    found = calibrate(
        Path(arguments.output).stem,
        [partial(file.plan, settings) for settings in MEASURED[: 1 if arguments.quick else None]],
        rounds=1 if arguments.quick else ROUNDS,
        tell=lambda text: print(text, file=sys.stderr),
    )
    atomic_write_text(Path(arguments.output), found.profile.to_json())
    data = {**asdict(found.profile), "output": arguments.output, "stages_measured": len(found.observations)}
    _emit(arguments, data, lambda: f"{found.describe()}\nprofile: {arguments.output}")
    return 0


def _show(arguments: argparse.Namespace) -> int:
    if Path(arguments.plan).is_dir():
        if arguments.image is not None:
            raise UsageError(f"--image draws a plan, and {arguments.plan!r} is a run; name its plan.py")
        return _show_run(arguments)
    if arguments.image is not None:
        from engine.pictures.image import check_image

        check_writable(arguments.image)
        check_image(arguments.image)
    plan, _ = _load(arguments)
    from engine.report import describe_plan

    data: dict[str, object] = {}
    if arguments.json:
        data = {
            "plan": plan.name,
            "choices": dict(plan.choices),
            "stages": [stage.name for stage in plan.ordered()],
            "edges": [[before, after] for before, after in plan.graph().edges],
        }
    if arguments.image is not None:
        _draw(plan, Path(arguments.image))
    image = f"\nimage: {arguments.image}" if arguments.image is not None else ""
    _emit(arguments, data, lambda: describe_plan(plan, every=arguments.every) + image)
    return 0


def _draw(plan: Plan, path: Path) -> None:
    from engine.pictures.collapse import collapse
    from engine.pictures.image import MOST_NODES, draw_image

    title = f"{plan.name}: {len(plan.stages)} stages"
    atomic_write_bytes(path, draw_image(collapse(plan, MOST_NODES), title, path.suffix))


def _show_run(arguments: argparse.Namespace) -> int:
    from engine.report import describe_commits

    records, _ = read_journal(RunDirectory.open(Path(arguments.plan)).journal_path)
    plans = [record for record in records if isinstance(record, PlanRecord)]
    if plans:  # a resumed step began again: what came before does not count
        records = records[len(records) - 1 - records[::-1].index(plans[-1]) :]
    commits = [record for record in records if isinstance(record, StageCommit)]
    finished = [record for record in records if isinstance(record, RunFinished)]
    data: dict[str, object] = {
        "plan": plans[-1].plan if plans else None,
        "choices": plans[-1].choices if plans else {},
        "stages_committed": len(commits),
        "finished": bool(finished),
        "results": finished[-1].results if finished else {},
    }
    title = f"run of plan {data['plan']}: {'finished' if finished else 'not finished, engine resume goes on'}"
    _emit(arguments, data, lambda: f"{title}\n{describe_commits(commits)}".rstrip())
    return 0


def _resume(arguments: argparse.Namespace) -> int:
    """Run an unfinished run again from its beginning, in the same directory; a finished one is left alone."""

    _check_pictures(arguments)
    for name in ("trace", "report"):  # where they mean it, not where the run was started
        if (path := getattr(arguments, name)) is not None:
            setattr(arguments, name, os.path.abspath(path))
    run = Path(arguments.run).absolute()
    directory = RunDirectory.open(run)
    Journal.check_free(directory.journal_path)
    records, _ = read_journal(directory.journal_path)
    plans = [record for record in records if isinstance(record, PlanRecord)]
    if not plans:
        raise RunDirectoryError(f"{run} was interrupted before its plan was recorded; remove it and execute again")
    if any(isinstance(record, RunFinished) for record in records):
        raise UsageError(f"{run} is finished; engine show {run} prints its results")
    recipe: dict[str, Any] = plans[-1].recipe
    with contextlib.chdir(recipe["cwd"]) if Path(recipe["cwd"]).is_dir() else contextlib.nullcontext():
        return _resume_from(arguments, directory, plans[-1])  # where relative paths mean what they meant


def _resume_from(arguments: argparse.Namespace, directory: Any, record: Any) -> int:
    recipe: dict[str, Any] = record.recipe
    for name in ("trace", "report"):
        setattr(arguments, name, getattr(arguments, name) or recipe.get(name))
    arguments.plan, arguments.settings, arguments.hardware = recipe["plan"], recipe["set"], recipe["hardware"]
    arguments.save_gradients = recipe["wanted"].get("gradients")
    _check_pictures(arguments, directory.path)
    if arguments.plan.endswith(".py") and not Path(arguments.plan).is_file():
        arguments.plan = str(directory.plan_path)  # the original is gone
    plan, source = _load(arguments)
    budget = merge_budget(record.budget_bytes, default_budget(directory.path))
    arguments.budget = ",".join(f"{tier}={nbytes}" for tier, nbytes in budget.as_dict().items())
    fixed = _check_same(record, plan)
    return _run_plan(arguments, plan, source, directory.path, recipe["wanted"], recipe, fixed=fixed)


def _check_same(record: Any, plan: Plan) -> Choices:
    """Return the choices that the run was started with. Raises RunDirectoryError if its plan was another one."""
    import engine
    from engine.recipe import plan_fingerprint

    if record.code_version != engine.CODE_VERSION:
        raise RunDirectoryError(f"the run was made by version {record.code_version}, this is {engine.CODE_VERSION}")
    choices = {name: value for name, value in record.choices.items() if name in plan.ladders}
    chosen = plan.lowered(choices)
    if plan_fingerprint(chosen) != record.fingerprint:
        now = _comparable(chosen.settings)
        changed = [key for key in record.settings if record.settings[key] != now.get(key)]
        raise RunDirectoryError(
            f"the plan is not the one that the run was started with: {', '.join(changed) or 'its stages'} differ; "
            "bring back what was changed, or execute in a new run directory"
        )
    return choices


def _comparable(settings: Mapping[str, object]) -> Any:
    """Return settings as they are read from a journal."""
    return json.loads(json.dumps(plain(settings)))


_COMMANDS = {
    "execute": _execute,
    "simulate": _simulate,
    "fit": _fit,
    "audit": _audit,
    "calibrate": _calibrate,
    "show": _show,
    "resume": _resume,
}
