"""What each command of ``engine`` does, from parsed arguments to exit code."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.atomic import atomic_write_bytes, atomic_write_text, check_writable
from engine.budget import Budget, default_budget, merge_budget, parse_budget
from engine.device_kind import CPU, DeviceKind
from engine.errors import DoesNotFitError, EngineError, RunDirectoryError, StageFailedError, UsageError
from engine.journal import Journal, PlanRecord, read_journal
from engine.loader import find_plan, parse_settings
from engine.output import only_the_object, say, told
from engine.outputs import Outputs
from engine.plain import finite
from engine.plan import Choices, Plan
from engine.resume import RunRequest, check_same, last_attempt, unfinished
from engine.run import RunDirectory, default_run_path, disk_usage_bytes
from engine.signals import interruption
from engine.units import format_bytes

if TYPE_CHECKING:
    from engine.device import Device
    from engine.planner import Forecast
    from engine.trace import Recording

OUT_OF_TOLERANCE = 1

_MEASURED_PLAN = "calibration"
# The shipped plan that was made to be measured.


def run_command(arguments: argparse.Namespace) -> int:
    """Run one command and return its exit code; ``arguments.out`` is where its results go."""
    with only_the_object(sys.stdout) if arguments.json else contextlib.nullcontext(sys.stdout) as arguments.out:
        return told(arguments.out, _guarded(arguments), _finished(arguments))


def _guarded(arguments: argparse.Namespace) -> int:
    """Run one command; errors made on purpose become a message on standard error and their exit code."""
    try:
        _check_current_folder()
        return _COMMANDS[arguments.command](arguments)
    except KeyboardInterrupt as error:
        run = _started(arguments)
        advice = f"engine resume {run} repeats it from its beginning; what was sampled is kept" if run else ""
        code, line = interruption(error, advice or _finished(arguments))
        say(line)
        return code
    except EngineError as error:
        if arguments.json and isinstance(error, DoesNotFitError):
            print(json.dumps({**error.report, "feasible": False, "error": str(error)}), file=arguments.out)
        say(f"engine: error: {error}")
        return error.exit_code
    except OSError as error:
        run = _started(arguments)
        advice = f"mend that, then engine resume {run}" if run else _finished(arguments)
        say("; ".join(filter(None, (f"engine: error: {error}", advice))))
        return StageFailedError.exit_code if run else UsageError.exit_code
    except Exception as error:  # not foreseen: exit code 1 would say "audit out of tolerance"
        traceback.print_exc(file=sys.stderr)
        say(f"engine: internal error: {type(error).__name__}: {error}; please report it")
        return StageFailedError.exit_code


def _check_current_folder() -> None:
    try:
        os.getcwd()
    except FileNotFoundError as error:
        raise UsageError("the current folder was removed; go to one that is there") from error


def _started(arguments: argparse.Namespace) -> Path | None:
    """Return the directory of a run that was started and can be resumed; one without a plan in its journal can't."""
    run: Path | None = getattr(arguments, "started_run", None)
    if run is None:
        return None
    try:
        unfinished(read_journal(RunDirectory(path=run).journal_path)[0], run)
    except EngineError:
        return None
    return run


def _finished(arguments: argparse.Namespace) -> str:
    """Say of a run that it is finished, whatever its command could not do then; nothing where none is."""
    run: Path | None = getattr(arguments, "finished_run", None)
    return "" if run is None else f"the run is finished, and engine show {run} prints its results"


def _emit(arguments: argparse.Namespace, data: Mapping[str, object], text: Callable[[], str]) -> None:
    if not arguments.json:
        print(text(), file=arguments.out)
        return
    print(json.dumps(finite(data), allow_nan=False), file=arguments.out)


def _load(plan: str, settings: Sequence[str], kind: DeviceKind = CPU) -> tuple[Plan, bytes]:
    file = find_plan(plan)
    return file.plan(parse_settings(settings), kind), file.path.read_bytes()


def _outputs(arguments: argparse.Namespace) -> Outputs:
    gradients = getattr(arguments, "save_gradients", None)
    return Outputs(trace=arguments.trace, report=arguments.report, gradients=gradients)


def _budget(arguments: argparse.Namespace, plan: Plan, directory: Path, free_device_bytes: int | None = None) -> Budget:
    """The command line's budget over the plan's own over the machine's, or that of a device with memory of its own."""
    return parse_budget(arguments.budget, merge_budget(plan.budget, default_budget(directory, free_device_bytes)))


