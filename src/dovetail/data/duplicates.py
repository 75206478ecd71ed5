"""Exact duplicates by the hash of the document; of equal documents the first in the order of the inputs stays.

    unit-00003.hashes     (documents,) hash and index of each, sorted by hash
    unit-00003.unique     (documents / 8,) one bit per document: whether it stays

Hashes have 128 bits: among 10¹² documents two different ones are taken as equal with a probability of 10⁻¹⁵. All units are
merged range by range of hashes, so that memory is bounded.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dovetail.base.limits import MB
from dovetail.disk.atomic import write_atomically

ENTRY = np.dtype([("high", "<u8"), ("low", "<u8"), ("index", "<u8")])
MERGED = 256 * MB  # bytes of entries that are merged at once, about


def write_hashes(path: Path, digests: Iterable[bytes]) -> None:
    """Write the entries of a unit, from digests of 16 bytes."""
    words = np.frombuffer(b"".join(digests), ">u8").reshape(-1, 2)
    entries = np.empty(len(words), ENTRY)
    entries["high"], entries["low"], entries["index"] = words[:, 0], words[:, 1], np.arange(len(words))
    write_atomically(path, np.sort(entries, kind="stable").tobytes())


def drop_duplicates(units: Sequence[tuple[Path, Path]]) -> None:
    """Write, for each (hashes, unique) of the units in order, which documents stay."""
    entries = [_entries(path) for path, _ in units]
    unique = [np.ones(len(some), bool) for some in entries]
    ranges = max(1, sum(some.nbytes for some in entries) // MERGED)
    bounds = [2**64 * i // ranges for i in range(1, ranges)]
    cuts = [[0, *np.searchsorted(some["high"], np.array(bounds, np.uint64)).tolist(), len(some)] for some in entries]
    for i in range(ranges):
        parts = [some[cut[i] : cut[i + 1]] for some, cut in zip(entries, cuts, strict=True)]
        owner = np.repeat(np.arange(len(parts)), [len(part) for part in parts])
        merged = np.concatenate([np.zeros(0, ENTRY), *parts])
        order = np.lexsort((merged["low"], merged["high"]))  # stable: equal hashes stay in the order of units and documents
        high, low = merged["high"][order], merged["low"][order]
        again = order[1:][(high[1:] == high[:-1]) & (low[1:] == low[:-1])]
        for unit in np.unique(owner[again]).tolist():
            unique[unit][merged["index"][again[owner[again] == unit]]] = False
    for (_, path), some in zip(units, unique, strict=True):
        write_atomically(path, len(some).to_bytes(8, "little") + np.packbits(some).tobytes())


def is_unique(path: Path) -> Iterator[bool]:
    """Yield whether each document of a unit stays."""
    data = path.read_bytes()
    count = int.from_bytes(data[:8], "little")
    return iter(np.unpackbits(np.frombuffer(data, np.uint8, offset=8), count=count).astype(bool).tolist())


def _entries(path: Path) -> NDArray[Any]:
    return np.memmap(path, ENTRY, "r") if path.stat().st_size else np.zeros(0, ENTRY)
