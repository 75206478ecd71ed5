"""train: train a small model from scratch on a text file."""

from __future__ import annotations

import contextlib
import dataclasses as dc
import math
from collections.abc import Callable, Sequence
from importlib.util import find_spec as find_module
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from dovetail.api.arguments import SpecLike, check_positive, read_spec, silent
from dovetail.api.result import Result
from dovetail.core.errors import FileError, UsageError
from dovetail.core.fold import parameters
from dovetail.core.memory import check_memory
from dovetail.core.part import plain
from dovetail.generation import Sampling
from dovetail.io.model_dir import must_be_free
from dovetail.io.model_files import PLOT_FILE, RUN_FILE, SAMPLES_FILE, TOKENIZER_FILE
from dovetail.io.spec import SPEC_FILE, Changes, to_yaml
from dovetail.io.untrusted import PICKLES, Directory
from dovetail.look.console import unwrapped
from dovetail.look.curve import draw_losses
from dovetail.surgery.widen import with_tied_scale
from dovetail.text.tokenizer import Tokenizer
from dovetail.training.interrupt import Interrupt
from dovetail.training.loop import train as train_loop
from dovetail.training.metrics import StepMetrics
from dovetail.training.plan import CHECKPOINT_MINUTES, KEEP, TIMEOUT, OptimizerKind, Plan, Precision, Recompute, ScheduleKind
from dovetail.training.ranks import ranks_of_run
from dovetail.training.run import Run, open_run
from dovetail.training.samples import Samples, check_samples, sample_text
from dovetail.training.source import Shape, TokenizerKind
from dovetail.training.step import DTYPES
from dovetail.training.task import generation_files, objective_kind, read_source, reads_of
from dovetail.transformer import Transformer

LAST_STEPS = 50  # steps whose mean loss is reported: a single step's loss is noisy
MINUTES = 5.0  # of a run without an end
BYTES_PER_PARAMETER = 16  # float32 weight and gradient, and AdamW's two moments


@dc.dataclass(frozen=True, repr=False, eq=False)
class TrainingRun(Result):
    """A trained model and its metrics; losses are in nats per token."""

    name: str
    model: Transformer
    tokenizer: Tokenizer | None  # None where it was trained on images
    history: tuple[StepMetrics, ...]
    interrupted: bool  # Ctrl-C ended the run early
    directory: Path | None = None  # the model directory that was written
    held_out_bits_per_byte: float | None = None  # comparable between vocabularies; None where it does not generate text
    prompt: str = ""
    sample: str | None = None

    @property
    def held_out_loss(self) -> float | None:
        """The loss on held-out text at the end."""
        return self.history[-1].val_loss

    @property
    def train_loss(self) -> float:
        """The mean training loss of the last steps."""
        tail = self.history[-LAST_STEPS:]
        return sum(metrics.loss for metrics in tail) / len(tail)

    def to_dict(self) -> dict[str, Any]:
        last = self.history[-1]
        data: dict[str, Any] = {
            "directory": None if self.directory is None else str(self.directory),
            "parameters": parameters(self.model.spec),
            "steps": last.step,
            "tokens": last.tokens,
            "seconds": round(last.seconds, 1),
            "tokens_per_second": round(last.tokens / last.seconds),
            "first_loss": self.history[0].loss,
            "train_loss": self.train_loss,
            "train_loss_steps": len(self.history[-LAST_STEPS:]),
            "held_out_loss": self.held_out_loss,
            **{f"held_out_{name}": value for name, value in (last.val_metrics or {}).items()},
        }
        if self.held_out_bits_per_byte is not None:
            data["held_out_bits_per_byte"] = self.held_out_bits_per_byte
        if self.sample is not None:
            data["sample"] = self.sample
        return {**data, "interrupted": self.interrupted}

    def view(self, width: int) -> RenderableType:
        data = self.to_dict()
        bits = self.held_out_bits_per_byte
        lines = [
            f"{data['steps']:,} steps, {data['tokens']:,} tokens in {data['seconds']:.0f} s: "
            f"{data['tokens_per_second']:,} tokens/s" + (" (interrupted)" if self.interrupted else ""),
            f"loss of step 1: {data['first_loss']:.3f}; train loss (mean of the last {data['train_loss_steps']} steps): "
            f"{self.train_loss:.3f}; held-out loss: {self.held_out_loss:.3f}"
            + "".join(f", {name} {value:.4g}" for name, value in (self.history[-1].val_metrics or {}).items())
            + ("" if bits is None else f", {bits:.3f} bits per byte"),
        ]
        if self.sample:
            lines += ["", f"a sample after {self.prompt!r}:", "", self.prompt + self.sample, ""]
        if self.directory is not None:
            lines.append(f"written to {self.directory}")
        return unwrapped("\n".join(lines))


