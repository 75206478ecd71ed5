"""Write a model as one PyTorch file that imports only torch and the standard library.

Weights saved by Dovetail load into the model of the file by the same names, and the outputs are bit-equal (for long sequences
with a window, a bias or a soft-cap: equal up to rounding). A part that cannot be written is an error with its path.

    dovetail emit llama-tiny -o llama.py
    python llama.py                                    random weights
    python llama.py my-model/model.safetensors         weights of `dovetail train` or `dovetail import`
"""

from __future__ import annotations

import dataclasses as dc
from pathlib import Path
from typing import Annotated, Any

from dovetail.api.arguments import Changes, SpecLike, read_spec
from dovetail.api.options import SET, SPEC, SWAP, OutFile
from dovetail.api.result import Result
from dovetail.base.option import Option
from dovetail.disk.atomic import write_new
from dovetail.views.blocks import View


@dc.dataclass(frozen=True, repr=False)
class EmittedFile(Result):
    """The text of the file, and where it was written, if it was."""

    name: str
    text: str
    out: Path | None = None

    @property
    def lines(self) -> int:
        """The number of lines."""
        return len(self.text.splitlines())

    def to_dict(self) -> dict[str, Any]:
        return {"spec": self.name, "file": None if self.out is None else str(self.out), "lines": self.lines, "text": self.text}

    def view(self, width: int) -> View:
        if self.out is None:
            return self.text.rstrip("\n")
        return f"{self.out}: {self.lines} lines; python {self.out} runs it"

    def __str__(self) -> str:
        return self.text


def emit(
    spec: Annotated[SpecLike, SPEC],
    *,
    out: Annotated[str | Path | None, OutFile("The file to write (default: stdout).", short="-o")] = None,
    set: Annotated[Changes, SET] = (),
    swap: Annotated[Changes, SWAP] = (),
    force: Annotated[bool, Option("Replace an existing file.")] = False,
) -> EmittedFile:
    """Return a model as the text of one PyTorch file; write it to `out` if given. An existing file is replaced if `force`.

    Weights saved by Dovetail load into the emitted model by the same names. A part that cannot be written raises SpecError.
    """
    from dovetail.codegen.file import emit as emit_text

    before = read_spec(spec)
    name, changed, _ = before.after(set, swap)
    text = emit_text(changed, Path(before.name).stem)
    if out is not None:
        write_new(Path(out), text, force)
    return EmittedFile(name, text, None if out is None else Path(out))
