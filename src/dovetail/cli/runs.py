"""List training runs, compare them and draw their losses over each other.

Directories are searched for runs up to four levels deep. Up to eight runs are compared with the first: what differs in spec and
settings; whether their batches, tokens and the initial weights that both have are equal.

    dovetail runs
    dovetail runs rope alibi --plot loss.png
"""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path
from typing import Annotated

import tyro

from dovetail.cli.flags import FileFlags, OutFile
from dovetail.cli.output import print_json
from dovetail.cli.printing import print_view


@dc.dataclass
class Command(FileFlags):
    """The directories."""

    directories: Annotated[tyro.conf.Positional[tuple[Path, ...]], tyro.conf.arg(metavar="DIR")] = ()
    """Runs, or directories that hold runs (default: the working directory)."""
    plot: OutFile | None = None
    """Also draw the losses to a .png, .svg or .pdf file."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        """Print the runs."""
        from dovetail.api.runs import runs

        result = runs(*self.directories, plot=self.plot, force=self.force)
        if self.json:
            print_json(result.to_dict())
        else:
            print_view(result)
        return 0
