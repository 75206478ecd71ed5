"""Print what a corpus of token shards holds: documents, tokens and bytes per split, and its tokenizer.

dovetail data show tokens --verify
"""

from __future__ import annotations

import dataclasses as dc

import tyro

from dovetail.cli.flags import InDir
from dovetail.cli.output import print_json
from dovetail.cli.shown import print_view


@dc.dataclass
class Command:
    """The corpus."""

    directory: tyro.conf.Positional[InDir]
    """The directory that `dovetail data build` wrote."""
    verify: bool = False
    """Compare the SHA-256 of every file with the manifest; exit code 4 where one differs."""
    quiet: bool = False
    """Show no progress."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        """Print the table."""
        from dovetail.api.show_data import show_data

        result = show_data(self.directory, verify=self.verify, quiet=self.quiet)
        if self.json:
            print_json(result.to_dict())
        else:
            print_view(result)
        return 4 if result.problems else 0
