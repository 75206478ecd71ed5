"""Faults of training and of its data, each with a pass criterion: kills, damaged files, full disks, stopped ranks.

    python benchmarks/faults.py [--json] [--quick] [--only C1 C7]

Processes and signals are real; ranks talk by gloo on 127.0.0.1. The model has 4 layers of width 64 and a vocabulary of 512, in
float32. C rows: checkpoints, runs and ranks (faults_checkpoints.py, faults_runs.py, faults_ranks.py); resume: kill -9 at random
moments and the same command again; D rows: data (faults_data.py). The seconds of each row are among the figures.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import faults_data
import torch
from faults_checkpoints import c1, c3, c4, c5, c6, c11
from faults_ranks import PRODUCT, TWO, Layout, c7, c8, c12, c13, c14, c15
from faults_runs import c2, c9, c10, kills
from measure import Goal, Row, Work, arguments, report, run_row

TRAINING: dict[str, tuple[Work, dict[str, Any]]] = {  # the sizes of --quick
    "C1": (c1, {"points": 2}),
    "C2": (c2, {"steps": 6, "stops": (2, 4), "ranks": (1,)}),
    "C3": (c3, {"flips": 12}),
    "C4": (c4, {}),
    "C5": (c5, {}),
    "C6": (c6, {"ranks": 2, "others": (1,)}),
    "C7": (c7, {"steps": 8, "killed": (3,), "layouts": (TWO,)}),
    "C8": (c8, {"timeout": 5, "within": 30, "layouts": (PRODUCT,)}),
    "C9": (c9, {"ranks": (1,)}),
    "C10": (c10, {}),
    "C11": (c11, {"saves": 5}),
    "C12": (c12, {"steps": 8, "at": 4, "timeout": 6, "layouts": (TWO,)}),
    "C13": (c13, {"steps": 25, "layouts": (TWO,)}),
    "C14": (c14, {"layouts": (Layout(1), TWO)}),
    "C15": (c15, {"steps": 24, "killed": 4}),
    "resume": (kills, {"steps": 30, "count": 2}),
}


def data_row(name: str) -> Work:
    """A row of faults_data.py: its verdict, and what it counted."""
    work = faults_data.ROWS[name]

    def run(place: Path, **sizes: Any) -> list[Row]:
        found = work(place, **sizes)
        about = (work.__doc__ or "").split("\n")[0].rstrip(".")
        numbers = {key: value for key, value in found.items() if key not in ("row", "passed")}
        facts = [Row(f"{name} {key}", float(value)) for key, value in numbers.items()]
        return [Row(f"{name} {about}", float(found["passed"]), Goal(low=1)), *facts]

    return run


ROWS = {**TRAINING, **{name: (data_row(name), faults_data.QUICK[name]) for name in faults_data.ROWS}}


def main() -> int:
    """Run the rows; exit with 1 unless all hold."""
    parser = arguments(__doc__ or "")
    parser.add_argument(
        "--only", nargs="+", choices=list(ROWS), default=list(ROWS), metavar="ROW", help="C1 … C15, resume, D1 … D7"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)  # forked ranks share the cores
    rows = [row for name in args.only for row in run_row(name, *ROWS[name], quick=args.quick)]
    report(rows, args.json)
    return 0 if all(row.holds is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
