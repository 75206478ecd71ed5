"""Faults of a server, each with a pass criterion: clients that vanish or flood, a killed engine, hostile inputs.

    python benchmarks/serve_faults.py [--json] [--quick] [--only S1 S5]

The server is `dovetail serve` in its own process, with the native engine in another; sockets, signals and OpenAI's client are
real. S rows: clients (faults_clients.py) and the engine; P rows: inputs that cost too much or forge turns (faults_hostile.py);
N rows: equal answers (faults_engine.py). The model has 2 layers of width 32, and has learned a text with emoji. A soak (S10)
runs on demand, `--only S10`, for ten minutes.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from faults_clients import s1, s2, s6, s7, s8, s9, s10
from faults_engine import n3, n7, p5, p6, p7, s3, s4, s5, s11, s12
from faults_hostile import p8, p9, s13
from measure import Work, arguments, report, run_row

ROWS: dict[str, tuple[Work, dict[str, Any]]] = {  # the sizes of --quick
    "S1": (s1, {"each": 6, "bystanders": 3}),
    "S2": (s2, {"count": 60, "queued": 8}),
    "S3": (s3, {"count": 24, "least": 5}),
    "S4": (s4, {"flights": 3}),
    "S5": (s5, {"clients": 3}),
    "S6": (s6, {"bad": 40, "good": 8}),
    "S7": (s7, {"slow": 8, "asked": 8}),
    "S8": (s8, {"prompts": 8}),
    "S9": (s9, {"rounds": 1}),
    "S10": (s10, {"minutes": 0.2}),
    "S11": (s11, {"loads": 8}),
    "S12": (s12, {"prompts": 6}),
    "S13": (s13, {"count": 100}),
    "P5": (p5, {}),
    "P6": (p6, {}),
    "P7": (p7, {}),
    "P8": (p8, {"attacks": 8, "asked": 3}),
    "P9": (p9, {}),
    "N3": (n3, {}),
    "N7": (n7, {"trials": 4}),
}
ON_DEMAND = ("S10",)


def main() -> int:
    """Run the rows; exit with 1 unless all hold."""
    parser = arguments(__doc__ or "")
    chosen = [name for name in ROWS if name not in ON_DEMAND]
    parser.add_argument(
        "--only", nargs="+", choices=list(ROWS), default=chosen, metavar="ROW", help="S1 … S13, P5 … P9, N3, N7"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)  # servers and clients share the cores
    rows = [row for name in args.only for row in run_row(name, *ROWS[name], quick=args.quick)]
    report(rows, args.json)
    return 0 if all(row.holds is not False for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
