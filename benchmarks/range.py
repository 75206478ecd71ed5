"""On which versions of transformers (and torch) do foreign laws and verify pass?

    python benchmarks/range.py [--json] [--make] [--only 5.22.2 5.0.0 …]

One environment per version, `.peers/range-VERSION`, made by `benchmarks/peers/make range VERSION` (`--make` does so where it is
missing): that transformers with the tokenizers and hub client it asks for, and behind it the packages of the environment that
this is called in. A version of torch is tested by calling this in an environment that has it. A version without an environment
is counted as not tested.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from measure import Row, arguments, progress, report

ROOT = Path(__file__).parent.parent
VERSIONS = ("5.22.2", "5.15.1", "5.10.4", "5.5.4", "5.0.0", "4.57.6", "4.51.3")
SECONDS = 1800  # of one version, at most


def tested(version: str, make: bool) -> dict[str, Any] | None:
    """The results of one version; None where there is no environment."""
    place = ROOT / ".peers" / f"range-{version}"
    if make and not (place / "ready").exists():
        subprocess.run(["bash", str(ROOT / "benchmarks/peers/make"), "range", version], check=False, stdout=sys.stderr)
    if not (place / "ready").exists():
        return None
    command = [str(place / "bin/python"), str(ROOT / "benchmarks/range_check.py")]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=env, check=False)
    except subprocess.TimeoutExpired:
        return {"transformers": version, "results": {"all": f"took more than {SECONDS} s"}}
    if done.returncode:
        return {"transformers": version, "results": {"all": (done.stderr.strip().splitlines() or [""])[-1][:200]}}
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--make", action="store_true", help="make the environments that are missing")
    parser.add_argument("--only", nargs="*", default=[], help="versions of transformers")
    asked = parser.parse_args()
    rows, versions = [], asked.only or VERSIONS[: 1 if asked.quick else None]
    with progress("versions", len(versions)) as tick:
        for version in versions:
            found = tested(version, asked.make)
            failures = {} if found is None else {name: text for name, text in found["results"].items() if text}
            for name, text in failures.items():
                print(f"transformers {version}: {name}: {text}", file=sys.stderr)
            count = 0 if found is None else len(found["results"]) - len(failures)
            rows.append(Row(f"transformers {version}: checks that pass", count))
            rows.append(Row(f"transformers {version}: checks", 0 if found is None else len(found["results"])))
            tick()
    report(rows, asked.json)


if __name__ == "__main__":
    main()
