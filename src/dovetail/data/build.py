"""Build token shards: the work on one unit, and the order of the phases.

    plan ──► hash each unit ──► find duplicates ──► write the shards of each unit ──► manifest
             (only where duplicates are dropped)

Each phase works unit by unit, in any order, in any process that sees the files. The result of a unit appears as a whole or not
at all, and a record of it last; a build that was killed continues with the units that have no record. The held-out split takes
the documents whose hash is below a bound, so equal documents are in the same split, wherever they are.
"""

from __future__ import annotations

import contextlib
import dataclasses as dc
import functools
import hashlib
import itertools
import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dovetail.base.errors import FileError, UsageError
from dovetail.base.limits import JSON_BYTES, TOKENIZER_BYTES
from dovetail.data.duplicates import drop_duplicates, is_unique, write_hashes
from dovetail.data.executors import Executor
from dovetail.data.manifest import HELD_OUT, MANIFEST_FILE, PLAN_FILE, TRAIN, DataSplit, Manifest, TokenizerInfo
from dovetail.data.plan import BYTES, BuildPlan, size_and_time
from dovetail.data.shards import ShardInfo, ShardWriter, dtype_for
from dovetail.disk.atomic import sync, try_lock, write_atomically
from dovetail.disk.model_files import TOKENIZER_FILE
from dovetail.disk.untrusted import Directory, exists, is_directory, problem
from dovetail.text.chat import CONFIG_FILE, special_token
from dovetail.text.learn import LEAST, learn
from dovetail.text.tokenizer import END, Tokenizer

WORK = "unfinished"  # the folder of records and hashes, deleted when the manifest is written
TOGETHER = 512, 1 << 20  # documents and characters that are encoded together
SPLITS = (TRAIN, HELD_OUT)

Progress = Callable[[str, int, int], None]  # (phase, bytes that are done, all bytes)


@dc.dataclass(frozen=True)
class UnitRecord:
    """What a unit became."""

    shards: dict[str, ShardInfo]  # by split; a split without documents has none
    duplicates: int
    empty: int


# -- one unit -----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1)
def _opened(directory: str, plan_sha256: str) -> tuple[BuildPlan, Tokenizer]:
    """Read the plan and the tokenizer, once per process."""
    path = Path(directory) / PLAN_FILE
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        remedy = "every node of a cluster needs the same files under the same paths"
        raise FileError(f"{path}: cannot be read on {platform.node()} ({problem(error)}); {remedy}") from error
    if hashlib.sha256(text.encode()).hexdigest() != plan_sha256:
        raise FileError(f"{directory}: another build has replaced {PLAN_FILE}; run one build at a time")
    return BuildPlan.from_json(text), Tokenizer.load(directory)


def _documents(plan: BuildPlan, number: int) -> Iterator[tuple[str, bytes]]:
    """(text, hash) of each document of a unit."""
    before = {path: (size, changed) for path, size, changed in plan.sources}
    for piece in plan.units[number].pieces:
        if size_and_time(Path(piece.path)) != before[piece.path]:
            raise FileError(f"{piece.path}: was changed since the build began; build again with --force")
        for text in piece.documents(plan.settings.options):
            yield text, hashlib.blake2b(text.encode(), digest_size=16).digest()


def hash_unit(directory: str, plan_sha256: str, number: int) -> None:
    """Write the hashes of a unit's documents."""
    plan, _ = _opened(directory, plan_sha256)
    write_hashes(_work(directory, number, "hashes"), (digest for _, digest in _documents(plan, number)))


