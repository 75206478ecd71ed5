"""The front page: length, order, numbers, counts and snippets. README and site have one source."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.hf.dialect import DIALECTS
from dovetail.nn.groups import GROUPS
from dovetail.proof.foreign.laws import FOREIGN
from dovetail.proof.laws.case import LAWS
from dovetail.proof.laws.suite import OWN_NUMBER
from dovetail.spec.part import KINDS

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FIGURES = ROOT / "docs/figures"
ORDER = (
    "# Dovetail",
    "Swap any part of a transformer",  # one sentence
    "](docs/_static/front.svg)",
    "| you have | you run | you learn |",
    "## Install",
    "## Five starts",
    "## Six numbers",
    "## When to use something else",
    "## Limits",
)


@pytest.fixture
def docs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scripts of the site can be imported."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))


def section(title: str) -> str:
    """The text under a heading."""
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_it_is_short_and_in_order() -> None:
    assert len(README.splitlines()) < 150
    places = [README.find(words) for words in ORDER]
    assert -1 not in places
    assert places == sorted(places)
    assert len(section("Limits").strip().splitlines()) == 5


def test_the_site_shows_the_same_page() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    assert index.count("```{include} ../README.md") == 2
    before, _, after = README.partition("<!-- doors -->")
    assert "| you have |" in before
    assert "## Install" in after
    assert "## Limits" in after.partition("<!-- site ends -->")[0]
    captions = re.findall(r":caption: (.+)", index)
    assert captions == ["Start", "How-to", "Learn", "Reference"]
    assert all(f"**{door}**" in index or f"**[{door}](" in index for door in captions)


def test_every_page_is_behind_a_door() -> None:
    index = (ROOT / "docs/index.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^[\w, /-]+ <([\w/]+)>$", index, re.MULTILINE))
    pages = {page.stem for page in (ROOT / "docs").glob("*.md")} - {"index"}
    book = (ROOT / "docs/book/index.md").read_text(encoding="utf-8")
    listed |= set(re.findall(r"^[\w, /-]+ <\.\./(\w+)>$", book, re.MULTILINE))
    assert pages | {"book/index"} == {page for page in listed if not page.startswith("reference/")}
    assert all(len(name) <= 16 for name in re.findall(r"^([\w, /-]+) <[\w/]+>$", index, re.MULTILINE))


def test_every_number_is_that_of_its_figure(docs: None) -> None:
    from front_numbers import BEGIN, END, NUMBERS, table

    assert README.partition(BEGIN)[2].partition(END)[0] == table()
    assert len(NUMBERS) == 6
    assert "vLLM" not in table()
    for number in NUMBERS:
        taken = json.loads((FIGURES / f"{number.figure}.json").read_text(encoding="utf-8"))["taken"]
        (row,) = [line for line in table().splitlines() if f"docs/figures/{number.figure}.json" in line]
        assert f"[{taken['commit']}]" in row
        assert f"`{taken['command'].partition(';')[0]}`" in row


def test_a_number_whose_goal_fails_is_not_stated(docs: None, tmp_path: Path) -> None:
    from front_numbers import NUMBERS, table

    for number in NUMBERS:
        data = json.loads((FIGURES / f"{number.figure}.json").read_text(encoding="utf-8"))
        if number.figure == "dist":
            data["result"]["rows"][0]["holds"] = False
        (tmp_path / f"{number.figure}.json").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="does not hold"):
        table(tmp_path)


def test_no_number_stands_outside_the_figures_and_the_code() -> None:
    """Numbers in the prose: those of the picture, of the table, of versions, and the counts below."""
    prose = README.partition("## Six numbers")[0] + section("When to use something else") + section("Limits")
    prose = re.sub(r"```.*?```|<[^>]*>|`[^`]*`|\]\([^)]*\)", "", prose, flags=re.DOTALL)
    assert OWN_NUMBER not in LAWS, "it is one more law"
    counts = {str(len(FOREIGN)), str(len(LAWS) + 1), str(len(DIALECTS))}
    assert set(re.findall(r"(?<![\w.])\d[\d,.]*\d|(?<![\w.])\d(?![\w.])", prose)) <= counts | {"3.11"}


def test_counts_are_those_of_the_code() -> None:
    assert f"{len(FOREIGN)} of the {len(LAWS) + 1} laws run on any `nn.Module`" in README
    assert f"(here {len(DIALECTS)})" in README
    parts = [kind for kind, part in KINDS.items() if issubclass(part, tuple(GROUPS))]
    assert f"{len(parts)} parts combine freely" in (ROOT / "docs/features.md").read_text(encoding="utf-8")


# -- the picture


def figure() -> dict[str, Any]:
    """What the picture is drawn from."""
    return json.loads((FIGURES / "front.json").read_text(encoding="utf-8"))


def test_the_picture_is_drawn_from_its_figure(docs: None) -> None:
    from front_picture import PICTURE, draw

    assert PICTURE.read_text(encoding="utf-8") == draw(figure())


def test_the_exact_numbers_of_the_picture_are_reproduced(docs: None) -> None:
    from front import counts, specs

    assert figure()["result"]["counts"] == counts()
    laws = {row["name"]: row["value"] for row in figure()["result"]["rows"] if row["name"].startswith("laws ")}
    assert 0 < sum(laws.values()) <= len(LAWS)  # a law that is younger than the figure is not in it
    assert laws["laws failed"] == 0
    before, after = (repr(spec).splitlines() for spec in specs().values())
    lines = [line.strip() for line in [*{*before} - {*after}, *{*after} - {*before}]]
    drawn = (ROOT / "docs/_static/front.svg").read_text(encoding="utf-8")
    assert len(lines) == 2
    assert all(line in drawn for line in lines)


def test_the_picture_is_legible() -> None:
    drawn = (ROOT / "docs/_static/front.svg").read_text(encoding="utf-8")
    assert "prefers-color-scheme:dark" in drawn
    (width,) = re.findall(r'viewBox="0 0 (\d+) ', drawn)
    sizes = [int(size) for size in re.findall(r"font:(\d+)px", drawn)]
    assert min(sizes) * 350 / int(width) >= 10, "on a page of 400 pixels"


# -- the starts


def test_there_are_five_starts_of_two_lines(docs: None) -> None:
    from start import installs, starts

    five = [*starts(README)]
    assert [len(start.lines) for start in five] == [2, 2, 2, 2, 2]
    verbs = [re.findall(r"dovetail (\w+)", " ".join(start.lines)) for start in five]
    assert verbs == [["tiny", "laws"], ["diff", "laws"], ["train"], ["show", "map"], ["serve"]]
    assert [line.split()[:2] for line in installs(README)] == [["pip", "install"]] * 2
    assert 'name = "dovetail-lm"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_every_start_runs(tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "benchmarks/start.py"), "--here", "--quick", "--json", "--transcript"]
    done = subprocess.run([*command, str(tmp_path / "start.txt")], capture_output=True, text=True, timeout=1400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout)["rows"][-1]["value"] == 5
    printed = (tmp_path / "start.txt").read_text(encoding="utf-8")
    for words in ("3 passed", "2 passed", "gated_deltanet", "map.png", '"finish_reason":"length"'):
        assert words in printed
