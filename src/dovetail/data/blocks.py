"""Files read by position, with a CRC-32 per block that is compared at every read of the block.

    file   |  block 0, 64 KiB  |  block 1  |  …  |  last, shorter  |        crcs  (blocks,) uint32

A corpus of terabytes is neither hashed when it is opened nor trusted: a byte that has changed, at whatever moment, is found in
the block that holds it, before a token of that block is returned; that costs less than 0.3 ms per block. Reads are `pread`, not
a memory map: a page of a map that cannot be read ends the process with SIGBUS, whereas a failed `pread` is tried again, and
then is an error that names the file.
"""

from __future__ import annotations

import collections
import os
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dovetail.base.errors import FileError
from dovetail.disk.untrusted import open_regular, problem

BLOCK = 1 << 16  # bytes
OPEN_FILES = 64  # descriptors that stay open: a corpus may have more shards than a process may open
RETRIES = (0.1, 0.5, 2.0)  # seconds before each further attempt of a read that failed

Read = Callable[[int, int, int], bytes]  # (descriptor, bytes, offset), as os.pread


def block_crcs(data: bytes) -> list[int]:
    """Return the CRC-32 of each block of the data."""
    return [zlib.crc32(data[i : i + BLOCK]) for i in range(0, len(data), BLOCK)]


class Descriptor:
    """An open file, closed when nobody refers to it any more: a thread may still read from one that OpenFiles dropped."""

    def __init__(self, path: Path) -> None:
        self.number = open_regular(path, path)

    def __del__(self) -> None:
        if (number := getattr(self, "number", None)) is not None:
            os.close(number)


class OpenFiles:
    """The most recently used files of a corpus, kept open."""

    def __init__(self, most: int = OPEN_FILES, read: Read = os.pread) -> None:
        self.most, self.pread, self.lock = most, read, threading.Lock()
        self.files: collections.OrderedDict[Path, Descriptor] = collections.OrderedDict()

    def open(self, path: Path) -> Descriptor:
        """Return the open file at this path."""
        with self.lock:
            if path not in self.files:
                self.files[path] = Descriptor(path)
                while len(self.files) > self.most:
                    self.files.popitem(last=False)
            self.files.move_to_end(path)
            return self.files[path]

    def drop(self, path: Path) -> None:
        """Open the file anew at the next read."""
        with self.lock:
            self.files.pop(path, None)

    def read(self, path: Path, start: int, stop: int) -> bytes:
        """Return the bytes [start, stop) of a file; a failed read is tried again, as often as RETRIES says."""
        for delay in (*RETRIES, None):
            try:
                return self._read(path, start, stop)
            except OSError as error:
                if delay is None:
                    attempts = len(RETRIES) + 1
                    where = f"bytes {start:,} to {stop:,} cannot be read after {attempts} attempts"
                    raise FileError(f"{path}: {where} ({problem(error)})") from error
                self.drop(path)
                time.sleep(delay)
        raise AssertionError("the last attempt returns or raises")

    def _read(self, path: Path, start: int, stop: int) -> bytes:
        file, parts, at = self.open(path), list[bytes](), start
        while at < stop:
            part = self.pread(file.number, stop - at, at)
            if not part:
                raise FileError(f"{path}: ends at byte {at:,}, where {stop:,} are needed; restore it, or build the data again")
            parts.append(part)
            at += len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


class CheckedFile:
    """The bytes of a file from `offset`, in blocks with known CRCs; None: not checked."""

    def __init__(self, files: OpenFiles, path: Path, size: int, crcs: NDArray[np.uint32] | None, offset: int = 0) -> None:
        self.files, self.path, self.size, self.crcs, self.offset = files, path, size, crcs, offset

    def read(self, start: int, stop: int) -> memoryview:
        """Return the bytes [start, stop)."""
        first, last = start // BLOCK, -(-stop // BLOCK)
        if self.crcs is None:
            return memoryview(self.files.read(self.path, self.offset + start, self.offset + stop))
        begin, end = first * BLOCK, min(last * BLOCK, self.size)
        data = self.files.read(self.path, self.offset + begin, self.offset + end)
        for number, crc in enumerate(block_crcs(data), first):
            if crc != self.crcs[number]:
                at = self.offset + number * BLOCK
                raise FileError(
                    f"{self.path}: the block at byte {at:,} does not match its checksum: the file was changed or damaged; "
                    "restore it, or build the data again"
                )
        return memoryview(data)[start - begin : stop - begin]
