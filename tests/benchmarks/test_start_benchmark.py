"""The starts of the front page: what of the README is run, how it is timed, and what a transcript shows of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
PAGE = """
## Install

```bash
pip install torch
pip install -e ".[plots,hf]"
```

## Five starts

**Look.** Words with `dovetail show`.

```bash
dovetail show a
```
More words.

**Serve.** It waits.

<!-- no run: a server -->
```bash
sleep 60 &
echo ready
```

## Another

**Not a start.**

```bash
dovetail train a
```
"""


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import start

    return start


def test_the_starts_of_a_page_are_in_order(start: Any) -> None:
    assert [*start.starts(PAGE)] == [
        start.Start("Look", ["dovetail show a"]),
        start.Start("Serve", ["sleep 60 &", "echo ready"]),
    ]


def test_this_clone_and_this_torch_are_installed(start: Any) -> None:
    torch_line, ours = start.installs(PAGE)
    assert torch_line.startswith("pip install torch==2.")
    assert "+" not in torch_line
    assert ours == f'pip install -e "{start.ROOT}[plots,hf]"'


def test_a_start_is_timed_to_its_first_result(start: Any) -> None:
    results = [start.Result("a > file", "", 2.0), start.Result("b", "text", 3.0), start.Result("c", "more", 50.0)]
    assert start.first_result(results) == 5.0


def test_a_server_ends_with_its_start(start: Any, tmp_path: Path) -> None:
    results = start.run(start.Start("Serve", ["sleep 60 &", "echo ready"]), tmp_path, {"PATH": "/usr/bin:/bin"})
    assert [result.out for result in results] == ["", "ready\n"]
    assert sum(result.seconds for result in results) < 30


def test_a_transcript_has_commands_and_outputs(start: Any) -> None:
    text = start.transcript(
        {
            "Install": [start.Result("pip install torch", "much\n", 3.21)],
            "Look": [start.Result("dovetail show a", "\n".join(map(str, range(50))), 1.0)],
        }
    )
    assert text.startswith("# Install\n$ pip install torch\n[3.2 s]\n\n# Look\n$ dovetail show a\n0\n1\n")
    assert "\n19\n… 10 lines …\n30\n" in text


def test_a_command_that_fails_ends_the_run(start: Any, tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="ended with 3"):
        start.run(start.Start("Fail", ["exit 3"]), tmp_path, {"PATH": "/usr/bin:/bin"})
