from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tiny import IDS, MODEL, OTHER, SPEC

import dovetail as dt
from dovetail.base.errors import FileError, InputError
from dovetail.look.streaming import read_stream, stream
from dovetail.look.tracer import trace
from dovetail.proof.laws.case import perturbed

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
        assert torch.equal(piece.pop("ids"), IDS)
        assert piece.keys() == want.keys()
        for address, x in piece.items():
            torch.testing.assert_close(x, want[address])


def test_a_directory_belongs_to_one_stream(tmp_path: Path) -> None:
    stream(MODEL, ROWS[:2], "layers.0.in", out=tmp_path, batch=2, dtype=torch.float32)
    assert next(read_stream(tmp_path))["layers.0.in"].dtype == torch.float32
    with pytest.raises(FileError, match="use a new directory"):
        stream(MODEL, ROWS[:2], "layers.1.in", out=tmp_path, batch=2, dtype=torch.float32)
    with pytest.raises(FileError, match="no such directory"):
        next(read_stream(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileError, match="holds no stream"):
        next(read_stream(tmp_path / "empty"))
    with pytest.raises(InputError, match="different lengths"):
        stream(MODEL, [IDS[0], IDS[0, :4]], "layers.0.in", out=tmp_path / "b")
    assert dt.look.stream is stream


def test_other_weights_or_other_rows_are_refused(tmp_path: Path) -> None:
    """Each was resumed silently: one half of the files was of another model, or of another text."""
    stream(MODEL, ROWS[:4], "layers.0.in", out=tmp_path, batch=2)
    with pytest.raises(FileError, match="of other weights; use a new directory"):
        stream(perturbed(SPEC, 1), ROWS[:4], "layers.0.in", out=tmp_path, batch=2)
    with pytest.raises(FileError, match=r"000001.safetensors: holds the activations of other rows"):
        stream(MODEL, torch.cat([ROWS[:2], OTHER]), "layers.0.in", out=tmp_path, batch=2)
    with pytest.raises(FileError, match="other rows"):
        stream(MODEL, ROWS[:3], "layers.0.in", out=tmp_path, batch=2)
    with pytest.raises(FileError, match="holds rows after the last of these"):
        stream(MODEL, ROWS[:2], "layers.0.in", out=tmp_path, batch=2)
    assert stream(MODEL, ROWS[:4], "layers.0.in", out=tmp_path, batch=2).computed == 0


def test_what_is_no_stream_is_refused(tmp_path: Path) -> None:
    stream(MODEL, ROWS[:2], "layers.0.in", out=tmp_path, batch=2)
    file = tmp_path / "000000.safetensors"
    file.write_bytes(file.read_bytes()[:-8])
    with pytest.raises(FileError, match="its header describes"):
        list(read_stream(tmp_path))
    file.unlink()
    file.symlink_to("/dev/zero")
    with pytest.raises(FileError, match="is a link out of the directory"):
        list(read_stream(tmp_path))
    (tmp_path / "stream.json").write_text("[" * 10**6)
    with pytest.raises(FileError, match=r"stream.json: holds more than"):
        stream(MODEL, ROWS[:2], "layers.0.in", out=tmp_path, batch=2)
