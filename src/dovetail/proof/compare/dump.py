"""Read a dump: the activations that another engine computed for a few token ids, as safetensors files and one `dump.json`.

    {"format": "dovetail-dump-1", "engine": "vllm 0.32.0", "dtype": "float32",
     "passes": [{"files": ["0.safetensors"],          one file per rank
                 "ids": [5, 9, 2, 7],                 the tokens of all sequences of one forward pass, one after the other
                 "sequences": [0, 0, 0, 1],           the sequence of each token
                 "positions": [0, 1, 2, 0]}, …],      its position, as the engine was given it
     "sharding": {"*.qkv_proj": -1}}                  optional: the dimension along which the tensors of ranks are shards

A tensor is called as the module that returns it; `NAME.in` is the input of the module. Where a module returns (or takes)
several tensors they are `NAME#0`, `NAME#1`; a second call of the module in one pass is `NAME~1`. `logits` are the logits.

Rows of a tensor are tokens: (tokens, …), (1, tokens, …) or (sequences, n, …). Rows after the last token are padding. A tensor
with one row per sequence holds the last token of each. All of it is untrusted input: files are opened by disk/untrusted.py and
disk/tensors.py, and every count is bounded.
"""

from __future__ import annotations

import dataclasses as dc
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dovetail.base.dtypes import dtype_of
from dovetail.base.errors import FileError, printable
from dovetail.base.limits import DUMP_BYTES, DUMP_NAME, DUMP_PASSES, DUMP_TENSORS, DUMP_TOKENS, JSON_NUMBER
from dovetail.disk.tensors import TensorFile
from dovetail.disk.untrusted import Directory, refuse_pickles

DUMP_FILE, FORMAT = "dump.json", "dovetail-dump-1"
KEYS = frozenset({"format", "engine", "dtype", "passes", "sharding"})
PASS_KEYS = ("files", "ids", "sequences", "positions")
PADDING = 512  # the most rows that an engine adds after the last token, per sequence
EXACT = torch.float64


@dc.dataclass(frozen=True)
class DumpPass:
    """One forward pass: its files by rank, and the id, the sequence and the position of every token."""

    files: tuple[str, ...]
    ids: tuple[int, ...]
    sequences: tuple[int, ...]
    positions: tuple[int, ...]

    def counts(self) -> list[int]:
        """The number of tokens of each sequence, in order of appearance."""
        counts: dict[int, int] = {}
        for sequence in self.sequences:
            counts[sequence] = counts.get(sequence, 0) + 1
        return list(counts.values())


@dc.dataclass(frozen=True)
class DumpTensor:
    """A tensor of a dump over all tokens of its sequences: shards (tokens, width) by rank, and which tokens it has."""

    shards: tuple[Tensor, ...]
    present: Tensor  # (tokens,)
    dim: int | None = None  # the declared dimension of sharding; None: every rank has the whole

    def width(self) -> int:
        """The columns of all ranks."""
        return sum(shard.shape[1] for shard in self.shards)

    def whole(self) -> Tensor:
        """The tensor of all ranks."""
        return self.shards[0] if self.dim is None else torch.cat(self.shards, -1)