def _simulate(arguments: argparse.Namespace) -> int:
    from engine.hardware import load_profile

    outputs = _outputs(arguments)
    outputs.check(plan=arguments.plan)
    profile = load_profile(arguments.hardware or CPU.name)
    parse_budget(arguments.budget, default_budget(Path()))  # a typing mistake is told before anything slow
    plan, _ = _load(arguments.plan, arguments.settings, profile.kind)
    from engine.planner import Planner
    from engine.report import describe_forecast  # torch comes with it

    planner, budget = (
        Planner(plan=plan, profile=profile),
        _budget(arguments, plan, Path(), profile.device_bytes or None),
    )
    result = planner.forecast(budget)
    offers = planner.offers(result)
    data = {**result.as_dict(), "pareto": [offer.as_dict() for offer in offers]}
    outputs.write_trace(result.recording)
    outputs.write_report(data, result)
    _emit(arguments, data, lambda: describe_forecast(result, offers) + outputs.lines())
    return 0


def _fit(arguments: argparse.Namespace) -> int:
    from engine.hardware import load_profile

    profile, settings = load_profile(arguments.hardware or CPU.name), parse_settings(arguments.settings)
    parse_budget(arguments.budget, default_budget(Path()))
    file = find_plan(arguments.plan)
    plan = file.plan(settings, profile.kind)
    from engine.fit import Fitter
    from engine.fit_report import describe_fit

    budget = _budget(arguments, plan, Path(), profile.device_bytes or None)
    fitter = Fitter(file=file, settings=settings, budget=budget, profile=profile, plan=plan, say=say)
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
    outputs, cwd = _outputs(arguments), os.getcwd()
    outputs.check(plan=arguments.plan, run=run)
    parse_budget(arguments.budget, default_budget(Path()))
    for text in (str(run.absolute()), arguments.plan, cwd, *arguments.settings):
        if not text.isascii() and text != text.encode("utf-8", "replace").decode():
            raise UsageError(f"{text!r} is not valid UTF-8, so a run could not record it; use another name")
    if os.path.isfile(journal := RunDirectory(path=run).journal_path):
        Journal.check_free(journal)
    RunDirectory.check_new(run)
    find_plan(arguments.plan)  # a typing mistake is told before torch is loaded
    from engine.device import open_device

    device = open_device(arguments.device)
    request = RunRequest(
        plan=arguments.plan,
        settings=tuple(arguments.settings),
        hardware=arguments.hardware or device.profile,
        device=device.name,
        outputs=outputs,
        cwd=cwd,
    )
    if device.name != CPU.name:
        say(f"note: stages run on {device.name}; no GPU was tested with this version (--device cpu avoids it)")
    plan, source = _load(request.plan, request.settings, device.kind)
    return _run_plan(arguments, request, device, plan, source, run, _budget(arguments, plan, run, device.free_bytes()))


def _run_plan(
    arguments: argparse.Namespace,
    request: RunRequest,
    device: Device,
    plan: Plan,
    source: bytes,
    run: Path,
    budget: Budget,
    *,
    fixed: Choices | None = None,
) -> int:
    """Plan and run; ``fixed`` are the choices of an unfinished run in that directory, which begins again."""
    from engine.hardware import load_profile
    from engine.planner import Planner
    from engine.progress import Progress
    from engine.report import describe_outcome
    from engine.runtime import execute, new_recording

    planner = Planner(plan=plan, profile=load_profile(request.hardware), fixed=fixed or {})
    _note_disk(budget, run)
    planned = planner.forecast(budget)
    for note in plan.notes:
        say(f"note: {note}")
    progress, recording, outputs = Progress(len(planned.schedule.stages)), new_recording(planned), request.outputs
    arguments.started_run = run
    try:
        outcome = execute(
            planned, run, plan_source=source, wanted=request.wanted, recipe=request.recipe(), again=fixed is not None,
            observers=[progress], recording=recording, device=device,
        )  # fmt: skip
        arguments.started_run, arguments.finished_run = None, run
    except BaseException:
        progress.close()
        _leave_trace(outputs, planned, recording)
        raise
    progress.close()
    outputs.write_trace(planned.recording, recording)
    comparison = _compare(plan, planned.budget)
    data = {**planned.as_dict(), **outcome.as_dict(), "run": str(run)}
    if comparison:
        data["comparison"] = {key: value for key, value in comparison.items() if key != "lines"}
    outputs.write_report(data, planned, recording)
    _emit(arguments, data, lambda: describe_outcome(planned, outcome, str(run), comparison) + outputs.lines())
    return 0


def _leave_trace(outputs: Outputs, planned: Forecast, recording: Recording) -> None:
    """Write the trace of what failed or was interrupted; that this can't be done does not hide why it was."""
    try:
        if recording.started:
            outputs.write_trace(planned.recording, recording)
    except OSError as error:
        say(f"note: the trace could not be written: {error}")


