"""benchmarks/unrun.py: every marked block is parsed, failures are reported as failures, processes are ended."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from test_snippets import FILES, snippets

ROOT = Path(__file__).parents[2]
PAGE = """
```bash
dovetail show a
```
<!-- no run: takes a day -->
```bash
dovetail train a \\
    --steps 3   # a comment

dovetail map a
```
<!-- no run: yours -->

```console
$ dovetail laws a
…
```
<!-- no run: yours -->
```text
pytest --dovetail py:a:b

[tool]
dovetail = 1
```
<!-- no run: a model -->
```python
x = 1
y = 2
```
"""
SERVER = """
import http.server, sys

class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.answer(b'{"data": [{"id": "a"}]}' if self.path == "/v1/models" else b"")
    def do_POST(self):
        self.answer(b'{"choices": [{"text": "so"}]}' if GOOD else b"{}")
    def answer(self, body):
        self.send_response(200); self.send_header("Content-Length", str(len(body))); self.end_headers(); self.wfile.write(body)
    def log_message(self, *args):
        pass

import signal
signal.signal(signal.SIGTERM, lambda *_: sys.exit(CODE))
http.server.HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def unrun(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import unrun

    return unrun


@pytest.fixture
def page(tmp_path: Path, unrun: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Runs the commands of a page with a text, by a limit of 60 s."""
    parse = unrun.commands
    monkeypatch.setattr(unrun, "commands", lambda path: parse(path, tmp_path))

    def run(text: str, limit: float = 60.0, **needs: Any) -> list[Any]:
        (tmp_path / "page.md").write_text(text)
        monkeypatch.setitem(unrun.PAGES, "page.md", unrun.Page(**needs))
        work = tmp_path / "work"
        return list(unrun.run_page(tmp_path / "page.md", work, limit))

    return run


def block(text: str, language: str = "bash") -> str:
    return f"<!-- no run: a test -->\n```{language}\n{text}\n```\n"


def test_commands_of_marked_blocks_are_in_order(unrun: Any, tmp_path: Path) -> None:
    (tmp_path / "page.md").write_text(PAGE)
    parsed = unrun.commands(tmp_path / "page.md", tmp_path)
    assert [(command.line, command.language, re.sub(" +", " ", command.text)) for command in parsed] == [
        (7, "bash", "dovetail train a --steps 3 # a comment"),
        (10, "bash", "dovetail map a"),
        (15, "console", "dovetail laws a"),
        (20, "text", "pytest --dovetail py:a:b"),
        (19, "text", "[tool]\ndovetail = 1"),
        (26, "python", "x = 1\ny = 2"),
    ]
    assert [command.reason for command in parsed][:3] == ["takes a day", "takes a day", "yours"]


def test_every_marked_block_of_every_page_has_a_command(unrun: Any) -> None:
    for path in FILES:
        marked = [snippet for snippet in snippets(path.read_text(encoding="utf-8")) if snippet.skipped is not None]
        parsed = unrun.commands(path)
        for snippet in marked:
            inside = [c for c in parsed if snippet.line <= c.line <= snippet.line + snippet.text.count("\n") + 1]
            assert inside, f"{path.name}:{snippet.line}"
            assert all((c.language, c.reason) == (snippet.language, snippet.skipped) for c in inside)
        words = sum(
            len(re.findall(r"^(?:\$ )?dovetail (?!=)", snippet.text, re.MULTILINE))
            for snippet in marked
            if snippet.language != "python"
        )
        assert sum(bool(re.match("dovetail (?!=)", c.text)) for c in parsed if c.language != "python") == words, path.name


def test_every_fixture_of_every_page_has_a_maker_and_every_page_is_there(unrun: Any) -> None:
    from unrun_fixtures import MAKERS

    assert set(unrun.PAGES) <= {str(path.relative_to(ROOT)) for path in unrun.pages()}
    for name, needs in unrun.PAGES.items():
        named = {*needs.fixtures, *(file for files in needs.fresh.values() for file in files)}
        assert named <= set(MAKERS), name
        texts = [command.text for command in unrun.commands(ROOT / name)]
        for begin in needs.fresh:
            assert any(text.startswith(begin) for text in texts), f"{name} has no command {begin}"


def test_what_needs_other_programs_is_not_run(unrun: Any) -> None:
    def why(text: str, language: str = "bash") -> str | None:
        return unrun.not_run(unrun.Command("page.md", 1, language, text, "the mark"))

    assert "installs packages" in why("pip install torch")
    assert "cluster" in why("sbatch --nodes 4 a.sbatch")
    assert why("a: 1", "yaml") == "the mark"
    assert why("dovetail show llama-tiny") is None
    assert why("x = 1", "python") is None


@pytest.mark.slow
def test_outcomes_are_those_of_the_commands(unrun: Any, page: Any) -> None:
    text = block("echo fine\nexit 3\nsleep 60\npip install torch\ncat\nno-such-program") + block("assert 1 == 2", "python")
    results = page(text, limit=5.0)
    outcomes = ["ok", "failed", "ended at the limit", "not run", "ok", "failed", "failed"]
    assert [result.outcome for result in results] == outcomes, results
    assert [result.exit for result in results] == [0, 3, None, None, 0, 127, 1]
    assert results[0].last == "fine"
    assert results[-1].last == "AssertionError"
    rows = {row.name: row for row in unrun.rows_of(results)}
    assert rows["commands found"].value == 7
    assert rows["ran to their end"].value == 5
    assert (rows["failed"].value, rows["failed"].holds) == (3, False)
    assert (rows["not run"].value, rows["ended at the limit"].value) == (1, 1)


def test_an_unknown_fixture_fails(unrun: Any, page: Any) -> None:
    results = page(block("echo fine"), fixtures=("no-such-file", "keys.txt"))
    assert [(result.outcome, result.command) for result in results] == [("failed", "(make no-such-file)"), ("ok", "echo fine")]
    assert unrun.rows_of(results)[0].value == 1


def test_a_command_at_the_limit_ends_with_its_children(page: Any, tmp_path: Path) -> None:
    (result,) = page(block("sleep 61 & echo $! > pid; wait"), limit=1.0)
    assert result.outcome == "ended at the limit"
    pid = int((tmp_path / "work/page/1/pid").read_text())
    for _ in range(50):
        stat = Path(f"/proc/{pid}/stat")
        if not stat.exists() or stat.read_text().split()[2] == "Z":
            return
        time.sleep(0.1)
    pytest.fail(f"process {pid} runs on")


@pytest.mark.parametrize(
    ("good", "code", "outcome", "last"),
    [(True, 0, "ok", "answered 'so', exit code 0"), (True, 4, "failed", "exit code 4"), (False, 0, "failed", "choices")],
)
def test_a_server_is_asked_and_ended(
    page: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, good: bool, code: int, outcome: str, last: str
) -> None:
    program = tmp_path / "bin" / "dovetail"
    program.parent.mkdir()
    source = SERVER.replace("GOOD", str(good)).replace("CODE", str(code))
    program.write_text(f"#!{sys.executable}\n{source}")
    program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(program.parent / "python"))  # its folder is the first of the path
    (result,) = page(block("dovetail serve a --port 8000"), limit=20.0)
    assert result.outcome == outcome, result
    assert last in result.last
    assert result.ran != result.command
    assert "8000" not in result.ran


def test_a_complete_page_is_taken_from_the_list(unrun: Any, tmp_path: Path) -> None:
    path, file = ROOT / "CONTRIBUTING.md", tmp_path / "list.jsonl"
    results = [unrun.Result(c.page, c.line, c.text, "ok") for c in unrun.commands(path)]
    file.write_text("".join(json.dumps(vars(result)) + "\n" for result in results))
    assert unrun.complete(path, unrun.known(file)["CONTRIBUTING.md"])
    assert not unrun.complete(path, results[1:])


@pytest.mark.slow
def test_it_runs(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "benchmarks" / "unrun.py"),
        "--quick",
        "--json",
        "--table",
        str(tmp_path / "all.json"),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False, env={**os.environ})
    assert done.returncode == 0, done.stderr[-2000:]
    rows = {row["name"]: row["value"] for row in json.loads(done.stdout)["rows"]}
    assert rows["failed"] == 0
    assert rows["commands found"] == len(json.loads((tmp_path / "all.json").read_text())) >= 6
