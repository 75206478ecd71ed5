"""Train a small model on a text, and let it write.

A tokenizer of the spec's vocabulary is trained on the text; the last twentieth of the text is held out. The directory that
comes out holds the spec, the weights, the tokenizer, every loss (loss.jsonl) and, with matplotlib, their picture.

    dovetail train llama-tiny --text plays.txt --minutes 5
"""

from __future__ import annotations

import dataclasses as dc
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from dovetail.cli.output import print_error, print_json, print_line, print_note, to_json
from dovetail.training.plan import Plan

if TYPE_CHECKING:
    from dovetail.datasets.corpus import Corpus
    from dovetail.model import ModelModule
    from dovetail.text.tokenizer import Tokenizer
    from dovetail.training.loop import Point


@dc.dataclass
class Command:
    """What to train, on what, how long."""

    spec: tyro.conf.Positional[str]
    """A preset's name or a .yaml file. A directory with trained weights is refused: training starts from random weights."""
    text: Path
    """A UTF-8 text to learn from; some megabytes do well."""
    minutes: float | None = None
    """Stop after this many minutes (5, where no steps are given)."""
    steps: int | None = None
    """Stop after this many steps; two such runs of one seed are equal bit for bit."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """The model directory to write; SPEC-trained by default."""
    force: bool = False
    """Replace the model directory where there is one."""
    seed: int = 0
    """First weights, batches, dropout and the sample follow from it."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Change a field first: --set layers.*.mixer.kv_heads=1; may be given many times."""
    swap: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Change a part wherever it stands: --swap position=alibi; may be given many times, and comes before --set."""
    tokenizer: Literal["byte_pair", "wordpiece", "unigram", "characters", "words"] = "byte_pair"
    """How the text is cut into tokens: merged bytes lose nothing and know everything."""
    batch: int = 8
    """Windows a step."""
    length: int = 128
    """Tokens a window."""
    learning_rate: float = Plan.learning_rate
    """The peak, after a short warm-up; it then falls along a cosine."""
    prompt: str = "The "
    """What the sample at the end goes on from."""
    sample: int = 160
    """Tokens to write at the end."""
    temperature: float = 0.8
    """0 always writes the likeliest token."""
    json: bool = False
    """One JSON object on stdout."""

    def run(self) -> int | None:
        """Train, write the directory, print the end and a sample."""
        from dovetail.construction import build
        from dovetail.core.fold import parameters
        from dovetail.datasets.corpus import Corpus, read_corpus
        from dovetail.io.model_dir import must_be_free, save
        from dovetail.io.spec import changed
        from dovetail.port.load import find_spec
        from dovetail.text.learn import learn
        from dovetail.text.tokenizer import TOKENIZER_FILE
        from dovetail.training.loop import train
        from dovetail.training.objective import check_learns_text, text_objective

        if wrong := self._wrong():
            print_error(wrong)
            return 2
        self._refuse_weights()
        out = self.out or Path(f"{Path(os.path.abspath(self.spec)).stem}-trained")
        must_be_free(out, self.force)
        spec = changed(find_spec(self.spec), self.set, self.swap)
        check_learns_text(spec)
        model = build(spec, seed=self.seed)
        text = read_corpus(self.text)
        print_note(f"{self.text}: {len(text):,} characters; training a tokenizer of {spec.vocab} tokens on them")
        tokenizer = learn(text, spec.vocab, self.tokenizer)
        corpus = Corpus.cut(tokenizer.encode(text), self.length, name=str(self.text))
        objective, does = text_objective(spec, tokenizer)
        count = len(corpus.train) + len(corpus.held_out)
        print_note(f"{self.spec}: {parameters(spec):,} parameters, {does}; {count:,} tokens, {len(corpus.held_out):,} held out")
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
            points = train(
                model, lambda step: corpus.batch(self.seed, step, self.batch, self.length), objective, plan, held_out
            )
        except KeyboardInterrupt:
            print_note(f"stopped; what was saved last is in {out}" if out.exists() else "stopped before anything was saved")
            return 130
        beside["loss.jsonl"] = "".join(f"{to_json(dc.asdict(point))}\n" for point in points)
        save(model, spec, out, beside)
        _picture(points, out, f"{self.spec} on {self.text.name}")
        report = {"directory": str(out), "parameters": parameters(spec), **_report(points)}
        if spec.order() == "causal":
            report["held_out_bits_per_byte"] = _bits_per_byte(report["held_out_loss"], corpus, tokenizer)
            report["sample"] = self._sample(model, tokenizer)
        if self.json:
            print_json(report)
        else:
            print_line(_text(report, self.prompt))
        return 0

    def _wrong(self) -> str | None:
        """The first flag that makes no sense."""
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
        from dovetail.io.spec import SPEC_FILE
        from dovetail.io.untrusted import PICKLES, Directory
        from dovetail.text.tokenizer import TOKENIZER_FILE

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
        """What the model writes after the prompt."""
        from dovetail.core.errors import DovetailError
        from dovetail.generation import Sampling, write

        try:
            sampling = Sampling(temperature=self.temperature, seed=self.seed)
            ids = list(write(model, tokenizer.encode(self.prompt), self.sample, sampling))
        except DovetailError as error:  # no more positions, say; the training is done and written all the same
            print_note(f"no sample: {error}")
            return ""
        return tokenizer.decode(ids)


def _report(points: list[Point]) -> dict[str, Any]:
    """The figures of a run; losses in nats a token."""
    last, tail = points[-1], points[-50:]
    return {
        "steps": last.step,
        "tokens": last.tokens,
        "seconds": round(last.seconds, 1),
        "tokens_per_second": round(last.tokens / last.seconds),
        "first_loss": points[0].loss,
        "train_loss": sum(point.loss for point in tail) / len(tail),
        "held_out_loss": last.validation,
    }


def _bits_per_byte(loss: float, corpus: Corpus, tokenizer: Tokenizer) -> float:
    """The same loss for each byte of the held-out text, which can be compared between vocabularies."""
    return loss / math.log(2) * len(corpus.held_out) / len(tokenizer.decode(corpus.held_out).encode())


def _text(report: dict[str, Any], prompt: str) -> str:
    bits = report.get("held_out_bits_per_byte")
    lines = [
        f"{report['steps']:,} steps, {report['tokens']:,} tokens in {report['seconds']:.0f} s: "
        f"{report['tokens_per_second']:,} tokens/s",
        f"loss {report['first_loss']:.3f} -> {report['train_loss']:.3f} (mean of the last steps), "
        f"held-out {report['held_out_loss']:.3f}" + (f" or {bits:.3f} bits a byte" if bits is not None else ""),
    ]
    if report.get("sample"):
        lines += ["", f"after {prompt!r} it writes:", "", prompt + report["sample"], ""]
    return "\n".join([*lines, f"written to {report['directory']}"])


def _picture(points: list[Point], out: Path, title: str) -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        print_note('no picture of the losses without matplotlib: pip install "dovetail[look]"')
        return
    from dovetail.look.curve import draw_losses

    draw_losses(points, out / "loss.png", title)
