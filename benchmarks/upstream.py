"""The reports of docs/upstream.md, run: does each script still show its fault, and is the fault gone with the suggested mend?

    python benchmarks/upstream.py [--json] [--only bamba_step …] [--quick]

The page is the only source: quoted lines are looked up in the installed transformers, scripts are run as they are and once more
with the page's diff applied, and what they print is compared with what the page says they print. A diff is applied in memory,
while Python imports the file; nothing is written to the installed package. Each run is a process of its own.
"""

from __future__ import annotations

import contextlib
import dataclasses as dc
import importlib.abc
import importlib.machinery
import importlib.util
import io
import multiprocessing as mp
import re
import runpy
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PAGE, SCRIPTS = ROOT / "docs/upstream.md", ROOT / "benchmarks/foreign_failures"
SECONDS = 600  # of one run, at most
TINY = 1e-4  # numbers below are rounding: which one is not compared
NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d+(?:e[+-]?\d+)?|(?<![\w.])-?\d+e[+-]?\d+")


@dc.dataclass(frozen=True)
class Report:
    """One section of the page."""

    name: str  # of the script
    title: str
    quotes: tuple[tuple[str, int, str], ...]  # file inside transformers, line, text of the line
    prints: str
    mend: str  # a unified diff; empty where none of a few lines is known
    prints_mended: str


def reports(page: str) -> list[Report]:
    """The sections that have a script."""
    found = []
    for section in re.split(r"^### ", page, flags=re.MULTILINE)[1:]:
        script = re.search(r"`benchmarks/foreign_failures/(\w+)\.py` prints", section)
        if script is None:
            continue
        quotes = re.findall(r"`((?:models/)?[\w/]+\.py):(\d+)`: `([^`\n]+)`", section)
        printed = re.findall(r"```text\n(.*?)```", section, re.DOTALL)
        mend = re.search(r"```diff\n(.*?)```", section, re.DOTALL)
        found.append(
            Report(
                script[1],
                section.splitlines()[0],
                tuple((file, int(line), text) for file, line, text in quotes),
                printed[0],
                mend[1] if mend else "",
                printed[1] if len(printed) > 1 else "",
            )
        )
    return found


def files(mend: str) -> dict[str, list[tuple[int, str, str]]]:
    """Per file of a unified diff its hunks: (first line, text before, text after)."""
    changed: dict[str, list[tuple[int, str, str]]] = {}
    for part in re.split(r"^--- a/transformers/", mend, flags=re.MULTILINE)[1:]:
        name, _, rest = part.partition("\n")
        for hunk in re.split(r"^@@ -", rest, flags=re.MULTILINE)[1:]:
            head, _, body = hunk.partition("\n")
            lines = [line or " " for line in body.rstrip("\n").split("\n")]  # an editor may strip the blank of an empty line
            before = "".join(f"{line[1:]}\n" for line in lines if line[0] in " -")
            after = "".join(f"{line[1:]}\n" for line in lines if line[0] in " +")
            changed.setdefault(name, []).append((int(re.split(r"[, ]", head)[0]), before, after))
    return changed


def mended(source: str, hunks: Sequence[tuple[int, str, str]]) -> str:
    """The source with these hunks applied, each at its own line and nowhere else."""
    lines = source.splitlines(keepends=True)
    for first, before, after in reversed(hunks):
        old = before.splitlines(keepends=True)
        if lines[first - 1 : first - 1 + len(old)] != old:
            raise ValueError(f"line {first}: the file differs from the diff; it is of another version")
        lines[first - 1 : first - 1 + len(old)] = after.splitlines(keepends=True)
    return "".join(lines)


class MendedLoader(importlib.machinery.SourceFileLoader):
    """Loads a module from a changed text."""

    def __init__(self, name: str, path: str, text: str) -> None:
        super().__init__(name, path)
        self.text = text

    def get_code(self, fullname: str) -> Any:
        """Compile the changed text under the path of the file."""
        return compile(self.text, self.path, "exec", dont_inherit=True)


