"""Take the figures that the project states, and tell which are stale.

    python benchmarks/figures.py                    list: each figure, the commit it was taken at, fresh or stale
    python benchmarks/figures.py laws mutants       take these: run their commands and write docs/figures/NAME.json
    python benchmarks/figures.py --stale --minutes 60    measure those that are missing or stale, oldest first
    python benchmarks/figures.py --judge            evaluate the goals of the stored figures by the rule of measure.py

Figures without times run two at once, the others alone. `--stale` begins none that would end after the minutes, by the time
it took last; the same command continues. Exit code
after a measurement: 0 every goal holds, 1 one fails or a command failed, 3 one is undecided; 75 if figures are left.

A result file is `{"taken": {"command", "commit", "sources", "seconds", …}, "result": what the command printed}`. `sources` is
a hash of the files that the command can run, found by their imports (measured.py); a figure is stale where these files have
changed since. An issue that claims a figure closes with it fresh.
"""

from __future__ import annotations

import argparse
import dataclasses as dc
import hashlib
import json
import math
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

from measure import Row, verdict
from measured import Closure

ROOT = Path(__file__).resolve().parents[1]
FIGURES = Path("docs/figures")
LANES = 2  # figures without times that run at once
EXITS = {"fails": 1, "left": 75, "undecided": 3}  # the worst first


@dc.dataclass(frozen=True)
class Figure:
    """The command that prints it as JSON. It measures the files that this command can run (measured.py)."""

    command: str
    threads: int | None = None  # OMP_NUM_THREADS; None: as it is
    alone: bool = True  # it has times, or uses all cores: nothing runs beside it


TABLE = {
    "attend": Figure("python benchmarks/attend.py --json", 2),
    "bare": Figure("python benchmarks/bare.py --json", 2),
    "decode": Figure("python benchmarks/decode.py --json", 2),
    "generate": Figure("python benchmarks/generate.py --dtypes f32 --json", 2),
    "generate-bf16": Figure("python benchmarks/generate.py --dtypes bf16 --json", 2),
    "paged": Figure("python benchmarks/paged.py --json", 2),
    "load": Figure("python benchmarks/load.py --json", 2),
    "shard": Figure("python benchmarks/shard.py --json --threads 1", 1),
    "mixers": Figure("python benchmarks/mixers.py --json --plot docs/figures/mixers.png", 2),
    "prefer": Figure("python benchmarks/prefer.py --threads 1 --json", 1),
    "plan": Figure("python benchmarks/plan.py --json", 1),
    "lab": Figure("python benchmarks/lab.py --json --losses docs/figures/lab_pool.json", 1, alone=False),
    "verify": Figure("python benchmarks/verify.py --json", 1, alone=False),
    "blind": Figure("python benchmarks/blind.py --json --table docs/figures/blind-cases.json", 1, alone=False),
    "rollouts": Figure("python benchmarks/rollouts.py --seed 7 --json", 1, alone=False),
    "engines": Figure("python benchmarks/engines.py --json", 1, alone=False),
    "servers": Figure("python benchmarks/servers.py --json --table docs/figures/servers_outcomes.json", 1, alone=False),
    "foreign": Figure("python benchmarks/foreign.py --json --table docs/figures/foreign_outcomes.json", 1, alone=False),
    "range": Figure("python benchmarks/range.py --json --make", 1, alone=False),
    "laws": Figure("dovetail laws --load checks.oracles --record .full/laws-{sources}.jsonl --json", alone=False),
    "mutants": Figure("python -m checks.mutants --json", alone=False),
    "random": Figure("python -m checks.mutants --random 200 --seed 6113 --json", alone=False),
    "parts": Figure("dovetail parts --json", alone=False),
    "stream": Figure("python benchmarks/stream.py --json --threads 1", 1),
    "graft": Figure("python benchmarks/graft.py --json --threads 1 --train 4", 1, alone=False),
    "quant": Figure("python benchmarks/quant.py --json --threads 1", 1),
    "faults": Figure("python benchmarks/faults.py --json", 1),
    "serve_faults": Figure("python benchmarks/serve_faults.py --json", 1),
    "serve": Figure("python benchmarks/serve.py --shapes 55m --json", 2),
    "serve-1b": Figure("python benchmarks/serve.py --shapes 1b --json", 2),
    "speculate": Figure("python benchmarks/speculate.py --json", 2),
    "train": Figure("python benchmarks/train.py --json", 2),
    "dist": Figure("python benchmarks/dist.py --json", 2),
    "layouts": Figure("python benchmarks/layouts.py --json", 1, alone=False),
    "corpus": Figure("python benchmarks/corpus.py --json", 2),
    "tune": Figure("python benchmarks/tune.py --json", 2),
    "muon": Figure("python benchmarks/muon.py --only muon --json", 2),
    "mup": Figure("python benchmarks/muon.py --only mup --threads 1 --json", 1, alone=False),
    "front": Figure("python benchmarks/front.py --threads 1 --json", 1, alone=False),
    "hostile": Figure("python benchmarks/hostile.py --json", 1),
    "unrun": Figure("python benchmarks/unrun.py --json --table docs/figures/unrun_commands.json", 1),
    "look": Figure("python benchmarks/look.py --json", 2),
    "recipes": Figure("python recipes/run.py --json --pictures docs/_static/recipes", 1, alone=False),
    "startup": Figure("python benchmarks/startup.py --json", 1),
    "look_traits": Figure("python benchmarks/look_traits.py --json --threads 1", 1, alone=False),
    "tiny": Figure("python benchmarks/tiny.py --json --workers 2", 1),
}


