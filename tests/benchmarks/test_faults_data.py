"""The faults of the data pipeline at a small size; and a row fails where its guarantee is broken."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dovetail.data import blocks, loader
from dovetail.data.stream import Permutation

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from faults_data import QUICK, ROWS


@pytest.mark.quick(3)
@pytest.mark.parametrize("row", [pytest.param(row, marks=pytest.mark.slow) if row == "D1" else row for row in ROWS])
def test_a_fault_does_no_harm(row: str, tmp_path: Path) -> None:
    result = ROWS[row](tmp_path, **QUICK[row])
    assert result["passed"], result


def _read_ahead_counts(self, position):  # type: ignore[no-untyped-def]
    self.position = position + self.batch  # the bug: the state is that of the readers
    return BATCH_AT(self, position)


BATCH_AT = loader.Loader.batch_at


@pytest.mark.parametrize(
    ("row", "where", "name", "bug"),
    [
        ("D2", loader.Loader, "batch_at", lambda self, at: BATCH_AT(self, at // self.world * self.world + self.world // 3)),
        ("D3", Permutation, "__call__", lambda self, index: (index + len(index) // 16) % self.size),
        ("D4", loader.Loader, "batch_at", _read_ahead_counts),
        ("D5", blocks, "block_crcs", lambda data: [0] * -(-len(data) // blocks.BLOCK)),
        ("D6", blocks.OpenFiles, "drop", lambda self, path: (_ for _ in ()).throw(OSError("no second attempt"))),
    ],
)
def test_a_row_sees_a_bug(
    row: str, where: object, name: str, bug: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(where, name, bug)
    if row == "D5":
        monkeypatch.setattr("dovetail.data.shards.block_crcs", bug)
    try:
        result = ROWS[row](tmp_path, **QUICK[row])
    except OSError:
        return
    assert not result["passed"], result
