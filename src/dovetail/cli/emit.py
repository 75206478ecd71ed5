"""Write a model as one PyTorch file that imports only torch and the standard library.

Weights saved by Dovetail load into the model of the file by the same names, and the outputs are bit-equal (for long sequences
with a window, a bias or a soft-cap: equal up to rounding). A part that cannot be written is an error with its path.

    dovetail emit llama-tiny -o llama.py
    python llama.py                                    random weights
    python llama.py my-model/model.safetensors         weights of `dovetail train` or `dovetail import`
"""

from __future__ import annotations

from dovetail.cli.command import Options
from dovetail.cli.output import print_json, print_line


def run(given: Options, json: bool) -> None:
    """Write the file, or print it."""
    from dovetail.api.emit import emit

    result = emit(**given)
    if json:
        print_json(result.to_dict())
    elif result.out is None:
        print(result.text, end="")
    else:
        print_line(f"{result.out}: {result.lines} lines; python {result.out} runs it")
