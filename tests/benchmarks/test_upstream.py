"""docs/upstream.md: quoted lines are in the installed transformers, diffs apply, scripts print what the page says."""

from __future__ import annotations

import importlib.metadata
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/upstream.md").read_text(encoding="utf-8")
VERSION = "5.22.2"


@pytest.fixture(scope="module")
def upstream() -> Any:
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import upstream
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))
    return upstream


@pytest.fixture(scope="module")
def installed() -> Path:
    if importlib.metadata.version("transformers") != VERSION:
        pytest.skip(f"the page quotes transformers {VERSION}")
    return Path(str(importlib.metadata.distribution("transformers").locate_file("transformers")))


def test_the_page_is_about_this_version() -> None:
    assert set(re.findall(r"transformers (\d+\.\d+\.\d+)", PAGE)) == {VERSION}


def test_every_fault_of_the_survey_has_a_report(upstream: Any) -> None:
    survey = (ROOT / "docs/foreign.md").read_text(encoding="utf-8")
    faults = re.findall(r"^\| (?:wrong result|unused weights) \| [^|]+ \| `(\w+)\.py`", survey, re.MULTILINE)
    found = upstream.reports(PAGE)
    assert sorted(r.name for r in found) == sorted(faults)
    assert len(faults) == 20
    assert sum(bool(r.mend) for r in found) == 15
    assert all(bool(r.mend) == bool(r.prints_mended) for r in found)
    assert all(r.quotes for r in found)


def test_quoted_lines_are_there(upstream: Any, installed: Path) -> None:
    for report in upstream.reports(PAGE):
        for file, line, text in report.quotes:
            lines = (installed / file).read_text(encoding="utf-8").splitlines()
            assert lines[line - 1].strip() == text, f"{report.name}: {file}:{line}"


def test_diffs_apply_and_compile(upstream: Any, installed: Path) -> None:
    for report in upstream.reports(PAGE):
        for file, hunks in upstream.files(report.mend).items():
            source = (installed / file).read_text(encoding="utf-8")
            changed = upstream.mended(source, hunks)
            assert changed != source
            compile(changed, file, "exec", dont_inherit=True)


def test_a_diff_of_another_version_is_refused(upstream: Any) -> None:
    mend = "--- a/transformers/a.py\n+++ b/transformers/a.py\n@@ -2,2 +2,2 @@\n b\n-c\n+d\n"
    ((file, hunks),) = upstream.files(mend).items()
    assert file == "a.py"
    assert upstream.mended("a\nb\nc\n", hunks) == "a\nb\nd\n"
    with pytest.raises(ValueError, match="line 2: the file differs"):
        upstream.mended("b\nc\n\n", hunks)


@pytest.mark.parametrize(
    ("text", "other", "equal"),
    [
        ("gap: 2.94\n", "gap: 2.95\n", True),
        ("gap: 2.94\n", "gap: 3.94\n", False),
        ("gap: 1.6e-06\n", "gap: 3e-07\n", True),
        ("gap: 1.6e-06\n", "gap: 0.0\n", True),
        ("gap: 2.9\n", "gap: 1.6e-06\n", False),
        ("gap: nan\n", "gap: 0.0\n", False),
        ("answers: (2, 2, 62)\n", "answers: (2, 1, 62)\n", False),
        ("11 gap: 1.0\n", "12 gap: 1.0\n", False),
    ],
)
def test_outputs_are_compared_by_words_and_numbers(upstream: Any, text: str, other: str, equal: bool) -> None:
    assert upstream.same(text, other) is equal


def shown(*names: str) -> dict[str, float]:
    command = [sys.executable, str(ROOT / "benchmarks/upstream.py"), "--json", "--only", *names]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return {row["name"]: row["value"] for row in json.loads(done.stdout)["rows"]}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_scripts_show_their_faults_and_mends_remove_them(installed: Path) -> None:
    assert set(shown().values()) == {16, 14}
