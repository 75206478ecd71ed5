"""Train a model on text, a synthetic task, labeled rows, tagged words or pairs, from random weights or those of a model.

A tokenizer of the spec's vocabulary size is trained on the text; a sample is generated at the end. The last 5 % of the tokens
are held out. The model directory holds the spec, the tokenizer, the settings (run.yaml), the metrics of each step (loss.jsonl),
checkpoints, and at the end the weights and, with matplotlib, a plot of the losses. The same command again resumes a run that
was interrupted or killed.

    dovetail train llama-tiny --text plays.txt --minutes 5
    dovetail train run.yaml --tokens 200M -o run-2
    dovetail train llama-tiny --task '{kind: mqar, pairs: 8}' --length 64 --minutes 5
    dovetail train --from llama-tiny-trained --text letters.txt --steps 500 -o second
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from dovetail.api.options import OutFile
from dovetail.base.errors import UsageError
from dovetail.base.option import Option, parameters
from dovetail.cli.command import Options, call
from dovetail.cli.printing import print_result
from dovetail.training.plan import Plan

SHARED = ("learning_rate", "optimizer", "batch", "length", "seed", "set", "swap")  # options of training that the check has too

Picture = Annotated[
    Path | None,
    OutFile(
        "Do not train, but check µP: plot to this file (.png) by how much the first steps change activations, over widths."
    ),
]
Widths = Annotated[Sequence[int], Option("The widths of --mup-check (default: 1, 2, 4 and 8 times that of the spec).")]


def run(given: Options, json: bool, mup_check: Picture = None, widths: Widths = ()) -> int:
    """Train, and print the losses and a sample. Ctrl-C ends the run after the current step and writes what there is."""
    from dovetail.api.run_file import default_out
    from dovetail.api.train import train

    if mup_check is not None:
        return _mup_check({**given, "widths": widths}, mup_check, json)
    given.setdefault("spec", None)
    if out := given.get("out") or default_out(given["spec"], given.get("from_")):
        given["out"] = out
    result = call(train, given)
    if os.environ.get("RANK", "0") != "0":  # of torchrun: one rank prints
        return result.exit_code
    return print_result(result, json)


def _mup_check(given: Options, picture: Path, json: bool) -> int:
    """Print and plot the coordinate check; 1 where activations change more in wider models."""
    from dovetail.api.mup_check import mup_check
    from dovetail.api.train import train

    if "spec" not in given or "text" not in given:
        raise UsageError("--mup-check: give a spec and a text file (--text)")
    options = {"learning_rate": Plan.learning_rate, "length": parameters(train)["length"].default}
    options |= {name: given[name] for name in SHARED if name in given}
    result = mup_check(given["spec"], given["text"], widths=given["widths"], **options)
    result.draw(picture, given.get("force", False))
    return print_result(result, json)
