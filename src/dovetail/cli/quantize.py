"""Store the matrices of a model in fewer bits: a smaller model directory, which every verb opens.

Embedding, norms, routers and head stay as they are. rtn rounds each value to the nearest level and needs no text. gptq and awq
read calibration text, layer by layer: gptq lets the codes of a row compensate for each other's errors, awq gives inputs with
large activations finer steps. With --text the perplexity is measured on the last twentieth of the file, before and after.

    dovetail quantize llama-tiny-trained --bits 4 --method gptq --text plays.txt -o small
    dovetail quantize llama-tiny-trained --format nf4 -o small
    dovetail generate small "Once upon"
"""

from __future__ import annotations

import dataclasses as dc
import os
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dovetail.cli.flags import BatchSize, InDir, InFile, Length, LoadFlags, OutDir, Seed, whole
from dovetail.cli.output import print_json
from dovetail.cli.printing import options, print_view

Skips = Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="PATTERN")]


@dc.dataclass
class Command(LoadFlags):
    """The model, the format, the method and its text, and the output."""

    directory: tyro.conf.Positional[InDir]
    """A model directory, in Dovetail's or Hugging Face's layout."""
    bits: Annotated[int, whole(4, 8)] | None = None
    """Bits per weight: 4, the default, is int4 in groups with a scale each; 8 is int8 with a scale per output channel."""
    format: Literal["int4", "int8", "nf4", "fp8"] | None = None
    """Another format, in place of --bits."""
    group: Length | None = None
    """Inputs that share a scale; by default 64, or fewer if 64 does not divide every matrix."""
    activations: Literal["int8"] | None = None
    """With --bits 8: also round each token that a matrix reads to 8 bits, and multiply integers."""
    method: Literal["rtn", "gptq", "awq"] | None = None
    """How codes are chosen; by default gptq with --text, else rtn."""
    text: InFile | None = None
    """A UTF-8 text file for calibration and perplexity."""
    samples: BatchSize = 128
    """Sequences of calibration."""
    length: Length = 512
    """Tokens per sequence."""
    skip: Skips = ()
    """Leaves to keep unquantized: --skip '*.mixer.o'; may be given many times."""
    out: Annotated[OutDir | None, tyro.conf.arg(aliases=["-o"])] = None
    """The model directory to write; DIRECTORY-quantized by default."""
    force: bool = False
    """Replace an existing model directory."""
    seed: Seed = 0
    """The seed of the calibration sequences."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        """Load, quantize, write, print."""
        from rich.progress import MofNCompleteColumn, TimeElapsedColumn

        from dovetail.api.quantize import quantize
        from dovetail.cli.bar import delayed_bar
        from dovetail.cli.loading import shown_loading

        out = self.out or Path(os.path.relpath(f"{os.path.abspath(self.directory)}-quantized"))
        given = options(self, "directory", "json", "load", "out")
        with (
            shown_loading(self.directory.name) as watch,
            delayed_bar("{task.description}", "calibrating", MofNCompleteColumn(), TimeElapsedColumn()) as on_step,
        ):
            result = quantize(self.directory, **given, out=out, watch=watch, on_step=on_step)
        if self.json:
            print_json(result.to_dict())
        else:
            print_view(result)
        return 0
