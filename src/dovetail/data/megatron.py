"""Megatron's indexed datasets: PREFIX.bin and PREFIX.idx.

    PREFIX.bin    ids of all sequences, one behind the other
    PREFIX.idx    "MMIDIDX\\0\\0", version 1 (uint64), dtype (uint8), sequences s (uint64), document boundaries d (uint64)
                  length of each sequence    (s,) int32      tokens
                  pointer of each sequence   (s,) int64      its first byte in PREFIX.bin
                  document boundaries        (d,) int64      0, …, s: the first sequence of each document, and s

The index is untrusted: sizes must match exactly, pointers must follow from lengths, boundaries must increase. Corpora with a
mode per sequence (images) are refused. The format has no checksums, so content is not checked.      Shoeybi et al. 2019
"""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.core.errors import FileError
from dovetail.data.blocks import OpenFiles, Read
from dovetail.data.tokens import Tokens
from dovetail.disk.untrusted import exists, open_regular

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats, which are no ids
REMEDY = "restore it, or write the corpus again"


class MegatronTokens(Tokens):
    """A Megatron corpus."""

    def __init__(self, prefix: str | Path, *, read: Read = os.pread) -> None:
        prefix = Path(prefix)
        self.name = str(prefix)
        self.path, index = (prefix.with_name(f"{prefix.name}{suffix}") for suffix in (".bin", ".idx"))
        for path in (self.path, index):
            if not exists(path):
                raise FileError(f"{path}: no such file; a Megatron corpus has a .bin and an .idx")
        with os.fdopen(open_regular(index.resolve(), index), "rb") as file:
            data = file.read()
        self.path = self.path.resolve()
        with os.fdopen(open_regular(self.path, self.path), "rb") as file:
            size = os.fstat(file.fileno()).st_size
        self.dtype, lengths, boundaries = _parsed(data, index, size)
        self.tokens = size // self.dtype.itemsize
        stops = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
        self.all_ends = stops[boundaries[1:]]
        self.documents = len(self.all_ends)
        self.fingerprint = hashlib.sha256(hashlib.sha256(data).digest() + size.to_bytes(8, "little")).hexdigest()
        self.files = OpenFiles(read=read)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"{self.name}: tokens {start:,} to {stop:,} of {self.tokens:,}")
        size = self.dtype.itemsize
        ids = np.frombuffer(self.files.read(self.path, start * size, stop * size), self.dtype)
        if len(ids) and ids.min() < 0:
            raise FileError(f"{self.path}: the id {ids.min()} among the tokens {start:,} to {stop:,} is below 0")
        return ids

    def ends(self, start: int, stop: int) -> NDArray[np.int64]:
        low, high = np.searchsorted(self.all_ends, (start, stop), side="right")
        return self.all_ends[low:high]


def _parsed(data: bytes, path: Path, size: int) -> tuple[np.dtype[Any], NDArray[np.int32], NDArray[np.int64]]:
    """Return the dtype, the lengths of sequences and the document boundaries of an index."""
    if len(data) < HEADER.size:
        raise FileError(f"{path}: has {len(data)} bytes, fewer than its header; {REMEDY}")
    magic, version, code, sequences, count = HEADER.unpack_from(data)
    if magic != MAGIC or version != 1:
        raise FileError(f"{path}: is not the index of a Megatron corpus of version 1")
    if code not in DTYPES:
        raise FileError(f"{path}: its ids have dtype {code}; known are {', '.join(map(str, DTYPES))}")
    dtype = np.dtype(DTYPES[code])
    expected = HEADER.size + 12 * sequences + 8 * count
    if len(data) == expected + sequences and sequences:
        raise FileError(f"{path}: has a mode per sequence, as a multimodal corpus has; only text is read")
    if len(data) != expected:
        raise FileError(f"{path}: has {len(data):,} bytes; {sequences:,} sequences and {count:,} boundaries are {expected:,}")
    at = HEADER.size
    lengths = np.frombuffer(data, "<i4", sequences, at)
    pointers = np.frombuffer(data, "<i8", sequences, at + 4 * sequences)
    boundaries = np.frombuffer(data, "<i8", count, at + 12 * sequences)
    if sequences == 0 or lengths.min() < 0:
        raise FileError(f"{path}: {'has no sequence' if sequences == 0 else 'a sequence has a length below 0'}; {REMEDY}")
    stops = np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
    if pointers[0] != 0 or (pointers[1:] != stops[:-1]).any():
        raise FileError(f"{path}: the pointers of its sequences do not follow from their lengths; {REMEDY}")
    if stops[-1] != size:
        raise FileError(f"{path}: its sequences have {stops[-1]:,} bytes; the .bin beside it has {size:,}; {REMEDY}")
    if count < 2 or boundaries[0] != 0 or boundaries[-1] != sequences or (np.diff(boundaries) < 0).any():
        raise FileError(f"{path}: its document boundaries do not increase from 0 to {sequences:,}; {REMEDY}")
    return dtype, lengths, boundaries