def write_unit(directory: str, plan_sha256: str, number: int) -> int:
    """Tokenize a unit, write its shards and then its record; return the number of tokens."""
    plan, tokenizer = _opened(directory, plan_sha256)
    settings, bound = plan.settings, int(plan.settings.held_out * 2**64)
    end = np.array([] if settings.end is None else [settings.end], np.int64)
    counts = {"duplicates": 0, "empty": 0}

    def kept() -> Iterator[tuple[str, str]]:
        unique = is_unique(_work(directory, number, "unique")) if settings.deduplicate else itertools.repeat(True)
        for (text, digest), first in zip(_documents(plan, number), unique, strict=settings.deduplicate):
            if not text.strip():
                counts["empty"] += 1
            elif not first:
                counts["duplicates"] += 1
            else:
                yield text, SPLITS[int.from_bytes(digest[:8], "big") < bound]

    writers: dict[str, ShardWriter] = {}
    with contextlib.ExitStack() as stack:
        for some in _batches(kept()):
            for (text, split), ids in zip(some, tokenizer.encode_batch([text for text, _ in some]), strict=True):
                if split not in writers:
                    writer = ShardWriter(Path(directory), f"{split}-{number:05d}", dtype_for(settings.vocab))
                    writers[split] = stack.enter_context(writer)
                writers[split].add(np.concatenate([ids, end]), len(text.encode()))
    shards = {split: writer.info for split, writer in writers.items() if writer.info is not None}
    record = UnitRecord(shards, **counts)
    write_atomically(_work(directory, number, "json"), json.dumps(dc.asdict(record)))
    return sum(info.tokens for info in shards.values())


def _batches(documents: Iterator[tuple[str, str]]) -> Iterator[list[tuple[str, str]]]:
    some, characters = list[tuple[str, str]](), 0
    for document in documents:
        some.append(document)
        characters += len(document[0])
        if len(some) >= TOGETHER[0] or characters >= TOGETHER[1]:
            yield some
            some, characters = [], 0
    if some:
        yield some


def _work(directory: str | Path, number: int, suffix: str) -> Path:
    return Path(directory) / WORK / f"unit-{number:05d}.{suffix}"


def _record(directory: Path, number: int) -> UnitRecord:
    data: dict[str, Any] = json.loads(_work(directory, number, "json").read_text(encoding="utf-8"))
    data["shards"] = {split: ShardInfo(**info) for split, info in data["shards"].items()}
    return UnitRecord(**data)


# -- all units ----------------------------------------------------------------------------------------------------------


def build(
    directory: Path, plan: BuildPlan, tokenizer: str, executor: Executor, progress: Progress, *, replace: bool = False
) -> Manifest:
    """Run every phase that is not done, and return the manifest. `tokenizer` is the content of tokenizer.json.

    `replace` deletes a corpus or an unfinished build first. Raises FileError where the directory holds another build.
    """
    with _locked(directory):
        text = plan.to_json()
        if replace and (directory / PLAN_FILE).exists():
            _delete_all_but_the_plan(directory)  # which says, after a kill, that what is there is unfinished
        else:
            _check_plan(directory, plan, text)
        if (directory / MANIFEST_FILE).exists():
            shutil.rmtree(directory / WORK, ignore_errors=True)  # the build before was killed while it deleted this
            return Manifest.load(directory)
        (directory / WORK).mkdir(exist_ok=True)
        write_atomically(directory / TOKENIZER_FILE, tokenizer)
        write_atomically(directory / PLAN_FILE, text)
        job = (str(directory), hashlib.sha256(text.encode()).hexdigest())
        if plan.settings.deduplicate and not (directory / WORK / "duplicates.json").exists():
            _run(hash_unit, job, "hashes", plan, executor, lambda done: progress("hashing", done, plan.bytes))
            units = range(len(plan.units))
            drop_duplicates([(_work(directory, i, "hashes"), _work(directory, i, "unique")) for i in units])
            write_atomically(directory / WORK / "duplicates.json", "{}")
        _run(write_unit, job, "json", plan, executor, lambda done: progress("tokenizing", done, plan.bytes))
        manifest = _manifest(directory, plan)
        sync(directory)
        manifest.write(directory)
        sync(directory)
        shutil.rmtree(directory / WORK)
        return manifest


