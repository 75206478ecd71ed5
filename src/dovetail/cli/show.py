"""Print the parts, shapes and costs of a model: parameters, FLOPs per token, decode state, and advice.

The figures are computed from the spec and no weight is allocated, so a model of 405 billion parameters takes no longer than a
small one. --html writes the model as a foldable block diagram.

    dovetail show llama-3-70b --length 4096
    dovetail show llama-tiny --set 'layers.*.mixer.kv_heads=1' --swap position=alibi --html llama-tiny.html
"""

from __future__ import annotations

import dataclasses as dc

import tyro

from dovetail.cli.flags import Dtype, FileFlags, Length, OutFile, Sets, Spec, Swaps
from dovetail.cli.output import print_json
from dovetail.cli.printing import options, print_view, write_page


@dc.dataclass
class Command(FileFlags):
    """The model, the length of a sequence, and the dtype."""

    spec: tyro.conf.Positional[Spec]
    """A preset's name, a .yaml file or a model directory."""
    length: Length | None = None
    """Tokens per sequence (default: 2048, or the longest sequence of the model if that is shorter)."""
    dtype: Dtype | None = None
    """The dtype of weights and decode state (default: that of the checkpoint's files, or bf16 without files)."""
    set: Sets = ()
    """Change a field first: --set layers.*.mixer.kv_heads=1; may be given many times."""
    swap: Swaps = ()
    """Change a part in every layer: --swap position=alibi; may be given many times, applied before --set."""
    json: bool = False
    """Print one JSON object."""
    html: OutFile | None = None
    """Also write an HTML page."""

    def run(self) -> int:
        """Print the summary."""
        from dovetail.api.show import show

        result = show(**options(self, "json", "html", "force", "load"))
        write_page(self.html, result, self.force)
        if self.json:
            print_json(result.to_dict())
        else:
            print_view(result)
        return 0