class Dump:
    """A dump on disk. Tokens are ordered by sequence, and in a sequence by appearance."""

    def __init__(self, place: str | Path, label: str | None = None) -> None:
        self.directory = Directory(place)
        self.where = str(self.directory.place / DUMP_FILE)
        self.label = label or f"dump:{place}"
        if not self.directory.has(DUMP_FILE):
            refuse_pickles(self.directory)  # as SGLang's dumper writes them
        data = self.directory.json(DUMP_FILE)
        if data.get("format") != FORMAT:
            raise self._error(f"its format is {str(data.get('format'))[:40]!r}; the known one is {FORMAT!r}")
        if unknown := sorted(set(data) - KEYS):
            raise self._error(f"unknown key {unknown[0][:40]!r}; the keys are {', '.join(sorted(KEYS))}")
        self.engine = printable(str(data.get("engine", "")))[:80]
        self.dtype = dtype_of(str(data.get("dtype", "")))
        if self.dtype.itemsize < 2:
            raise self._error(f"its dtype is {data['dtype']!r}; activations have float64, float32, bfloat16 or float16")
        self.sharding = self._sharding(data.get("sharding", {}))
        self.passes = self._passes(data.get("passes"))
        self.sequences = self._by_sequence(lambda one: one.ids)
        self.order = self._order()
        self._tensors = self._read()

    def _by_sequence(self, column: Callable[[DumpPass], tuple[int, ...]]) -> dict[int, list[int]]:
        """What a column of all passes has for each sequence."""
        values: dict[int, list[int]] = {}
        for one in self.passes:
            for sequence, value in zip(one.sequences, column(one), strict=True):
                values.setdefault(sequence, []).append(value)
        return values

    def prefill(self, sequence: int) -> int:
        """The number of tokens of a sequence that were computed before its first pass with a single token."""
        counts = [one.sequences.count(sequence) for one in self.passes]
        counts = [count for count in counts if count]
        steps = next((i for i, count in enumerate(counts) if i and count == 1), len(counts))
        return sum(counts[:steps])

    def shifted(self) -> list[str]:
        """Sentences on sequences whose positions are not 0, 1, 2 …"""
        positions_of = self._by_sequence(lambda one: one.positions)
        wrong = [(name, positions) for name, positions in positions_of.items() if positions != list(range(len(positions)))]
        return [
            f"in sequence {sequence} token {i} has position {positions[i]}"
            for sequence, positions in wrong
            for i in [next(i for i, position in enumerate(positions) if position != i)]
        ]

    def names(self) -> list[str]:
        """The names of the tensors, in the order of the first file."""
        return list(self._tensors)

    def __getitem__(self, name: str) -> DumpTensor:
        return self._tensors[name]

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def _error(self, problem: str) -> FileError:
        return FileError(f"{self.where}: {problem}")

    def _sharding(self, given: Any) -> dict[str, int]:
        if not isinstance(given, dict) or not all(value == -1 and type(value) is int for value in given.values()):
            raise self._error("sharding maps patterns of names to -1, the dimension of shards; other dimensions are not read")
        return given

    def _passes(self, given: Any) -> list[DumpPass]:
        if not isinstance(given, list) or not 0 < len(given) <= DUMP_PASSES:
            raise self._error(f"passes is a list of 1 to {DUMP_PASSES:,} forward passes")
        passes = [self._pass(i, one) for i, one in enumerate(given)]
        if len({len(one.files) for one in passes}) > 1:
            raise self._error("every pass has as many files as there are ranks")
        tokens = sum(len(one.ids) for one in passes)
        if tokens > DUMP_TOKENS:
            raise self._error(f"has {tokens:,} tokens; the limit is {DUMP_TOKENS:,}")
        return passes

    def _pass(self, number: int, given: Any) -> DumpPass:
        if not isinstance(given, dict) or set(given) != set(PASS_KEYS):
            raise self._error(f"passes.{number} has the keys {', '.join(PASS_KEYS)}")
        files = given["files"]
        if not isinstance(files, list) or not files or not all(isinstance(name, str) for name in files):
            raise self._error(f"passes.{number}.files is a list of file names, one per rank")
        columns = [given[key] for key in PASS_KEYS[1:]]
        for key, column in zip(PASS_KEYS[1:], columns, strict=True):
            if not isinstance(column, list) or not all(type(x) is int and 0 <= x < JSON_NUMBER for x in column):
                raise self._error(f"passes.{number}.{key} is a list of whole numbers from 0 on")
        if not columns[0] or len({len(column) for column in columns}) > 1:
            raise self._error(f"passes.{number}: ids, sequences and positions have one entry per token each")
        return DumpPass(tuple(files), *(tuple(column) for column in columns))

    def _order(self) -> Tensor:
        """(tokens,) the index, in the order of passes, of each token in the order of sequences."""
        sequences = torch.tensor([sequence for one in self.passes for sequence in one.sequences])
        ranks = {sequence: i for i, sequence in enumerate(self.sequences)}
        return torch.tensor([ranks[int(one)] for one in sequences]).argsort(stable=True)

    def _read(self) -> dict[str, DumpTensor]:
        """Every floating-point tensor whose rows are tokens."""
        sizes = [os.stat(self.directory.path(name)).st_size for one in self.passes for name in one.files]
        if sum(sizes) > DUMP_BYTES:
            raise self._error(f"its files have {sum(sizes):,} bytes; the limit is {DUMP_BYTES:,}")
        per_pass = [[self._file(name) for name in one.files] for one in self.passes]
        result: dict[str, DumpTensor] = {}
        for name in dict.fromkeys(name for files in per_pass for name in files[0]):
            dim = next((dim for pattern, dim in self.sharding.items() if fnmatchcase(name, pattern)), None)
            shards, present = [], torch.zeros(0, dtype=torch.bool)
            for rank in range(len(self.passes[0].files) if dim is not None else 1):
                parts = [_rows(files[rank].get(name), one) for files, one in zip(per_pass, self.passes, strict=True)]
                widths = {x.shape[1] for x, _ in parts if x is not None}
                if len(widths) != 1:  # no rows per token, or another width in another pass
                    break
                width = widths.pop()
                filled = [torch.zeros(len(mask), width, dtype=EXACT) if x is None else x for x, mask in parts]
                shards.append(torch.cat(filled)[self.order])
                present = torch.cat([mask for _, mask in parts])[self.order]
            if shards and (dim is None or len(shards) == len(self.passes[0].files)):
                result[name] = DumpTensor(tuple(shards), present, dim)
        if not result:
            raise self._error("no tensor of its files has one row per token")
        return result

    def _file(self, name: str) -> Mapping[str, Tensor]:
        path, shown = self.directory.path(name), self.directory.place / name
        with TensorFile(path, shown) as file:
            if len(file.entries) > DUMP_TENSORS:
                raise FileError(f"{shown}: holds {len(file.entries):,} tensors; the limit is {DUMP_TENSORS:,}")
            for tensor in file.entries:
                if len(tensor) > DUMP_NAME or not tensor.isprintable():
                    raise FileError(f"{shown}: the name {printable(tensor[:60])!r} is too long or not printable")
            wide = (name for name, entry in file.entries.items() if entry.dtype.is_floating_point and entry.dtype.itemsize > 1)
            return {name: file.read(name) for name in wide}


