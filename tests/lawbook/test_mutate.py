"""Mechanical mutants: which are made, which questions come first, and what becomes of one that hangs or changes nothing."""

import ast
import time

import pytest

from dovetail.lawbook import mutate


def site(file: str, what: str, within: str = "") -> mutate.Site:
    """The one mutation that is described so."""
    (found,) = [s for s in mutate.sites() if s.file == file and s.what == what and within in s.within]
    return found


def offered(source: str, room: str) -> set[str]:
    visitor = mutate._Visitor(room=room)
    visitor.visit(ast.parse(source))
    return set(visitor.places)


def test_a_cost_is_left_alone_where_it_only_chooses_a_kernel():
    source = "class A:\n    def cost(self):\n        return 1 + 2\n\ndef check(x):\n    return x + 1\n"
    assert offered(source, "parts") == {"A.cost"}
    assert offered(source, "ops") == {"check"}


def test_a_site_knows_where_it_stands():
    found = site("parts/mask/near.py", "self.keep == 0: NotEq")
    assert (found.within, found.module) == ("Window.relative", "dovetail.parts.mask.near")
    assert found.name == f"parts/mask/near.py:{found.line} self.keep == 0: NotEq"


def test_who_uses_a_file():
    assert "dovetail.parts.head" in mutate.users("dovetail.ops.loss")
    tiles = mutate.users("dovetail.ops.tiles")
    assert {"dovetail.ops.attend_tiled", "dovetail.ops.attend", "dovetail.parts.mixer.attention"} <= tiles
    assert not {"dovetail.parts.head", "dovetail.ops.mask"} & tiles
    assert mutate.users("dovetail.parts.act") == {"dovetail.parts.act"}


@pytest.mark.parametrize(
    ("file", "what"),
    [
        ("ops/loss.py", "total / count: the second term dropped"),
        ("ops/attend.py", "k.n - 1: Add"),
        ("ops/mask.py", "unsure <= LOOKED_AT: Lt"),
        ("parts/mask/near.py", "self.keep == 0: NotEq"),
    ],
)
def test_a_number_sees_it(file: str, what: str):
    _, said = mutate._try(site(file, what), 0)
    assert said.startswith("own_number: "), said


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_one_that_loops_for_ever_is_stopped():
    begin = time.monotonic()
    _, said = mutate._try(site("ops/mask.py", "len(levels[-1]) > 1: GtE"), 0)
    assert said
    assert time.monotonic() - begin < mutate.PATIENCE * mutate.SECONDS


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_one_that_changes_nothing_lives():
    # single precision to single precision: were this caught, the questions would be wrong, or the limits too narrow
    _, said = mutate._try(site("ops/loss.py", "x.dtype.itemsize < 4: LtE"), 0)
    assert said == ""


def test_sites_reach_state_core_model_floats_and_constants():
    sites = mutate.sites()
    rooms = {site.file.partition("/")[0] for site in sites}
    assert rooms == {"parts", "ops", "state", "core", "model.py", "construction.py"}
    constants = [site.name for site in sites if site.within == ""]
    assert any("parts/ffn/router.py" in name and "0.001: 0.0015" in name for name in constants)
    assert not any(name.startswith("core/errors.py") for name in (site.name for site in sites))
    visitor = mutate._Visitor()
    visitor.visit(ast.parse("CHUNK = 4\nRATE = 0.5\nlocal = 3\n"))
    assert [what for _, what in visitor.found] == ["0.5: 0.75"]


def test_a_changed_slot_of_the_cache_is_caught():
    _, said = mutate._try(site("state/slots.py", "row * self.capacity + position: Sub"), 0)
    assert said
