"""The five starts of the front page, as a new user runs them: from an empty folder, in a new environment.

    python benchmarks/start.py [--json] [--here] [--transcript docs/figures/start.txt]

A new virtual environment is created; torch and this clone are installed by the lines of the README, torch in the version of the
environment that runs this script (CPU builds are of the index that pip is configured for). Then the starts run in order in one
empty folder. The first result is the output of the first line that prints something; its time begins with the first line of the
start. `--here` uses the present environment and installs nothing. The transcript has the commands, the outputs and the seconds.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from measure import Goal, Row, arguments, progress, report

ROOT = Path(__file__).parents[1]
START = re.compile(r"^\*\*(.+?)\*\*.*?^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
INSTALL = re.compile(r"^## Install$.*?^```bash\n(.*?)^```", re.DOTALL | re.MULTILINE)
LONGEST = 40  # lines of one output in the transcript
LIMIT = 180  # seconds until the result of a start
QUICK = {"--minutes 1": "--steps 2 --batch 2 --length 16 --set width=64 --set layers.*.mixer.head=8", "--seeds 3": "--seeds 1"}


class Start(NamedTuple):
    """A start of the page: its name and its lines."""

    name: str
    lines: list[str]


class Result(NamedTuple):
    """The output of a line and its time."""

    line: str
    out: str
    seconds: float


def installs(page: str) -> list[str]:
    """The lines that install, as they run here: with this version of torch, and this clone instead of the current folder."""
    (block,) = INSTALL.findall(page)
    torch_version = f"pip install torch=={torch.__version__.partition('+')[0]}"
    return [
        line.replace("pip install torch", torch_version).replace('-e ".', f'-e "{ROOT}') for line in block.splitlines() if line
    ]


def starts(page: str) -> Iterator[Start]:
    """The starts of the page, in order."""
    section = page.partition("\n## Five starts\n")[2].partition("\n## ")[0]
    for name, block in START.findall(section):
        yield Start(name.rstrip("."), [line for line in block.splitlines() if line])


def run(start: Start, folder: Path, env: Mapping[str, str]) -> list[Result]:
    """Run the lines of a start in one shell session; exit where one fails. A line that ends with & runs until the start has."""
    results, servers = list[Result](), list[subprocess.Popen[str]]()
    try:
        for line in start.lines:
            begin = time.perf_counter()
            if line.endswith("&"):
                log = (folder / "server.log").open("w")
                server = ["bash", "-c", f"exec {line.rstrip(' &')}"]
                servers.append(subprocess.Popen(server, cwd=folder, env=env, stdout=log, stderr=log, text=True))
                results.append(Result(line, "", time.perf_counter() - begin))
                continue
            done = subprocess.run(["bash", "-c", line], cwd=folder, env=env, capture_output=True, text=True, check=False)
            if done.returncode:
                last = f"{done.stdout[-1000:]}{done.stderr[-1000:]}"
                raise SystemExit(f"{start.name}: {line}\nended with {done.returncode}:\n{last}")
            results.append(Result(line, done.stdout, time.perf_counter() - begin))
    finally:
        for server in servers:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
    return results


def transcript(sections: Mapping[str, list[Result]]) -> str:
    """The session as text: prompts, commands and outputs."""
    parts: list[str] = []
    for name, results in sections.items():
        parts.append(f"# {name}")
        for line, out, seconds in results:
            lines = [] if line.startswith("pip ") else [line.rstrip() for line in out.strip("\n").splitlines()]
            if len(lines) > LONGEST:
                lines = [*lines[: LONGEST // 2], f"… {len(lines) - LONGEST} lines …", *lines[-LONGEST // 2 :]]
            parts += [f"$ {line.replace(str(ROOT), '.')}", *lines, f"[{seconds:.1f} s]", ""]
    return "\n".join(parts)


def free_port() -> str:
    """A port that no server uses: 8000 may be taken."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return str(taken.getsockname()[1])


def environment(folder: Path, here: bool) -> dict[str, str]:
    """The variables of the session: those of a new virtual environment, or of the present one."""
    env = {**os.environ, "COLUMNS": "130", "HF_HUB_OFFLINE": "1", "NO_COLOR": "1"}
    if here:
        return env | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"}
    subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
    env.pop("PYTHONPATH", None)
    return env | {"VIRTUAL_ENV": str(folder), "PATH": f"{folder}/bin{os.pathsep}{env['PATH']}"}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--here", action="store_true", help="use the present environment; install nothing")
    parser.add_argument("--transcript", type=Path, help="write the commands and their outputs to this file")
    flags = parser.parse_args()
    page, port = (ROOT / "README.md").read_text(encoding="utf-8"), free_port()
    every = [Start(name, [line.replace("8000", port) for line in lines]) for name, lines in starts(page)]
    if not flags.here:
        every = [Start("Install", installs(page)), *every]
    if flags.quick:
        every = [Start(name, [shortened(line) for line in lines]) for name, lines in every]
    sections: dict[str, list[Result]] = {}
    with tempfile.TemporaryDirectory() as place, progress("starts", len(every)) as tick:
        folder, env = Path(place) / "empty", environment(Path(place) / "new", flags.here)
        folder.mkdir()
        for start in every:
            sections[start.name] = run(start, folder, env)
            tick()
    if flags.transcript:
        flags.transcript.write_text(transcript(sections), encoding="utf-8")
    rows: list[Row] = []
    for name, results in sections.items():
        install = name == "Install"
        rows.append(Row(f"{name}: seconds of all lines", sum(result.seconds for result in results)))
        rows += [] if install else [Row(f"{name}: seconds until the first result", first_result(results), Goal(high=LIMIT))]
    report([*rows, Row("starts", len(sections) - (not flags.here), Goal(5, 5))], flags.json)


def first_result(results: list[Result]) -> float:
    """The seconds until the first line that prints something has ended."""
    seconds = 0.0
    for result in results:
        seconds += result.seconds
        if result.out.strip():
            break
    return seconds


def shortened(line: str) -> str:
    """The line with less work, for a test that it runs."""
    for long, short in QUICK.items():
        line = line.replace(long, short)
    return line


if __name__ == "__main__":
    main()
