"""Corpora: one long sequence of token ids, cut into documents, in a directory of token shards or in Megatron's .bin and .idx.

    ids    e0 e1 e2 e3 │ e4 e5 │ e6 e7 e8 …        ends  4 6 …     the position behind the last token of each document

    PREFIX.bin    ids of all sequences, one behind the other
    PREFIX.idx    "MMIDIDX\\0\\0", version 1 (uint64), dtype (uint8), sequences s (uint64), document boundaries d (uint64)
                  length of each sequence    (s,) int32      tokens
                  pointer of each sequence   (s,) int64      its first byte in PREFIX.bin
                  document boundaries        (d,) int64      0, …, s: the first sequence of each document, and s

Any window can be read without reading what comes before. Megatron's index is untrusted: sizes must match exactly, pointers must
follow from lengths, boundaries must increase. Corpora with a mode per sequence (images) are refused. That format has no
checksums, so content is not checked.      Shoeybi et al. 2019
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
import struct
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.base.errors import FileError
from dovetail.data.blocks import OpenFiles, Read
from dovetail.data.manifest import MANIFEST_FILE, TRAIN, Manifest
from dovetail.data.shards import OpenShard, check_size, files_of
from dovetail.disk.shape import file_sha256
from dovetail.disk.untrusted import exists, open_regular


class CorpusTokens(ABC):
    """The token ids of a corpus."""

    name: str  # for messages
    tokens: int
    documents: int
    fingerprint: str  # of the content: equal corpora have equal ones

    @abstractmethod
    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return the ids (stop − start,) of a window, unsigned or not, as they are stored."""

    @abstractmethod
    def ends(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the document ends e with start < e ≤ stop, in order."""


# -- Megatron ---------------------------------------------------------------------------------------------------------


MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<9sQBQQ")
DTYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}  # 6 and 7 are floats, which are no ids
REMEDY = "restore it, or write the corpus again"


class MegatronTokens(CorpusTokens):
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


# -- token shards -----------------------------------------------------------------------------------------------------


class ShardedTokens(CorpusTokens):
    """A split of a directory of token shards; its shards form one sequence. Reading is safe in many threads."""

    def __init__(self, directory: str | Path, split: str = TRAIN, *, check: bool = True, read: Read = os.pread) -> None:
        self.directory, self.check = Path(directory), check
        self.manifest = Manifest.load(directory)
        self.split = self.manifest.splits[split]
        self.name = f"{directory} ({split})"
        self.tokens, self.documents, self.bytes = self.split.tokens, self.split.documents, self.split.bytes
        self.fingerprint = hashlib.sha256(f"{self.manifest.fingerprint} {split}".encode()).hexdigest()
        self.starts = list(itertools.accumulate((shard.tokens for shard in self.split.shards), initial=0))
        self.files, self.shards, self.lock = OpenFiles(read=read), dict[int, OpenShard](), threading.Lock()
        if not self.tokens:
            raise FileError(f"{self.name}: holds no tokens; build the data with a larger fraction of them (--held-out)")
        for shard in self.split.shards:
            check_size(self.directory / files_of(shard.name)[0], shard.tokens * self.manifest.dtype.itemsize)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        parts = [shard.read(low, high) for shard, _, low, high in self._within(start, stop)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def ends(self, start: int, stop: int) -> NDArray[np.int64]:
        parts = [shard.ends(low, high) + first for shard, first, low, high in self._within(start, stop)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _within(self, start: int, stop: int) -> list[tuple[OpenShard, int, int, int]]:
        """(shard, its first token, and the part of the window in it) of every shard that the window touches."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"{self.name}: tokens {start:,} to {stop:,} of {self.tokens:,}")
        found, at = list[tuple[OpenShard, int, int, int]](), bisect.bisect_right(self.starts, start) - 1
        while at < len(self.split.shards) and self.starts[at] < stop:
            first, last = self.starts[at], self.starts[at + 1]
            if first < last:
                found.append((self._shard(at), first, max(start, first) - first, min(stop, last) - first))
            at += 1
        return found

    def _shard(self, at: int) -> OpenShard:
        with self.lock:
            if at not in self.shards:
                self.shards[at] = OpenShard(self.directory, self.split.shards[at], self.manifest.dtype, self.files, self.check)
            return self.shards[at]


def open_tokens(path: str | Path, split: str = TRAIN, *, check: bool = True) -> CorpusTokens:
    """Open a directory of token shards, or the path of a Megatron corpus with or without .bin or .idx.

    `check` compares every block with its checksum before its first use; False reads a damaged corpus as it is.
    """
    path = Path(path)
    if exists(path / MANIFEST_FILE) or path.is_dir():
        return ShardedTokens(path, split, check=check)
    prefix = path.with_suffix("") if path.suffix in (".bin", ".idx") else path
    if exists(prefix.with_name(f"{prefix.name}.idx")):
        return MegatronTokens(prefix)
    raise FileError(f"{path}: is neither a directory of token shards nor a Megatron corpus (no {prefix.name}.idx)")


def verify_shards(directory: str | Path, progress: Callable[[int, int], None] = lambda done, total: None) -> list[str]:
    """Compare the SHA-256 of every file with the manifest; return what differs, in words. `progress(bytes, all bytes)`."""
    manifest, problems, done = Manifest.load(directory), list[str](), 0
    shards = [shard for split in manifest.splits.values() for shard in split.shards]
    total = sum(shard.tokens for shard in shards) * manifest.dtype.itemsize
    for shard in shards:
        for name, expected in zip(files_of(shard.name), (shard.sha256, shard.index_sha256), strict=True):
            path = Path(directory) / name
            try:
                actual = file_sha256(path)
            except FileError as error:
                problems.append(str(error))
                continue
            if actual != expected:
                problems.append(f"{path}: its SHA-256 is {actual[:12]}…, but {expected[:12]}… by the manifest")
        done += shard.tokens * manifest.dtype.itemsize
        progress(done, total)
    return problems
