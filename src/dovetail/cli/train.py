"""Train a small model from scratch on a text file, then generate a sample.

A tokenizer of the spec's vocabulary size is trained on the text. The last 5 % of the tokens are held out. The model directory
holds the spec, the weights, the tokenizer, the metrics of each step (loss.jsonl) and, with matplotlib, a plot of the losses.

    dovetail train llama-tiny --text plays.txt --minutes 5
"""

from __future__ import annotations

import dataclasses as dc
import os
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dovetail.cli.flags import BatchSize, InFile, Length, LoadFlags, OutDir, SampleTokens, Seed, Sets, Spec, Steps, Swaps
from dovetail.cli.output import print_json, print_note
from dovetail.cli.shown import options, print_view
from dovetail.training.plan import Plan

INTERRUPTED = 130


@dc.dataclass
class Command(LoadFlags):
    """The spec, the text, and the length of the run."""

    spec: tyro.conf.Positional[Spec]
    """A preset's name or a .yaml file. A directory with trained weights is refused: training starts from random weights."""
    text: InFile
    """A UTF-8 text file to train on, best of some megabytes."""
    minutes: float | None = None
    """Stop after this many minutes (default: 5, if --steps is not given)."""
    steps: Steps | None = None
    """Stop after this many steps; two such runs with one seed are bit-equal."""
    out: Annotated[OutDir | None, tyro.conf.arg(aliases=["-o"])] = None
    """The model directory to write (default: SPEC-trained)."""
    force: bool = False
    """Replace an existing model directory."""
    seed: Seed = 0
    """The seed of initial weights, batches, dropout and the sample."""
    set: Sets = ()
    """Change a field first: --set layers.*.mixer.kv_heads=1; may be given many times."""
    swap: Swaps = ()
    """Change a part in every layer: --swap position=alibi; may be given many times, applied before --set."""
    tokenizer: Literal["byte_pair", "wordpiece", "unigram", "characters", "words"] = "byte_pair"
    """The kind of tokenizer; byte_pair encodes any text without loss."""
    batch: BatchSize = 8
    """Sequences per step."""
    length: Length = 128
    """Tokens per sequence."""
    learning_rate: float = Plan.learning_rate
    """The peak learning rate, after the warm-up; then it decays along a cosine."""
    warmup: float = Plan.warmup_fraction
    """The fraction of the run over which the learning rate rises to its peak."""
    prompt: str = "The "
    """The prompt of the sample at the end."""
    sample: SampleTokens = 160
    """Tokens to generate at the end."""
    temperature: float = 0.8
    """The temperature of the sample; 0 takes the most probable token."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        """Train, and print the losses and a sample. Ctrl-C ends the run after the current step and writes what there is."""
        from dovetail.api.train import train

        out = self.out or Path(f"{Path(os.path.abspath(self.spec)).stem}-trained")
        result = train(**{**options(self, "json", "load"), "out": out}, note=print_note)
        if self.json:
            print_json(result.to_dict())
        else:
            print_view(result)
        if result.interrupted:
            print_note(f"interrupted after step {result.history[-1].step}; the model and its losses are in {out}")
        return INTERRUPTED if result.interrupted else 0
