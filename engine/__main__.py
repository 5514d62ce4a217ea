"""The command ``engine``: thin, so that ``engine --help`` and mistakes of usage answer at once.

Standard output carries results (with ``--json`` one JSON object and nothing else), standard error carries progress
and errors. Exit codes are those of `engine.errors`, and 128 + N for an interruption by signal N.
"""

from __future__ import annotations

import contextlib
import os
import sys

if __name__ == "__main__" and sys.path:
    with contextlib.suppress(FileNotFoundError):  # the current folder was removed
        if sys.path[0] in ("", os.getcwd()):
            del sys.path[0]  # python -m puts the current folder first, where a folder named models/ would shadow ours

import argparse
from collections.abc import Sequence

from engine.output import forgive_streams, say, told
from engine.signals import interruptible, interruption

_PLANS = "quickstart, from_rollouts, tiny_dense, tiny_hybrid, qwen3_6_27b, custom_stage, learn_tiny"
_PLAN_HELP = f"a plan file, or the name of a shipped plan ({_PLANS})"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="engine",
        description="Plan, simulate and execute post-training steps at million-token context under a memory budget.",
        epilog="exit codes: 0 done, 1 audit out of tolerance, 2 wrong usage, bad input or a result that can't be "
        "written, 3 does not fit the budget, 4 run directory damaged, gone or of another plan, 5 a stage failed or "
        "passed its planned bytes, 129, 130 and 143 interrupted by SIGHUP, SIGINT and SIGTERM, 141 whoever read the "
        "output went away",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, help: str, *, plan: bool = True) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=help, description=help, allow_abbrev=False)
        if plan:
            command.add_argument("plan", metavar="PLAN", help=_PLAN_HELP)
            command.add_argument(
                "--set", metavar="NAME=VALUE", action="append", default=[], dest="settings",
                help="override a keyword argument of the plan function; repeatable",
            )  # fmt: skip
        command.add_argument("--json", action="store_true", help="print one JSON object on standard output")
        return command

    def add_budget(command: argparse.ArgumentParser, *, times: bool = True) -> None:
        command.add_argument(
            "--budget", metavar="device=8GiB,host=32GiB,disk=200GiB",
            help="bytes per tier; a tier that is not named keeps its default",
        )  # fmt: skip
        if times:
            command.add_argument(
                "--hardware", metavar="NAME|FILE",
                help="hardware profile for times, and for what allocations take (default: cpu; of execute, that of the "
                "device)",
            )  # fmt: skip

    def add_device(command: argparse.ArgumentParser) -> None:
        command.add_argument(
            "--device", choices=("cpu", "cuda"), help="where stages run (default: a CUDA device if there is one)"
        )

    def add_pictures(command: argparse.ArgumentParser) -> None:
        command.add_argument("--trace", metavar="FILE.json", help="also write what happens when, for Perfetto")
        command.add_argument("--report", metavar="FILE.html", help="also write a report to look at in a browser")

    execute = add("execute", "run a plan in a new run directory")
    add_budget(execute)
    add_device(execute)
    execute.add_argument("--run", metavar="DIR", help="the run directory (default: runs/PLAN-TIME)")
    execute.add_argument("--save-gradients", metavar="FILE.safetensors", help="also write the merged gradients")
    add_pictures(execute)
    simulate = add("simulate", "say what a plan would need and take, without running it")
    add_budget(simulate)
    add_pictures(simulate)
    fit = add("fit", "find the largest parameter of a plan that fits, and the smallest budget that works")
    fit.add_argument(
        "--vary", metavar="NAME", action="append", default=[],
        help="a parameter of the plan function that is a whole number, or device, host or disk; repeatable "
        "(default: prompt_tokens and group_size where the plan has them, and all three tiers)",
    )  # fmt: skip
    add_budget(fit)
    audit = add("audit", "compare the planned gradient with dense autograd")
    add_budget(audit, times=False)
    show = add("show", "draw a plan's graph and list its stages, or say what a run directory holds")
    show.add_argument("--image", metavar="FILE.png|.svg|.pdf", help="also draw the graph of a plan into a file")
    show.add_argument("--all", action="store_true", dest="every", help="list every stage of a large plan")
    calibrate = add("calibrate", "measure this machine and write its hardware profile", plan=False)
    calibrate.add_argument(
        "--output", metavar="FILE.json", default="hardware.json", help="where the profile goes (default: hardware.json)"
    )
    calibrate.add_argument("--quick", action="store_true", help="measure once and little: seconds, and rough figures")
    resume = add("resume", "finish an interrupted run", plan=False)
    resume.add_argument("run", metavar="DIR", help="the run directory")
    add_pictures(resume)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    forgive_streams()
    try:
        with interruptible():
            arguments = _parse(argv)
            from engine.commands import run_command

            return run_command(arguments)
    except KeyboardInterrupt as error:  # while still being loaded; commands have their own words for it
        code, line = interruption(error)
        say(line)
        return code


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    try:
        return _parser().parse_args(argv)
    except SystemExit as ended:  # help was printed, or what is wrong
        sys.exit(told(sys.stdout, int(ended.code or 0)))


if __name__ == "__main__":
    sys.exit(main())
