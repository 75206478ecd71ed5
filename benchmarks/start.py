"""The first ten minutes, as a newcomer has them: every line of docs/start.md, from an empty folder in a new environment.

    python benchmarks/start.py [--json] [--transcript docs/figures/start.txt]

The environment is made anew, torch and then this clone are installed as the page says, and its snippets are run one after the
other, those too that are not run as the page is built. The transcript has what was typed, what came back, and the seconds.
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
from measure import Goal, Row, arguments, progress, tell

ROOT = Path(__file__).parents[1]
FENCED = re.compile(r"^```(\w+)\n(.*?)^```", re.DOTALL | re.MULTILINE)
LONGEST = 40  # lines of one answer in the transcript


class Typed(NamedTuple):
    """What a reader types: a line of a shell, or some Python."""

    text: str
    python: bool


class Answered(NamedTuple):
    """What came back."""

    typed: Typed
    out: str
    seconds: float


def typed(page: str) -> Iterator[Typed]:
    """The lines of a page, in order."""
    for language, text in FENCED.findall(page):
        if language == "python":
            yield Typed(text.strip(), python=True)
        elif language in ("bash", "console"):
            lines = text.splitlines()
            if language == "console":
                lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
            yield from (Typed(line, python=False) for line in lines if line.strip())


def installing(line: Typed) -> bool:
    return line.text.startswith("pip ")


def typed_install(line: Typed) -> str:
    """The line as it is run here: the torch this clone asks for, and the clone instead of the current folder."""
    text = line.text.replace("pip install torch", f"pip install torch=={torch.__version__.partition('+')[0]}")
    return text.replace('-e ".', f'-e "{ROOT}')


def answered(line: Typed, command: str, folder: Path, env: dict[str, str]) -> Answered:
    """Run one line; a line that fails ends everything."""
    begin = time.perf_counter()
    args = ["python", "-c", command] if line.python else ["bash", "-c", command]
    done = subprocess.run(args, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{line.text}\nended with {done.returncode}:\n{done.stdout[-2000:]}")
    return Answered(line, done.stdout, time.perf_counter() - begin)


def transcript(answers: list[Answered]) -> str:
    """What a reader would have seen."""
    told: list[str] = []
    for typed, out, seconds in answers:
        lines = [] if installing(typed) else [line.rstrip() for line in out.strip("\n").splitlines()]
        if len(lines) > LONGEST:
            lines = [*lines[: LONGEST // 2], f"… {len(lines) - LONGEST} lines …", *lines[-LONGEST // 2 :]]
        prompt = ">>> " if typed.python else "$ "
        told += [prompt + typed.text.replace("\n", "\n... "), *lines, f"[{seconds:.1f} s]", ""]
    return "\n".join(told)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--transcript", type=Path, help="write what was typed and what came back")
    asked = parser.parse_args()
    lines = list(typed((ROOT / "docs" / "start.md").read_text(encoding="utf-8")))
    if asked.quick:
        lines = [line for line in lines if not installing(line)][:2]
    with tempfile.TemporaryDirectory() as place, progress("lines", len(lines)) as tick:
        folder, env = Path(place) / "empty", {**os.environ, "COLUMNS": "130", "HF_HUB_OFFLINE": "1"}
        folder.mkdir()
        if not asked.quick:
            subprocess.run([sys.executable, "-m", "venv", str(Path(place) / "new")], check=True)
            env |= {"VIRTUAL_ENV": str(Path(place) / "new"), "PATH": f"{place}/new/bin{os.pathsep}{env['PATH']}"}
            env.pop("PYTHONPATH", None)
        answers: list[Answered] = []
        for line in lines:
            command = typed_install(line) if installing(line) else line.text
            answers.append(answered(line, command, folder, env))
            tick()
    if asked.transcript:
        asked.transcript.write_text(transcript(answers), encoding="utf-8")
    rest = [one.seconds for one in answers if not installing(one.typed)]
    rows = [
        Row("seconds of the install", sum(one.seconds for one in answers if installing(one.typed))),
        Row("seconds from the install to the first result", rest[0], Goal(high=180)),
        Row("seconds of all that follows", sum(rest), Goal(high=600)),
        Row("lines run", len(rest)),
    ]
    tell(rows, asked.json)


if __name__ == "__main__":
    main()
