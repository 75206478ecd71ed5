"""The tree as data, and what every room stands on, import no torch: a spec is read and checked before it is needed."""

from __future__ import annotations

import subprocess
import sys

import pytest

IMPORTS = """
import importlib, pkgutil, sys
room = importlib.import_module(sys.argv[1])
for module in pkgutil.iter_modules(room.__path__, room.__name__ + "."):
    importlib.import_module(module.name)
print(len([name for name in sys.modules if name.startswith(room.__name__ + ".")]), "torch" in sys.modules)
"""


def imported(room: str) -> tuple[int, bool]:
    """How many modules a room has, and whether importing them imports torch."""
    run = subprocess.run([sys.executable, "-P", "-c", IMPORTS, room], capture_output=True, text=True, check=True)
    count, torch = run.stdout.split()
    return int(count), torch == "True"


@pytest.mark.parametrize(("room", "least"), [("dovetail.base", 10), ("dovetail.spec", 5)])
def test_a_room_without_tensors_imports_no_torch(room: str, least: int) -> None:
    count, torch = imported(room)
    assert count >= least
    assert not torch


@pytest.mark.slow
def test_torch_is_seen_where_it_is_imported() -> None:
    assert imported("dovetail.nn.groups")[1]
