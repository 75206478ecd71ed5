"""Read and write safetensors files, one tensor at a time; a tensor that is read is mapped, not copied.

    8 bytes: n, little-endian · n bytes: {name: {"dtype", "shape", "data_offsets"}} as JSON · the data, without gaps

`safetensors.safe_open` does not read untrusted files here: it takes the last of two tensors with one name, follows links,
parses headers of 100 MB, and the process dies of SIGBUS where a file is truncated before a tensor is read
(tests/files/test_tensors.py).

The header is checked against the file before it is used: every dtype is known, every size is the product of its shape, every
tensor begins where the one before it ends, and the last ends with the file. So no allocation is larger than the file.

A mapped file must not be changed in place while its tensors are in use; replacing it by another file of its name is safe.
"""

from __future__ import annotations

import functools
import json
import mmap
import os
import struct
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from dovetail.base.errors import FileError
from dovetail.base.limits import JSON_BYTES
from dovetail.disk.untrusted import open_regular, parse_object, pickle_refusal

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_DIMS = 16
ALIGNMENT = 64  # bytes: the data of a file that we write begins at a multiple
CHUNK = 2**30  # bytes per system call
PICKLE_STARTS = (b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")


class Entry(NamedTuple):
    """One tensor of a file: its dtype, shape and byte range."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # bytes from the beginning of the file
    stop: int

    @property
    def size(self) -> int:
        """Its size in bytes."""
        return self.stop - self.start


class TensorFile:
    """An open file with a checked header. `shown` is its name in errors."""

    def __init__(self, path: Path, shown: Path | None = None) -> None:
        self.shown = shown or path
        self.handle = open_regular(path, self.shown)
        self.size = os.fstat(self.handle).st_size
        try:
            self.entries = self._entries()
        except BaseException:
            os.close(self.handle)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self.handle)

    def read(self, name: str) -> Tensor:
        """Return one tensor, mapped: its pages are read from the file on first use, and copied on the first write."""
        entry = self.entries[name]
        if not entry.size:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if entry.start % entry.dtype.itemsize:  # torch needs aligned memory
            bytes_ = torch.frombuffer(self._mapped, dtype=torch.uint8, count=entry.size, offset=entry.start)
            return bytes_.clone().view(entry.dtype).reshape(entry.shape)
        count = entry.size // entry.dtype.itemsize
        return torch.frombuffer(self._mapped, dtype=entry.dtype, count=count, offset=entry.start).reshape(entry.shape)

    @functools.cached_property
    def _mapped(self) -> mmap.mmap:
        """The whole file, mapped privately: writes do not reach the file."""
        if os.fstat(self.handle).st_size != self.size:
            raise FileError(f"{self.shown}: its size changed while it was read; try again")
        try:
            return mmap.mmap(self.handle, self.size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except (OSError, ValueError) as error:
            raise FileError(f"{self.shown}: cannot be mapped ({error})") from error

    def _entries(self) -> dict[str, Entry]:
        size = self.size
        first = os.pread(self.handle, 8, 0)
        if len(first) < 8:
            raise self._damaged(f"it ends after {len(first)} bytes")
        (length,) = struct.unpack("<Q", first)
        if length > size - 8 and first.startswith(PICKLE_STARTS):
            raise FileError(pickle_refusal(self.shown))
        if length > size - 8:
            raise self._damaged(f"a header of {length:,} bytes does not fit into {size:,}")
        if length > JSON_BYTES:
            raise FileError(f"{self.shown}: has a header of {length:,} bytes; more than {JSON_BYTES:,} are not read")
        header = parse_object(os.pread(self.handle, length, 8), str(self.shown))
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
            raise self._damaged("its metadata are not strings")
        entries = {name: self._entry(name, described, 8 + length) for name, described in header.items()}
        end = 8 + length
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop)):
            if entry.start != end:
                raise self._damaged(f"{name} does not begin where the tensor before it ends")
            end = entry.stop
        if end != size:
            raise self._damaged(f"its header describes {end:,} bytes; the file has {size:,}")
        return entries

    def _entry(self, name: str, described: Any, begin: int) -> Entry:
        if not isinstance(described, dict) or set(described) != {"dtype", "shape", "data_offsets"}:
            raise self._damaged(f"{name} is not described by dtype, shape and data_offsets")
        dtype, shape, offsets = described["dtype"], described["shape"], described["data_offsets"]
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise FileError(f"{self.shown}: {name} has dtype {dtype!r}; the known ones are {', '.join(DTYPES)}")
        if not _counts(shape) or len(shape) > MAX_DIMS:
            raise self._damaged(f"{name} has no shape")
        if not _counts(offsets) or len(offsets) != 2:
            raise self._damaged(f"{name} has no two offsets")
        size = prod(shape) * DTYPES[dtype].itemsize
        if offsets[1] - offsets[0] != size:
            raise self._damaged(f"{name} takes {offsets[1] - offsets[0]:,} bytes; its shape needs {size:,}")
        return Entry(DTYPES[dtype], tuple(shape), begin + offsets[0], begin + offsets[1])

    def _damaged(self, why: str) -> FileError:
        return FileError(f"{self.shown}: is damaged or not a safetensors file ({why})")


def _counts(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def write_tensors(path: Path, layout: Mapping[str, Tensor], tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Write a new file. `layout` gives the shape and dtype of each tensor (on meta, if need be); `tensors` then come one by
    one, in any order, so that only one has to be in memory."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end, starts = 0, {}
    for name, tensor in sorted(
        layout.items(), key=lambda item: -item[1].dtype.itemsize
    ):  # the largest items first, so that all are aligned
        starts[name], end = end, end + tensor.nbytes
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [starts[name], end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGNMENT)  # so that mapped tensors are aligned as kernels prefer
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _write_at(handle, memoryview(struct.pack("<Q", len(text)) + text), 0)
        for name, tensor in tensors:
            assert tensor.shape == layout[name].shape
            assert tensor.dtype == layout[name].dtype
            if tensor.numel():
                flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
                _write_at(handle, flat.numpy().data, 8 + len(text) + starts.pop(name))
            else:
                starts.pop(name)
        assert not starts, f"{sorted(starts)[0]} was not given"
    finally:
        os.close(handle)


def _write_at(handle: int, data: memoryview, start: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(handle, data[done : done + CHUNK], start + done)
