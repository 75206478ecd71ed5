"""Megatron's .bin and .idx: read as written, and validated as untrusted input."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dovetail.base.errors import FileError
from dovetail.data.corpora import open_tokens


def write(
    prefix: Path,
    all_ids: Sequence[Sequence[int]],
    boundaries: Sequence[int] | None = None,
    dtype: str = "<u2",
    **changes: Any,
) -> Path:
    """Write a corpus as Megatron does; `changes` replace fields of the index."""
    arrays = [np.array(ids, dtype) for ids in all_ids]
    lengths = np.array([len(ids) for ids in arrays], "<i4")
    pointers = np.concatenate([[0], np.cumsum(lengths)[:-1]]).astype("<i8") * np.dtype(dtype).itemsize
    code = {"u1": 1, "i1": 2, "<i2": 3, "<i4": 4, "<i8": 5, "<u2": 8}[dtype]
    bounds = np.array(list(range(len(arrays) + 1)) if boundaries is None else boundaries, "<i8")
    fields: dict[str, Any] = {"magic": b"MMIDIDX\x00\x00", "version": 1, "code": code, "sequences": len(arrays)}
    fields |= {"count": len(bounds), "lengths": lengths, "pointers": pointers, "bounds": bounds, "tail": b""}
    fields |= changes
    head = struct.pack("<9sQBQQ", *(fields[name] for name in ("magic", "version", "code", "sequences", "count")))
    body = b"".join(np.asarray(fields[name]).tobytes() for name in ("lengths", "pointers", "bounds"))
    prefix.with_name(prefix.name + ".idx").write_bytes(head + body + fields["tail"])
    prefix.with_name(prefix.name + ".bin").write_bytes(b"".join(ids.tobytes() for ids in arrays))
    return prefix


SEQUENCES = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10]]


@pytest.mark.parametrize("dtype", ["u1", "i1", "<i2", "<i4", "<i8", "<u2"])
@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_every_window_is_read(tmp_path: Path, dtype: str, suffix: str) -> None:
    prefix = write(tmp_path / "corpus.text_document", SEQUENCES, [0, 2, 4], dtype)
    tokens = open_tokens(f"{prefix}{suffix}")
    assert (tokens.tokens, tokens.documents) == (10, 2)
    for start in range(10):
        for stop in range(start + 1, 11):
            assert tokens.read(start, stop).tolist() == list(range(start + 1, stop + 1))
            assert tokens.ends(start, stop).tolist() == [end for end in (5, 10) if start < end <= stop]


def test_the_fingerprint_is_of_the_index_and_the_size(tmp_path: Path) -> None:
    one, again, other = (
        open_tokens(write(tmp_path / name, ids)) for name, ids in (("a", [[1, 2]]), ("b", [[1, 2]]), ("c", [[1], [2]]))
    )
    assert one.fingerprint == again.fingerprint != other.fingerprint


DAMAGE: dict[str, dict[str, Any]] = {
    "is not the index of a Megatron corpus": {"magic": b"MMIDIDX\x00\x01"},
    "corpus of version 1": {"version": 2},
    "dtype 7": {"code": 7},
    r"has [\d,]+ bytes; 4,000,000,000,000 sequences": {"sequences": 4_000_000_000_000},
    "bytes; 4 sequences": {"tail": b"123"},
    "a mode per sequence": {"tail": bytes(4)},
    "length below 0": {"lengths": np.array([3, -2, 1, 4], "<i4")},
    "do not follow from their lengths": {"pointers": np.array([0, 6, 10, 14], "<i8")},
    "the .bin beside it has 20": {"lengths": np.array([3, 2, 1, 5], "<i4")},
    "do not increase from 0 to 4": {"bounds": np.array([0, 3, 2, 3, 4], "<i8")},
}


@pytest.mark.parametrize("says", DAMAGE)
def test_a_damaged_index_is_refused(tmp_path: Path, says: str) -> None:
    prefix = write(tmp_path / "corpus", SEQUENCES, **DAMAGE[says])
    with pytest.raises(FileError, match=rf"corpus\.idx: .*{says}"):
        open_tokens(prefix)


def test_truncated_and_missing_files_are_named(tmp_path: Path) -> None:
    prefix = write(tmp_path / "corpus", SEQUENCES)
    index = tmp_path / "corpus.idx"
    data = index.read_bytes()
    for size in (0, 7, 8, 33, 34, len(data) - 1):
        index.write_bytes(data[:size])
        with pytest.raises(FileError, match=r"corpus\.idx"):
            open_tokens(prefix)
    index.write_bytes(data)
    (tmp_path / "corpus.bin").unlink()
    with pytest.raises(FileError, match=r"corpus\.bin: no such file"):
        open_tokens(prefix)


def test_negative_ids_are_refused(tmp_path: Path) -> None:
    tokens = open_tokens(write(tmp_path / "corpus", [[1, -2]], dtype="<i4"))
    with pytest.raises(FileError, match=r"corpus\.bin: the id -2 among the tokens 0 to 2 is below 0"):
        tokens.read(0, 2)
