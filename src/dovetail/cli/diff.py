"""Print the status of each tensor between two specs: kept, reinterpreted, transformed, new, dropped or impossible.

Weights are compared by path, layers by their number. `dovetail graft` applies the result to a checkpoint.

    dovetail diff mistral-7b llama-3-8b
    dovetail diff llama-tiny llama-tiny --set 'layers.*.mixer.kv_heads=1' --swap position=alibi
"""

from __future__ import annotations

import dataclasses as dc

import tyro

from dovetail.cli.flags import FileFlags, OutFile, Sets, Spec, Swaps
from dovetail.cli.output import print_json
from dovetail.cli.printing import options, print_view, write_page


@dc.dataclass
class Command(FileFlags):
    """The two models to compare."""

    a: tyro.conf.Positional[Spec]
    """A preset's name, a .yaml file or a model directory."""
    b: tyro.conf.Positional[Spec]
    """Another one."""
    set: Sets = ()
    """Change a field of B: --set layers.*.mixer.kv_heads=1; may be given many times."""
    swap: Swaps = ()
    """Change a part of B in every layer: --swap position=alibi; may be given many times, applied before --set."""
    json: bool = False
    """Print one JSON object."""
    html: OutFile | None = None
    """Also write an HTML page, the models side by side."""

    def run(self) -> int:
        """Compare the specs and print the result."""
        from dovetail.api.diff import diff

        result = diff(**options(self, "json", "html", "force", "load"))
        write_page(self.html, result, self.force)
        if self.json:
            print_json(result.to_dict())
        else:
            print_view(result)
        return 0
