"""Token shards: token ids and document ends in two plain files.

    NAME.bin    ids, little-endian uint16 or uint32, one document behind the other
    NAME.idx    magic, version, bytes per token, documents, tokens       32 bytes
                CRC-32 of each block of NAME.bin                         uint32 each
                CRC-32 of each block of the ends                         uint32 each
                CRC-32 of all of the above                               uint32, then zeros up to a multiple of 8
                ends: behind the last token of each document             uint64 each

Everything is validated before it is used: sizes and header when a shard is opened, blocks when they are first read.
"""

from __future__ import annotations

import array
import dataclasses as dc
import hashlib
import struct
import sys
import zlib
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from dovetail.base.errors import FileError
from dovetail.data.blocks import BLOCK, CheckedFile, OpenFiles, block_crcs
from dovetail.disk.atomic import writing

MAGIC, VERSION = b"dovetail", 1
HEADER = struct.Struct("<8sIIQQ")  # magic, version, bytes per token, documents, tokens
DTYPES = {2: np.dtype("<u2"), 4: np.dtype("<u4")}
ENDS = np.dtype("<u8")
PER_BLOCK = BLOCK // ENDS.itemsize


def dtype_for(vocab: int) -> np.dtype[Any]:
    """Return the smallest dtype that holds the ids 0 … vocab − 1."""
    return DTYPES[2 if vocab <= 2**16 else 4]


@dc.dataclass(frozen=True)
class ShardInfo:
    """What the manifest says about a shard."""

    name: str
    documents: int
    tokens: int
    bytes: int  # of the text of its documents, in UTF-8
    sha256: str  # of NAME.bin
    index_sha256: str  # of NAME.idx


def files_of(name: str) -> tuple[str, str]:
    """Return the names of a shard's two files."""
    return f"{name}.bin", f"{name}.idx"


# -- writing ------------------------------------------------------------------------------------------------------------


