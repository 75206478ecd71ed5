"""Every recipe over three seeds and once with each of its faults: do all goals hold, and in how many minutes?

    python recipes/run.py [--json] [--quick] [--only vae,gan] [--seeds 3] [--pictures docs/_static/recipes]

A figure is the value of the worst seed, and holds if every seed does. A fault has to move its figure past the goal by at least
twice the range over the seeds. What is finished is kept in .full/recipes/, by the sources that a recipe can run: a run that was
cut off goes on where it was.
"""

from __future__ import annotations

import importlib
import json
import math
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "benchmarks")]

from figures import sources  # noqa: E402
from measure import Goal, Row, arguments, report  # noqa: E402

Value = tuple[float, float | None, float | None]  # as in figures.json of a recipe: value, lowest and highest that hold
WIDE, LARGEST = 1480, 60_000  # pixels and bytes of a picture for the page
MEDIAN, LONGEST, MOVED = 4.0, 12.0, 2.0  # minutes per seed, of all recipes and of any; of the range over seeds


def names() -> list[str]:
    """The recipes."""
    return sorted(path.stem for path in (ROOT / "recipes").glob("*.py") if path.stem != "run")


def ran(name: str, flags: list[str], place: Path) -> dict[str, dict]:
    """The figures by seed, from the folder of a finished run or a new one."""
    kept = place / name / "figures.json"
    if not kept.is_file():
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir(parents=True)
        print(f"{name} {' '.join(flags)}", file=sys.stderr, flush=True)
        command = [sys.executable, str(ROOT / "recipes" / f"{name}.py"), *flags]
        done = subprocess.run(command, cwd=place, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode not in (0, 1) or not kept.is_file():
            raise SystemExit(f"{name}: exited with {done.returncode}: {done.stdout[-500:]}")
    return json.loads(kept.read_text(encoding="utf-8"))


def margin(value: Value) -> float:
    """How far a value is within its goal; negative outside, and for a value that is not finite."""
    x, low, high = value
    if not math.isfinite(x):
        return -math.inf
    return min(x - low if low is not None else float("inf"), high - x if high is not None else float("inf"))


def write_small(picture: Path, to: Path) -> None:
    """Write a picture for the page: as wide as its column on a screen of two pixels per point, below LARGEST bytes."""
    from PIL import Image  # matplotlib needs it as well

    to.parent.mkdir(parents=True, exist_ok=True)
    with Image.open(picture) as image:
        for width, colors in ((min(image.width, WIDE), 96), (WIDE * 2 // 3, 32), (WIDE // 2, 12)):
            small = image.convert("RGB").resize((width, round(image.height * width / image.width)), Image.Resampling.LANCZOS)
            small.quantize(colors, kmeans=2, dither=Image.Dither.NONE).save(to, optimize=True)
            if to.stat().st_size < LARGEST:
                return


def rows(name: str, seeds: int, quick: bool, pictures: Path | None) -> tuple[list[Row], float]:
    """The rows of a recipe, and its minutes per seed."""
    place = ROOT / ".full" / "recipes" / f"{name}-{sources(f'python recipes/{name}.py')}{'-quick' if quick else ''}"
    sizes = ["--quick"] if quick else []
    by_seed = ran(name, [*sizes, "--seeds", str(seeds)], place / f"seeds-{seeds}")
    if pictures is not None:
        write_small(place / f"seeds-{seeds}" / name / f"{name}.png", pictures / f"{name}.png")
    figures: dict[str, list[Value]] = {}
    for one in by_seed.values():
        for figure, value in one["figures"].items():
            figures.setdefault(figure, []).append(tuple(value))
    found = list[Row]()
    for figure, values in figures.items():
        worst = min(values, key=margin)
        goal = None if worst[1:] == (None, None) else Goal(*worst[1:])
        found.append(Row(f"{name}: {figure}", worst[0], goal))
    for fault, figure in importlib.import_module(f"recipes.{name}").RECIPE.faults.items():
        (broken,) = ran(name, [*sizes, "--fault", fault], place / fault).values()
        spread = max(value[0] for value in figures[figure]) - min(value[0] for value in figures[figure])
        past = -margin(tuple(broken["figures"][figure]))
        moved = max(min(past / max(spread, 1e-9), 1000.0), -1000.0)
        found.append(Row(f"{name}: fault {fault}: {figure} past the goal, ÷ range over seeds", moved, Goal(low=MOVED)))
    minutes = statistics.mean(one["seconds"] for one in by_seed.values()) / 60
    found.append(Row(f"{name}: minutes per seed", minutes, Goal(high=LONGEST)))
    return found, minutes


def main() -> int:
    """Run those that are asked for, and print the rows."""
    parser = arguments(__doc__)
    parser.add_argument("--only", default="", metavar="NAME,…", help="these recipes")
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="how many seeds (default: 3)")
    parser.add_argument("--pictures", type=Path, metavar="DIR", help="copy the pictures there")
    given = parser.parse_args()
    chosen = given.only.split(",") if given.only else names()
    if unknown := sorted({*chosen} - {*names()}):
        raise SystemExit(f"--only: no recipe is called {unknown[0]}; recipes: {', '.join(names())}")
    table, minutes = list[Row](), list[float]()
    for name in chosen:
        more, took = rows(name, given.seeds, given.quick, given.pictures)
        table += more
        minutes.append(took)
    table.append(Row("median of the minutes per seed", statistics.median(minutes), Goal(high=MEDIAN)))
    report(table, given.json)
    return 1 if any(row.holds is False for row in table) else 0


if __name__ == "__main__":
    sys.exit(main())
