"""Named and mechanical mutants: enough of them, one for each law, and machinery that really changes the code."""

import ast

from dovetail.lawbook import mutate
from dovetail.lawbook.case import LAWS
from dovetail.lawbook.seeded.run import named, verdict
from dovetail.lawbook.suite import OWN_NUMBER


def test_every_law_has_a_mutant():
    laws = {mutant.law for mutant in named().values()}
    assert laws == {*LAWS, OWN_NUMBER}
    assert len(named()) >= 24


def test_a_planted_bug_is_gone_afterwards():
    mutant = named()["a token sees the next one"]
    with mutant.plant():
        assert verdict(mutant.law, mutant.spec, mutant.name)
    assert verdict(mutant.law, mutant.spec) == ""


def test_sites_are_many_and_each_changes_the_source():
    sites = mutate.sites()
    assert len(sites) > 500
    for site in sites[::97]:
        before = ast.unparse(ast.parse((mutate.ROOT / site.file).read_text(encoding="utf-8")))
        assert mutate.mutated(site) != before, site


def test_what_laws_try_and_say_is_left_alone():
    source = "def samples(cls):\n    return 1 + 2\n\ndef forward(x):\n    return x + 1\n"
    visitor = mutate._Visitor()
    visitor.visit(ast.parse(source))
    assert {line for line, _ in visitor.found} == {5}


def test_a_mechanical_mutant_is_caught_in_a_process_of_its_own():
    site = next(s for s in mutate.sites() if s.file == "parts/position/alibi.py" and "sign dropped" in s.what)
    _, said = mutate._try(site, 0)
    assert "own_number" in said
