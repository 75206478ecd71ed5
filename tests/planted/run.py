"""Plant bugs one at a time in a copy of the sources, and report which check sees each: the tests of its room, or the laws.

    python tests/planted/run.py [--set fresh_two] [--only N …] [--checks tests] [--seconds 300] [--json] [--out FILE]

For each bug, first (by default) the laws and random programs of calls, where they reach its room (`law_commands`); then the
quick tests of its room, those that name the changed file first. A test that fails without the bug, too, has not seen it.
Results are written after every bug, so that a run can be ended early.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import contextlib
import dataclasses as dc
import functools
import json
import os
import py_compile
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
from bugs import BUGS, Bug
from fresh import FRESH
from fresh_two import FRESH_TWO

from dovetail.files.spec import load_spec, to_yaml, zoo
from dovetail.proof.laws import suite  # registers the laws, too
from dovetail.proof.laws.case import LAWS as ALL_LAWS
from dovetail.spec.part import walk_spec

ROOT = Path(__file__).resolve().parents[2]
SETS = {"bugs": BUGS, "fresh": FRESH, "fresh_two": FRESH_TWO}
SPECS = sorted(Path(__file__).parent.glob("*.yaml"))
FAST = [law.name for law in ALL_LAWS.values() if not law.slow]
PROGRAMS = ("-m", "checks.programs", "--programs", "200")
NUMBERS = (
    "import sys, checks.oracles; from dovetail.proof.laws.oracle import ORACLES, check_oracles; "
    "failed = check_oracles(set(sys.argv[1:]) & ORACLES.keys()); print('own_number fails:', *failed); sys.exit(bool(failed))"
)
# rooms whose code the laws and the random programs run; the others have only tests
LAWS = ("spec", "nn", "model", "ops", "parts", "weights", "training", "hf", "state", "parallel", "look")
PROGRAMMED = ("serving", "text", "data", "decoding", "state")
RANKED = re.compile(r"\bctx\.(all_reduce|enter|leave|join|max|first|batch_\w+)\(")  # where ranks share the work of a part
NEAR = 3  # files of parts that import a module, at most, for their kinds to be tested by themselves
MOVED = {"serving": "serve", "disk": "files"}  # rooms whose tests have another name
WALL = 20  # seconds of waiting per CPU second of the limit
CHECKS = ("laws", "tests")
MISTAKEN = 3  # tests that may fail without the bug before the run is believed
OPTIONS = ("-q", "-x", "-m", "not slow", "-p", "no:cacheprovider", "--no-header", "--tb=line")


@dc.dataclass
class Outcome:
    """What saw a bug: `laws`, `tests` or nothing; `check` names the law or the test."""

    number: int
    room: str
    function: str
    breaks: str
    seen_by: str | None
    check: str
    seconds: float


def place(bug: Bug, root: Path = ROOT) -> tuple[Path, str]:
    """The file of a bug, and its text with the bug; LookupError where it does not apply."""
    for path in sorted((root / "src").rglob(bug.file)):
        text = path.read_text(encoding="utf-8")
        found = _lines(ast.parse(text), bug.function.split("."))
        if found is None:
            continue
        lines = text.splitlines(keepends=True)
        begin, end = found
        inside = "".join(lines[begin:end])
        if inside.count(bug.old) == 1:
            return path, "".join(lines[:begin]) + inside.replace(bug.old, bug.new) + "".join(lines[end:])
    raise LookupError(f"{bug.file}: {bug.function} does not hold {bug.old!r} once; adapt the entry of bugs.py")


def _lines(tree: ast.AST, names: list[str]) -> tuple[int, int] | None:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == names[0]:
            if len(names) == 1:
                return node.lineno - 1, node.end_lineno or node.lineno
            return _lines(node, names[1:])
    return None


def fitting_tests(bug: Bug, root: Path = ROOT) -> list[str]:
    """The test files that may see a bug: first those that import its module, then its room, then others that name it."""
    folder = root / "tests" / MOVED.get(bug.room, bug.room)
    texts = {path: path.read_text(encoding="utf-8") for path in sorted((root / "tests").rglob("test_*.py"))}
    imported = re.compile(rf"^\s*(?:from|import) dovetail[\w.]*\.{Path(bug.file).stem}\b", re.MULTILINE)
    named = re.compile(rf"\b({Path(bug.file).stem}|{bug.function.split('.')[0]})\b")

    def rank(path: Path) -> int:
        signs = (imported.search(texts[path]), folder in path.parents and named.search(texts[path]), folder in path.parents)
        return next((at for at, sign in enumerate(signs) if sign), len(signs))

    fitting = [path for path in texts if folder in path.parents or named.search(texts[path])]
    return [str(path) for path in sorted(fitting, key=rank) if "planted" not in path.relative_to(root).parts]


def run(bug: Bug, number: int, copy: Path, seconds: float, checks: Sequence[str] = CHECKS) -> Outcome:
    """Plant a bug in the copy, run the checks in their order until one sees it, and restore the file."""
    path, text = place(bug, copy)
    before, begin = path.read_text(encoding="utf-8"), time.monotonic()
    path.write_text(text, encoding="utf-8")
    seen, check = None, "survived"
    try:
        for kind in checks:
            sees, said = _laws(bug, copy, seconds) if kind == "laws" else _tests(bug, copy, seconds, path, before, text)
            check = said if said != "survived" else check
            if sees:
                seen = kind
                break
    finally:
        path.write_text(before, encoding="utf-8")
    return Outcome(number, bug.room, bug.function, bug.breaks, seen, check, round(time.monotonic() - begin, 1))


def law_commands(bug: Bug, root: Path = ROOT) -> Iterator[Sequence[str]]:
    """The commands of the laws and programs that a bug meets: the literal numbers of its kinds, laws on a preset and a sampled
    spec that have them (if the file is near to no kind: on sampled specs that predict several tokens) and on two small specs,
    law 8 where ranks are spoken of, and random programs."""
    path = place(bug)[0]  # in the clone: the copy has the bug already
    kinds = set(kinds_near(path, ROOT))
    if kinds and bug.room in LAWS:
        yield "-c", NUMBERS, *sorted(kinds)
    specs = [str(spec.relative_to(ROOT)) for spec in SPECS]
    small = [name for name, of_it in _presets().items() if of_it & kinds] if bug.room in LAWS else []
    for i, text in enumerate(_sampled()):
        wanted = any(f"kind: {kind}" in text for kind in kinds) if kinds else "mtp:" in text
        if bug.room in LAWS and wanted and len(specs) < len(SPECS) + 2 - bool(small):
            (root / f"sampled-{i}.yaml").write_text(text, encoding="utf-8")
            specs.insert(0, f"sampled-{i}.yaml")
    ranked = bug.room == "parallel" or (bug.room in LAWS and RANKED.search(path.read_text(encoding="utf-8")))
    specs[:0] = small[:1]  # a preset is smaller than a sampled spec
    for only, some in (
        (FAST, specs if bug.room in LAWS and bug.room != "parallel" else []),
        (["sharded"], specs if ranked else []),
    ):
        yield from (("-m", "dovetail", "laws", spec, "--seeds", "1", "--only", *only) for spec in some)
    if bug.room in PROGRAMMED:
        yield PROGRAMS


def kinds_near(path: Path, root: Path) -> list[str]:
    """The kinds that a file registers, or the few files of parts that import it."""
    imports = re.compile(rf"^from dovetail\.[\w.]*\b{path.stem} import", re.MULTILINE)
    parts = [path for path in (root / "src/dovetail/parts").rglob("*.py") if imports.search(path.read_text(encoding="utf-8"))]
    files = [path, *(parts if len(parts) <= NEAR else [])]
    return sorted(
        {kind for file in files for kind in re.findall(r'^@register\("(\w+)"\)', file.read_text("utf-8"), re.MULTILINE)}
    )


@functools.cache
def _presets() -> dict[str, set[str]]:
    """The kinds of each small preset."""
    return {name: {part.kind for _, part in walk_spec(load_spec(name))} for name in zoo() if name.endswith("-tiny")}


@functools.cache
def _sampled() -> list[str]:
    """The few sampled specs that together have every kind, as YAML."""
    return [to_yaml(spec) for spec in suite.quick_specs(0)]


def _laws(bug: Bug, copy: Path, seconds: float) -> tuple[bool, str]:
    """Whether the laws or the random programs of its room see the planted bug, and which."""
    for command in law_commands(bug, copy):
        code, said = _command(list(command), copy, seconds)
        if code not in (0, 1, None):
            raise RuntimeError(f"{' '.join(command)} ended with {code}, which is no verdict: {said[-2000:]}")
        if code == 1:
            return True, _named(said)
    return False, "survived"


def _tests(bug: Bug, copy: Path, seconds: float, path: Path, before: str, text: str) -> tuple[bool, str]:
    """Whether a fitting test sees the bug, and which; one that also fails with the file as it was before has not seen it."""
    skipped: list[str] = []
    while files := fitting_tests(bug, copy):
        code, said = _command(["-m", "pytest", *OPTIONS, *skipped, *files], copy, seconds)
        if code in (0, None, 5):
            return False, f"not seen within {seconds:.0f} s of CPU time" if code is None else "survived"
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
        if failed is None or len(skipped) == MISTAKEN:
            return True, _named(said)
        path.write_text(before, encoding="utf-8")
        alone = _command(["-m", "pytest", *OPTIONS, str(copy / failed[1])], copy, seconds)[0]
        path.write_text(text, encoding="utf-8")
        if alone == 0:
            return True, _named(said)
        skipped.append(f"--deselect={failed[1]}")
    return False, "survived"


def _command(arguments: list[str], copy: Path, seconds: float) -> tuple[int | None, str]:
    """The exit code (None: the time was up) and the output of a command in the copy."""
    env = {**os.environ, "PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    with tempfile.TemporaryFile("w+") as out:
        child = subprocess.Popen(
            [sys.executable, *arguments], cwd=copy, env=env, stdout=out, stderr=out, start_new_session=True
        )
        try:
            code, begin = None, time.monotonic()
            while code is None and _cpu_seconds(child.pid) < seconds and time.monotonic() - begin < WALL * seconds:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    code = child.wait(1)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        out.seek(0)
        return code, out.read()


def _cpu_seconds(group: int) -> float:
    """CPU seconds of the living processes of a group: the limit then means the same on a busy machine."""
    ticks = 0
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError, IndexError):
            fields = path.read_text().rpartition(")")[2].split()
            ticks += sum(map(int, fields[11:15])) if int(fields[2]) == group else 0
    return ticks / os.sysconf("SC_CLK_TCK")


def _named(text: str) -> str:
    """The line that names the law or the test."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if line.startswith(("FAILED", "ERROR")) or "fails" in line or "✗" in line]
    return (named or lines or [""])[0][:200]


