"""Seeded bugs and mechanical mutants: at least one per law, each listed once, and each really changes the code."""

import ast
import dataclasses as dc
from pathlib import Path

import pytest

from checks.mutants import mechanical, run, seeded, sites
from checks.mutants.run import areas, run_seeded, seeded_bugs, verdict_of, without
from dovetail.proof.laws.case import LAWS
from dovetail.proof.laws.suite import OWN_NUMBER


def test_every_law_has_a_seeded_bug():
    laws = {bug.law for bug in seeded_bugs().values()}
    assert laws == {*LAWS, OWN_NUMBER}


def test_every_file_of_seeded_bugs_is_found_and_names_are_distinct():
    files = {path.stem for path in Path(seeded.__path__[0]).glob("*.py")} - {"__init__"}
    assert set(areas()) == files
    assert sum(len(rows) for rows in areas().values()) == len(seeded_bugs()) >= 154
    assert all(rows for rows in areas().values())


def test_a_seeded_bug_is_gone_afterwards():
    bug = seeded_bugs()["a token sees the next one"]
    assert verdict_of(bug)
    assert without(bug) == ""


def test_a_law_that_fails_without_the_bug_does_not_count_as_caught(monkeypatch: pytest.MonkeyPatch):
    bug = seeded_bugs()["a token sees the next one"]
    ahead = bug.spec.set("layers.*.mixer.mask", "full")  # the law is not applicable there
    monkeypatch.setattr(run, "seeded_bugs", lambda: {bug.name: dc.replace(bug, spec=ahead)})
    (row,) = run_seeded()["rows"]
    assert (row["caught"], row["by"]) == (
        False,
        "causal: fails without the bug: not applicable: outputs may depend on later tokens",
    )


@pytest.mark.slow
def test_two_processes_judge_as_one_does():
    assert run_seeded(only=["padded"], workers=2) == run_seeded(only=["padded"])


@pytest.mark.slow
def test_sites_are_many_and_each_changes_the_source():
    possible = sites.sites()
    assert len(possible) > 500
    for site in possible[::97]:
        before = ast.unparse(ast.parse((sites.ROOT / site.file).read_text(encoding="utf-8")))
        assert sites.mutated(site) != before, site


def test_messages_and_samples_are_not_mutated():
    source = "class PartProof(Proof):\n    def idle(self):\n        return 1 + 2\n\ndef forward(x):\n    return x + 1\n"
    visitor = sites.Visitor()
    visitor.visit(ast.parse(source))
    assert {line for line, _ in visitor.found} == {6}


@pytest.mark.slow
def test_a_mechanical_mutant_is_caught_in_a_process_of_its_own():
    site = next(s for s in sites.sites() if s.file == "parts/position/bias.py" and "sign dropped" in s.what)
    _, message = mechanical._try(site, 0)
    assert "own_number" in message


def test_every_seeded_bug_replaces_code_that_exists():
    for bug in seeded_bugs().values():
        with bug.seed():
            pass
