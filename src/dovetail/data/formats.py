"""Formats of input files: text, JSON Lines and Parquet. Each cuts a file into spans that are read apart, and yields documents.

    text      one document per file; or per line; or a line equal to `separator` between two documents
    jsonl     one document per line: the string in one field of a JSON object
    parquet   one document per row: the string in one column

A span [start, stop) of a text file owns the documents that begin in it, so spans can be read in any order, by any process, and
no document is read twice or left out. A file is untrusted: what is not UTF-8, not JSON or too long is an error with file and
line.
"""

from __future__ import annotations

import contextlib
import dataclasses as dc
import importlib
import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, NoReturn

from dovetail.base.errors import DovetailError, FileError, UsageError, install_command, names_or_nearest
from dovetail.base.limits import TEXT_BYTES
from dovetail.disk.untrusted import open_named

BOM = b"\xef\xbb\xbf"
COUNTED = 1 << 20  # bytes read at once to count lines
GROUP_BYTES = 512 << 20  # of a column in a row group of Parquet, as it is stored before compression
EXPANSION, SMALL = 100, 1 << 18  # characters per byte of a Parquet file, which counts as SMALL at the least


@dc.dataclass(frozen=True)
class ReadOptions:
    """How documents are found in files."""

    field: str = "text"  # of a JSON object, or the column of a table
    lines: bool = False  # text: one document per line
    separator: str | None = None  # text: the line between two documents

    def __post_init__(self) -> None:
        if self.lines and self.separator is not None:
            raise UsageError("--separator: with --lines every line is a document; give one of them")
        if self.separator is not None and ("\n" in self.separator or "\r" in self.separator):
            raise UsageError("--separator: is compared with whole lines, so it cannot hold a line end; for blank lines give ''")


class ByteSpan(NamedTuple):
    """A part of a file that is read by itself, and how many bytes it has, about."""

    start: int
    stop: int
    size: int


class InputFormat(ABC):
    """A format of input files."""

    name: ClassVar[str]
    suffixes: ClassVar[tuple[str, ...]]

    @abstractmethod
    def spans(self, path: Path, size: int, target: int, options: ReadOptions) -> list[ByteSpan]:
        """Return spans of about `target` bytes that cover the file."""

    @abstractmethod
    def documents(self, path: Path, start: int, stop: int, options: ReadOptions) -> Iterator[str]:
        """Yield the documents of a span."""


# -- lines --------------------------------------------------------------------------------------------------------------


class Line(NamedTuple):
    """A line without its end, and the byte it begins at."""

    data: bytes
    start: int


def _lines(path: Path, start: int) -> Iterator[Line]:
    """Yield the lines that begin at or behind `start`."""
    with open_named(path) as file:
        if start:
            file.seek(start - 1)
            while part := file.readline(COUNTED):  # the rest of a line that began before; `start` itself may begin one
                if part.endswith(b"\n"):
                    break
        at = file.tell()
        if at == 0 and file.read(len(BOM)) != BOM:
            file.seek(0)
        while data := file.readline(TEXT_BYTES + 1):
            if len(data) > TEXT_BYTES:
                _fail(path, at, f"is longer than {TEXT_BYTES:,} bytes, the limit for a line")
            yield Line(data.rstrip(b"\r\n") if data.endswith(b"\n") else data, at)
            at = file.tell()


def _fail(path: Path, at: int, what: str, cause: Exception | None = None, further: int = 0) -> NoReturn:
    """Raise FileError for the line that begins at a byte, or some lines further; its number is counted now."""
    with open_named(path) as file:
        number, left = 1 + further, at
        while left and (data := file.read(min(left, COUNTED))):
            number += data.count(b"\n")
            left -= len(data)
    raise FileError(f"{path}:{number}: {what}") from cause


def _decoded(path: Path, at: int, data: bytes) -> str:
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        what = f"is not UTF-8 ({error.reason}); convert it, say with `iconv -f latin1 -t utf-8`"
        _fail(path, at, what, error, data.count(b"\n", 0, error.start))


