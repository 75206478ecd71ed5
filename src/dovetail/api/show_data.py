"""Print the contents of a corpus of token shards, or the rows of a tuning file as a model reads them.

For a corpus: documents, tokens and bytes per split, and its tokenizer. For a tuning file (JSON Lines), with the tokenizer and
chat template of a model: every token of the first rows, learned tokens in color and in brackets.

    dovetail data show tokens --verify
    dovetail data show chats.jsonl --model llama-tiny-trained --template plain
"""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, overload

from dovetail.api.options import TEMPLATE, InDir, InPath, Steps
from dovetail.api.result import Result
from dovetail.base.errors import UsageError
from dovetail.base.option import Option
from dovetail.views.blocks import View
from dovetail.views.corpus import corpus_view
from dovetail.views.progress import WorkProgress

if TYPE_CHECKING:
    from dovetail.api.show_rows import ShownRows
    from dovetail.data.manifest import Manifest

DATA_ERROR = 4  # exit code


@dc.dataclass(frozen=True, repr=False)
class DataSummary(Result):
    """The counts of a corpus."""

    directory: Path
    manifest: Manifest
    problems: tuple[str, ...] | None = None  # files that do not match their checksum; None: not verified

    @property
    def exit_code(self) -> int:
        return DATA_ERROR if self.problems else 0

    def to_dict(self) -> dict[str, Any]:
        data = self.manifest.to_data()
        splits = {name: {**split, "shards": len(split["shards"])} for name, split in data["splits"].items()}
        verified = {} if self.problems is None else {"problems": list(self.problems)}
        return {"directory": str(self.directory), **data, "splits": splits, **verified}

    def view(self, width: int) -> View:
        return [f"{self.directory}\n", *corpus_view(self.manifest, self.problems)]


@overload
def show_data(path: str | Path, *, model: None = None, verify: bool = False, quiet: bool = False) -> DataSummary: ...


@overload
def show_data(path: str | Path, *, model: str | Path, template: str | None = None, rows: int = 3) -> ShownRows: ...


def show_data(
    path: Annotated[str | Path, InPath("The directory that `dovetail data build` wrote, or a tuning file.", argument=True)],
    *,
    model: Annotated[
        str | Path | None, InDir("The model directory whose tokenizer and chat template read the tuning file.")
    ] = None,
    template: Annotated[str | None, TEMPLATE] = None,
    rows: Annotated[int, Steps("Rows of the tuning file to print.")] = 3,
    verify: Annotated[bool, Option("Compare the SHA-256 of every file with the manifest; exit code 4 if one differs.")] = False,
    quiet: Annotated[bool, Option("Show no progress.")] = False,
) -> DataSummary | ShownRows:
    """Return what a corpus of token shards holds. `verify` compares the SHA-256 of every file with the manifest.

    With the directory of a `model`, the path is that of a tuning file (JSON Lines: chats, completions, preferences). Its first
    `rows` are encoded by the model's tokenizer and chat template, and show which tokens are learned. `template` is a file, or
    "plain", for a model without a chat template.
    """
    from dovetail.api.show_rows import show_rows
    from dovetail.data.corpora import verify_shards
    from dovetail.data.manifest import Manifest

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