def _run(
    work: Callable[[str, str, int], Any],
    job: tuple[str, str],
    suffix: str,
    plan: BuildPlan,
    executor: Executor,
    progress: Callable[[int], None],
) -> None:
    """Run a phase on the units that have no result of this suffix yet."""
    left = [number for number in range(len(plan.units)) if not _work(job[0], number, suffix).exists()]
    done = plan.bytes - sum(plan.units[number].size for number in left)
    progress(done)
    for number in executor.run(functools.partial(work, *job), left):
        done += plan.units[number].size
        progress(done)


def _manifest(directory: Path, plan: BuildPlan) -> Manifest:
    records = [_record(directory, number) for number in range(len(plan.units))]
    splits = {split: DataSplit(tuple(record.shards[split] for record in records if split in record.shards)) for split in SPLITS}
    dropped = {name: sum(getattr(record, name) for record in records) for name in ("duplicates", "empty")}
    settings = plan.settings
    told = {**dc.asdict(settings.options), "deduplicate": settings.deduplicate, "held_out": settings.held_out}
    return Manifest(TokenizerInfo(settings.tokenizer, settings.vocab, settings.end), splits, dropped, told)


def _check_plan(directory: Path, plan: BuildPlan, text: str) -> None:
    """Raise FileError unless the directory is empty, or holds this very plan."""
    path = directory / PLAN_FILE
    if path.exists():
        before = path.read_text(encoding="utf-8", errors="replace")
        if before != text:
            what = "a corpus" if (directory / MANIFEST_FILE).exists() else "an unfinished build"
            why = plan.difference(before)
            raise FileError(f"{directory}: holds {what} of other inputs or settings ({why}); choose another, or use --force")
    elif not (directory / WORK).exists() and (others := [name for name in os.listdir(directory) if name != LOCK]):
        raise FileError(f"{directory}: is not empty (it holds {sorted(others)[0]}); choose another directory")


def _delete_all_but_the_plan(directory: Path) -> None:
    """Delete a corpus or an unfinished build, the manifest first; other files stay."""
    (directory / MANIFEST_FILE).unlink(missing_ok=True)
    for path in [*directory.glob("train-*"), *directory.glob("held_out-*"), directory / TOKENIZER_FILE]:
        path.unlink(missing_ok=True)
    shutil.rmtree(directory / WORK, ignore_errors=True)


LOCK = ".lock"


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Hold the directory's lock, which ends with the process; raise where another process holds it."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        handle = os.open(directory / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise FileError(f"{directory}: cannot be written ({problem(error)})") from error
    try:
        if not try_lock(handle):
            raise FileError(f"{directory}: another process builds here; wait for it")
        yield
    finally:
        os.close(handle)


def read_tokenizer(given: str | Path | Tokenizer) -> tuple[str, Tokenizer]:
    """Return the content of tokenizer.json, and the tokenizer."""
    if isinstance(given, Tokenizer):
        return given.to_json(), given
    path = Path(given)
    if is_directory(path):
        return Directory(path).text(TOKENIZER_FILE, TOKENIZER_BYTES), Tokenizer.load(path)
    if exists(path):
        if path.name != TOKENIZER_FILE:
            raise FileError(f"{path}: is not called {TOKENIZER_FILE}; give the directory that holds one")
        return read_tokenizer(path.parent)
    if given != BYTES:
        raise FileError(f"{given}: no such tokenizer; give a directory with a {TOKENIZER_FILE}, or {BYTES!r}")
    learned = learn("", LEAST)
    return learned.to_json(), learned


def end_token(tokenizer: Tokenizer, given: str | Path | Tokenizer, end: str | None) -> int | None:
    """Return the id after each document."""
    if end is not None:
        return tokenizer.id_of(end) if end else None
    if (token := tokenizer.engine.token_to_id(END)) is not None:
        return token
    declared = None
    if not isinstance(given, Tokenizer):
        path = Path(given)
        where = Directory(path if is_directory(path) else path.parent)
        declared = where.json(CONFIG_FILE, JSON_BYTES).get("eos_token") if where.has(CONFIG_FILE) else None
    if (content := special_token(declared)) is None:
        raise UsageError(f"--end: {CONFIG_FILE} has no eos_token; name the token after each document, or '' for none")
    return tokenizer.id_of(content)
