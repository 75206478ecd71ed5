"""Train a model on text, labeled rows, tagged words or pairs, from random weights or those of a model, then generate a sample.

A tokenizer of the spec's vocabulary size is trained on the text. The last 5 % of the tokens are held out. The model directory
holds the spec, the tokenizer, the settings (run.yaml), the metrics of each step (loss.jsonl), checkpoints, and at the end the
weights and, with matplotlib, a plot of the losses. The same command again resumes a run that was interrupted or killed.

    dovetail train llama-tiny --text plays.txt --minutes 5
    dovetail train run.yaml --tokens 200M -o run-2
    dovetail train --from llama-tiny-trained --text letters.txt --steps 500 -o second
"""

from __future__ import annotations

import dataclasses as dc
import os
from pathlib import Path
from typing import Annotated, Literal

import tyro

from dovetail.cli.flags import (
    BatchSize,
    Count,
    InDir,
    InFile,
    Length,
    LoadFlags,
    OutDir,
    OutFile,
    Overrides,
    SampleTokens,
    Seed,
    Sets,
    Spec,
    Steps,
    Swaps,
)
from dovetail.cli.output import print_json, print_note
from dovetail.cli.printing import options, print_view
from dovetail.training.metrics import LogKind
from dovetail.training.plan import (
    CHECKPOINT_MINUTES,
    KEEP,
    TIMEOUT,
    OptimizerKind,
    Plan,
    PrecisionChoice,
    Recompute,
    ScheduleKind,
)

INTERRUPTED = 130
NOT_KEYS = ("json", "load", "mup_check", "out", "widths")  # flags of the command only


