"""Tables and listings of the documents are compared with the code that they describe."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from pathlib import Path

import pytest

from dovetail.cli import VERBS
from dovetail.files.spec import zoo
from dovetail.hf.dialect import DIALECTS
from dovetail.model.model import Model
from dovetail.nn.groups import GROUPS
from dovetail.ops.attend import BACKENDS
from dovetail.proof.laws.case import LAWS
from dovetail.proof.laws.suite import OWN_NUMBER, exceptions
from dovetail.spec.part import KINDS, Part, from_data
from dovetail.spec.part_proof import Proof

ROOT = Path(__file__).parent.parent
OUTSIDE = ROOT / "tests/outside/offset_position"
NUMBERS = ("no", "one", "two", "three", "four", "five", "six")
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]


def table(page: str, header: str) -> list[list[str]]:
    """The rows of the table under this header."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    begin = lines.index(header) + 2
    rows = []
    for line in lines[begin:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    return rows


def test_every_part_is_listed() -> None:
    written = {group: kinds.split(", ") for group, kinds in table("docs/features.md", "| group | parts |")}
    known = {group.group: sorted(kind for kind, cls in KINDS.items() if issubclass(cls, group)) for group in GROUPS}
    assert written == known


def test_every_law_is_listed_with_what_it_says() -> None:
    rows = {law: (int(number), says) for number, law, says in table("docs/laws.md", "| number | law | says |")}
    assert rows.pop(OWN_NUMBER)[0] == 14
    assert rows == {law.name: (law.number, law.says) for law in LAWS.values()}


AHEAD, VARIES, SHIFTS = (
    [{"mask": {"any": ["causal", {"kind": kind}]}} for kind in ("window", "global_tokens")],
    [{"position": {"scaling": kind}} for kind in ("dynamic_ntk", "longrope")],
    [{"position": "none", "bias": True}],
)


def test_the_exception_of_routers_is_listed() -> None:
    _, laws, why = table("docs/laws.md", "| who | laws | why |")[3]
    ffn = {"kind": "moe", "experts": 4, "hidden": 8, "router": {"kind": "softmax_router", "top_k": 1, "normalize": True}}
    found = exceptions(from_data({"width": 28, "layers": [{"mixer": {"heads": 2}, "ffn": ffn}]}, Model))
    assert {law: [why] for law, [(_, why)] in found.items()} == {laws: [why]}


@pytest.mark.parametrize(("row", "mixers"), [(0, AHEAD), (1, VARIES), (2, SHIFTS)])
def test_every_exception_is_listed(row: int, mixers: list[dict[str, object]]) -> None:
    _, laws, why = table("docs/laws.md", "| who | laws | why |")[row]
    for mixer in mixers:
        spec = from_data({"width": 28, "layers": [{"mixer": {"heads": 2, **mixer}}]}, Model)
        found = exceptions(spec)
        assert sorted(found) == laws.split(", ")
        assert all(reason.endswith(why) for told in found.values() for _, reason in told)


def _excepts(cls: type[Part]) -> bool:
    return type(cls.proof).excepts is not Proof.excepts or cls.whole_prefill is not Part.whole_prefill


def test_there_are_no_other_exceptions() -> None:
    declaring = {cls.kind for cls in KINDS.values() if _excepts(cls)}
    table = {
        "attention",
        "cross_attention",
        "mla",
        "additive_attention",
        "additive_cross_attention",
        "multiplicative_attention",
        "multiplicative_cross_attention",
        "differential_attention",
        "linformer",
        "nsa",
        "mamba",
        "rnn",
        "lstm",
        "gru",
        "rope",
        "softmax_router",
        "sigmoid_router",
        "medusa",
        "eagle",
        "mtp",
    }
    assert declaring <= table  # a new one belongs there


def test_numbers_in_words_are_right() -> None:
    changes, features = ((ROOT / name).read_text(encoding="utf-8") for name in ("CHANGELOG.md", "docs/features.md"))
    assert f"and {len(zoo())} presets" in features
    assert all(f"`{verb}`" in changes or f"`dovetail {verb}`" in changes for verb in VERBS)


def test_f_counts_of_the_pages_are_those_of_the_code() -> None:
    features = (ROOT / "docs/features.md").read_text(encoding="utf-8")
    pages = [page.read_text(encoding="utf-8") for page in PAGES[3:]]
    parts = [kind for kind, part in KINDS.items() if issubclass(part, tuple(GROUPS))]
    faults = Counter(
        row[0] for row in table("docs/foreign.md", "| what it is | law | where it is shown | classes (model types) |")
    )
    wrong, unused = faults["wrong result"], faults["unused weights"]
    for text in (
        f"{len(parts)} parts combine freely",
        f"[{len(DIALECTS)} families](port.md)",
        f"{NUMBERS[len(BACKENDS)]} attention kernels:",
    ):
        assert text in features
    assert all(
        f"{min(script_lines())} to {max(script_lines())} lines" in page for page in pages if "foreign_failures/`" in page
    )
    assert f"**{wrong + unused} distinct faults**" in (ROOT / "docs/foreign.md").read_text(encoding="utf-8")


def script_lines() -> list[int]:
    """The lines of each script of a fault, without its docstring, comments and empty lines."""
    found = []
    for path in sorted((ROOT / "benchmarks/foreign_failures").glob("*.py")):
        lines = path.read_text(encoding="utf-8").splitlines()
        _, begin, *_ = ast.parse("\n".join(lines)).body
        found.append(sum(1 for line in lines[begin.lineno - 1 :] if line.strip() and not line.strip().startswith("#")))
    return found


def test_f_no_ratio_against_another_server_in_the_readme() -> None:
    sentences = re.split(r"[.;:]\s", (ROOT / "README.md").read_text(encoding="utf-8"))
    assert not [one for one in sentences if re.search(r"vLLM|llama\.cpp", one) and re.search(r"\d ?times|÷|±", one)]


def test_f_memory_rows_of_the_plan_are_all_told() -> None:
    rows = json.loads((ROOT / "docs/figures/plan.json").read_text())["result"]["rows"]
    memory, times = ([row for row in rows if row["name"].endswith(end)] for end in ("peak memory", "step time"))
    page = " ".join((ROOT / "docs/plan.md").read_text(encoding="utf-8").split())
    missed = sum(row["holds"] is False for row in memory)
    assert f"In {len(memory)} layouts" in page
    assert f"{len(memory) - missed} layouts are within 5 %, and {missed} are not" in page
    values = [row["value"] for row in memory]
    assert f"Peak memory is {min(values):.2f} to {max(values):.2f} of the plan" in page
    assert sum(row["holds"] is None for row in times) == len(times) - 1


@pytest.mark.parametrize("name", ["__init__.py", "oracle.py"])
def test_the_worked_example_is_the_tested_part(name: str) -> None:
    source = (OUTSIDE / "src/offset_position" / name).read_text(encoding="utf-8")
    assert f"```python\n{source}```" in (ROOT / "docs/parts.md").read_text(encoding="utf-8")


def test_the_entry_points_shown_are_the_tested_ones() -> None:
    (shown,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs/parts.md").read_text(encoding="utf-8"), re.DOTALL)
    assert shown in (OUTSIDE / "pyproject.toml").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)]+)\)", prose):
        if page.parent.name == "docs" and target.startswith("reference/"):
            continue  # written when the site is built, which fails where a link leads nowhere
        assert target.startswith("https://") or (page.parent / target.partition("#")[0]).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_files_that_are_named_are_there(page: Path) -> None:
    for path in re.findall(r"`((?:src|tests|docs|\.ci|benchmarks)/[\w./-]+)`", page.read_text(encoding="utf-8")):
        assert (ROOT / path).exists(), path


def test_the_license_is_the_one_that_is_declared() -> None:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    assert "Apache License" in text
    assert "Version 2.0, January 2004" in text
    assert 'license = "Apache-2.0"' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")
