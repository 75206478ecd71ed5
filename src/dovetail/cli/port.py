"""List the Hugging Face model types that can be imported and exported.

dovetail port
dovetail port --json
"""

from __future__ import annotations

import dataclasses as dc

from dovetail.cli.output import print_json
from dovetail.cli.printing import print_view


@dc.dataclass
class Command:
    """The format of the output."""

    json: bool = False
    """Print a JSON list."""

    def run(self) -> int:
        """Print one row per family."""
        from dovetail.api.list_families import list_families

        result = list_families()
        if self.json:
            print_json(result.to_dict()["families"])
        else:
            print_view(result)
        return 0