def train(
    spec: SpecLike,
    text: str | Path | None = None,
    *,
    data: str | Sequence[str] = (),
    labels: str | Path | None = None,
    pairs: str | Path | None = None,
    objective: str | None = None,
    minutes: float | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    force: bool = False,
    seed: int = 0,
    set: Changes = (),
    swap: Changes = (),
    tokens: float | None = None,
    tokenizer: TokenizerKind = "byte_pair",
    batch: int = 8,
    length: int = 128,
    learning_rate: float = Plan.learning_rate,
    schedule: ScheduleKind = Plan.schedule,
    warmup: float = Plan.warmup_fraction,
    optimizer: OptimizerKind = Plan.optimizer,
    weight_decay: float = Plan.weight_decay,
    clip: float = Plan.clip,
    ema: float | None = None,
    micro_batches: int = 1,
    precision: Precision = Plan.precision,
    compile: bool = False,
    recompute: Recompute = Plan.recompute,
    checkpoint_minutes: float = CHECKPOINT_MINUTES,
    keep: int = KEEP,
    timeout: float = TIMEOUT,
    prompt: str = "The ",
    sample: int = 160,
    sample_every: int = 0,
    temperature: float = 0.8,
    quiet: bool = False,
    note: Callable[[str], None] | None = None,
) -> TrainingRun:
    """Train a model from random weights on a text file, token shards, labeled rows or pairs; return it with its metrics.

    A tokenizer of the spec's vocabulary size is trained on the text; the last 5 % of the tokens are held out. `data` are
    directories of `build_data`, `DIR` or `DIR=WEIGHT`; their tokenizer and held-out documents are used. `labels` is a file of
    labeled texts (JSON Lines) or images (.npz), `pairs` one of pairs of texts; a tenth of their rows is held out. `objective`
    names one of `dovetail.training.task.OBJECTIVES`; by default it follows from the spec and the data. The run ends
    after `tokens`, `steps` or about as many `minutes` (5 by default); two runs of equal steps and seed are bit-equal. The
    learning rate rises over the fraction `warmup` of the run, then follows the schedule. `quiet` shows no progress; `note` is
    called with lines about the text and the spec. At every `sample_every`-th eval a sample is generated.

    `out` is the directory to train in: spec, tokenizer, settings, metrics of each step, checkpoints every
    `checkpoint_minutes`, and at the end the weights and a plot of the losses. The same call again resumes a run that was
    interrupted or killed, and ends with the weights of the unbroken run. Ctrl-C ends the run after the current step, with a
    checkpoint and the weights so far; `interrupted` is true. On several ranks, one that dies, or does not answer within
    `timeout` seconds, ends all of them.
    """
    numbers = {"minutes": minutes, "steps": steps, "tokens": tokens, "batch": batch, "length": length}
    positive = {"learning_rate": learning_rate, "clip": clip, "micro_batches": micro_batches, "keep": keep, "timeout": timeout}
    other = {"temperature": temperature, "sample": sample, "sample-every": sample_every, "seed": seed}
    _check_options(numbers | positive, other, warmup, prompt)
    say = note or silent
    name, changed, directory = read_spec(spec).after(set, swap)
    if directory is not None:
        _refuse_weights(directory)
    place = None if out is None else Path(out)
    if place is not None and not (place / RUN_FILE).is_file():
        must_be_free(place, force)
    places = [data] if isinstance(data, str) else list(data)
    given = {"text": text, "data": places, "labels": labels, "pairs": pairs}
    kind = objective_kind(changed, reads_of(given), objective)
    if tokens is not None and kind.reads != "text":
        raise UsageError(f"--tokens: the rows of --{kind.reads} differ in length; give --steps or --minutes")
    if (scaled := with_tied_scale(changed)) != changed:
        say(f"µP multiplies the logits of a tied head by base_width/width: --set head.scale={plain(scaled.head)['scale']:g}")
    needed = BYTES_PER_PARAMETER * parameters(changed) + 4 * batch * length * changed.vocab // micro_batches
    check_memory(needed, f"training {parameters(changed):,} parameters on {batch:,} × {length:,} tokens per step")
    ends = [steps, None if tokens is None else math.ceil(tokens / (batch * length))]
    end = min((one for one in ends if one is not None), default=None)
    plan = Plan(
        steps=end,
        minutes=MINUTES if minutes is None and end is None else minutes,
        schedule=schedule,
        learning_rate=learning_rate,
        warmup_fraction=warmup,
        optimizer=optimizer,
        weight_decay=weight_decay,
        clip=clip,
        ema=ema,
        micro_batches=micro_batches,
        precision=precision,
        compile=compile,
        recompute=recompute,
        seed=seed,
        quiet=quiet,
    )
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(ranks_of_run(timeout))
        if ranks.count > 1 and plan.minutes is not None:
            raise UsageError("--minutes: ranks measure different times; give --tokens or --steps")
        if sample_every:
            check_samples(kind, ranks)
        plan, say = (plan, say) if ranks.first else (dc.replace(plan, quiet=True), silent)
        shape = Shape(batch, length, seed, ranks.rank, ranks.count)
        source = read_source(kind, changed, tokenizer, shape, say, given)
        learned = kind.of(changed, source.tokenizer, length)
        counts = f"{source.tokens + source.held_out_tokens:,} {source.unit}, {source.held_out_tokens:,} held out"
        say(f"{name}: {parameters(changed):,} parameters, {kind.task}; {counts}")
        model = ranks.build(changed, seed, DTYPES[precision])
        interrupted, run = stack.enter_context(Interrupt()), None
        if place is not None:
            settings = {"spec": plain(changed), "data": dict(source.settings), "batch": batch, "length": length}
            settings |= {"objective": kind.name}
            files = {SPEC_FILE: to_yaml(changed), **generation_files(source.tokenizer, learned)}
            if ranks.first_does(lambda: open_run(place, settings | plan.settings(), files, force)):
                say(f"{place}: resuming")
            run = stack.enter_context(Run(place, plan, ranks, checkpoint_minutes, keep))
        sampling, samples = Sampling(temperature=temperature, seed=seed), None
        if sample_every and source.tokenizer is not None:
            path = None if place is None else place / SAMPLES_FILE
            samples = Samples(source.tokenizer, prompt, sample, sampling, sample_every, path, say)
        history = train_loop(
            model, source.batch, learned, plan, source.held_out, interrupted, run, ranks, samples, source.where
        )
        stopped = ranks.any(interrupted.received)  # Ctrl-C may have reached one rank alone
        if run is not None and place is not None:
            run.write_model(changed)
            title = f"{name} on {Path(text or labels or pairs or places[0]).name}"
            ranks.first_does(lambda: _plot(history, place / PLOT_FILE, title, say))
    result = TrainingRun(name, model, source.tokenizer, tuple(history), stopped, place, prompt=prompt)
    if not kind.generates or source.tokenizer is None:
        return result
    bits = source.bits_per_byte(result.held_out_loss or math.nan)
    alone = ranks.count == 1 and not stopped  # a model over several ranks is sampled from its directory
    written = sample_text(model, source.tokenizer, prompt, sample, sampling, say) if alone else None
    return dc.replace(result, held_out_bits_per_byte=bits, sample=written)


