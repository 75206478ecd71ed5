"""manifest.json: what a directory of token shards holds. It is written last: a directory without one is unfinished.

    {"dovetail_data": 1, "dtype": "uint16", "tokenizer": {…}, "settings": {…},
     "splits": {"train": {"documents": …, "tokens": …, "bytes": …, "shards": [{"name": …, "sha256": …}, …]}, "held_out": {…}},
     "dropped": {"duplicates": …, "empty": …}, "sha256": "of all the rest"}

The checksum covers the checksums of the shards, so it is the fingerprint of the corpus. A manifest is untrusted input: names
are plain, counts are whole numbers that add up, unknown keys are errors.
"""

from __future__ import annotations

import dataclasses as dc
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.base.errors import FileError
from dovetail.data.shards import ShardInfo, dtype_for
from dovetail.disk.atomic import write_atomically
from dovetail.disk.shape import data_sha256
from dovetail.disk.untrusted import Directory

MANIFEST_FILE = "manifest.json"
SCHEMA = 1
TRAIN, HELD_OUT = "train", "held_out"
SHARD_NAME = re.compile(r"(train|held_out)-\d{5,9}")
SHA256 = re.compile(r"[0-9a-f]{64}")


@dc.dataclass(frozen=True)
class TokenizerInfo:
    """The tokenizer that made the ids; tokenizer.json lies beside the manifest."""

    sha256: str  # of tokenizer.json
    vocab: int  # the number of ids
    end: int | None  # the id behind each document; None: there is none


@dc.dataclass(frozen=True)
class DataSplit:
    """The shards of one split, in order."""

    shards: tuple[ShardInfo, ...] = ()

    @property
    def documents(self) -> int:
        """Documents in all shards."""
        return sum(shard.documents for shard in self.shards)

    @property
    def tokens(self) -> int:
        """Tokens in all shards, those that end documents included."""
        return sum(shard.tokens for shard in self.shards)

    @property
    def bytes(self) -> int:
        """Bytes of text in all shards."""
        return sum(shard.bytes for shard in self.shards)

    def to_data(self) -> dict[str, Any]:
        """Return plain data."""
        counts = {"documents": self.documents, "tokens": self.tokens, "bytes": self.bytes}
        return {**counts, "shards": [dc.asdict(shard) for shard in self.shards]}


