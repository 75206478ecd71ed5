"""Write a model as one PyTorch file that imports only torch and the standard library.

Weights saved by Dovetail load into the model of the file by the same names, and the outputs are bit-equal (for long sequences
with a window, a bias or a soft-cap: equal up to rounding). A part that cannot be written is an error with its path.

    dovetail emit llama-tiny -o llama.py
    python llama.py                                    random weights
    python llama.py my-model/model.safetensors         weights of `dovetail train` or `dovetail import`
"""

from __future__ import annotations

import dataclasses as dc
from typing import Annotated

import tyro

from dovetail.cli.flags import LoadFlags, OutFile, Sets, Spec, Swaps
from dovetail.cli.output import print_json, print_line
from dovetail.cli.printing import options


@dc.dataclass
class Command(LoadFlags):
    """The model and the file."""

    spec: tyro.conf.Positional[Spec]
    """A preset's name, a .yaml file or a model directory."""
    out: Annotated[OutFile | None, tyro.conf.arg(aliases=["-o"])] = None
    """The file to write (default: stdout)."""
    set: Sets = ()
    """Change a field first: --set layers.*.mixer.kv_heads=1; may be given many times."""
    swap: Swaps = ()
    """Change a part in every layer: --swap position=alibi; may be given many times, applied before --set."""
    force: bool = False
    """Replace an existing file."""
    json: bool = False
    """Print one JSON object, with the text of the file."""

    def run(self) -> int:
        """Write the file, or print it."""
        from dovetail.api.emit import emit

        result = emit(**options(self, "json", "load"))
        if self.json:
            print_json(result.to_dict())
        elif self.out is None:
            print(result.text, end="")
        else:
            print_line(f"{self.out}: {result.lines} lines; python {self.out} runs it")
        return 0