def main() -> int:
    """Run some or all bugs."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--set", choices=SETS, default="bugs", help="the file with the bugs")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of bugs, from 1")
    parser.add_argument("--seconds", type=float, default=300.0, help="CPU seconds that one command may take")
    parser.add_argument("--checks", nargs="+", choices=CHECKS, default=CHECKS, help="in this order; default: laws, then tests")
    parser.add_argument("--json", action="store_true", help="print the outcomes as JSON")
    parser.add_argument("--out", type=Path, help="write the outcomes here after every bug")
    flags = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # ends the command that runs, too
    outcomes: list[Outcome] = []
    bugs = SETS[flags.set]
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        copy = Path(folder)
        for name in ("src", "tests", "benchmarks", "checks", "docs", "action", "deploy"):
            if (ROOT / name).is_dir():
                shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__", "_build"))
        for path in ROOT.glob("*.*"):
            if path.is_file():
                shutil.copy(path, copy)
        compileall.compile_dir(copy / "src", quiet=2, invalidation_mode=py_compile.PycInvalidationMode.CHECKED_HASH)
        for number in flags.only or range(1, len(bugs) + 1):
            outcome = run(bugs[number - 1], number, copy, flags.seconds, flags.checks)
            outcomes.append(outcome)
            print(f"{number:2} {outcome.room:12} {outcome.seen_by or '-':6} {outcome.check}", file=sys.stderr, flush=True)
            if flags.out is not None:
                flags.out.write_text(json.dumps([dc.asdict(one) for one in outcomes], ensure_ascii=False, indent=1) + "\n")
    if flags.json:
        print(json.dumps([dc.asdict(one) for one in outcomes], ensure_ascii=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
