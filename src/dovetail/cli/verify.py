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

import dataclasses as dc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated

import tyro

from dovetail.cli.flags import FileFlags, InFile, Length, OutFile, RunDtype, Seed, number
from dovetail.cli.output import SafeConsole, print_json
from dovetail.cli.printing import options, print_view, write_page
from dovetail.core.limits import ANSWER_SECONDS

if TYPE_CHECKING:
    from dovetail.proof.compare.comparison import Progress


@dc.dataclass
class Command(FileFlags):
    """The two sides and their input."""

    a: tyro.conf.Positional[str]
    """A side: DIR, hf:DIR, py:FILE.py:FACTORY or emit:FILE.py."""
    b: tyro.conf.Positional[str | None] = None
    """Another, dump:DIR, vllm:DIR, mlx:DIR, llamacpp:FILE.gguf or http://HOST:PORT/v1; none with --rollouts."""
    rollouts: InFile | None = None
    """Explain the log-probs that a sampler recorded: JSON lines with prompt_ids, completion_ids and logprobs, or NeMo-RL's
    train_data_stepN.jsonl."""
    older: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """An earlier checkpoint that may have sampled the rollouts: DIR or hf:DIR; may be given many times."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A text that both sides read, by the tokenizer of the first directory that has one; may be given many times."""
    rows: int = 2
    """Rows of random tokens, if no prompt is given."""
    length: Length | None = None
    """Tokens per row; by default enough to pass the edge of a short window."""
    longest: int = 4096
    """The most tokens of the long prompt, which passes every window and length that a spec or config names; 0: none."""
    decode: bool = True
    """Also decode with a cache."""
    dtype: RunDtype | None = None
    """Run both sides in this dtype; by default each in that of its weights."""
    map: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A module of a py: side that computes the output of one of ours: 'blocks.{}.attn.proj=layers.{}.mixer.o'; {} is the
    number of the layer."""
    model: str | None = None
    """The name of the model on a server that has several."""
    timeout: Annotated[float, number(0.1, 3600)] = ANSWER_SECONDS
    """Seconds that one answer of a server may take in all."""
    python: str | None = None
    """The interpreter of another engine's environment, where B is recorded by one."""
    seed: Seed = 0
    """The seed of the random prompts."""
    why: bool = True
    """Search for the cause of a difference."""
    every: bool = False
    """A line per tap in every layer."""
    json: bool = False
    """Print one JSON object."""
    html: OutFile | None = None
    """Also write an HTML page."""

    def run(self) -> int:
        """Compare, and print the verdict."""
        from dovetail.api.verify import verify

        with shown_progress() as progress:
            result = verify(**options(self, "json", "html", "force", "load"), progress=progress)
        write_page(self.html, result, self.force)
        if self.json:
            print_json(result.to_dict())
        else:
            print_view(result)
        return 1 if result.failed else 0


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """Yield a function progress(line): the current step and its time, on stderr."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("verify {task.description}", markup=False), TimeElapsedColumn())
    with Progress(*columns, console=SafeConsole(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda line: bar.update(task, description=line)
