"""Open a corpus: a directory of token shards, or Megatron's pair of .bin and .idx."""

from __future__ import annotations

import bisect
import hashlib
import itertools
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.core.errors import FileError
from dovetail.data.blocks import OpenFiles, Read
from dovetail.data.manifest import MANIFEST_FILE, TRAIN, Manifest
from dovetail.data.megatron import MegatronTokens
from dovetail.data.shards import Shard, check_size, files_of
from dovetail.data.tokens import Tokens
from dovetail.disk.checksum import file_sha256
from dovetail.disk.untrusted import exists


class ShardedTokens(Tokens):
    """A split of a directory of token shards; its shards form one sequence. Reading is safe in many threads."""

    def __init__(self, directory: str | Path, split: str = TRAIN, *, check: bool = True, read: Read = os.pread) -> None:
        self.directory, self.check = Path(directory), check
        self.manifest = Manifest.load(directory)
        self.split = self.manifest.splits[split]
        self.name = f"{directory} ({split})"
        self.tokens, self.documents, self.bytes = self.split.tokens, self.split.documents, self.split.bytes
        self.fingerprint = hashlib.sha256(f"{self.manifest.fingerprint} {split}".encode()).hexdigest()
        self.starts = list(itertools.accumulate((shard.tokens for shard in self.split.shards), initial=0))
        self.files, self.shards, self.lock = OpenFiles(read=read), dict[int, Shard](), threading.Lock()
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

    def _within(self, start: int, stop: int) -> list[tuple[Shard, int, int, int]]:
        """(shard, its first token, and the part of the window in it) of every shard that the window touches."""
        if not 0 <= start <= stop <= self.tokens:
            raise IndexError(f"{self.name}: tokens {start:,} to {stop:,} of {self.tokens:,}")
        found, at = list[tuple[Shard, int, int, int]](), bisect.bisect_right(self.starts, start) - 1
        while at < len(self.split.shards) and self.starts[at] < stop:
            first, last = self.starts[at], self.starts[at + 1]
            if first < last:
                found.append((self._shard(at), first, max(start, first) - first, min(stop, last) - first))
            at += 1
        return found

    def _shard(self, at: int) -> Shard:
        with self.lock:
            if at not in self.shards:
                self.shards[at] = Shard(self.directory, self.split.shards[at], self.manifest.dtype, self.files, self.check)
            return self.shards[at]


def open_tokens(path: str | Path, split: str = TRAIN, *, check: bool = True) -> Tokens:
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