def _byte_spans(size: int, target: int) -> list[ByteSpan]:
    count = max(1, -(-size // target))
    cuts = [size * i // count for i in range(count + 1)]
    return [ByteSpan(start, stop, stop - start) for start, stop in itertools.pairwise(cuts)]


# -- the formats --------------------------------------------------------------------------------------------------------


class Text(InputFormat):
    """Plain text in UTF-8; line ends of Windows become those of Unix."""

    name, suffixes = "text", (".txt", ".text", ".md")

    def spans(self, path: Path, size: int, target: int, options: ReadOptions) -> list[ByteSpan]:
        return _byte_spans(size, target) if options.lines or options.separator is not None else [ByteSpan(0, size, size)]

    def documents(self, path: Path, start: int, stop: int, options: ReadOptions) -> Iterator[str]:
        if options.lines:
            for line in _lines(path, start):
                if line.start >= stop:
                    return
                yield _decoded(path, line.start, line.data)
        elif options.separator is not None:
            yield from self._separated(path, start, stop, options.separator.encode())
        else:
            yield self._whole(path)

    def _separated(self, path: Path, start: int, stop: int, separator: bytes) -> Iterator[str]:
        """Yield the documents whose separator begins in the span; that of the first document is the start of the file."""
        lines, first, size = list[bytes](), start, 0
        inside = start == 0
        for line in _lines(path, start):
            if line.data != separator:
                first = line.start if not lines else first
                size += len(line.data) + 1
                if inside and size > TEXT_BYTES:
                    _fail(path, first, f"begins a document of more than {TEXT_BYTES:,} bytes, the limit")
                if inside:
                    lines.append(line.data)
                continue
            if inside:
                yield _decoded(path, first, b"\n".join(lines))
            if line.start >= stop:
                return
            lines, inside, size = [], True, 0
        if inside:
            yield _decoded(path, first, b"\n".join(lines))

    def _whole(self, path: Path) -> str:
        with open_named(path) as file:
            data = file.read(TEXT_BYTES + 1)
        if len(data) > TEXT_BYTES:
            remedy = "cut it into documents with --lines or --separator"
            raise FileError(f"{path}: is longer than {TEXT_BYTES:,} bytes, the limit for a document; {remedy}")
        return _decoded(path, 0, data).removeprefix("\ufeff").replace("\r\n", "\n")


class JsonLines(InputFormat):
    """One JSON object per line."""

    name, suffixes = "jsonl", (".jsonl", ".ndjson")

    def spans(self, path: Path, size: int, target: int, options: ReadOptions) -> list[ByteSpan]:
        return _byte_spans(size, target)

    def documents(self, path: Path, start: int, stop: int, options: ReadOptions) -> Iterator[str]:
        for line in _lines(path, start):
            if line.start >= stop:
                return
            if line.data.strip():
                yield self._field(path, line, options.field)

    def _field(self, path: Path, line: Line, field: str) -> str:
        text = _decoded(path, line.start, line.data)
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            _fail(path, line.start, f"is not JSON ({str(error)[:120]})", error)
        if not isinstance(row, dict):
            _fail(path, line.start, "is not a JSON object")
        if field not in row:
            fields = ", ".join(map(repr, list(row)[:12]))[:300]
            _fail(path, line.start, f"has no field {field!r}; its fields are {fields}: choose one with --field")
        value = row[field]
        if not isinstance(value, str):
            _fail(path, line.start, f"its field {field!r} is {type(value).__name__}, not a string")
        try:
            value.encode()
        except UnicodeEncodeError as error:
            _fail(path, line.start, f"its field {field!r} holds a lone surrogate, which is no character", error)
        return value


class Parquet(InputFormat):
    """One row per document; a span is a range of row groups."""

    name, suffixes = "parquet", (".parquet", ".pq")
    ROWS = 1024  # rows decoded at once

    def spans(self, path: Path, size: int, target: int, options: ReadOptions) -> list[ByteSpan]:
        with _parquet(path) as file:
            self._check_column(path, file, options.field)
            self._check_size(path, file, options.field)
            sizes = [max(1, file.metadata.row_group(i).total_byte_size) for i in range(file.metadata.num_row_groups)]
        spans, first, total = list[ByteSpan](), 0, 0
        for number, size_of_group in enumerate(sizes, 1):
            total += size_of_group
            if total >= target or number == len(sizes):
                spans.append(ByteSpan(first, number, total))
                first, total = number, 0
        return spans

    def documents(self, path: Path, start: int, stop: int, options: ReadOptions) -> Iterator[str]:
        with _parquet(path, [options.field]) as file:
            row = sum(file.metadata.row_group(i).num_rows for i in range(start))
            decoded, largest = 0, EXPANSION * max(path.stat().st_size, SMALL)
            for batch in file.iter_batches(self.ROWS, row_groups=list(range(start, stop)), columns=[options.field]):
                for value in batch.column(0):  # one by one: equal strings are stored once, and may be long
                    text = value.as_py()
                    if not isinstance(text, str):
                        raise FileError(f"{path}: row {row + 1:,} of {options.field!r} is {type(text).__name__}, not a string")
                    decoded += len(text)
                    if len(text) > TEXT_BYTES:
                        raise FileError(f"{path}: row {row + 1:,} has more than {TEXT_BYTES:,} characters, the limit for a row")
                    if decoded > largest:
                        raise FileError(f"{path}: holds more than {EXPANSION:,} times its size in text; it is not read further")
                    yield text
                    row += 1

    def _check_size(self, path: Path, file: Any, field: str) -> None:
        """Refuse a row group whose column is too large to decode: pyarrow allocates it as a whole."""
        for i in range(file.metadata.num_row_groups):
            group = file.metadata.row_group(i)
            columns = [group.column(j) for j in range(group.num_columns)]
            size = sum(column.total_uncompressed_size for column in columns if column.path_in_schema.split(".")[0] == field)
            if size > GROUP_BYTES:
                limit = f"the limit is {GROUP_BYTES:,}; write it with smaller row groups"
                raise FileError(f"{path}: row group {i} holds {size:,} bytes of {field!r}; {limit}")

    def _check_column(self, path: Path, file: Any, field: str) -> None:
        names = file.schema_arrow.names
        if field not in names:
            shown = ", ".join(map(repr, names[:12]))[:300]
            raise FileError(f"{path}: has no column {field!r}; its columns are {shown}: choose one with --field")


@contextlib.contextmanager
def _parquet(path: Path, dictionaries: Sequence[str] = ()) -> Iterator[Any]:
    """Open a Parquet file; an error of pyarrow is a FileError with the path. `dictionaries` are columns of which equal values
    are decoded once."""
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError:
        raise FileError(f"{path}: Parquet is read with pyarrow: {install_command('data')}") from None
    with open_named(path) as opened:
        try:
            yield parquet.ParquetFile(opened, read_dictionary=list(dictionaries))
        except DovetailError:
            raise
        except Exception as error:  # pyarrow's errors, ValueError and OSError
            raise FileError(f"{path}: cannot be read as Parquet ({str(error)[:200]})") from error


FORMATS: dict[str, InputFormat] = {format.name: format for format in (Text(), JsonLines(), Parquet())}


def format_of(path: Path, name: str | None) -> InputFormat:
    """Return the format of a file: the one that is named, else by its suffix."""
    if name is not None:
        if name not in FORMATS:
            raise UsageError(f"--format: unknown format {name!r}; {names_or_nearest(name, FORMATS, 'formats')}")
        return FORMATS[name]
    found = [format for format in FORMATS.values() if path.suffix.lower() in format.suffixes]
    if not found:
        known = ", ".join(suffix for format in FORMATS.values() for suffix in format.suffixes)
        raise FileError(f"{path}: its format is not known by its suffix ({known}); name it with --format")
    return found[0]