class ShardWriter:
    """`with ShardWriter(directory, name, dtype) as shard: shard.add(ids, bytes)`; both files appear when the block ends."""

    def __init__(self, directory: Path, name: str, dtype: np.dtype[Any]) -> None:
        self.directory, self.name, self.dtype = directory, name, dtype
        self.ends, self.crcs = array.array("Q"), list[int]()
        self.tokens = self.bytes = 0
        self.pending, self.sha = bytearray(), hashlib.sha256()
        self.opened = writing(directory / files_of(name)[0])
        self.file: BinaryIO | None = None
        self.info: ShardInfo | None = None

    def __enter__(self) -> ShardWriter:
        self.file = self.opened.__enter__()
        return self

    def add(self, ids: NDArray[Any], num_bytes: int) -> None:
        """Append a document: its ids (n,), and the bytes of its text."""
        self.pending += np.ascontiguousarray(ids, self.dtype).tobytes()
        self.tokens += len(ids)
        self.bytes += num_bytes
        self.ends.append(self.tokens)
        if len(self.pending) >= 16 * BLOCK:
            self._flush(len(self.pending) // BLOCK * BLOCK)

    def _flush(self, size: int) -> None:
        assert self.file is not None
        data = bytes(self.pending[:size])
        del self.pending[:size]
        self.crcs += block_crcs(data)
        self.sha.update(data)
        self.file.write(data)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self.opened.__exit__(kind, error, trace)
            return
        self._flush(len(self.pending))
        self.opened.__exit__(None, None, None)
        index = index_bytes(self.dtype.itemsize, self.tokens, self.crcs, self.ends)
        with writing(self.directory / files_of(self.name)[1]) as file:
            file.write(index)
        sums = self.sha.hexdigest(), hashlib.sha256(index).hexdigest()
        self.info = ShardInfo(self.name, len(self.ends), self.tokens, self.bytes, *sums)


def index_bytes(itemsize: int, tokens: int, crcs: list[int], ends: array.array[int]) -> bytes:
    """Return the content of NAME.idx; `crcs` are those of the blocks of NAME.bin."""
    if sys.byteorder == "big":
        ends.byteswap()
    tail = ends.tobytes()
    head = HEADER.pack(MAGIC, VERSION, itemsize, len(ends), tokens)
    head += np.array(crcs + block_crcs(tail), "<u4").tobytes()
    head += struct.pack("<I", zlib.crc32(head))
    return head + bytes(-len(head) % 8) + tail


# -- reading ------------------------------------------------------------------------------------------------------------


class OpenShard:
    """An open shard; positions are counted from its first token."""

    def __init__(self, directory: Path, info: ShardInfo, dtype: np.dtype[Any], files: OpenFiles, check: bool = True) -> None:
        self.tokens, self.documents, self.dtype = info.tokens, info.documents, dtype
        self.path, self.index = (directory / name for name in files_of(info.name))
        check_size(self.path, info.tokens * dtype.itemsize)
        blocks, index_blocks = (-(-size // BLOCK) for size in (info.tokens * dtype.itemsize, info.documents * ENDS.itemsize))
        summed = HEADER.size + 4 * (blocks + index_blocks)
        offset = -(-(summed + 4) // 8) * 8
        check_size(self.index, offset + info.documents * ENDS.itemsize)
        head = files.read(self.index, 0, offset)
        _check_header(self.index, head[: HEADER.size], info, dtype)
        if check and (zlib.crc32(head[:summed]) != struct.unpack_from("<I", head, summed)[0] or any(head[summed + 4 :])):
            raise FileError(f"{self.index}: its header does not match its checksum; restore it, or build the data again")
        crcs = np.frombuffer(head, "<u4", blocks + index_blocks, HEADER.size)
        sizes = info.tokens * dtype.itemsize, info.documents * ENDS.itemsize
        self.ids = CheckedFile(files, self.path, sizes[0], crcs[:blocks] if check else None)
        self.index_ends = CheckedFile(files, self.index, sizes[1], crcs[blocks:] if check else None, offset)

    def read(self, start: int, stop: int) -> NDArray[Any]:
        """Return the ids of a window."""
        size = self.dtype.itemsize
        return np.frombuffer(self.ids.read(start * size, stop * size), self.dtype)

    def ends(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the document ends e with start < e ≤ stop, found by bisection: few blocks of the index are read."""
        low, high = 0, self.documents  # the first end above `start` is in [low, high]
        while high - low > PER_BLOCK:
            middle = (low + high) // 2
            low, high = (low, middle) if self._ends(middle, middle + 1)[0] > start else (middle + 1, high)
        parts = [np.zeros(0, np.int64)]
        while low < self.documents:
            part = self._ends(low, min(low + PER_BLOCK, self.documents))
            parts.append(part[(part > start) & (part <= stop)])
            low += len(part)
            if part[-1] >= stop:
                break
        return np.concatenate(parts)

    def _ends(self, first: int, last: int) -> NDArray[np.int64]:
        size = ENDS.itemsize
        ends = np.frombuffer(self.index_ends.read(first * size, last * size), ENDS).astype(np.int64)
        if ends[0] < 0 or ends[-1] > self.tokens or (np.diff(ends) < 0).any():
            raise FileError(f"{self.index}: the ends of documents {first:,} to {last:,} do not increase up to {self.tokens:,}")
        return ends


def check_size(path: Path, size: int) -> None:
    """Raise FileError unless a file of a shard has the size that follows from the manifest."""
    try:
        actual = path.stat().st_size
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({error.strerror}); the manifest lists it") from error
    if actual != size:
        raise FileError(f"{path}: has {actual:,} bytes, but {size:,} by the manifest; restore it, or build the data again")


def _check_header(path: Path, header: bytes, info: ShardInfo, dtype: np.dtype[Any]) -> None:
    magic, version, itemsize, documents, tokens = HEADER.unpack(header)
    if magic != MAGIC:
        raise FileError(f"{path}: is not the index of a token shard (it begins with {magic!r})")
    if version != VERSION:
        raise FileError(f"{path}: has format version {version}; this version of Dovetail reads {VERSION}")
    if (itemsize, documents, tokens) != (dtype.itemsize, info.documents, info.tokens):
        raise FileError(
            f"{path}: has {documents:,} documents and {tokens:,} tokens of {itemsize} bytes; the manifest says "
            f"{info.documents:,}, {info.tokens:,} and {dtype.itemsize}"
        )
