"""BuildPlan: the units of work of a build, a function of the inputs and the settings alone.

    files, globs → sources → spans → units of about equal size; unit 7 → train-00007, held_out-00007

The number of workers has no part in it, so it does not change the result. The plan is build.json in the output directory. A
build that finds the same plan there continues it; another plan is refused.
"""

from __future__ import annotations

import dataclasses as dc
import glob
import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from dovetail.base.errors import FileError, UsageError
from dovetail.base.limits import MB
from dovetail.data.formats import FORMATS, ReadOptions, format_of
from dovetail.disk.untrusted import exists, problem

BYTES = "bytes"  # the name of the tokenizer with one token per byte
UNIT_BYTES = (MB, 256 * MB)  # of input per unit, at least and at most
UNITS = 256  # that are aimed at between these limits: many more than processes, for an even end and a smooth progress bar
MOST_UNITS = 8192  # of a corpus of terabytes, whose units are larger
VERSION = 1
PLAN_KEYS = ("dovetail_build", "settings", "sources", "units")


@dc.dataclass(frozen=True)
class BuildSettings:
    """What determines the result, beside the inputs."""

    tokenizer: str  # the SHA-256 of tokenizer.json
    vocab: int
    end: int | None  # the id behind each document
    options: ReadOptions
    deduplicate: bool
    held_out: float  # the fraction of documents


@dc.dataclass(frozen=True)
class FileSpan:
    """A span of a file."""

    path: str
    format: str
    start: int
    stop: int

    def documents(self, options: ReadOptions) -> Iterator[str]:
        """Yield its documents."""
        return FORMATS[self.format].documents(Path(self.path), self.start, self.stop, options)


@dc.dataclass(frozen=True)
class Unit:
    """Pieces that one worker turns into one shard per split."""

    pieces: tuple[FileSpan, ...]
    size: int  # bytes of input, about


@dc.dataclass(frozen=True)
class BuildPlan:
    """The units of a build."""

    settings: BuildSettings
    sources: tuple[tuple[str, int, int], ...]  # path, bytes and time of the last change of each file
    units: tuple[Unit, ...]

    def to_json(self) -> str:
        """Return the content of build.json."""
        return json.dumps(dict(zip(PLAN_KEYS, (VERSION, *dc.asdict(self).values()), strict=True)), indent=1) + "\n"

    @staticmethod
    def from_json(text: str) -> BuildPlan:
        """Read what `to_json` wrote."""
        data = json.loads(text)
        options = ReadOptions(**data["settings"].pop("options"))
        units = (Unit(tuple(FileSpan(**piece) for piece in unit["pieces"]), unit["size"]) for unit in data["units"])
        sources = tuple((path, size, changed) for path, size, changed in data["sources"])
        return BuildPlan(BuildSettings(**data["settings"], options=options), sources, tuple(units))

    @property
    def bytes(self) -> int:
        """Bytes of input, about."""
        return sum(unit.size for unit in self.units)

    def difference(self, text: str) -> str:
        """Return in words how an earlier plan, the content of build.json, differs from this one."""
        try:
            before: dict[str, Any] = json.loads(text)
            settings, sources = before["settings"], {path: rest for path, *rest in before["sources"]}
        except (ValueError, KeyError, TypeError):
            return "its build.json cannot be read"
        now = dc.asdict(self.settings)
        for name in now:
            if settings.get(name) != now[name]:
                return f"{name} was {settings.get(name)!r} and is {now[name]!r}"
        for path, size, changed in self.sources:
            if path not in sources:
                return f"{path} is a new input"
            if sources[path] != [size, changed]:
                return f"{path} was changed since"
        missing = sources.keys() - {path for path, *_ in self.sources}
        return f"{min(missing)} is not an input now" if missing else "it is from another version of Dovetail"


def expand(inputs: Sequence[str | Path]) -> list[Path]:
    """Return the files that paths and globs name, each once: inputs in their order, the files of a glob sorted."""
    if not inputs:
        raise UsageError("inputs: give at least one file, directory or glob")
    found: dict[Path, None] = {}
    for given in inputs:
        path = Path(os.path.abspath(given))
        if exists(path) and not path.is_dir():
            found[path] = None
            continue
        pattern = str(path / "**") if path.is_dir() else str(path)
        names = sorted(name for name in glob.glob(pattern, recursive=True) if os.path.isfile(name))
        if not names:
            what = "holds no file" if path.is_dir() else "no such file, and no file matches it as a pattern"
            raise FileError(f"{given}: {what}")
        found |= dict.fromkeys(map(Path, names))
    return list(found)


def make_plan(files: Sequence[Path], settings: BuildSettings, format: str | None = None) -> BuildPlan:
    """Cut files into units."""
    formats = [format_of(path, format) for path in files]
    sources = tuple((str(path), *size_and_time(path)) for path in files)
    total = sum(size for _, size, _ in sources)
    target = max(min(max(total // UNITS, UNIT_BYTES[0]), UNIT_BYTES[1]), total // MOST_UNITS)
    units, pieces, size = list[Unit](), list[FileSpan](), 0
    for path, kind, (name, length, _) in zip(files, formats, sources, strict=True):
        for span in kind.spans(path, length, target, settings.options):
            if pieces and size + span.size > target * 3 // 2:
                units.append(Unit(tuple(pieces), size))
                pieces, size = [], 0
            pieces.append(FileSpan(name, kind.name, span.start, span.stop))
            size += span.size
    if pieces:
        units.append(Unit(tuple(pieces), size))
    return BuildPlan(settings, sources, tuple(units))


def size_and_time(path: Path) -> tuple[int, int]:
    """Return the bytes and the time of the last change of a file."""
    try:
        status = path.stat()
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({problem(error)})") from error
    return status.st_size, status.st_mtime_ns