class Mends(importlib.abc.MetaPathFinder):
    """Finds the modules that a mend changes."""

    def __init__(self, texts: Mapping[str, tuple[Path, str]]) -> None:
        self.texts = texts

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        """The spec of a changed module; None for every other."""
        if fullname not in self.texts:
            return None
        file, text = self.texts[fullname]
        return importlib.util.spec_from_file_location(fullname, file, loader=MendedLoader(fullname, str(file), text))


def install(mend: str) -> None:
    """Apply a diff to modules of transformers, in this process."""
    import transformers

    root, texts = Path(transformers.__file__).parent, {}
    for name, hunks in files(mend).items():
        module = "transformers." + name.removesuffix(".py").replace("/", ".")
        texts[module] = (root / name, mended((root / name).read_text(encoding="utf-8"), hunks))
    sys.meta_path.insert(0, Mends(texts))
    for module, (file, text) in texts.items():
        if module in sys.modules:
            exec(compile(text, str(file), "exec", dont_inherit=True), vars(sys.modules[module]))


def print_script(name: str, mend: str, sent: Any) -> None:
    """In a process of its own: run a script and send what it printed, or its error."""
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    out = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(io.StringIO()):
            if mend:
                install(mend)
            runpy.run_path(str(SCRIPTS / f"{name}.py"), run_name="__main__")
        sent.send(out.getvalue())
    except BaseException as error:
        sent.send(f"{out.getvalue()}{type(error).__name__}: {error}\n")


def printed(name: str, mend: str = "") -> str:
    """What a script prints, with a mend or without."""
    hears, sent = mp.get_context("fork").Pipe(duplex=False)
    child = mp.get_context("fork").Process(target=print_script, args=(name, mend, sent), daemon=True)
    child.start()
    sent.close()
    try:
        return hears.recv() if hears.poll(SECONDS) else f"took more than {SECONDS} s\n"
    except EOFError:
        return f"its process ended with {child.exitcode}\n"
    finally:
        child.kill()
        child.join()


def same(text: str, other: str) -> bool:
    """Whether two outputs say the same: equal words, and numbers that agree to 1 % or are both rounding."""
    if NUMBER.sub("#", text) != NUMBER.sub("#", other):
        return False
    pairs = zip(map(float, NUMBER.findall(text)), map(float, NUMBER.findall(other)), strict=True)
    return all(abs(a - b) <= max(TINY, 0.01 * abs(b)) for a, b in pairs)


def main() -> None:
    from measure import Goal, Row, arguments, progress, report

    parser = arguments(__doc__ or "")
    parser.add_argument("--only", nargs="*", default=[], help="scripts: bamba_step xlm_mask …")
    asked = parser.parse_args()
    import torch
    import transformers.modeling_utils  # noqa: F401  once, for every process that is forked from this one

    torch.set_num_threads(1)
    chosen = [r for r in reports(PAGE.read_text(encoding="utf-8")) if not asked.only or r.name in asked.only]
    chosen = chosen[:2] if asked.quick else chosen
    shown = gone = mends = 0
    with progress("reports", len(chosen)) as tick:
        for each in chosen:
            plain = printed(each.name)
            shown += same(plain, each.prints)
            now = printed(each.name, each.mend) if each.mend else ""
            mends += bool(each.mend)
            gone += bool(each.mend) and same(now, each.prints_mended)
            if not asked.json:
                print(f"{each.title}\n{plain}with the mend:\n{now}" if each.mend else f"{each.title}\n{plain}")
            tick()
    rows = [
        Row("reports", len(chosen)),
        Row("scripts that print what the page quotes", shown, Goal(low=len(chosen))),
        Row("mends", mends),
        Row("mends with which the script prints what the page quotes", gone, Goal(low=mends)),
    ]
    report(rows, asked.json)
    sys.exit(0 if shown == len(chosen) and gone == mends else 1)


if __name__ == "__main__":
    main()
