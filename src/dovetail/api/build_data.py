"""Turn text, JSON Lines and Parquet into token shards: files of ids with document ends, checksums and a manifest.

The result does not depend on the number of workers. After a kill, the same command continues the
build. Documents for validation are chosen by their hash.

    dovetail data build corpus/*.jsonl -o tokens --tokenizer my-model --deduplicate
    dovetail data build plays.txt -o tokens --separator ""                               blank lines between documents
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from dovetail.api.arguments import silent
from dovetail.api.options import OUT
from dovetail.api.show_data import DataSummary
from dovetail.base.errors import UsageError
from dovetail.base.option import Option
from dovetail.data.executors import Executor, ProcessPool, RayCluster, available_workers
from dovetail.data.formats import ReadOptions
from dovetail.data.plan import BYTES, BuildSettings, expand, make_plan
from dovetail.views.progress import WorkProgress

if TYPE_CHECKING:
    from dovetail.text.tokenizer import Tokenizer


def build_data(
    inputs: Annotated[
        str | Path | Sequence[str | Path],
        Option(
            "Files, directories or globs (in quotes: `'corpus/**/*.jsonl'`), of .txt, .jsonl or .parquet.",
            form="FILE|DIR|GLOB",
            argument=True,
        ),
    ],
    out: Annotated[str | Path, OUT],
    *,
    tokenizer: Annotated[
        str | Path | Tokenizer,
        Option("A directory with a tokenizer.json, or bytes: one token per byte.", form="DIR|bytes", read=str),
    ] = BYTES,
    format: Annotated[
        Literal["text", "jsonl", "parquet"] | None, Option("The format of all inputs (default: by the suffix of each).")
    ] = None,
    field: Annotated[str, Option("The field of a JSON object, or the column of a table, that holds the document.")] = "text",
    lines: Annotated[bool, Option("Text: every line is a document (default: every file).")] = False,
    separator: Annotated[str | None, Option("Text: this line separates two documents; '' for blank lines.")] = None,
    end: Annotated[
        str | None, Option("The token after each document (default: the end-of-text token of the tokenizer); '' for none.")
    ] = None,
    deduplicate: Annotated[bool, Option("Drop documents that are equal to an earlier one.")] = False,
    held_out: Annotated[float, Option("The fraction of documents for validation.", low=0.0, high=0.999)] = 0.01,
    workers: Annotated[
        int | None, Option("Processes (default: one per processor); they do not change the result.", low=1, high=4096)
    ] = None,
    cluster: Annotated[
        str | None,
        Option(
            "Work on the nodes of this Ray cluster instead, which share a file system (extra `cluster`).", form="HOST:PORT|auto"
        ),
    ] = None,
    executor: Executor | None = None,
    force: Annotated[bool, Option("Replace the corpus or the unfinished build in the directory.")] = False,
    quiet: Annotated[bool, Option("Show no progress.")] = False,
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
    from dovetail.data.build import build, end_token, read_tokenizer
    from dovetail.data.manifest import HELD_OUT

    options = ReadOptions(field, lines, separator)
    if (workers, cluster, executor).count(None) < 2:
        raise UsageError("--workers: the units run in processes, on a --cluster or by an executor; give one of them")
    place, say = Path(out), note or silent
    text, found = read_tokenizer(tokenizer)
    settings = BuildSettings(
        hashlib.sha256(text.encode()).hexdigest(), found.size, end_token(found, tokenizer, end), options, deduplicate, held_out
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