def sources(command: str, root: Path = ROOT, closure: Closure | None = None) -> str:
    """Return a hash of the names and contents of the files that the command can run."""
    digest = hashlib.sha256()
    for path in (closure or Closure(root)).of(command):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def take(name: str, root: Path = ROOT) -> dict[str, Any]:
    """Run the command of a figure and write its result."""
    figure = TABLE[name]
    env = dict(os.environ)
    if figure.threads is not None:
        env["OMP_NUM_THREADS"] = str(figure.threads)
    before, begin = sources(figure.command, root), time.monotonic()
    (root / ".full").mkdir(exist_ok=True)  # records by which a command continues
    command = shlex.split(figure.command.replace("{sources}", before))
    done = subprocess.run(command, cwd=root, env=env, stdout=subprocess.PIPE, text=True, check=False)
    seconds = time.monotonic() - begin
    if sources(figure.command, root) != before:
        raise SystemExit(f"{name}: the sources changed while it was measured; nothing was written")
    try:
        result = json.loads(done.stdout)
    except ValueError:
        raise SystemExit(f"{name}: {figure.command} exited with {done.returncode} and printed no JSON") from None
    taken = {"command": figure.command, "commit": commit(root), "sources": before, "exit": done.returncode}
    data = {"taken": {**taken, "seconds": round(seconds), "cores": os.cpu_count()}, "result": result}
    file = root / FIGURES / f"{name}.json"
    _write(file, data)
    return data


def commit(root: Path = ROOT) -> str:
    """Return the commit of the checkout, with a + where files other than figures differ from it."""

    def git(*args: str) -> str:
        return subprocess.run(["git", *args], cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":!{FIGURES}")
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")


@dc.dataclass(frozen=True)
class Standing:
    """Whether a figure is there and fresh."""

    name: str
    state: str  # fresh, stale, or not taken
    commit: str
    seconds: int | None
    result: Any


def standings(root: Path = ROOT) -> list[Standing]:
    """Return the state of every figure of the table."""
    found, closure = list[Standing](), Closure(root)
    for name, figure in TABLE.items():
        file = root / FIGURES / f"{name}.json"
        data = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
        taken = data.get("taken") if isinstance(data, dict) else None
        if data is None or taken is None:
            found.append(Standing(name, "not taken" if data is None else "stale", "", None, data))
            continue
        state = "fresh" if taken["sources"] == sources(figure.command, root, closure) else "stale"
        found.append(Standing(name, state, taken["commit"], taken["seconds"], data["result"]))
    return found


def left(root: Path = ROOT) -> list[Standing]:
    """The figures that are missing or stale, the one whose measurement is oldest first."""

    def age(standing: Standing) -> float:
        file = FIGURES / f"{standing.name}.json"
        command = ["git", "log", "-1", "--format=%ct", "--", str(file)]
        return float(subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout or 0)

    return sorted((one for one in standings(root) if one.state != "fresh"), key=age)