@dc.dataclass(frozen=True)
class Manifest:
    """The content of manifest.json."""

    tokenizer: TokenizerInfo
    splits: Mapping[str, DataSplit]
    dropped: Mapping[str, int]
    settings: Mapping[str, Any]  # of the build, for people

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the ids."""
        return dtype_for(self.tokenizer.vocab)

    def to_data(self) -> dict[str, Any]:
        """Return plain data with its checksum."""
        data: dict[str, Any] = {
            "dovetail_data": SCHEMA,
            "dtype": self.dtype.name,
            "tokenizer": dc.asdict(self.tokenizer),
            "settings": dict(self.settings),
            "splits": {name: split.to_data() for name, split in self.splits.items()},
            "dropped": dict(self.dropped),
        }
        return {**data, "sha256": data_sha256(data)}

    @property
    def fingerprint(self) -> str:
        """The SHA-256 of the content, checksums of the shards included."""
        return self.to_data()["sha256"]

    def write(self, directory: Path) -> None:
        """Write manifest.json as a whole."""
        write_atomically(directory / MANIFEST_FILE, json.dumps(self.to_data(), indent=1) + "\n")

    @staticmethod
    def load(directory: str | Path) -> Manifest:
        """Read and validate manifest.json."""
        where = Directory(directory)
        path = where.place / MANIFEST_FILE
        if not where.has(MANIFEST_FILE):
            unfinished = where.has(PLAN_FILE)
            remedy = "run the same `dovetail data build` again to finish it" if unfinished else "build one: dovetail data build"
            what = "is an unfinished corpus" if unfinished else f"is not a corpus of token shards (no {MANIFEST_FILE})"
            raise FileError(f"{where.place}: {what}; {remedy}")
        try:
            return _manifest(where.json(MANIFEST_FILE))
        except _Invalid as error:
            raise FileError(f"{path}: {error}") from None


PLAN_FILE = "build.json"  # of an unfinished build


class _Invalid(Exception):
    """A manifest that cannot be right."""


def _manifest(data: dict[str, Any]) -> Manifest:
    version = data.get("dovetail_data")
    if version != SCHEMA:
        raise _Invalid(f"has schema version {version!r}; this version of Dovetail reads {SCHEMA}")
    keys = ("dovetail_data", "dtype", "tokenizer", "settings", "splits", "dropped", "sha256")
    _exactly(data, keys, "the manifest")
    if data["sha256"] != data_sha256({key: value for key, value in data.items() if key != "sha256"}):
        raise _Invalid("does not match its own checksum: it was changed or damaged; restore it, or build the data again")
    tokenizer = _exactly(data["tokenizer"], ("sha256", "vocab", "end"), "tokenizer")
    vocab = _count(tokenizer["vocab"], "tokenizer.vocab", 2**31 - 1)
    if tokenizer["end"] is not None:
        _count(tokenizer["end"], "tokenizer.end", vocab - 1)
    info = TokenizerInfo(_sha(tokenizer["sha256"], "tokenizer.sha256"), vocab, tokenizer["end"])
    splits = _exactly(data["splits"], (TRAIN, HELD_OUT), "splits")
    dropped = _exactly(data["dropped"], ("duplicates", "empty"), "dropped")
    counts = {name: _count(value, f"dropped.{name}") for name, value in dropped.items()}
    if not isinstance(data["settings"], dict):
        raise _Invalid("settings is not an object")
    manifest = Manifest(info, {name: _split(name, split) for name, split in splits.items()}, counts, data["settings"])
    if data["dtype"] != manifest.dtype.name:
        raise _Invalid(f"dtype is {data['dtype']!r}; a vocabulary of {vocab:,} has {manifest.dtype.name}")
    return manifest


def _split(name: str, data: Any) -> DataSplit:
    _exactly(data, ("documents", "tokens", "bytes", "shards"), name)
    if not isinstance(data["shards"], list):
        raise _Invalid(f"{name}.shards is not a list")
    split = DataSplit(tuple(_shard(name, number, shard) for number, shard in enumerate(data["shards"])))
    names = [shard.name for shard in split.shards]
    if len(set(names)) < len(names):
        raise _Invalid(f"{name}: a shard is listed twice")
    for key in ("documents", "tokens", "bytes"):
        if data[key] != getattr(split, key):
            raise _Invalid(f"{name}.{key} is {data[key]!r}; its shards have {getattr(split, key):,}")
    return split


def _shard(split: str, number: int, data: Any) -> ShardInfo:
    where = f"{split}.shards.{number}"
    _exactly(data, [field.name for field in dc.fields(ShardInfo)], where)
    if not isinstance(data["name"], str) or not SHARD_NAME.fullmatch(data["name"]) or not data["name"].startswith(split):
        raise _Invalid(f"{where}.name is {data['name']!r}, which is not the name of a shard of {split}")
    for key in ("documents", "tokens", "bytes"):
        _count(data[key], f"{where}.{key}")
    for key in ("sha256", "index_sha256"):
        _sha(data[key], f"{where}.{key}")
    return ShardInfo(**data)


def _exactly(data: Any, keys: Any, where: str) -> dict[str, Any]:
    if not isinstance(data, dict) or set(data) != set(keys):
        given = f"its keys are {', '.join(map(str, data))}" if isinstance(data, dict) else "it is not an object"
        raise _Invalid(f"{where} must have the keys {', '.join(keys)}; {given[:200]}")
    return data


def _count(value: Any, where: str, most: int = 2**53) -> int:
    if type(value) is not int or not 0 <= value <= most:
        raise _Invalid(f"{where} is {str(value)[:40]!r}, which is not a whole number up to {most:,}")
    return value


def _sha(value: Any, where: str) -> str:
    if not isinstance(value, str) or not SHA256.fullmatch(value):
        raise _Invalid(f"{where} is {str(value)[:80]!r}, which is not a SHA-256")
    return value
