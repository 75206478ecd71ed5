"""Run the laws, property tests generated from the spec: on all parts, on one spec, on a model of another library, or on a
running server.

    dovetail laws llama-tiny --swap position=alibi
    dovetail laws py:model.py:tiny --only causal padded
    dovetail laws http://localhost:8000/v1
"""

from __future__ import annotations

import contextlib
import dataclasses as dc
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from dovetail.cli.flags import InDir, LoadFlags, RunDtype, Seed, Sets, Spec, Swaps
from dovetail.cli.output import SafeConsole, print_json
from dovetail.cli.printing import options, shown

if TYPE_CHECKING:
    from dovetail.api.laws import Progress


@dc.dataclass
class Command(LoadFlags):
    """The model (all sampled specs by default), and the laws."""

    spec: Annotated[Spec | None, tyro.conf.Positional] = None
    """A preset, .yaml file or model directory; `hf:DIR` is run by transformers, `py:FILE.py:FACTORY` is any nn.Module that
    takes token ids: both run the laws that need no declarations. `http://HOST/v1` is a running
    OpenAI-compatible server."""
    set: Sets = ()
    """Change a field of SPEC first: --set layers.*.mixer.kv_heads=1; may be given many times."""
    swap: Swaps = ()
    """Change a part of SPEC wherever it occurs: --swap position=alibi; may be given many times, applied before --set."""
    only: tuple[str, ...] = ()
    """Only these laws."""
    as_is: bool = False
    """With hf: and py:, do not perturb initial weights, which hide bugs. The weights of a checkpoint are never perturbed."""
    quick: bool = False
    """A few sampled specs that hold every kind; under a minute."""
    seed: Seed = 0
    """The seed of sampled specs, weights and inputs."""
    seeds: int | None = None
    """On one spec, test each law with the weights and inputs of N seeds, from --seed on; 3 by default. Slow laws use
    only the first."""
    record: Path | None = None
    """On sampled specs, append outcomes to this file; the same command continues a run that was killed."""
    model: str | None = None
    """On a server: the name of the model there; the first that it lists by default."""
    key: str | None = None
    """On a server: its API key, sent as a bearer token."""
    tokenizer: InDir | None = None
    """On a server that takes only text: a directory with its tokenizer.json."""
    dtype: RunDtype | None = None
    """On a server: the dtype in which it computes, if known. By default the bound comes only from the server's own spread."""
    exact: bool = False
    """On a server that promises batch invariance: repeated and concurrent requests must be equal bit by bit."""
    against: str | None = None
    """On a server with speculation: the URL of one with the same model, without."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        """Check, print, and return 1 where a law fails."""
        from dovetail.api.laws import laws

        # a result is printed when it is known: on stdout, or with --json, whose object comes last, on stderr
        with shown_progress() as progress:
            result = laws(
                **options(self, "json", "load"),
                announce=announced,
                progress=progress,
                shown=lambda row: shown(lambda _: row, sys.stderr if self.json else sys.stdout),
            )
        if self.json:
            print_json(result.to_dict(), indent=1)
        else:
            shown(lambda _: result.summary())
        return 1 if result.failed else 0


def announced(line: str) -> None:
    """Print the planned requests to a server, on stderr."""
    SafeConsole(file=sys.stderr).print(line, highlight=False, markup=False)


@contextlib.contextmanager
def shown_progress() -> Iterator[Progress]:
    """Yield a function progress(done, in all, note): a bar on stderr with the time left."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    times = (TimeElapsedColumn(), TimeRemainingColumn())
    columns = (TextColumn("laws"), BarColumn(), MofNCompleteColumn(), *times, TextColumn("{task.fields[note]}", markup=False))
    console = SafeConsole(file=sys.stderr)
    # rich would print results that are meant for a pipe on the terminal of the bar
    with Progress(*columns, console=console, transient=True, redirect_stdout=sys.stdout.isatty()) as bar:
        task = bar.add_task("laws", total=None, note="")
        yield lambda done, known, note: bar.update(task, completed=done, total=known, note=note)
