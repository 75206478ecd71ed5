"""Compare two implementations of a model: where they diverge, whether the cause is rounding or a bug, and which bug.

A side is a model directory (ours or in Hugging Face layout, run by us), hf:DIR (run by transformers), py:FILE.py:FACTORY (an
nn.Module that your function returns; the file is executed), emit:FILE.py (written by `dovetail emit`) or, as the second,
http://… (a server's completions with log-probs), dump:DIR (activations that another engine recorded) or vllm:DIR, mlx:DIR,
llamacpp:FILE.gguf (recorded now, by the engine's own interpreter; see `dovetail record --help`). Both run the same prompts in
their own dtype and in float64, and are compared tap by tap.

    dovetail verify my-model hf:my-model
    dovetail verify hf:original py:mine.py:load --map 'blocks.{}.attn.proj=layers.{}.mixer.o' --html report.html
    dovetail verify my-model mlx:my-model --python ~/mlx/bin/python
    dovetail verify my-model http://localhost:8080/v1
    dovetail verify my-model --rollouts rollouts.jsonl --older step-100

--rollouts explains the gap between the log-probs that a sampler recorded and those of the model: temperature, truncation,
rounding, older weights, a shift by one, another architecture, each with its share.

Exit code 0: the same function. 1: two functions, or NaN or infinity. Other codes are errors, and there is no verdict.
"""

from __future__ import annotations

from dovetail.cli.command import Options
from dovetail.cli.printing import Printer
from dovetail.views.progress import step_bar


def run(given: Options, printer: Printer) -> int:
    """Compare, and print the verdict."""
    from dovetail.api.verify import verify

    with step_bar("verify") as move:
        result = verify(**given, progress=move, watch=printer.event)
    return printer.end(result)