@dc.dataclass
class Command(LoadFlags, Overrides):
    """The spec, the text, and the length of the run."""

    spec: tyro.conf.Positional[Spec | None] = None
    """A preset's name, a .yaml file, or a run file: YAML with `spec` and any flag as keys, which flags here override;
    without it, the spec of --from."""
    text: InFile | None = None
    """A UTF-8 text file to train on, best of some megabytes."""
    data: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Token shards of `dovetail data build` to train on, DIR or DIR=WEIGHT; may be given many times."""
    labels: InFile | None = None
    """Labeled rows to classify: JSON Lines of {"text": …, "label": …}, or an .npz of images and labels."""
    tags: InFile | None = None
    """Words with a tag each, as of entities: JSON Lines of {"tokens": ["…", "…"], "tags": ["B-PER", "O"]}."""
    pairs: InFile | None = None
    """Pairs of texts, to match or, by an encoder–decoder, to translate: JSON Lines of {"source": …, "target": …} (or "a" and
    "b"), or a .tsv."""
    objective: str | None = None
    """next_token, masked_tokens, span_corruption, denoising, classification, token_classification, contrastive or translation
    (default: by the spec and data)."""
    from_: Annotated[InDir | None, tyro.conf.arg(name="from")] = None
    """Start from the weights and the tokenizer of a model directory, or of the newest checkpoint of a run."""
    adapter: str | None = None
    """Train an adapter on the frozen weights of --from: lora, dora, ia3, or its fields as YAML: {kind: lora, rank: 8}."""
    only: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """Train only the weights whose paths match this pattern: 'layers.*.mixer.prefix_*'; may be given many times."""
    minutes: float | None = None
    """Train for about N minutes: the first steps are measured (default: 5, if no other end is given)."""
    tokens: Count | None = None
    """Stop after N tokens: 200M, 1.5B, 2e8."""
    steps: Steps | None = None
    """Stop after N steps; two such runs with one seed are bit-equal."""
    out: Annotated[OutDir | None, tyro.conf.arg(aliases=["-o"])] = None
    """The model directory to write (default: SPEC-trained; for the run.yaml of a run, its directory)."""
    force: bool = False
    """Replace an existing model directory."""
    seed: Seed = 0
    """The seed of initial weights, batches, dropout and the sample."""
    set: Sets = ()
    """Change a field first: --set layers.*.mixer.kv_heads=1, or a key of the run file: --set run.batch=4; may be given many
    times."""
    swap: Swaps = ()
    """Change a part in every layer: --swap position=alibi; may be given many times, applied before --set."""
    tokenizer: Literal["byte_pair", "wordpiece", "unigram", "characters", "words"] = "byte_pair"
    """The kind of tokenizer; byte_pair encodes any text without loss."""
    batch: BatchSize = 8
    """Sequences per step."""
    length: Length = 128
    """Tokens per sequence."""
    learning_rate: float | None = None
    """The peak learning rate, after the warm-up (default: 0.0025; with --adapter ten times as much)."""
    schedule: ScheduleKind = Plan.schedule
    """How the learning rate decays: along a cosine, linearly, in the last fifth of the run (wsd), or not."""
    warmup: float = Plan.warmup_fraction
    """The fraction of the run over which the learning rate rises to its peak."""
    floor: float = Plan.floor
    """The last learning rate as a fraction of the peak."""
    cooldown: float = Plan.cooldown
    """The fraction of a run with the schedule wsd over which the learning rate decays."""
    optimizer: OptimizerKind = Plan.optimizer
    """AdamW for all weights, or Muon for matrices and AdamW for the rest."""
    betas: Annotated[tuple[float, float], tyro.conf.arg(metavar="X X")] = Plan.betas
    """Decay rates of AdamW's two moments (default: 0.9 0.95)."""
    momentum: float = Plan.momentum
    """Momentum of Muon."""
    weight_decay: float = Plan.weight_decay
    """Weight decay of matrices and tables."""
    clip: float = Plan.clip
    """The largest gradient norm."""
    ema: float | None = None
    """Save a moving average of the weights with this decay: 0.999."""
    micro_batches: BatchSize = 1
    """Compute a batch in N pieces, in less memory; the result is the same."""
    precision: PrecisionChoice = Plan.precision
    """bf16: matmuls in bfloat16; weights, gradients and the optimizer's state stay in float32. auto: bf16 if this machine
    multiplies faster in it."""
    compile: bool = False
    """Compile each block: faster steps after a slow first one."""
    recompute: Recompute = Plan.recompute
    """Compute activations again in the backward pass, in less memory: all inside a block, or (selective) all but those of
    matmuls and attention."""
    tensor: BatchSize = 1
    """On several ranks: the number of ranks that share each layer (tensor and expert parallelism)."""
    sequence: BatchSize = 1
    """On several ranks: the number of ranks that each have a chunk of every row (context parallelism)."""
    ring: bool = False
    """With --sequence: send keys and values around the ranks, in less memory than gathering them (ring attention)."""
    pipeline: BatchSize = 1
    """On several ranks: the number of pipeline stages, each with some of the layers; --micro-batches go through them (1F1B)."""
    shards: BatchSize | None = None
    """On several ranks: the number of data-parallel ranks over which FSDP shards the weights, by default all; the others
    are replicas (HSDP; with 1, DDP)."""
    evals: Steps = Plan.evals
    """Times per run that the held-out loss is measured."""
    beams: BatchSize | None = None
    """translation: beams of the search by which held-out pairs are decoded at evals (default: 4)."""
    checkpoint_minutes: float = CHECKPOINT_MINUTES
    """Minutes between checkpoints."""
    keep: BatchSize = KEEP
    """Checkpoints that stay; older ones are deleted."""
    log: tyro.conf.UseAppendAction[tuple[LogKind, ...]] = ()
    """Also log the metrics for tensorboard or wandb (Weights & Biases), in the model directory; may be given many times."""
    timeout: float = TIMEOUT
    """Seconds that a rank waits for the others before all of them end, with their stacks on stderr."""
    prompt: str = "The "
    """The prompt of the sample at the end."""
    sample: SampleTokens = 160
    """Tokens to generate at the end."""
    sample_every: int = 0
    """Also generate a sample at every N-th eval (samples.jsonl)."""
    temperature: float = 0.8
    """The temperature of the sample; 0 picks the most probable token."""
    mup_check: OutFile | None = None
    """Do not train, but check µP: plot to this file (.png) by how much the first steps change activations, over widths."""
    widths: tuple[int, ...] = ()
    """The widths of --mup-check (default: 1, 2, 4 and 8 times that of the spec)."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int:
        """Train, and print the losses and a sample. Ctrl-C ends the run after the current step and writes what there is."""
        if self.mup_check is not None:
            return self._mup_check(self.mup_check)
        from dovetail.api.run_file import default_out
        from dovetail.api.train import train

        given = {name: value for name, value in options(self, *NOT_KEYS).items() if name in {"spec", *self.given}}
        if out := self.out or default_out(self.spec, self.from_):
            given["out"] = out
        result = train(**given, note=print_note)
        if os.environ.get("RANK", "0") != "0":  # of torchrun: one rank prints
            return INTERRUPTED if result.interrupted else 0
        if self.json:
            print_json(result.to_dict())
        else:
            print_view(result)
        if result.interrupted:
            print_note(
                f"interrupted after step {result.history[-1].step}; the model and its losses are in {result.directory}; "
                "the same command resumes the run"
            )
        return INTERRUPTED if result.interrupted else 0

    def _mup_check(self, picture: Path) -> int:
        """Print and plot the coordinate check; 1 where activations change more in wider models."""
        from dovetail.api.mup_check import mup_check
        from dovetail.core.errors import UsageError

        if self.spec is None or self.text is None:
            raise UsageError("--mup-check: give a spec and a text file (--text)")
        numbers = {
            "learning_rate": self.learning_rate or Plan.learning_rate,
            "optimizer": self.optimizer,
            "batch": self.batch,
            "length": self.length,
        }
        changes = {"seed": self.seed, "set": self.set, "swap": self.swap}
        result = mup_check(self.spec, self.text, widths=self.widths, **numbers, **changes)
        result.draw(picture, self.force)
        if self.json:
            print_json(result.to_dict())
        else:
            print_view(result)
        return 0 if result.flat else 1
