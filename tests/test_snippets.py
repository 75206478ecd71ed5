"""Every snippet of the documents is run, and the console output that they show is compared.

    ```python     snippets of one file share a namespace
    ```yaml       a spec that can be built
    ```bash       each line is a `dovetail …` that exits with 0
    ```console    the same for each line after `$ `, with the output that it must print below

A file has a directory of its own to work in. In an output, a line `…` matches any lines, and spaces do not count.
`<!-- no run: reason -->` before a snippet leaves it out, and must say why.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest

from dovetail.cli import main
from dovetail.files.spec import from_yaml
from dovetail.hf.dialect import DIALECTS
from dovetail.spec.check import check

ROOT = Path(__file__).parent.parent
PAGES = [*sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs/book").glob("*.md"))]
FILES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *PAGES]
RUN = ("python", "bash", "console", "yaml")
SKIP = re.compile(r"<!-- no run:(.*?)-->", re.DOTALL)


@pytest.fixture(autouse=True)
def dialects() -> Iterator[None]:
    """A dialect that a page registers is gone after it."""
    with patch.dict(DIALECTS):
        yield


class Snippet(NamedTuple):
    """A fenced block: its language, its text, the line it begins at, and why it is not run."""

    language: str
    text: str
    line: int
    skipped: str | None


def snippets(text: str) -> Iterator[Snippet]:
    """The fenced blocks of a document, in order."""
    before, lines = "", iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if not line.startswith("```"):
            before = line if line.strip() else before
            continue
        body: list[str] = []
        for _, inner in lines:
            if inner.startswith("```"):
                break
            body.append(inner)
        skip = SKIP.fullmatch(before.strip())
        yield Snippet(line[3:].strip(), "\n".join(body), number, skip and skip[1].strip())
        before = ""


def commands(snippet: Snippet) -> Iterator[tuple[list[str], list[str] | None]]:
    """(arguments, the lines that are said to be printed) of each command of a shell snippet."""
    lines = snippet.text.replace("\\\n", " ").splitlines()
    if snippet.language == "bash":
        yield from ((shlex.split(line, comments=True), None) for line in lines if line.strip())
        return
    shown: list[str] = []
    command: list[str] = []
    for line in [*lines, "$ "]:
        if line.startswith("$ "):
            if command:
                yield command, shown
            command, shown = shlex.split(line[2:]), []
        else:
            shown.append(line)


def agrees(shown: list[str], printed: str) -> bool:
    """Whether what is shown, with `…` for any lines, is what was printed."""
    pattern = ""
    for line in shown:
        words = r"[ ]+".join(map(re.escape, line.split()))
        pattern += r"(?:.*\n)*?" if line.strip() == "…" else rf"[ ]*{words}[ ]*\n"
    return re.fullmatch(pattern + r"\s*", printed.rstrip() + "\n") is not None


def run(args: list[str], where: str, shown: list[str] | None, capsys: pytest.CaptureFixture[str]) -> None:
    """One command line of a document."""
    assert args[0] == "dovetail", f"{where}: only dovetail is run here; mark what is not to be run"
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        main(args[1:])
    out, err = capsys.readouterr()
    assert ended.value.code == 0, f"{where}: {err}"
    if shown is not None:
        assert agrees(shown, out), f"{where}: it prints\n{out}"


@pytest.mark.slow
@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_snippets_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)  # as in an interpreter started there
    scope: dict[str, Any] = {"__name__": path.stem}
    for snippet in snippets(path.read_text(encoding="utf-8")):
        where = f"{path.name}:{snippet.line}"
        if snippet.skipped is not None or snippet.language not in RUN:
            continue
        if snippet.language == "python":
            exec(compile("\n" * snippet.line + snippet.text, str(path), "exec"), scope)
        elif snippet.language == "yaml":
            check(from_yaml(snippet.text, where))
        else:
            for args, shown in commands(snippet):
                run(args, where, shown, capsys)


def test_snippets_that_are_not_run_have_a_reason() -> None:
    found = [(path.name, snippet) for path in FILES for snippet in snippets(path.read_text(encoding="utf-8"))]
    assert sum(snippet.language in RUN and snippet.skipped is None for _, snippet in found) >= 10
    for name, snippet in found:
        assert snippet.language, f"{name}:{snippet.line}: a snippet without a language"
        assert snippet.skipped != "", f"{name}:{snippet.line}: not run, and does not say why"


# -- the reader of documents is tested too

SAMPLE = """
```python
a = 1
```
<!-- no run: it takes a day -->

```bash
dovetail train x
```
Words.

```console
$ dovetail show a
first
…
last
$ dovetail show b
```
<!-- no run: -->
```text
```
"""


def test_snippets_are_found() -> None:
    found = list(snippets(SAMPLE))
    assert [snippet.language for snippet in found] == ["python", "bash", "console", "text"]
    assert [snippet.skipped for snippet in found] == [None, "it takes a day", None, ""]
    assert [snippet.line for snippet in found][:2] == [2, 7]
    assert list(commands(found[2])) == [(["dovetail", "show", "a"], ["first", "…", "last"]), (["dovetail", "show", "b"], [])]
    assert list(commands(found[1])) == [(["dovetail", "train", "x"], None)]


@pytest.mark.parametrize(
    ("shown", "holds"),
    [
        (["first", "…", "last"], True),
        (["first", "second  one", "last"], True),
        (["…"], True),
        (["first", "last"], False),
        (["first", "…"], True),
        (["…", "second one"], False),
        (["first", "second on", "last"], False),
        ([], False),
    ],
)
def test_shown_outputs_are_compared(shown: list[str], holds: bool) -> None:
    assert agrees(shown, "first\nsecond one   \n  last\n") is holds


def test_a_snippet_that_fails_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for text in ("```python\nassert 1 == 2\n```", "```bash\ndovetail show nowhere\n```", "```bash\nls\n```"):
        path = tmp_path / "page.md"
        path.write_text(text)
        with pytest.raises(AssertionError):
            test_snippets_run(path, tmp_path, monkeypatch, capsys)
    path.write_text("```console\n$ dovetail --version\ndovetail 0.0.0\n```")
    with pytest.raises(AssertionError, match="it prints"):
        test_snippets_run(path, tmp_path, monkeypatch, capsys)