def _rows(x: Tensor | None, one: DumpPass) -> tuple[Tensor | None, Tensor]:
    """A tensor of a pass as (tokens, width) in float64, and which tokens it has; None where its rows are no tokens."""
    tokens, counts = len(one.ids), one.counts()
    missing = torch.zeros(tokens, dtype=torch.bool)
    if x is None or x.dim() < 2 or not x.numel():
        return None, missing
    for dims in range(1, x.dim()):
        if prod(x.shape[:dims]) == tokens:
            return x.reshape(tokens, -1).to(EXACT), ~missing
    if x.shape[0] == 1 and x.dim() > 2:
        x = x[0]
    longest = max(counts)
    if x.dim() > 2 and x.shape[0] == len(counts) and longest <= x.shape[1] <= longest + PADDING:
        return torch.cat(list(_cut(x, counts))).to(EXACT), ~missing
    if tokens < x.shape[0] <= tokens + PADDING:
        return x[:tokens].reshape(tokens, -1).to(EXACT), ~missing
    if x.shape[0] == len(counts):
        last = torch.tensor(counts).cumsum(0) - 1
        filled = torch.zeros(tokens, prod(x.shape[1:]), dtype=EXACT)
        filled[last] = x.reshape(len(counts), -1).to(EXACT)
        return filled, missing.index_fill(0, last, True)
    return None, missing


def _cut(x: Tensor, counts: Sequence[int]) -> Iterator[Tensor]:
    """The tokens of every sequence of a padded batch (sequences, n, …)."""
    for row, count in zip(x, counts, strict=True):
        yield row[:count].reshape(count, -1)
