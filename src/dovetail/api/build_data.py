"""build_data: text files to token shards."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from dovetail.api.arguments import silent
from dovetail.api.show_data import DataSummary
from dovetail.core.errors import FileError, UsageError
from dovetail.core.limits import JSON_BYTES, TOKENIZER_BYTES
from dovetail.data.build import build
from dovetail.data.cluster import RayCluster
from dovetail.data.executors import Executor, ProcessPool, available_workers
from dovetail.data.formats import Options
from dovetail.data.manifest import HELD_OUT
from dovetail.data.plan import Settings, expand, make_plan
from dovetail.disk.model_files import TOKENIZER_FILE
from dovetail.disk.untrusted import Directory, exists, is_directory
from dovetail.text.chat import CONFIG_FILE, special_token
from dovetail.text.learn import LEAST, learn
from dovetail.text.tokenizer import END, Tokenizer
from dovetail.views.progress import WorkProgress

BYTES = "bytes"  # the name of the tokenizer with one token per byte


def build_data(
    inputs: str | Path | Sequence[str | Path],
    out: str | Path,
    *,
    tokenizer: str | Path | Tokenizer = BYTES,
    format: Literal["text", "jsonl", "parquet"] | None = None,
    field: str = "text",
    lines: bool = False,
    separator: str | None = None,
    end: str | None = None,
    deduplicate: bool = False,
    held_out: float = 0.01,
    workers: int | None = None,
    cluster: str | None = None,
    executor: Executor | None = None,
    force: bool = False,
    quiet: bool = False,
    note: Callable[[str], None] | None = None,
) -> DataSummary:
    """Turn text, JSON Lines and Parquet into a directory of token shards, and return its summary.

    `inputs` are files, directories or globs. A text file is one document, or has one per `lines`, or has a line `separator`
    between two; a JSON object and a row of a table have their document in `field`. `tokenizer` is a directory with a
    tokenizer.json, such a file, or "bytes". The token `end` follows each document: by default the end-of-text token of the
    tokenizer, "" for none. `deduplicate` drops documents that are equal to an earlier one. `held_out` is the fraction of
    documents for validation, chosen by their hash.

    The work is done by `workers` processes (by default one per processor), on a Ray cluster at the address `cluster`, or by an
    `executor` of your own; the result is the same. After a kill, the same call continues the build.
    `force` replaces what `out` holds.
    """
    _check(held_out, workers, lines, separator)
    if (workers, cluster, executor).count(None) < 2:
        raise UsageError("--workers: the units run in processes, on a --cluster or by an executor; give one of them")
    place, say = Path(out), note or silent
    text, found = _tokenizer(tokenizer)
    options = Options(field, lines, separator)
    settings = Settings(
        hashlib.sha256(text.encode()).hexdigest(), found.size, _end(found, tokenizer, end), options, deduplicate, held_out
    )
    files = expand([inputs] if isinstance(inputs, (str, Path)) else inputs)
    plan = make_plan(files, settings, format)
    say(f"files {len(files):,}, bytes {plan.bytes:,}, units {len(plan.units):,}")
    if executor is None:
        executor = ProcessPool(workers or available_workers()) if cluster is None else RayCluster(cluster)
    with WorkProgress(quiet) as progress:
        manifest = build(place, plan, text, executor, progress, replace=force)
    if held_out and not manifest.splits[HELD_OUT].documents:
        say("no document is held out: there are too few; cut files into documents (--lines, --separator), or raise --held-out")
    return DataSummary(place, manifest)


def _check(held_out: float, workers: int | None, lines: bool, separator: str | None) -> None:
    if not 0 <= held_out < 1:
        raise UsageError(f"--held-out: {held_out} is not a fraction from 0 to below 1")
    if workers is not None and workers < 1:
        raise UsageError(f"--workers: {workers} is not above 0")
    if lines and separator is not None:
        raise UsageError("--separator: with --lines every line is a document; give one of them")
    if separator is not None and ("\n" in separator or "\r" in separator):
        raise UsageError("--separator: is compared with whole lines, so it cannot hold a line end; for blank lines give ''")


def _tokenizer(given: str | Path | Tokenizer) -> tuple[str, Tokenizer]:
    """Return the content of tokenizer.json, and the tokenizer."""
    if isinstance(given, Tokenizer):
        return given.to_json(), given
    path = Path(given)
    if is_directory(path):
        return Directory(path).text(TOKENIZER_FILE, TOKENIZER_BYTES), Tokenizer.load(path)
    if exists(path):
        if path.name != TOKENIZER_FILE:
            raise FileError(f"{path}: is not called {TOKENIZER_FILE}; give the directory that holds one")
        return _tokenizer(path.parent)
    if given != BYTES:
        raise FileError(f"{given}: no such tokenizer; give a directory with a {TOKENIZER_FILE}, or {BYTES!r}")
    learned = learn("", LEAST)
    return learned.to_json(), learned


def _end(tokenizer: Tokenizer, given: str | Path | Tokenizer, end: str | None) -> int | None:
    """Return the id after each document."""
    if end is not None:
        return tokenizer.id_of(end) if end else None
    if (token := tokenizer.engine.token_to_id(END)) is not None:
        return token
    declared = None
    if not isinstance(given, Tokenizer):
        place = Path(given)
        where = Directory(place if is_directory(place) else place.parent)
        declared = where.json(CONFIG_FILE, JSON_BYTES).get("eos_token") if where.has(CONFIG_FILE) else None
    if (content := special_token(declared)) is None:
        raise UsageError(f"--end: {CONFIG_FILE} has no eos_token; name the token after each document, or '' for none")
    return tokenizer.id_of(content)
