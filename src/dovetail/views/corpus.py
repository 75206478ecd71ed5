"""The counts of a corpus of token shards, and examples of a tuning file with the tokens that are learned."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dovetail.views.blocks import StyledText, TextTable, View, styled

if TYPE_CHECKING:
    from dovetail.data.manifest import Manifest
    from dovetail.text.conversation import Encoded
    from dovetail.text.tokenizer import Tokenizer

COUNTS = ("documents", "tokens", "bytes", "bytes per token", "shards", "size")
LISTED = 20  # problems that are printed
LEARNED, MASKED = "bold green", "dim"
LEGEND = styled(("⟦learned⟧", LEARNED), " ", ("not learned", MASKED))


def corpus_view(manifest: Manifest, problems: Sequence[str] | None) -> list[View]:
    """A row for each split, the tokenizer, and the files that do not match their checksum (None: not verified)."""
    from dovetail.data.shards import files_of

    item, rows = manifest.dtype.itemsize, list[tuple[str, ...]]()
    for name, split in manifest.splits.items():
        counts = (f"{count:,}" for count in (split.documents, split.tokens, split.bytes))
        ratio = f"{split.bytes / split.tokens:.2f}" if split.tokens else ""
        rows.append((name, *counts, ratio, f"{len(split.shards):,}", f"{split.tokens * item / 2**20:,.1f} MB"))
    tokenizer, dropped = manifest.tokenizer, manifest.dropped
    end = "no end token" if tokenizer.end is None else f"end token {tokenizer.end}"
    lines = [
        "",
        f"tokenizer    {tokenizer.vocab:,} ids as {manifest.dtype.name}, {end}, SHA-256 {tokenizer.sha256[:12]}…",
        f"dropped      {dropped['duplicates']:,} duplicates, {dropped['empty']:,} empty documents",
        f"fingerprint  {manifest.fingerprint}",
    ]
    if problems is not None:
        files = sum(len(files_of(shard.name)) for split in manifest.splits.values() for shard in split.shards)
        lines.append(f"checksums    {files - len(problems):,} of {files:,} files match")
        lines += [f"             {problem}" for problem in problems[:LISTED]]
    return [TextTable(("split", *COUNTS), rows, right=COUNTS), "\n".join(lines)]


def example_text(one: Encoded, tokenizer: Tokenizer) -> StyledText:
    """The tokens of an example; those that are learned stand in brackets, too, for those who see no color."""
    pieces = list[tuple[str, str]]()
    for learned, run in itertools.groupby(zip(one.ids.tolist(), one.answer.tolist(), strict=True), lambda pair: pair[1]):
        labels = "".join(tokenizer.label(token) for token, _ in run)
        pieces.append((f"⟦{labels}⟧" if learned else labels, LEARNED if learned else MASKED))
    return styled(*pieces)
