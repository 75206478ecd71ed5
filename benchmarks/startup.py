"""CPU time from the command line to the answer: `dovetail show llama-tiny` against `python -c "import torch"`, taking turns.

    python benchmarks/startup.py [--json] [--rounds N]

CPU time of the child, user and system, so that other work on the machine counts little. Three answers that need no torch (help,
a mistyped flag, a mistyped preset) are measured against the same base.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys

from measure import Goal, Row, arguments, middle, progress, report

COMMANDS = {
    "dovetail show llama-tiny": ("-m", "dovetail", "show", "llama-tiny"),
    "dovetail show --help": ("-m", "dovetail", "show", "--help"),
    "dovetail show lama-tiny": ("-m", "dovetail", "show", "lama-tiny"),
    "dovetail show --lenght 3": ("-m", "dovetail", "show", "llama-tiny", "--lenght", "3"),
}
GOALS = dict.fromkeys(COMMANDS, 0.5) | {"dovetail show llama-tiny": 1.5}


def cpu_seconds(args: tuple[str, ...]) -> float:
    """Run Python with these arguments; return the CPU time it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    subprocess.run([sys.executable, *args], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=9)
    asked = parser.parse_args()
    rounds = 1 if asked.quick else asked.rounds
    ratios: dict[str, list[float]] = {name: [] for name in COMMANDS}
    with progress("rounds", rounds + 1) as tick:
        for i in range(rounds + 1):  # the first round fills the caches of the disk
            for name, command in COMMANDS.items():
                sides = [("-c", "import torch"), command]
                times = [cpu_seconds(side) for side in (sides if i % 2 else sides[::-1])]
                base, ours = times if i % 2 else times[::-1]
                if i:
                    ratios[name].append(ours / base)
            tick()
    rows = []
    for name, values in ratios.items():
        ratio, spread = middle(values)
        rows.append(Row(f"CPU time of {name} ÷ import torch", ratio, Goal(high=GOALS[name]), spread))
    report(rows, asked.json)


if __name__ == "__main__":
    main()
