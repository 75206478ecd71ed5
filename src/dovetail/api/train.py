"""train: train a small model from scratch on a text file."""

from __future__ import annotations

import dataclasses as dc
import math
from collections.abc import Callable
from importlib.util import find_spec as find_module
from pathlib import Path
from typing import Any, Literal

from rich.console import RenderableType

from dovetail.api.arguments import SpecLike, check_positive, read_spec, silent
from dovetail.api.result import Result
from dovetail.construction import build
from dovetail.core.errors import DovetailError, FileError, UsageError
from dovetail.core.fold import parameters
from dovetail.core.memory import check_memory
from dovetail.datasets.corpus import Corpus, read_corpus
from dovetail.generation import Sampling, generate_tokens
from dovetail.io.model_dir import must_be_free, save
from dovetail.io.model_files import LOSSES_FILE, TOKENIZER_FILE
from dovetail.io.spec import SPEC_FILE, Changes
from dovetail.io.untrusted import PICKLES, Directory
from dovetail.look.console import unwrapped
from dovetail.look.curve import draw_losses
from dovetail.text.learn import learn
from dovetail.text.tokenizer import Tokenizer
from dovetail.training.interrupt import Interrupt
from dovetail.training.loop import train as train_loop
from dovetail.training.metrics import StepMetrics, to_jsonl
from dovetail.training.objective import check_learns_text, text_objective
from dovetail.training.plan import Plan
from dovetail.transformer import Transformer

LAST_STEPS = 50  # steps whose mean loss is reported: a single step's loss is noisy
MINUTES = 5.0  # of a run without an end
BYTES_PER_PARAMETER = 16  # float32 weight and gradient, and AdamW's two moments
PICTURE = "loss.png"
TokenizerKind = Literal["byte_pair", "wordpiece", "unigram", "characters", "words"]


@dc.dataclass(frozen=True, repr=False, eq=False)
class TrainingRun(Result):
    """A trained model and its metrics; losses are in nats per token."""

    name: str
    model: Transformer
    tokenizer: Tokenizer
    history: tuple[StepMetrics, ...]
    interrupted: bool  # Ctrl-C ended the run early
    directory: Path | None = None  # the model directory that was written
    held_out_bits_per_byte: float | None = None  # comparable between vocabularies; None for a bidirectional model
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
            + ("" if bits is None else f", {bits:.3f} bits per byte"),
        ]
        if self.sample:
            lines += ["", f"a sample after {self.prompt!r}:", "", self.prompt + self.sample, ""]
        if self.directory is not None:
            lines.append(f"written to {self.directory}")
        return unwrapped("\n".join(lines))


def train(
    spec: SpecLike,
    text: str | Path,
    *,
    minutes: float | None = None,
    steps: int | None = None,
    out: str | Path | None = None,
    force: bool = False,
    seed: int = 0,
    set: Changes = (),
    swap: Changes = (),
    tokenizer: TokenizerKind = "byte_pair",
    batch: int = 8,
    length: int = 128,
    learning_rate: float = Plan.learning_rate,
    warmup: float = Plan.warmup_fraction,
    prompt: str = "The ",
    sample: int = 160,
    temperature: float = 0.8,
    quiet: bool = False,
    note: Callable[[str], None] | None = None,
) -> TrainingRun:
    """Train a model from random weights on a text file, and return it with its metrics.

    A tokenizer of the spec's vocabulary size is trained on the text; the last 5 % of the tokens are held out. The run ends
    after `minutes` (5 by default) or `steps`; two runs of equal steps and seed are bit-equal. The learning rate rises over the
    fraction `warmup` of the run, then decays along a cosine. `out` is the model directory to write: spec, weights, tokenizer,
    metrics of each step, and a plot of the losses. Ctrl-C ends the run after the current step: all of this is written, and
    `interrupted` is true. `quiet` shows no progress; `note` is called with lines about the text and the spec.
    """
    numbers = {"minutes": minutes, "steps": steps, "batch": batch, "length": length, "learning_rate": learning_rate}
    _check_options(numbers, {"temperature": temperature, "sample": sample, "seed": seed}, warmup, prompt)
    say = note or silent
    name, changed, directory = read_spec(spec).after(set, swap)
    if directory is not None:
        _refuse_weights(directory)
    place = None if out is None else Path(out)
    if place is not None:
        must_be_free(place, force)
    check_learns_text(changed)
    needed = BYTES_PER_PARAMETER * parameters(changed) + 4 * batch * length * changed.vocab
    check_memory(needed, f"training {parameters(changed):,} parameters on {batch:,} × {length:,} tokens per step")
    content = read_corpus(Path(text))
    say(f"{text}: {len(content):,} characters; training a tokenizer of {changed.vocab} tokens")
    vocabulary = learn(content, changed.vocab, tokenizer)
    corpus = Corpus.cut(vocabulary.encode(content), length, name=str(text))
    objective, task = text_objective(changed, vocabulary)
    count = len(corpus.train) + len(corpus.held_out)
    say(f"{name}: {parameters(changed):,} parameters, {task}; {count:,} tokens, {len(corpus.held_out):,} held out")
    model = build(changed, seed=seed)
    beside = {TOKENIZER_FILE: vocabulary.to_json()}
    plan = Plan(
        steps=steps,
        minutes=MINUTES if minutes is None and steps is None else minutes,
        learning_rate=learning_rate,
        warmup_fraction=warmup,
        seed=seed,
        out=place,
        beside=beside,
        quiet=quiet,
    )
    held_out = list(corpus.validation(batch, length))
    with Interrupt() as interrupted:
        history = train_loop(
            model, lambda step: corpus.batch(seed, step, batch, length), objective, plan, held_out, interrupted
        )
    if place is not None:
        beside[LOSSES_FILE] = to_jsonl(history)
        save(model, changed, place, beside, keep_foreign=True)  # files that appeared during the run
        _plot(history, place / PICTURE, f"{name} on {Path(text).name}", say)
    run = TrainingRun(name, model, vocabulary, tuple(history), interrupted.received, place, prompt=prompt)
    if changed.order() != "causal":
        return run
    bits = _bits_per_byte(run.held_out_loss or math.nan, corpus, vocabulary)
    written = None if interrupted.received else _sample(model, vocabulary, prompt, sample, temperature, seed, say)
    return dc.replace(run, held_out_bits_per_byte=bits, sample=written)


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


def _sample(
    model: Transformer,
    tokenizer: Tokenizer,
    prompt: str,
    count: int,
    temperature: float,
    seed: int,
    note: Callable[[str], None],
) -> str:
    """Return the text that the model generates after the prompt."""
    try:
        sampling = Sampling(temperature=temperature, seed=seed)
        ids = list(generate_tokens(model, tokenizer.encode(prompt), count, sampling))
    except DovetailError as error:  # e.g. a position table that is too short; the trained model is written already
        note(f"no sample: {error}")
        return ""
    return tokenizer.decode(ids)


def _bits_per_byte(loss: float, corpus: Corpus, tokenizer: Tokenizer) -> float:
    """Return the loss per byte of the held-out text."""
    return loss / math.log(2) * len(corpus.held_out) / len(tokenizer.decode(corpus.held_out).encode())


def _plot(history: list[StepMetrics], path: Path, title: str, note: Callable[[str], None]) -> None:
    if find_module("matplotlib") is None:
        note('the losses are not plotted without matplotlib: pip install "dovetail[look]"')
    else:
        draw_losses(history, path, title)
