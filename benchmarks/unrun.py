"""Run the commands of the pages that the docs build does not run, as a user would type them.

    python benchmarks/unrun.py [--json] [--only serve tune …] [--seconds 600] [--list FILE] [--table FILE]

Every block of README.md, CONTRIBUTING.md and docs/*.md that is marked `<!-- no run: … -->` is parsed, and its commands run in
order, by `bash -c` with stdin closed, in a new folder per page that holds the files that the page names (unrun_fixtures.py:
tiny models, short texts). A server is asked for its health and one answer, then ended by SIGTERM, and must exit with 0. A
command is

    ok                   it exited with 0
    failed               it did not, or a file that it needs could not be made
    ended at the limit   it was ended after --seconds; .ci/full runs some of these
    not run              it needs what is not here; the reason is in the list (unrun_pages.py has the table)

What was run otherwise than it is written (a free port, fewer tokens) is in the list as `ran`. `--list` appends a line of JSON
per command as soon as its result is known; pages that are complete in that file are not run again.
"""

from __future__ import annotations

import contextlib
import dataclasses as dc
import json
import os
import re
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from measure import Goal, Row, arguments, progress, report
from unrun_fixtures import make
from unrun_pages import CHANGES, IN_CI, PAGES, PEERS, ROOT, Command, Page, commands, not_run, pages, peer_of, ready
from unrun_process import Done, finished, free_port, running, serve

LAST = 200  # characters of the last line that a command printed
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
SERVER = re.compile(r"^(dovetail serve|serve run|python -m vllm\S*api_server) ")
ADDRESS = re.compile(r"(localhost:|127\.0\.0\.1:|--port )(80\d\d)")


@dc.dataclass(frozen=True)
class Result:
    """The outcome of one command. `note`: why it was not run, or where else it is run; `ran`: what was run instead."""

    page: str
    line: int
    command: str
    outcome: str
    exit: int | None = None
    seconds: float = 0.0
    last: str = ""
    ran: str = ""
    note: str = ""