def _note_disk(budget: Budget, run: Path) -> None:
    """Say before the planning that the disk has less room than the budget; what the run has there is room, too."""
    existing = next(path for path in (run.absolute(), *run.absolute().parents) if path.exists())
    room_bytes = shutil.disk_usage(existing).free + disk_usage_bytes(run)
    if budget.disk_bytes > room_bytes:
        say(
            f"note: the budget has {format_bytes(budget.disk_bytes)} of disk, but the disk of {existing} has only "
            f"{format_bytes(room_bytes)} free; the run stops where that is used up, and can be resumed"
        )


def _compare(plan: Plan, budget: Budget) -> Mapping[str, Any]:
    """Call the plan's comparison, if it has one; to stop it does not undo the run, which is finished."""
    if "compare" not in plan.hooks:
        return {}
    say("measuring the alternative; the run itself is finished")
    try:
        found: Mapping[str, Any] = plan.hooks["compare"](budget)
    except KeyboardInterrupt:
        return {"lines": ["the comparison was interrupted"]}
    return found


def _audit(arguments: argparse.Namespace) -> int:
    plan, _ = _load(arguments.plan, arguments.settings)
    from engine.report import describe_audit

    if "audit" not in plan.hooks:
        raise UsageError(f"plan {plan.name!r} can't be audited: it registers no audit")
    report = plan.hooks["audit"](_budget(arguments, plan, Path()))
    _emit(arguments, report, lambda: describe_audit(report))
    return 0 if report["passed"] else OUT_OF_TOLERANCE


def _calibrate(arguments: argparse.Namespace) -> int:
    """Measure this machine on the shipped plan that was made for it, and write the profile."""
    check_writable(arguments.output)
    from engine.calibrate import ROUNDS, calibrate

    file = find_plan(_MEASURED_PLAN)
    found = calibrate(
        Path(arguments.output).stem,
        [partial(file.plan, settings) for settings in file.measured[: 1 if arguments.quick else None]],
        rounds=1 if arguments.quick else ROUNDS,
        tell=say,
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
    plan, _ = _load(arguments.plan, arguments.settings)
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
    attempt = last_attempt(records)
    commits = attempt.commits if attempt else ()
    finished = attempt is not None and attempt.results is not None
    data: dict[str, object] = {
        "plan": attempt.plan.plan if attempt else None,
        "choices": attempt.plan.choices if attempt else {},
        "stages_committed": len(commits),
        "finished": finished,
        "results": (attempt.results or {}) if attempt else {},
    }
    title = f"run of plan {data['plan']}: {'finished' if finished else 'not finished, engine resume goes on'}"
    _emit(arguments, data, lambda: f"{title}\n{describe_commits(commits)}".rstrip())
    return 0


def _resume(arguments: argparse.Namespace) -> int:
    """Run an unfinished run again from its beginning, in the same directory; a finished one is left alone."""
    outputs, run = _outputs(arguments), Path(arguments.run).absolute()
    outputs.check()
    directory = RunDirectory.open(run)
    Journal.check_free(directory.journal_path)
    record = unfinished(read_journal(directory.journal_path)[0], run)
    request = RunRequest.of_recipe(record.recipe)
    request = replace(request, outputs=outputs.over(request.outputs))
    with contextlib.chdir(request.cwd) if Path(request.cwd).is_dir() else contextlib.nullcontext():
        return _resume_from(arguments, request, directory, record)  # where relative paths mean what they meant


def _resume_from(
    arguments: argparse.Namespace, request: RunRequest, directory: RunDirectory, record: PlanRecord
) -> int:
    request.outputs.check(plan=request.plan, run=directory.path)
    gone = request.plan.endswith(".py") and not Path(request.plan).is_file()
    from engine.device import open_device

    device = open_device(CPU.name if request.device == CPU.name else None)
    if device.name != request.device:
        raise RunDirectoryError(
            f"the run was started on {request.device}, and here is {device.name}, where bits would differ; resume it "
            "there, or execute in a new run directory"
        )
    plan, source = _load(str(directory.plan_path) if gone else request.plan, request.settings, device.kind)
    budget, choices = merge_budget(record.budget_bytes, default_budget(directory.path)), check_same(record, plan)
    return _run_plan(arguments, request, device, plan, source, directory.path, budget, fixed=choices)


_COMMANDS = {
    "execute": _execute,
    "simulate": _simulate,
    "fit": _fit,
    "audit": _audit,
    "calibrate": _calibrate,
    "show": _show,
    "resume": _resume,
}
