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

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dovetail.api.options import OutFile
from dovetail.cli.command import FORCE, Options
from dovetail.cli.output import SafeConsole
from dovetail.cli.printing import print_result, write_page

if TYPE_CHECKING:
    from dovetail.proof.compare.comparison import Progress


def run(
    given: Options,
    json: bool,
    html: Annotated[Path | None, OutFile("Also write an HTML page.")] = None,
    force: Annotated[bool, FORCE] = False,
) -> int:
    """Compare, and print the verdict."""
    from dovetail.api.verify import verify

    with shown_progress() as progress:
        result = verify(**given, progress=progress)
    write_page(html, result, force)
    return print_result(result, json)


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """Yield a function progress(line): the current step and its time, on stderr."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("verify {task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=SafeConsole(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda line: bar.update(task, description=line)
