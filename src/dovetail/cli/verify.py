"""Say where two implementations of a model part, whether that is rounding or a bug, and what kind of bug.

A side is a model directory (ours or in Hugging Face layout, run by us), hf:DIR (run by transformers), py:FILE.py:FACTORY (an
nn.Module that a function of yours returns; the file is run), emit:FILE.py (written by `dovetail emit`) or http://… (a server's
completions with log-probs). Both run the same prompts in their own dtype and in float64, and are compared tap by tap.

    dovetail verify my-model hf:my-model
    dovetail verify hf:original py:mine.py:load --map 'blocks.{}.attn.proj=layers.{}.mixer.o' --html report.html
    dovetail verify my-model http://localhost:8080/v1

Exit code 0: the same function. 1: two functions. Else an error.
"""

from __future__ import annotations

import dataclasses as dc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from dovetail.cli.output import print_json
from dovetail.cli.shown import shown, write_text

if TYPE_CHECKING:
    import torch

    from dovetail.text.tokenizer import Tokenizer
    from dovetail.verification.prompt import Prompt
    from dovetail.verification.sides import Local
    from dovetail.verification.walk import Told


@dc.dataclass
class Command:
    """Which two sides, and what they read."""

    a: tyro.conf.Positional[str]
    """A side: DIR, hf:DIR, py:FILE.py:FACTORY or emit:FILE.py."""
    b: tyro.conf.Positional[str]
    """Another, or http://HOST:PORT/v1."""
    prompt: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A text both sides read, by the tokenizer of the first directory that has one; may be given many times."""
    rows: int = 2
    """Rows of random tokens, where no prompt is given."""
    length: int | None = None
    """Tokens a row; by default enough to pass the edge of a short window."""
    dtype: Literal["float64", "float32", "bfloat16", "float16"] | None = None
    """Run both sides in this dtype; by default each in that of its weights."""
    map: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """A module of a py: side that computes what one of ours does: 'blocks.{}.attn.proj=layers.{}.mixer.o'; {} is the layer."""
    model: str | None = None
    """The name by which a server knows its model, where it has several."""
    seed: int = 0
    """Draws other prompts."""
    why: bool = True
    """Look for the cause of a difference."""
    every: bool = False
    """A line for each tap, also where nothing is wrong."""
    json: bool = False
    """One JSON object on stdout."""
    html: Path | None = None
    """Write the whole report as a page, too."""

    def run(self) -> int:
        """Compare, and say what was found."""
        from dovetail.core.errors import FileError

        if self.a.startswith(("http://", "https://")):
            raise FileError(f"{self.a}: a server can be the second side only; the first must be run here")
        if self.b.startswith(("http://", "https://")):
            return self._served()
        from dovetail.verification.check import verify
        from dovetail.verification.report import page, view
        from dovetail.verification.sides import pair

        with shown_progress() as told:
            told(f"reads {self.a} and {self.b}")
            a, b = pair(self.a, self.b, self._told())
            verdict = verify(a, b, self._prompt(a, b), dtype=self._dtype(), why=self.why, told=told)
        if self.html is not None:
            write_text(self.html, page(verdict))
        if self.json:
            print_json(verdict.data())
        else:
            shown(lambda _: view(verdict, every=self.every))
        return 1 if verdict.word == "structural" else 0

    def _served(self) -> int:
        """A server as the second side."""
        from dovetail.verification.served import compare, view
        from dovetail.verification.sides import local

        with shown_progress() as told:
            told(f"reads {self.a}")
            a = local(self.a, self._told())
            found = compare(a, self.b, self._prompt(a, None), model=self.model, tokenizer=self._tokenizer(), told=told)
        if self.json:
            print_json(found.data())
        else:
            shown(lambda _: view(found))
        return 1 if found.word == "structural" else 0

    def _told(self) -> dict[str, str]:
        """Which modules belong together, as the user says."""
        from dovetail.core.errors import FileError

        told = {}
        for pair in self.map:
            theirs, equals, ours = pair.partition("=")
            if not equals or not theirs or not ours:
                raise FileError(f"--map takes THEIRS=OURS, not {pair!r}")
            told[theirs] = ours
        return told

    def _dtype(self) -> torch.dtype | None:
        import torch

        return None if self.dtype is None else getattr(torch, self.dtype)

    def _prompt(self, a: Local, b: Local | None) -> Prompt:
        from dovetail.core.errors import SpecError
        from dovetail.verification.prompt import drawn, of_ids

        spec = a.spec or (b.spec if b is not None else None)
        if not self.prompt:
            if spec is None:
                raise SpecError("prompt", "neither side says what it reads", "give --prompt ids, e.g. --prompt '3 14 15'")
            return drawn(spec, rows=self.rows, length=self.length, seed=self.seed, avoid=self._padding())
        vocab = None if spec is None else spec.vocab
        tokenizer = self._tokenizer()
        if tokenizer is None:
            if not all(text.replace(" ", "").isdigit() for text in self.prompt):
                raise SpecError("prompt", "no side has a tokenizer", "give token ids instead: --prompt '3 14 15'")
            rows = [[int(word) for word in text.split()] for text in self.prompt]
        else:
            rows = [tokenizer.prompt(text) for text in self.prompt]
        shortest = min(map(len, rows))  # both sides read rows of one length: what is longer is cut
        return of_ids([row[:shortest] for row in rows], vocab)

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

    def _padding(self) -> int | None:
        """A token that a side takes for padding, which random prompts leave out."""
        from dovetail.io.untrusted import Directory
        from dovetail.port.load import CONFIG_FILE, LARGEST_CONFIG

        for place in self._directories():
            where = Directory(place)
            if where.has(CONFIG_FILE):
                said = where.json(CONFIG_FILE, LARGEST_CONFIG).get("pad_token_id")
                if isinstance(said, int):
                    return said
        return None


@contextmanager
def shown_progress() -> Iterator[Told]:
    """What is being done and for how long, on stderr."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("verify {task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr), transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda note: bar.update(task, description=note)