class Runner:
    """The folder of a page, the environment of its commands, and the ports in place of those on the page."""

    def __init__(self, page: Page, work: Path, limit: float) -> None:
        self.page, self.work, self.limit = page, work, limit
        self.folders, self.folder = 0, work
        self.ports: dict[str, int] = {}

    def begin(self, fixtures: Sequence[str]) -> Iterator[tuple[str, str]]:
        """Make a folder with fixtures. Yields (name, error) of each that could not be made."""
        self.folders += 1
        self.folder = self.work / str(self.folders)
        self.folder.mkdir(parents=True)
        for name in fixtures:
            try:
                make(name, self.folder)
            except KeyError:
                yield name, f"nobody makes the file {name}"
            except Exception as error:
                yield name, (str(error).splitlines() or [repr(error)])[0]

    def changed(self, text: str) -> tuple[str, str]:
        """A command as it is run, and why it differs."""
        reasons: list[str] = []
        for written, instead, why in CHANGES:
            text, count = re.subn(written, instead, text)
            reasons += [why] * bool(count)
        text, count = ADDRESS.subn(lambda match: f"{match[1]}{self.port(match[2])}", text)
        return text, "; ".join(reasons + ["a free port"] * bool(count))

    def port(self, written: str) -> int:
        """The free port in place of one on the page."""
        return self.ports.setdefault(written, free_port())

    def environment(self, command: Command) -> dict[str, str]:
        """The environment of a command: `dovetail` on the path, and the environment of a peer that is ready."""
        paths = [str(Path(sys.executable).parent), os.environ.get("PATH", "")]
        env = {**os.environ, "COLUMNS": "130", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
        env |= {"PET_MASTER_PORT": str(free_port()), "PYTEST_ADDOPTS": "-p no:cacheprovider", "MPLBACKEND": "agg"}
        python = [str(ROOT / "src")]
        if command.language != "python" and (self.folder / "installed").is_dir():
            python.append(str(self.folder / "installed"))
        if ready(peer := peer_of(command)):
            paths.insert(0, str(PEERS / peer / "bin"))
            env["HOME"] = str(self.work / "home")
            (self.work / "home").mkdir(exist_ok=True)
            with contextlib.suppress(FileExistsError):
                (self.work / "home" / peer).symlink_to(PEERS / peer)
        return {**env, "PATH": os.pathsep.join(paths), "PYTHONPATH": os.pathsep.join(python)}

    def run(self, command: Command) -> Result:
        """Run one command."""
        result = Result(command.page, command.line, command.text, "not run")
        if why := not_run(command):
            return dc.replace(result, note=why)
        text, differs = self.changed(command.text)
        result = dc.replace(result, ran=text if differs else "", note=differs)
        begin, env = time.monotonic(), self.environment(command)
        with contextlib.ExitStack() as stack:
            if not SERVER.match(command.text):
                for port in dict.fromkeys(match[2] for match in ADDRESS.finditer(command.text)):
                    serving = f"{self.page.servers[int(port)]} --port {self.port(port)}"
                    stack.enter_context(running(serving, self.folder, env, self.limit))
            if command.language == "python":
                done = self.python(text, env)
            elif SERVER.match(command.text):
                done = serve(text, self.folder, env, self.limit)
            else:
                cwd = ROOT if command.text.startswith("pytest tests/") else self.folder
                done = finished(["bash", "-c", text], cwd, env, self.limit)
        outcome = "ended at the limit" if done.code is None else "failed" if done.code else "ok"
        note = result.note or IN_CI.get(command.text, "")
        if outcome == "failed":
            print(f"--- {command.page}:{command.line} {text}\n{done.out[-3000:]}\n---", file=sys.stderr, flush=True)
        seconds, last = round(time.monotonic() - begin, 1), self.last(done.out)
        return dc.replace(result, outcome=outcome, exit=done.code, seconds=seconds, last=last, note=note)

    def python(self, text: str, env: Mapping[str, str]) -> Done:
        """Run a Python block after the code that it needs."""
        before = next((code for part, code in self.page.before if part in text), "")
        (self.folder / "snippet.py").write_text(f"exec({before!r})\nexec({text!r})\n", encoding="utf-8")
        ranks = ["-m", "torch.distributed.run", "--nproc-per-node", "2"] if "split_ctx" in text else []
        return finished([sys.executable, *ranks, "snippet.py"], self.folder, env, self.limit)

    def last(self, out: str) -> str:
        """The last line of an output, without colors and paths of this machine."""
        lines = [line.strip() for line in re.split(r"[\r\n]+", ESCAPES.sub("", out)) if line.strip()]
        line = lines[-1] if lines else ""
        for path, name in ((self.folder, "."), (self.work, "WORK"), (ROOT, "ROOT"), (Path(sys.prefix), "VENV")):
            line = line.replace(str(path), name)
        return line[:LAST]


def run_page(path: Path, work: Path, limit: float) -> Iterator[Result]:
    """Run the commands of a page."""
    items = commands(path)
    name = items[0].page if items else ""
    runner = Runner(PAGES.get(name, Page()), work / path.stem, limit)
    begin: Sequence[str] | None = runner.page.fixtures
    cut = 0  # the line of a command of this folder that was ended at the limit
    for command in items:
        fresh = [fixtures for text, fixtures in runner.page.fresh.items() if command.text.startswith(text)]
        begin = fresh[0] if fresh else begin
        for file, error in runner.begin(begin) if begin is not None else ():
            yield Result(name, command.line, f"(make {file})", "failed", last=error[:LAST])
        cut, begin = (0 if begin is not None else cut), None
        try:
            result = runner.run(command)
        except (RuntimeError, KeyError) as error:  # a server beside the command
            result = Result(name, command.line, command.text, "failed", last=runner.last(str(error)))
        if result.outcome == "failed" and cut:  # what it reads may be missing
            result = dc.replace(result, note=f"after the command of line {cut}, which was ended at the limit")
        cut = command.line if result.outcome == "ended at the limit" else cut
        yield result


def rows_of(results: Sequence[Result]) -> list[Row]:
    """The rows of all commands."""
    count = Counter(result.outcome for result in results)
    return [
        Row("commands found", sum(not result.command.startswith("(make ") for result in results)),
        Row("ran to their end", count["ok"] + count["failed"]),
        Row("failed", count["failed"], Goal(high=0)),
        Row("not run", count["not run"]),
        Row("ended at the limit", count["ended at the limit"]),
        Row("ran with a free port, fewer tokens or another address", sum(bool(result.ran) for result in results)),
        Row("pages", len({result.page for result in results})),
    ]


def known(file: Path | None) -> dict[str, list[Result]]:
    """The results of a list by page."""
    lists: dict[str, dict[tuple[int, str], Result]] = {}
    for line in file.read_text(encoding="utf-8").splitlines() if file is not None and file.exists() else ():
        result = Result(**json.loads(line))
        lists.setdefault(result.page, {})[result.line, result.command] = result
    return {page: list(results.values()) for page, results in lists.items()}


def complete(path: Path, results: Sequence[Result]) -> bool:
    """Whether results are those of all commands of a page as it is now."""
    listed = [(result.line, result.command) for result in results if not result.command.startswith("(make ")]
    return listed == [(command.line, command.text) for command in commands(path)]


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.set_defaults(threads=1)
    parser.add_argument("--only", nargs="+", metavar="PAGE", help="names of pages without .md: README serve tune")
    parser.add_argument("--seconds", type=float, default=600.0, help="limit of one command")
    parser.add_argument("--list", type=Path, help="append a line of JSON per command; complete pages are taken from it")
    parser.add_argument("--table", type=Path, help="write all results as JSON")
    flags = parser.parse_args()
    torch.set_num_threads(flags.threads)
    names = flags.only or (["CONTRIBUTING", "port"] if flags.quick else None)
    paths = [path for path in pages() if commands(path) and (names is None or path.stem in names)]
    if missing := set(names or ()) - {path.stem for path in paths}:
        parser.error(f"no page with marked blocks is called {', '.join(sorted(missing))}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that servers are ended too
    before, results = known(flags.list), list[Result]()
    with tempfile.TemporaryDirectory(prefix="dovetail-unrun-") as work, progress("pages", len(paths)) as tick:
        for path in paths:
            page = str(path.relative_to(ROOT))
            if complete(path, before.get(page, [])):
                results += before[page]
            else:
                for result in run_page(path, Path(work).resolve(), flags.seconds):
                    results.append(result)
                    print(
                        f"{result.page}:{result.line} {result.outcome}, {result.seconds:.0f} s: {result.command}",
                        file=sys.stderr,
                    )
                    if flags.list is not None:
                        with flags.list.open("a", encoding="utf-8") as file:
                            file.write(json.dumps(dc.asdict(result), ensure_ascii=False) + "\n")
            tick()
    if flags.table is not None:
        flags.table.write_text(json.dumps([dc.asdict(result) for result in results], indent=1, ensure_ascii=False) + "\n")
    report(rows_of(results), flags.json)
    return 1 if any(result.outcome == "failed" for result in results) else 0


if __name__ == "__main__":
    sys.exit(main())
