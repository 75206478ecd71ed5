"""show_data: the manifest of a corpus of token shards, and on request whether its files match it; or the rows of a tuning file
as a model reads them."""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path
from typing import Any, overload

from rich.console import Group, RenderableType

from dovetail.api.result import Result
from dovetail.api.show_rows import TuningRows, show_rows
from dovetail.core.errors import UsageError
from dovetail.data.corpora import verify_shards
from dovetail.data.manifest import Manifest
from dovetail.data.shards import files_of
from dovetail.views.console import plain_table, unwrapped
from dovetail.views.progress import WorkProgress

COUNTS = ("documents", "tokens", "bytes", "bytes per token", "shards", "size")
LISTED = 20  # problems that are printed


@dc.dataclass(frozen=True, repr=False)
class DataSummary(Result):
    """The counts of a corpus."""

    directory: Path
    manifest: Manifest
    problems: tuple[str, ...] | None = None  # files that do not match their checksum; None: not verified

    def to_dict(self) -> dict[str, Any]:
        data = self.manifest.to_data()
        splits = {name: {**split, "shards": len(split["shards"])} for name, split in data["splits"].items()}
        verified = {} if self.problems is None else {"problems": list(self.problems)}
        return {"directory": str(self.directory), **data, "splits": splits, **verified}

    def view(self, width: int) -> RenderableType:
        table = plain_table("split", *COUNTS, right=COUNTS, header=True)
        item = self.manifest.dtype.itemsize
        for name, split in self.manifest.splits.items():
            counts = (f"{count:,}" for count in (split.documents, split.tokens, split.bytes))
            ratio = f"{split.bytes / split.tokens:.2f}" if split.tokens else ""
            table.add_row(name, *counts, ratio, f"{len(split.shards):,}", f"{split.tokens * item / 2**20:,.1f} MB")
        tokenizer = self.manifest.tokenizer
        end = "no end token" if tokenizer.end is None else f"end token {tokenizer.end}"
        dropped = self.manifest.dropped
        lines = [
            "",
            f"tokenizer    {tokenizer.vocab:,} ids as {self.manifest.dtype.name}, {end}, SHA-256 {tokenizer.sha256[:12]}…",
            f"dropped      {dropped['duplicates']:,} duplicates, {dropped['empty']:,} empty documents",
            f"fingerprint  {self.manifest.fingerprint}",
        ]
        if self.problems is not None:
            files = sum(len(files_of(shard.name)) for split in self.manifest.splits.values() for shard in split.shards)
            lines.append(f"checksums    {files - len(self.problems):,} of {files:,} files match")
            lines += [f"             {problem}" for problem in self.problems[:LISTED]]
        return Group(unwrapped(f"{self.directory}\n"), table, unwrapped("\n".join(lines)))


@overload
def show_data(path: str | Path, *, model: None = None, verify: bool = False, quiet: bool = False) -> DataSummary: ...


@overload
def show_data(path: str | Path, *, model: str | Path, template: str | None = None, rows: int = 3) -> TuningRows: ...


def show_data(
    path: str | Path,
    *,
    model: str | Path | None = None,
    template: str | None = None,
    rows: int = 3,
    verify: bool = False,
    quiet: bool = False,
) -> DataSummary | TuningRows:
    """Return what a corpus of token shards holds. `verify` compares the SHA-256 of every file with the manifest.

    With the directory of a `model`, the path is that of a tuning file (JSON Lines: chats, completions, preferences). Its first
    `rows` are encoded by the model's tokenizer and chat template, and show which tokens are learned. `template` is a file, or
    "plain", for a model without a chat template.
    """
    if model is not None:
        return show_rows(Path(path), model, template, rows)
    if Path(path).is_file():
        raise UsageError(f"{path}: is a file; give the model that reads it with --model, or a directory of token shards")
    result = DataSummary(Path(path), Manifest.load(path))
    if not verify:
        return result
    with WorkProgress(quiet) as progress:
        problems = verify_shards(path, lambda done, total: progress("verifying", done, total))
    return dc.replace(result, problems=tuple(problems))
