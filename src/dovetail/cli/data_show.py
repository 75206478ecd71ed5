"""Print the contents of a corpus of token shards, or the rows of a tuning file as a model reads them.

For a corpus: documents, tokens and bytes per split, and its tokenizer. For a tuning file (JSON Lines), with the tokenizer and
chat template of a model: every token of the first rows, learned tokens in color and in brackets.

    dovetail data show tokens --verify
    dovetail data show chats.jsonl --model llama-tiny-trained --template plain
"""

from __future__ import annotations

import dataclasses as dc

import tyro

from dovetail.cli.flags import InDir, InPath, Steps
from dovetail.cli.output import print_json
from dovetail.cli.printing import print_view


@dc.dataclass
class Command:
    """The corpus or the tuning file."""

    path: tyro.conf.Positional[InPath]
    """The directory that `dovetail data build` wrote, or a tuning file."""
    model: InDir | None = None
    """The model directory whose tokenizer and chat template read the tuning file."""
    template: str | None = None
    """A chat template in place of the model's: a file, or plain, which writes `role: content`."""
    rows: Steps = 3
    """Rows of the tuning file to print."""
    verify: bool = False
    """Compare the SHA-256 of every file with the manifest; exit code 4 if one differs."""
    quiet: bool = False
    """Show no progress."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        """Print the table."""
        from dovetail.api.show_data import show_data

        if self.model is not None:
            rows = show_data(self.path, model=self.model, template=self.template, rows=self.rows)
            if self.json:
                print_json(rows.to_dict())
            else:
                print_view(rows)
            return 0
        result = show_data(self.path, verify=self.verify, quiet=self.quiet)
        if self.json:
            print_json(result.to_dict())
        else:
            print_view(result)
        return 4 if result.problems else 0
