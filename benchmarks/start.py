"""The first ten minutes of a new user: every command of docs/start.md, from an empty folder in a new environment.

    python benchmarks/start.py [--json] [--transcript docs/figures/start.txt]

A new virtual environment is created, torch and then this clone are installed as the page says, and the snippets of the page
run in order, those included that the docs build does not run. The transcript has the commands, their outputs and the seconds.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from measure import Goal, Row, arguments, progress, report

ROOT = Path(__file__).parents[1]
FENCED = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LONGEST = 40  # lines of one output in the transcript


class Command(NamedTuple):
    """A line of a shell, or a Python snippet."""

    text: str
    python: bool


class Result(NamedTuple):
    """The output of a command and its time."""

    command: Command
    out: str
    seconds: float


def commands(page: str) -> Iterator[Command]:
    """The commands of a page, in order."""
    for language, text in FENCED.findall(page):
        if language == "python":
            yield Command(text.strip(), python=True)
        elif language in ("bash", "console"):
            lines = text.splitlines()
            if language == "console":
                lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
            yield from (Command(line, python=False) for line in lines if line.strip())


def installs(command: Command) -> bool:
    return command.text.startswith("pip ")


def local_install(command: Command) -> str:
    """The command as it runs here: with this version of torch, and this clone instead of the current folder."""
    text = command.text.replace("pip install torch", f"pip install torch=={torch.__version__.partition('+')[0]}")
    return text.replace('-e ".', f'-e "{ROOT}')


def run(command: Command, text: str, folder: Path, env: dict[str, str]) -> Result:
    """Run one command; exit where it fails."""
    begin = time.perf_counter()
    args = ["python", "-c", text] if command.python else ["bash", "-c", text]
    done = subprocess.run(args, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{command.text}\nended with {done.returncode}:\n{done.stdout[-2000:]}")
    return Result(command, done.stdout, time.perf_counter() - begin)


def transcript(results: list[Result]) -> str:
    """The session as text: prompts, commands and outputs."""
    parts: list[str] = []
    for command, out, seconds in results:
        lines = [] if installs(command) else [line.rstrip() for line in out.strip("\n").splitlines()]
        if len(lines) > LONGEST:
            lines = [*lines[: LONGEST // 2], f"… {len(lines) - LONGEST} lines …", *lines[-LONGEST // 2 :]]
        prompt = ">>> " if command.python else "$ "
        parts += [prompt + command.text.replace("\n", "\n... "), *lines, f"[{seconds:.1f} s]", ""]
    return "\n".join(parts)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--transcript", type=Path, help="write the commands and their outputs to this file")
    flags = parser.parse_args()
    page = list(commands((ROOT / "docs" / "start.md").read_text(encoding="utf-8")))
    if flags.quick:
        page = [command for command in page if not installs(command)][:2]
    with tempfile.TemporaryDirectory() as place, progress("commands", len(page)) as tick:
        folder, env = Path(place) / "empty", {**os.environ, "COLUMNS": "130", "HF_HUB_OFFLINE": "1"}
        folder.mkdir()
        if not flags.quick:
            subprocess.run([sys.executable, "-m", "venv", str(Path(place) / "new")], check=True)
            env |= {"VIRTUAL_ENV": str(Path(place) / "new"), "PATH": f"{place}/new/bin{os.pathsep}{env['PATH']}"}
            env.pop("PYTHONPATH", None)
        results: list[Result] = []
        for command in page:
            text = local_install(command) if installs(command) else command.text
            results.append(run(command, text, folder, env))
            tick()
    if flags.transcript:
        flags.transcript.write_text(transcript(results), encoding="utf-8")
    rest = [result.seconds for result in results if not installs(result.command)]
    rows = [
        Row("seconds of the install", sum(result.seconds for result in results if installs(result.command))),
        Row("seconds from the install to the first result", rest[0], Goal(high=180)),
        Row("seconds of all that follows", sum(rest), Goal(high=600)),
        Row("lines run", len(rest)),
    ]
    report(rows, flags.json)


if __name__ == "__main__":
    main()