def _check_options(positive: dict[str, float | None], other: dict[str, float], warmup: float, prompt: str) -> None:
    """Raise UsageError for the first option with an impossible value."""
    check_positive(positive)
    for name, value in other.items():
        if not 0 <= value < math.inf:
            raise UsageError(f"--{name}: {value} is below 0")
    if not 0 <= warmup <= 1:
        raise UsageError(f"--warmup: {warmup} is not from 0 to 1")
    if not prompt:
        raise UsageError("--prompt: give at least one character")


def _refuse_weights(place: Path) -> None:
    """Raise where the directory holds weights or a tokenizer: both would be discarded."""
    directory = Directory(place)
    present = [name for name in directory.names() if name.endswith((".safetensors", *PICKLES, TOKENIZER_FILE))]
    if present:
        spec = f"{place / SPEC_FILE}" if directory.has(SPEC_FILE) else "a preset or a .yaml file"
        raise FileError(
            f"{place}: holds {present[0]}, which train would discard: it starts with random weights and a tokenizer; "
            f"to train this architecture from scratch give {spec} (continuing from trained weights is not implemented)"
        )


def _plot(history: list[StepMetrics], path: Path, title: str, note: Callable[[str], None]) -> None:
    if find_module("matplotlib") is None:
        note('the losses are not plotted without matplotlib: pip install "dovetail[look]"')
    else:
        draw_losses(history, path, title)
