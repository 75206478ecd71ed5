"""Write a model as one plain PyTorch file: torch and the standard library, and nothing of ours.

A reader learns the model from top to bottom, and may leave with it: weights saved here load there by the same names, and the
numbers are the same, bit for bit (long texts behind a window, a bias or a soft-cap: up to rounding). What has no words in such
a file yet is an error that names the part.

    dovetail emit llama-tiny -o llama.py
    python llama.py                                    random weights
    python llama.py my-model/model.safetensors         those of `dovetail train` or `dovetail import`
"""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path
from typing import Annotated

import tyro

from dovetail.cli.output import print_line
from dovetail.cli.shown import write_text


@dc.dataclass
class Command:
    """Which model, and where to."""

    spec: tyro.conf.Positional[str]
    """A preset's name, a .yaml file or a model directory."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """The file to write; stdout by default."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Change a field first: --set layers.*.mixer.kv_heads=1; may be given many times."""
    swap: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Change a part wherever it stands: --swap position=alibi; may be given many times, and comes before --set."""
    force: bool = False
    """Replace the file where there is one."""

    def run(self) -> int | None:
        """Read the spec, write the file, say how long it is."""
        from dovetail.codegen.file import emit
        from dovetail.core.errors import FileError
        from dovetail.io.spec import changed
        from dovetail.port.load import find_spec

        text = emit(changed(find_spec(self.spec), self.set, self.swap), Path(self.spec).stem)
        if self.out is None:
            print(text, end="")
            return 0
        if self.out.exists() and not (self.force and self.out.is_file()):
            raise FileError(
                f"{self.out}: exists already; choose another path with -o" + ("" if self.force else ", or use --force")
            )
        write_text(self.out, text)
        print_line(f"{self.out}: {len(text.splitlines())} lines; python {self.out} runs it")
        return 0
