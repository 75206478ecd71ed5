from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import IDS, MODEL

import dovetail as dt
from dovetail.core.errors import FileError, InputError
from dovetail.look.streaming import read_stream, stream
from dovetail.look.tracer import trace

ROWS = IDS.repeat(3, 1)


def test_a_stream_holds_what_a_trace_holds_and_resumes(tmp_path: Path) -> None:
    first = stream(MODEL, ROWS[:4], "layers.*.in", "layers.1.mixer.z[head=2]", out=tmp_path / "a", batch=2)
    assert (first.files, first.tokens, first.computed) == (2, 36, 2)
    again = stream(MODEL, iter(ROWS), "layers.*.in", "layers.1.mixer.z[head=2]", out=tmp_path / "a", batch=2)
    assert (again.files, again.tokens, again.computed) == (3, 54, 1)
    want = trace(MODEL, IDS, "layers.*.in", "layers.1.mixer.z[head=2]")
    pieces = list(read_stream(tmp_path / "a"))
    assert len(pieces) == 3
    for piece in pieces:
        assert piece.keys() == want.keys()
        for address, x in piece.items():
            torch.testing.assert_close(x, want[address])


def test_a_directory_belongs_to_one_stream(tmp_path: Path) -> None:
    stream(MODEL, ROWS[:2], "layers.0.in", out=tmp_path, batch=2, dtype=torch.float32)
    assert next(read_stream(tmp_path))["layers.0.in"].dtype == torch.float32
    with pytest.raises(FileError, match="use a new directory"):
        stream(MODEL, ROWS[:2], "layers.1.in", out=tmp_path, batch=2, dtype=torch.float32)
    with pytest.raises(FileError, match="holds no stream"):
        next(read_stream(tmp_path / "none"))
    with pytest.raises(InputError, match="different lengths"):
        stream(MODEL, [IDS[0], IDS[0, :4]], "layers.0.in", out=tmp_path / "b")
    assert dt.look.stream is stream