def outcome(data: Any) -> str:
    """The verdict on a measured figure: fails, undecided or holds."""
    verdicts = {verdict(row) for row in stored_rows(data)} - {"yes", "no goal"}
    if "NO" in verdicts or (data["taken"]["exit"] != 0 and not verdicts):
        return "fails"
    return "undecided" if verdicts else "holds"


def judge(root: Path = ROOT) -> list[str]:
    """Evaluate the goals of all stored rows with a spread again, by the rule of measure.py, and write what has changed. Returns
    a line per changed row. Rows without a spread stay: their verdict is on the value before it was rounded."""
    changed: list[str] = []
    for file in sorted((root / FIGURES).glob("*.json")):
        data, before = json.loads(file.read_text(encoding="utf-8")), len(changed)
        for row in stored_rows(data):
            if row.get("spread") is not None and row["holds"] is not (holds := Row.read(row).holds):
                changed.append(f"{file.name}: {row['name']}: holds {row['holds']} -> {holds}")
                row["holds"] = holds
        if len(changed) > before:
            _write(file, data)
    return changed


def stored_rows(data: Any) -> list[dict[str, Any]]:
    """The rows with a verdict in a result file."""
    result = data.get("result") if isinstance(data, dict) else None
    rows = result.get("rows") if isinstance(result, dict) else None
    return [row for row in rows or [] if isinstance(row, dict) and {"name", "value", "goal", "holds"} <= set(row)]


def _write(file: Path, data: Any) -> None:
    fresh = file.with_suffix(".json.tmp")
    fresh.write_text(json.dumps(data, ensure_ascii=False, indent=1) + "\n", encoding="utf-8")
    os.replace(fresh, file)


def main() -> int:
    """List the figures, or take some."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"figures to take: {', '.join(TABLE)}")
    parser.add_argument("--judge", action="store_true", help="evaluate the goals of the stored figures again")
    parser.add_argument("--stale", action="store_true", help="measure the figures that are missing or stale, oldest first")
    parser.add_argument("--minutes", type=float, default=60.0, help="with --stale, begin none that would end later")
    flags = parser.parse_args()
    names = flags.names
    if flags.judge:
        print(*judge(), sep="\n")
        return 0
    if unknown := [name for name in names if name not in TABLE]:
        parser.error(f"no figure is called {unknown[0]!r}; figures: {', '.join(TABLE)}")
    if flags.stale:
        waiting = left()
        outcomes = measure([one.name for one in waiting], {one.name: one.seconds or 0 for one in waiting}, flags.minutes)
    elif names:
        outcomes = measure(names)
    else:
        found = standings()
        for one in found:
            print(f"{one.name:14} {one.state:10} {one.commit:10} {'' if one.seconds is None else f'{one.seconds:6} s'}")
        fresh, timed = sum(one.state == "fresh" for one in found), [one for one in found if one.seconds is not None]
        seconds = sum((one.seconds or 0) / (1 if TABLE[one.name].alone else LANES) for one in timed)
        print(f"{fresh} of {len(found)} fresh; {len(timed)} take {seconds / 3600:.1f} h, by their last measurement")
        return 0
    return next((code for state, code in EXITS.items() if state in outcomes), 0)


def measure(names: Sequence[str], seconds: Mapping[str, int] = MappingProxyType({}), minutes: float = math.inf) -> list[str]:
    """Measure figures; the verdict on each, or `left` for those that would end after the minutes, by the seconds they took."""
    begin = time.monotonic()

    def one(name: str) -> str:
        needed = seconds.get(name, 0)
        if time.monotonic() - begin + needed > 60 * minutes:
            print(f"{name}: left; it took {needed} s the last time", file=sys.stderr)
            return "left"
        try:
            data = take(name)
        except SystemExit as error:
            print(error, file=sys.stderr)
            return "fails"
        found = outcome(data)
        print(f"{name}: {found}, {data['taken']['seconds']} s at {data['taken']['commit']}", file=sys.stderr)
        return found

    with ThreadPoolExecutor(LANES) as lanes:
        beside = list(lanes.map(one, [name for name in names if not TABLE[name].alone]))
    return beside + [one(name) for name in names if TABLE[name].alone]


if __name__ == "__main__":
    sys.exit(main())
