"""The command: `python -m checks.mutants`; see the package.

Nothing of Dovetail is imported before `main`: a process that judges a mutation imports this file, and must then still be able
to import the mutated source.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from checks.mutants import __doc__ as about

WORKERS = 2


def main(given: Sequence[str] | None = None) -> int:
    """Seed the bugs, print each result when it is known, and return the exit code."""
    parser = argparse.ArgumentParser("checks.mutants", description=(about or "").split("\n\n")[0])
    parser.add_argument("--quick", action="store_true", help="only bugs whose law needs no second process and no compiler")
    parser.add_argument("--only", nargs="+", default=[], metavar="LAW", help="only the bugs that these laws catch")
    parser.add_argument("--random", type=int, metavar="N", help="this many random mutations of the sources instead")
    parser.add_argument("--seed", type=int, help="with --random, which mutations and sampled specs; 0 by default")
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout, and the results on stderr")
    flags = parser.parse_args(given)
    if flags.random is not None and (flags.quick or flags.only):
        parser.error("--random: takes neither --quick nor --only; leave them out")
    if flags.random is None and flags.seed is not None:
        parser.error("--seed: chooses random mutations; add --random N")
    if flags.random is not None and flags.random < 1:
        parser.error(f"--random: is {flags.random}; the least is 1")
    out = sys.stderr if flags.json else sys.stdout

    begin = time.monotonic()

    def show(row: Mapping[str, Any], done: int, total: int) -> None:
        left = (time.monotonic() - begin) / done * (total - done)
        mark = "caught" if row["caught"] else "NOT CAUGHT"
        print(f"{done:4}/{total}, {left:5.0f} s left  {mark:10}  {row['name']}  [{row['by']}]", file=out, flush=True)

    if flags.random is not None:
        from checks.mutants.mechanical import run_random

        data = run_random(flags.random, flags.seed or 0, tested=show)
    else:
        from checks.mutants.run import run_seeded

        data = run_seeded(quick=flags.quick, only=flags.only, tested=show, workers=WORKERS)
    if flags.json:
        print(json.dumps(data, ensure_ascii=False, indent=1))
    else:
        print(f"{data['caught']} of {data['mutants']} caught")
        for row in data["rows"]:  # once more: it would be one line among hundreds
            if not row["caught"]:
                print(f"  NOT CAUGHT  {row['name']}  [{row['by']}]")
    return int(flags.random is None and data["caught"] != data["mutants"])


if __name__ == "__main__":
    sys.exit(main())
