"""Train a small model from scratch on a text file, then generate a sample.

A tokenizer of the spec's vocabulary size is trained on the text. The last 5 % of the tokens are held out. The model directory
holds the spec, the weights, the tokenizer, the metrics of each step (loss.jsonl) and, with matplotlib, a plot of the losses.

    dovetail train llama-tiny --text plays.txt --minutes 5
"""

from __future__ import annotations

import dataclasses as dc
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from dovetail.cli.flags import BatchSize, InFile, Length, LoadFlags, OutDir, Seed, Sets, Spec, Steps, Swaps
from dovetail.cli.output import print_error, print_json, print_line, print_note, to_json
from dovetail.training.plan import Plan

if TYPE_CHECKING:
    from dovetail.datasets.corpus import Corpus
    from dovetail.model import ModelModule
    from dovetail.text.tokenizer import Tokenizer
    from dovetail.training.metrics import StepMetrics

BYTES_PER_PARAMETER = 16  # float32: the weight, its gradient, and two moments of Adam
LAST_STEPS = 50  # steps whose mean loss is reported: a single step's loss is noisy


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
    """Change a part wherever it stands: --swap position=alibi; may be given many times, and comes before --set."""
    tokenizer: Literal["byte_pair", "wordpiece", "unigram", "characters", "words"] = "byte_pair"
    """The kind of tokenizer; byte_pair encodes any text without loss."""
    batch: BatchSize = 8
    """Sequences per step."""
    length: Length = 128
    """Tokens per sequence."""
    learning_rate: float = Plan.learning_rate
    """The peak learning rate, after 40 steps of warm-up; then it decays along a cosine."""
    prompt: str = "The "
    """The prompt of the sample at the end."""
    sample: int = 160
    """Tokens to generate at the end."""
    temperature: float = 0.8
    """The temperature of the sample; 0 takes the most probable token."""
    json: bool = False
    """Print one JSON object on stdout."""

    def run(self) -> int | None:
        """Train, write the model directory, and print the losses and a sample."""
        from dovetail.construction import build
        from dovetail.core.fold import parameters
        from dovetail.core.memory import check_memory
        from dovetail.datasets.corpus import Corpus, read_corpus
        from dovetail.io.model_dir import must_be_free, save
        from dovetail.io.model_files import LOSSES_FILE, TOKENIZER_FILE
        from dovetail.io.spec import changed
        from dovetail.port.load import find_spec
        from dovetail.text.learn import learn
        from dovetail.training.loop import train
        from dovetail.training.objective import check_learns_text, text_objective

        if problem := self._wrong_flag():
            print_error(problem)
            return 2
        self._refuse_weights()
        out = self.out or Path(f"{Path(os.path.abspath(self.spec)).stem}-trained")
        must_be_free(out, self.force)
        spec = changed(find_spec(self.spec), self.set, self.swap)
        check_learns_text(spec)
        needed = BYTES_PER_PARAMETER * parameters(spec) + 4 * self.batch * self.length * spec.vocab
        check_memory(needed, f"training {parameters(spec):,} parameters on {self.batch:,} × {self.length:,} tokens per step")
        model = build(spec, seed=self.seed)
        text = read_corpus(self.text)
        print_note(f"{self.text}: {len(text):,} characters; training a tokenizer of {spec.vocab} tokens")
        tokenizer = learn(text, spec.vocab, self.tokenizer)
        corpus = Corpus.cut(tokenizer.encode(text), self.length, name=str(self.text))
        objective, task = text_objective(spec, tokenizer)
        num_tokens = len(corpus.train) + len(corpus.held_out)
        name = " ".join([self.spec, *(f"--swap {swap}" for swap in self.swap), *(f"--set {value}" for value in self.set)])
        print_note(f"{name}: {parameters(spec):,} parameters, {task}; {num_tokens:,} tokens, {len(corpus.held_out):,} held out")
        beside = {TOKENIZER_FILE: tokenizer.to_json()}
        plan = Plan(
            steps=self.steps,
            minutes=5.0 if self.minutes is None and self.steps is None else self.minutes,
            learning_rate=self.learning_rate,
            seed=self.seed,
            out=out,
            beside=beside,
        )
        held_out = list(corpus.validation(self.batch, self.length))
        try:
            history = train(
                model, lambda step: corpus.batch(self.seed, step, self.batch, self.length), objective, plan, held_out
            )
        except KeyboardInterrupt:
            print_note(f"interrupted; the last save is in {out}" if out.exists() else "interrupted before the first save")
            return 130
        beside[LOSSES_FILE] = "".join(f"{to_json(dc.asdict(metrics))}\n" for metrics in history)
        save(model, spec, out, beside, keep_foreign=True)  # files that appeared during the run
        _plot(history, out, f"{name} on {self.text.name}")
        report = {"directory": str(out), "parameters": parameters(spec), **_report(history)}
        if spec.order() == "causal":
            report["held_out_bits_per_byte"] = _bits_per_byte(report["held_out_loss"], corpus, tokenizer)
            report["sample"] = self._sample(model, tokenizer)
        if self.json:
            print_json(report)
        else:
            print_line(_text(report, self.prompt))
        return 0

    def _wrong_flag(self) -> str | None:
        """Return the problem of the first flag with an impossible value."""
        for name in ("minutes", "steps", "batch", "length", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                return f"--{name.replace('_', '-')}: {value} is not above 0"
        for name in ("temperature", "sample", "seed"):
            if not 0 <= getattr(self, name) < math.inf:
                return f"--{name}: {getattr(self, name)} is below 0"
        return None if self.prompt else "--prompt: give at least one character"

    def _refuse_weights(self) -> None:
        """Raise where SPEC is a directory with weights or a tokenizer: both would be discarded."""
        from dovetail.core.errors import FileError
        from dovetail.io.model_files import SPEC_FILE, TOKENIZER_FILE
        from dovetail.io.untrusted import PICKLES, Directory

        if not Path(self.spec).is_dir():
            return
        directory = Directory(self.spec)
        trained = (".safetensors", *PICKLES, TOKENIZER_FILE)
        present = [name for name in directory.names() if name.endswith(trained)]
        if present:
            spec = f"{Path(self.spec) / SPEC_FILE}" if directory.has(SPEC_FILE) else "a preset or a .yaml file"
            raise FileError(
                f"{self.spec}: holds {present[0]}, which train would discard: it starts with random weights and a tokenizer; "
                f"to train this architecture from scratch give {spec} (continuing from trained weights is not implemented)"
            )

    def _sample(self, model: ModelModule, tokenizer: Tokenizer) -> str:
        """Return the text that the model generates after the prompt."""
        from dovetail.core.errors import DovetailError
        from dovetail.generation import Sampling, generate_tokens

        try:
            sampling = Sampling(temperature=self.temperature, seed=self.seed)
            ids = list(generate_tokens(model, tokenizer.encode(self.prompt), self.sample, sampling))
        except DovetailError as error:  # e.g. a table of positions that is too short; the trained model is written already
            print_note(f"no sample: {error}")
            return ""
        return tokenizer.decode(ids)


def _report(history: list[StepMetrics]) -> dict[str, Any]:
    """Return the figures of a run, losses in nats per token; `train_loss` is the mean of the last `train_loss_steps` steps."""
    last, tail = history[-1], history[-LAST_STEPS:]
    return {
        "steps": last.step,
        "tokens": last.tokens,
        "seconds": round(last.seconds, 1),
        "tokens_per_second": round(last.tokens / last.seconds),
        "first_loss": history[0].loss,
        "train_loss": sum(metrics.loss for metrics in tail) / len(tail),
        "train_loss_steps": len(tail),
        "held_out_loss": last.val_loss,
    }


def _bits_per_byte(loss: float, corpus: Corpus, tokenizer: Tokenizer) -> float:
    """Return the loss per byte of the held-out text, which is comparable between vocabularies."""
    return loss / math.log(2) * len(corpus.held_out) / len(tokenizer.decode(corpus.held_out).encode())


def _text(report: dict[str, Any], prompt: str) -> str:
    bits = report.get("held_out_bits_per_byte")
    lines = [
        f"{report['steps']:,} steps, {report['tokens']:,} tokens in {report['seconds']:.0f} s: "
        f"{report['tokens_per_second']:,} tokens/s",
        f"loss of step 1: {report['first_loss']:.3f}; train loss (mean of the last {report['train_loss_steps']} steps): "
        f"{report['train_loss']:.3f}; held-out loss: {report['held_out_loss']:.3f}"
        + (f", {bits:.3f} bits per byte" if bits is not None else ""),
    ]
    if report.get("sample"):
        lines += ["", f"a sample after {prompt!r}:", "", prompt + report["sample"], ""]
    return "\n".join([*lines, f"written to {report['directory']}"])


def _plot(history: list[StepMetrics], out: Path, title: str) -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        print_note('the losses are not plotted without matplotlib: pip install "dovetail[look]"')
        return
    from dovetail.io.model_files import PLOT_FILE
    from dovetail.look.curve import draw_losses

    draw_losses(history, out / PLOT_FILE, title)
