"""--load: a part that is not installed works in every verb, from a file or a module of the working directory, on ranks, too."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from dovetail.cli import VERBS
from dovetail.cli.command import command_of

PART = Path(__file__).parents[1] / "outside" / "offset_position" / "src" / "offset_position" / "__init__.py"
SPEC = "{dovetail: 1, width: 28, vocab: 62, layers: [{mixer: {heads: 2, head: 14, position: offset}, ffn: {hidden: 44}}]}"
WITHOUT = (  # they read no spec
    *("port", "doctor", "completion", "data build", "data show"),
    *("recipes", "recipes copy", "learn", "learn check", "scaling"),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(PART.read_text())
    (tmp_path / "spec.yaml").write_text(SPEC)
    return tmp_path


def run(folder: Path, *args: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dovetail", *args]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=200, check=False)


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_that_reads_a_spec_has_the_flag(verb: str) -> None:
    assert ("load" in command_of(verb).options) == (verb not in WITHOUT)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mine.py", "./mine.py", "mine"])
def test_a_file_or_module_of_the_working_directory_is_loaded(name: str, folder: Path) -> None:
    done = run(folder, "show", "spec.yaml", "--load", name)
    assert (done.returncode, done.stderr) == (0, "")
    assert "offset" in done.stdout


@pytest.mark.slow
def test_without_it_the_kind_is_unknown(folder: Path) -> None:
    done = run(folder, "show", "spec.yaml")
    assert done.returncode == 3
    assert "no part is called 'offset'" in done.stderr


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("def", "SyntaxError"),
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
    ],
)
def test_code_that_fails_is_one_line(text: str, message: str, folder: Path) -> None:
    (folder / "bad.py").write_text(text)
    done = run(folder, "show", "llama-tiny", "--load", "bad.py")
    assert (done.returncode, done.stdout) == (4, "")
    assert f"--load bad.py: {message}" in done.stderr
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    ("name", "message"), [("nope", "no such module"), ("nope.py", "no such file"), ("a/b", "no such file")]
)
def test_what_does_not_exist_is_one_line(name: str, message: str, folder: Path) -> None:
    done = run(folder, "laws", "spec.yaml", "--load", name)
    assert (done.returncode, len(done.stderr.splitlines())) == (4, 1)
    assert message in done.stderr


@pytest.mark.slow
def test_law_8_runs_on_it(folder: Path) -> None:
    done = run(folder, "laws", "spec.yaml", "--load", "mine.py", "--only", "sharded", "--json")
    assert (done.returncode, done.stderr.strip()) == (0, "")
    assert '"state": "passed"' in done.stdout
