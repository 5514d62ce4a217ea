"""Where the time of the step goes that `tests.benchmarks.step_against_alternatives` measures, as a table.

    python -m tests.benchmarks.time_spent
    python -m tests.benchmarks.time_spent --prompt-tokens 256 --group-size 2 --set chunk_tokens=128

The step runs once within the machine's default budget, or within ``--device-bytes``. What the rows mean is said in
`tests.benchmarks.profiled`. Run it on an idle machine: what has to wait for a core takes as much longer.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence

from engine.units import parse_bytes
from tests.benchmarks.machine import heading, markdown
from tests.benchmarks.step_against_alternatives import RESPONSE_TOKENS, choice, engine_time_spent


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="Where the time of one exact GRPO step goes.")
    parser.add_argument("--prompt-tokens", type=int, default=2048, metavar="N")
    parser.add_argument("--group-size", type=int, default=8, metavar="G")
    parser.add_argument("--device-bytes", type=parse_bytes, metavar="SIZE", help="a device budget, as 2GiB")
    parser.add_argument("--set", type=choice, action="append", default=[], metavar="NAME=N", help="fix a choice")
    options = parser.parse_args(arguments)
    spent = engine_time_spent(options.prompt_tokens, options.group_size, dict(options.set), options.device_bytes)
    work = f"SmolLM2-135M, float32: {options.prompt_tokens} prompt tokens, {options.group_size} x {RESPONSE_TOKENS}"
    print(heading(work), shares(spent), sep="\n\n")


def shares(spent: Mapping[str, float]) -> str:
    """Return a table of seconds and shares."""
    total_s = sum(spent.values())
    rows = [[kind, f"{seconds:.2f}", f"{seconds / total_s:.1%}"] for kind, seconds in spent.items()]
    return markdown(["where the time goes, profiled", "s", "share"], [*rows, ["all", f"{total_s:.2f}", "100 %"]])


if __name__ == "__main__":
    main()
