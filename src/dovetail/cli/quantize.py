"""Store the matrices of a model in fewer bits: a smaller model directory, which every verb opens.

Embedding, norms, routers and head stay as they are. rtn rounds each value to the nearest level and needs no text. gptq and awq
read calibration text, layer by layer: gptq lets the codes of a row compensate for each other's errors, awq gives inputs with
large activations finer steps. With --text the perplexity is measured on the last twentieth of the file, before and after.

    dovetail quantize llama-tiny-trained --bits 4 --method gptq --text plays.txt -o small
    dovetail quantize llama-tiny-trained --format nf4 -o small
    dovetail generate small "Once upon"
"""

from __future__ import annotations

from dovetail.cli.command import Options, call
from dovetail.cli.printing import print_result
from dovetail.views.progress import delayed_bar


def run(given: Options, json: bool) -> int:
    """Load, quantize, write, print."""
    from dovetail.api.quantize import quantize

    with delayed_bar("{task.description}", "calibrating", counts=True) as on_step:
        return print_result(call(quantize, {**given, "on_step": on_step}), json)
