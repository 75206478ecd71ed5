"""Turn text, JSON Lines and Parquet into token shards: files of ids with document ends, checksums and a manifest.

The result does not depend on the number of workers. After a kill, the same command continues the
build. Documents for validation are chosen by their hash.

    dovetail data build corpus/*.jsonl -o tokens --tokenizer my-model --deduplicate
    dovetail data build plays.txt -o tokens --separator ""                               blank lines between documents
"""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dovetail.cli.flags import OutDir, number, whole
from dovetail.cli.output import print_json, print_note
from dovetail.cli.printing import options, print_view


@dc.dataclass
class Command:
    """The inputs, the tokenizer and the directory."""

    inputs: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="FILE|DIR|GLOB")]]
    """Files, directories or globs (in quotes: `'corpus/**/*.jsonl'`), of .txt, .jsonl or .parquet."""
    out: Annotated[OutDir, tyro.conf.arg(aliases=["-o"])]
    """The directory to write."""
    tokenizer: Annotated[str, tyro.conf.arg(metavar="DIR|bytes")] = "bytes"
    """A directory with a tokenizer.json, or bytes: one token per byte."""
    format: Literal["text", "jsonl", "parquet"] | None = None
    """The format of all inputs (default: by the suffix of each)."""
    field: str = "text"
    """The field of a JSON object, or the column of a table, that holds the document."""
    lines: bool = False
    """Text: every line is a document (default: every file)."""
    separator: str | None = None
    """Text: this line separates two documents; '' for blank lines."""
    end: str | None = None
    """The token after each document (default: the end-of-text token of the tokenizer); '' for none."""
    deduplicate: bool = False
    """Drop documents that are equal to an earlier one."""
    held_out: Annotated[float, number(0, 0.999)] = 0.01
    """The fraction of documents for validation."""
    workers: Annotated[int, whole(1, 4096)] | None = None
    """Processes (default: one per processor); they do not change the result."""
    cluster: Annotated[str | None, tyro.conf.arg(metavar="HOST:PORT|auto")] = None
    """Work on the nodes of this Ray cluster instead, which share a file system (extra `cluster`)."""
    force: bool = False
    """Replace the corpus or the unfinished build in the directory."""
    quiet: bool = False
    """Show no progress."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        """Build the shards and print their counts."""
        from dovetail.api.build_data import build_data

        result = build_data(**options(self, "json"), note=print_note)
        if self.json:
            print_json(result.to_dict())
        else:
            print_view(result)
        return 0
