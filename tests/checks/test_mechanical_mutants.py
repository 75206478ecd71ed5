"""Mechanical mutants: their sites, the order of laws and oracles, and mutants that hang or change nothing."""

import ast
import subprocess
import sys
import time

import pytest

from checks.mutants import mechanical, sites
from dovetail.files.spec import to_yaml
from dovetail.proof.laws.mutant import spec
from dovetail.proof.laws.sharded import WAYS


def site(file: str, what: str, within: str = "") -> sites.Site:
    """The one mutation with this file and description."""
    (match,) = [s for s in sites.sites() if s.file == file and s.what == what and within in s.within]
    return match


def offered(source: str, room: str) -> set[str]:
    visitor = sites.Visitor(room=room)
    visitor.visit(ast.parse(source))
    return set(visitor.places)


def test_a_cost_is_left_alone_where_it_only_chooses_a_kernel():
    source = "class A:\n    def cost(self):\n        return 1 + 2\n\ndef check_size(x):\n    return x + 1\n"
    assert offered(source, "parts") == {"A.cost"}
    assert offered(source, "ops") == set()


def test_a_site_has_its_function_and_module():
    near = site("parts/mask/distance.py", "distance(q, k).abs() < self.size: LtE")
    assert (near.within, near.module) == ("Window.visible", "dovetail.parts.mask.distance")
    assert near.name == f"parts/mask/distance.py:{near.line} distance(q, k).abs() < self.size: LtE"


@pytest.mark.slow
def test_users_of_a_module():
    assert "dovetail.parts.head" in sites.users("dovetail.ops.vocab")
    tiles = sites.users("dovetail.ops.tiles")
    assert {"dovetail.ops.attend_tiled", "dovetail.ops.attend", "dovetail.parts.mixer.attention"} <= tiles
    assert not {"dovetail.parts.head", "dovetail.ops.mask"} & tiles
    assert sites.users("dovetail.parts.act") == {"dovetail.parts.act"}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("file", "what"),
    [
        pytest.param("ops/vocab.py", "total + summed_chunk: Sub", marks=pytest.mark.slow),
        pytest.param("ops/attend.py", "k.n - 1: Add", marks=pytest.mark.slow),
        pytest.param("ops/mask.py", "partial <= MAX_COUNTED: Lt", marks=pytest.mark.slow),
        ("parts/mask/distance.py", "self.keep == 0: NotEq"),
    ],
)
def test_an_oracle_catches_it(file: str, what: str):
    _, message = mechanical._try(site(file, what), 0)
    assert message.startswith("own_number: "), message


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_mutant_that_never_ends_is_stopped():
    begin = time.monotonic()
    _, message = mechanical._try(site("ops/mask.py", "len(levels[-1]) > 1: GtE"), 0)
    assert message
    assert time.monotonic() - begin < mechanical.PATIENCE * mechanical.SECONDS


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_a_mutant_that_changes_nothing_survives():
    # float32 cast to float32: if this were caught, a law would be wrong or its tolerance too small
    _, message = mechanical._try(site("ops/vocab.py", "part.dtype.itemsize < 4: LtE"), 0)
    assert message == ""


def test_sites_reach_state_nn_parallel_model_floats_and_constants():
    possible = sites.sites()
    rooms = {site.file.partition("/")[0] for site in possible}
    assert rooms == {"parts", "ops", "state", "base", "spec", "nn", "model", "parallel"}
    constants = [site.name for site in possible if site.within == ""]
    assert any("parts/ffn/router.py" in name and "0.001: 0.0015" in name for name in constants)
    assert not any(name.startswith("base/errors.py") for name in (site.name for site in possible))
    visitor = sites.Visitor()
    visitor.visit(ast.parse("CHUNK = 4\nRATE = 0.5\nlocal = 3\n"))
    assert [what for _, what in visitor.found] == ["0.5: 0.75"]


@pytest.mark.slow
def test_a_changed_slot_of_the_cache_is_caught():
    _, message = mechanical._try(site("state/slots.py", "row * self.capacity + position: Sub"), 0)
    assert message


LLAMA = to_yaml(spec())


@pytest.mark.slow
def test_ranks_import_the_changed_file():
    _, message = mechanical._try(site("parallel/shard.py", "self.running > 0: GtE"), 0, {LLAMA: dict.fromkeys(WAYS, False)})
    assert message.startswith("sharded: tp, evaluation: "), message


@pytest.mark.slow
def test_a_spec_that_is_no_longer_refused_is_a_failure():
    unchanged = dict.fromkeys(WAYS, False)
    harmless = site("parallel/mesh.py", "min(sizes) < 1 or data * sequence * tensor != world: And")
    assert mechanical._try(harmless, 0, {LLAMA: {**unchanged, "tp": True}})[1].startswith("sharded: tp is not refused")


@pytest.mark.slow
def test_an_interrupted_run_ends_at_once():
    """Ctrl-C while the first of forty mutants are judged; the unchanged code is taken to pass."""
    code = (
        "import threading, os, signal, time\n"
        "from checks.mutants import mechanical as mutate\n"
        "own = mechanical._try\n"
        "mechanical._try = lambda site, *rest: (site, '') if site is None else own(site, *rest)\n"
        "mutate.refusals = lambda seed: {}\n"
        "def interrupt():\n"
        "    while not mutate.RUNNING:\n"
        "        time.sleep(0.1)\n"
        "    print(time.monotonic(), flush=True)\n"
        "    os.kill(os.getpid(), signal.SIGINT)\n"
        "threading.Thread(target=interrupt, daemon=True).start()\n"
        "if __name__ == '__main__':\n"
        "    mutate.run_random(40, 3)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=240)
    assert done.returncode != 0
    assert time.monotonic() - float(done.stdout) < 20
