"""Laws on foreign models: a correct model passes, each seeded bug is caught by its law."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from dovetail.base.errors import FileError
from dovetail.cli import main
from dovetail.proof.foreign.laws import FOREIGN, laws_on
from dovetail.proof.foreign.opening import opened
from dovetail.proof.laws.law import Outcome

FILE = Path(__file__).parent / "foreign_model.py"


def tried(factory: str, *laws: str) -> dict[str, Outcome]:
    return {found.law: found for found in laws_on(opened(f"py:{FILE}:{factory}"), laws)}


def test_a_correct_model_passes_every_law() -> None:
    found = tried("Tiny")
    assert {name: one.state for name, one in found.items()} == dict.fromkeys(FOREIGN, "passed"), found


@pytest.mark.parametrize(
    ("bug", "law", "where"),
    [
        ("leak", "causal", "outputs before token 1, when it is changed: first differ at position 0"),
        ("window", "chunked", "step by step: first differ at row 0, position 7"),
        ("position", "chunked", "step by step: first differ at row 0, position 1"),
        ("padding", "padded", "12 padded on the left, and alone"),
        ("neighbor", "padded", "row 0 among neighbors and alone"),
        ("compiled", "compiled", "compiled and eager"),
        ("detached", "gradient", "finite differences deviate"),
        ("unused", "every_weight", "no gradient: layers.0.gate.bias, layers.0.gate.weight, layers.1.gate.bias and 1 more"),
    ],
)
def test_a_seeded_bug_is_caught_by_its_law(bug: str, law: str, where: str) -> None:
    (found,) = tried(bug, law).values()
    assert found.state == "failed"
    assert where in found.detail


def test_the_features_of_a_model_are_detected_by_calling_it() -> None:
    case = opened(f"py:{FILE}:Tiny")
    assert case.vocab == 62
    assert (case.masks, case.positions, case.documents) == (True, True, False)
    assert case.cache is not None
    assert (case.cache.argument, case.cache.place, case.mask_covers) == ("past", 1, "all")
    assert (case.dtype, case.tolerance) == (torch.float64, 1e-9)


def test_a_model_that_ignores_its_mask_fails() -> None:
    assert opened(f"py:{FILE}:padding").masks


def test_laws_without_the_needed_features_are_not_applicable() -> None:
    found = tried("Stateless", "causal", "chunked", "padded")
    assert [one.state for one in found.values()] == ["passed", "not applicable", "passed"]
    assert "no cache" in found["chunked"].detail
    assert found["padded"].detail == "it takes no attention_mask; it does not separate packed documents"


def test_a_model_in_float32_only_has_a_wider_tolerance() -> None:
    case = opened(f"py:{FILE}:single")
    assert (case.dtype, case.tolerance) == (torch.float32, 1e-4)
    states = {found.law: found.state for found in laws_on(case, ["causal", "chunked", "gradient"])}
    assert states == {"causal": "passed", "chunked": "passed", "gradient": "not applicable"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("py:nowhere.py:make", "no such file"),
        (f"py:{FILE}:nothing", "no function called nothing"),
        (f"py:{FILE}", "write hf:DIR, py:file.py:factory or py:package.module:factory"),
        (f"py:{FILE}:no_module", "returned int, not an nn.Module"),
        ("hf:nowhere", "no such directory"),
    ],
)
def test_a_model_that_cannot_be_opened_raises_with_the_reason(text: str, says: str) -> None:
    with pytest.raises(FileError, match=says):
        opened(text)


def test_code_of_a_directory_is_not_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "auto_map": {"AutoModel": "evil.Model"}}))
    with pytest.raises(FileError, match="no code in a model directory is executed"):
        opened(f"hf:{tmp_path}")


def test_the_command_reports_the_first_failure_and_exits_with_1(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["laws", f"py:{FILE}:leak", "--only", "causal", "padded", "--json"])
    assert ended.value.code == 1
    data = json.loads(capsys.readouterr().out)
    assert (data["failed"], data["dtype"], data["tolerance"]) == (1, "float64", 1e-9)
    assert [(row["law"], row["state"]) for row in data["laws"]] == [("causal", "failed"), ("padded", "passed")]


def test_the_command_shows_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["laws", f"py:{FILE}:Stateless", "--only", "causal", "chunked"])
    assert ended.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "✓ causal" in out
    assert "– chunked" in out
    assert "no cache" in out


def test_an_unknown_law_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["laws", f"py:{FILE}:Tiny", "--only", "casual"])
    assert ended.value.code == 4
    assert "'casual'" in capsys.readouterr().err
