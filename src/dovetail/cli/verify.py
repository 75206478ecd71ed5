"""Compare two implementations of a model: where they diverge, whether that is rounding or a bug, and which bug.

A side is a model directory (ours or in Hugging Face layout, run by us), hf:DIR (run by transformers), py:FILE.py:FACTORY (an
nn.Module that a function of yours returns; the file is executed), emit:FILE.py (written by `dovetail emit`) or http://… (a
server's completions with log-probs). Both run the same prompts in their own dtype and in float64, and are compared tap by tap.

    dovetail verify my-model hf:my-model
    dovetail verify hf:original py:mine.py:load --map 'blocks.{}.attn.proj=layers.{}.mixer.o' --html report.html
    dovetail verify my-model http://localhost:8080/v1

Exit code 0: the same function. 1: two functions, or NaN or infinity. Other codes are errors, and there is no verdict.
"""

from __future__ import annotations

import dataclasses as dc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from dovetail.cli.flags import Length, LoadFlags, OutFile, RunDtype, Seed, number
from dovetail.cli.output import SafeConsole, print_json
from dovetail.cli.shown import shown
from dovetail.core.limits import ANSWER_SECONDS

if TYPE_CHECKING:
    import torch

    from dovetail.text.tokenizer import Tokenizer
    from dovetail.verification.comparison import Progress
    from dovetail.verification.prompt import Prompt
    from dovetail.verification.sides import Side
    from dovetail.verification.verdict import Verdict

MOST_ROWS, MOST_TOKENS = 256, 65_536  # of a random prompt


@dc.dataclass
class Command(LoadFlags):
    """The two sides and their input."""

    a: tyro.conf.Positional[str]
    """A side: DIR, hf:DIR, py:FILE.py:FACTORY or emit:FILE.py."""
    b: tyro.conf.Positional[str]
    """Another, or http://HOST:PORT/v1."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A text that both sides read, by the tokenizer of the first directory that has one; may be given many times."""
    rows: int = 2
    """Rows of random tokens, where no prompt is given."""
    length: Length | None = None
    """Tokens per row; by default enough to pass the edge of a short window."""
    longest: int = 4096
    """The most tokens of the long prompt, which passes every window and length that a spec or config names; 0: none."""
    decode: bool = True
    """Decode with a cache, too."""
    dtype: RunDtype | None = None
    """Run both sides in this dtype; by default each in that of its weights."""
    map: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A module of a py: side that computes the output of one of ours: 'blocks.{}.attn.proj=layers.{}.mixer.o'; {} is the
    number of the layer."""
    model: str | None = None
    """The name by which a server knows its model, where it has several."""
    timeout: Annotated[float, number(0.1, 3600)] = ANSWER_SECONDS
    """Seconds that one answer of a server may take in all."""
    seed: Seed = 0
    """Selects the random prompts."""
    why: bool = True
    """Search for the cause of a difference."""
    every: bool = False
    """A line per tap in every layer."""
    json: bool = False
    """One JSON object on stdout."""
    html: OutFile | None = None
    """Write the whole report as an HTML page, too."""

    def run(self) -> int:
        """Compare, and print the verdict."""
        from dovetail.core.errors import FileError

        if self.a.startswith(("http://", "https://")):
            raise FileError(f"{self.a}: a server can be the second side only; the first must be run here")
        if self.b.startswith(("http://", "https://")):
            return self._served()
        from dovetail.verification.opening import pair
        from dovetail.verification.report import page, view

        with shown_progress() as progress:
            progress(f"reading {self.a} and {self.b}")
            a, b = pair(self.a, self.b, self._map())
            verdict = self._verify(a, b, progress)
        if self.html is not None:
            from dovetail.io.atomic import write_atomically

            write_atomically(self.html, page(verdict))
        if self.json:
            print_json(verdict.data())
        else:
            shown(lambda _: view(verdict, every=self.every))
        return 1 if verdict.failed else 0

    def _verify(self, a: Side, b: Side, progress: Progress) -> Verdict:
        from dovetail.verification.check import verify

        how = {"dtype": self._dtype(), "why": self.why, "decode": self.decode, "longest": self.longest}
        return verify(a, b, self._prompt(a, b), **how, progress=progress)

    def _served(self) -> int:
        """A server as the second side."""
        from dovetail.verification.opening import local
        from dovetail.verification.server import compare_server, view

        with shown_progress() as progress:
            progress(f"reading {self.a}")
            a = local(self.a, self._map())
            prompt, tokenizer = self._prompt(a, None), self._tokenizer()
            verdict = compare_server(
                a, self.b, prompt, model=self.model, tokenizer=tokenizer, seconds=self.timeout, progress=progress
            )
        if self.json:
            print_json(verdict.data())
        else:
            shown(lambda _: view(verdict))
        return 1 if verdict.failed else 0

    def _map(self) -> dict[str, str]:
        """The modules that --map pairs."""
        from dovetail.core.errors import FileError

        mapped = {}
        for pair in self.map:
            theirs, equals, ours = pair.partition("=")
            if not equals or not theirs or not ours:
                raise FileError(f"--map takes THEIRS=OURS, not {pair!r}")
            mapped[theirs] = ours
        return mapped

    def _dtype(self) -> torch.dtype | None:
        import torch

        return None if self.dtype is None else getattr(torch, self.dtype)

    def _prompt(self, a: Side, b: Side | None) -> Prompt:
        from dovetail.core.errors import SpecError
        from dovetail.verification.check import padding_token
        from dovetail.verification.prompt import prompt_of_ids, random_prompt

        for name, value, most in (("rows", self.rows, MOST_ROWS), ("length", self.length, MOST_TOKENS)):
            if value is not None and not 1 <= value <= most:
                raise SpecError(f"--{name}", f"{value} is not from 1 to {most:,}")

        sides = [side for side in (a, b) if side is not None]
        spec = next((side.spec for side in sides if side.spec is not None), None)
        if not self.prompt:
            if spec is None:
                raise SpecError(
                    "prompt", "neither side has a spec to draw a prompt from", "give --prompt ids, e.g. --prompt '3 14 15'"
                )
            return random_prompt(spec, rows=self.rows, length=self.length, seed=self.seed, avoid=padding_token(*sides))
        vocab = None if spec is None else spec.vocab
        tokenizer = self._tokenizer()
        if tokenizer is None:
            if not all(text.replace(" ", "").isdigit() for text in self.prompt):
                raise SpecError("prompt", "no side has a tokenizer", "give token ids instead: --prompt '3 14 15'")
            rows = [[int(word) for word in text.split()] for text in self.prompt]
        else:
            rows = [tokenizer.prompt(text) for text in self.prompt]
        shortest = min(map(len, rows))  # both sides read rows of one length
        return prompt_of_ids([row[:shortest] for row in rows], vocab)

    def _directories(self) -> Iterator[Path]:
        for text in (self.a, self.b):
            place = Path(text.removeprefix("hf:"))
            if place.is_dir():
                yield place

    def _tokenizer(self) -> Tokenizer | None:
        from dovetail.text.tokenizer import Tokenizer

        for place in self._directories():
            if (place / "tokenizer.json").is_file():
                return Tokenizer.load(place)
        return None


@contextmanager
def shown_progress() -> Iterator[Progress]:
    """The current step and the time it takes, on stderr."""
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("verify {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=SafeConsole(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda line: bar.update(task, description=line)
