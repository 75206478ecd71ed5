"""CPU time from the command line to the answer: against `python -c "import torch"`, and against an earlier revision.

    python benchmarks/startup.py [--json] [--rounds N] [--against REVISION]

CPU time of the child, user and system, so that other work on the machine counts little. Three answers that need no torch (help,
a mistyped flag, a mistyped preset) are measured against the same base. The sides take turns. The revision is that in
which flags began to follow from signatures (one declaration per verb): the start must not become slower by it.
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from measure import Goal, Row, arguments, middle, progress, report

ROOT = Path(__file__).resolve().parents[1]
REVISION = "ffa81e77"
COMMANDS = {
    "dovetail show llama-tiny": ("-m", "dovetail", "show", "llama-tiny"),
    "dovetail show --help": ("-m", "dovetail", "show", "--help"),
    "dovetail show lama-tiny": ("-m", "dovetail", "show", "lama-tiny"),
    "dovetail show --lenght 3": ("-m", "dovetail", "show", "llama-tiny", "--lenght", "3"),
    "import dovetail": ("-c", "import dovetail"),
}
GOALS = dict.fromkeys(COMMANDS, 0.5) | {"dovetail show llama-tiny": 1.5}
REPEATS = 4  # of a command without torch, per round
SLOWER = 1.03  # at most, than the revision


def cpu_seconds(args: tuple[str, ...], root: Path) -> float:
    """Run Python with these arguments on the sources of a tree; return the CPU time it took."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONPATH": str(root / "src")}
    subprocess.run([sys.executable, *args], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=False)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def check_out(revision: str, place: str) -> Path:
    """Write the sources of a revision into a directory."""
    archive = subprocess.run(["git", "archive", revision, "src"], cwd=ROOT, capture_output=True, check=True)
    subprocess.run(["tar", "-x", "-C", place], input=archive.stdout, check=True)
    return Path(place)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--against", default=REVISION, help="the earlier revision")
    asked = parser.parse_args()
    rounds = 1 if asked.quick else asked.rounds
    ratios: dict[str, list[tuple[float, float]]] = {name: [] for name in COMMANDS}
    with tempfile.TemporaryDirectory() as place, progress("rounds", rounds + 1) as tick:
        earlier = check_out(asked.against, place)
        for i in range(rounds + 1):  # the first round fills the caches of the disk
            torch = cpu_seconds(("-c", "import torch"), ROOT)
            for name, command in COMMANDS.items():
                ours = before = 0.0
                repeats = 1 if asked.quick or GOALS[name] > 1 else REPEATS
                for k in range(repeats):
                    first = cpu_seconds(command, (ROOT, earlier)[(i + k) % 2])
                    second = cpu_seconds(command, (earlier, ROOT)[(i + k) % 2])
                    ours, before = (ours + second, before + first) if (i + k) % 2 else (ours + first, before + second)
                if i:
                    ratios[name].append((ours / repeats / torch, ours / before))
            tick()
    rows = []
    for k, (base, goals) in enumerate([("import torch", GOALS), (f"at {asked.against}", dict.fromkeys(COMMANDS, SLOWER))]):
        for name, values in ratios.items():
            ratio, spread = middle([pair[k] for pair in values])
            rows.append(Row(f"CPU time of {name} ÷ {base}", ratio, Goal(high=goals[name]), spread))
    report(rows, asked.json)


if __name__ == "__main__":
    main()
