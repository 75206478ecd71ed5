"""The first ten minutes: what of a page is typed, and what a transcript shows of it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGE = """
```bash
pip install torch
```
Words with `dovetail show`.
```console
$ dovetail show a
a tree
…
```
```python
x = 1
y = 2
```
<!-- no run: takes a day -->
```bash
dovetail train a

dovetail map a
```
```yaml
width: 4
```
"""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import start

    return start


def test_commands_of_a_page_are_in_order(start: Any) -> None:
    texts = [command.text for command in start.commands(PAGE)]
    assert texts == ["pip install torch", "dovetail show a", "x = 1\ny = 2", "dovetail train a", "dovetail map a"]


def test_this_clone_is_installed(start: Any) -> None:
    command = start.Command('pip install -e ".[look,hf]"', python=False)
    assert start.local_install(command) == f'pip install -e "{start.ROOT}[look,hf]"'


def test_a_transcript_has_commands_and_outputs(start: Any) -> None:
    text = start.transcript(
        [
            start.Result(start.Command("pip install torch", python=False), "much\n", 3.21),
            start.Result(start.Command("x = 1\ny = 2", python=True), "", 0.04),
            start.Result(start.Command("dovetail show a", python=False), "\n".join(map(str, range(50))), 1.0),
        ]
    )
    assert text.startswith("$ pip install torch\n[3.2 s]\n\n>>> x = 1\n... y = 2\n[0.0 s]\n\n$ dovetail show a\n0\n1\n")
    assert "\n19\n… 10 lines …\n30\n" in text


def test_a_command_that_fails_ends_the_run(start: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="ended with 3"):
        start.run(start.Command("exit 3", python=False), "exit 3", tmp_path, {"PATH": "/usr/bin:/bin"})


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "start.py"), "--quick", "--json", "--transcript", str(tmp_path / "start.txt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert [row["holds"] for row in json.loads(done.stdout)["rows"]] == [None, True, True, None]
    assert "70,553,706,496 parameters" in (tmp_path / "start.txt").read_text(encoding="utf-8")
