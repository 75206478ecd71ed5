"""Change a trained model: keep or transform its weights where possible, and initialize the new ones.

Fewer KV heads, a longer context by YaRN, a sliding window, layers removed or repeated, a larger vocabulary, an untied head:
whatever --set, --swap and --layers can express. With --text the loss is measured on the last twentieth of the file before and
after the change, and --heal trains on the rest. A tensor that cannot be carried over is an error with its path, unless
--redraw.

    dovetail graft llama-tiny-trained --set 'layers.*.mixer.kv_heads=1' --text plays.txt --heal 1
    dovetail graft llama-tiny-trained --layers 0-3,3-5 -o deeper --hf
    dovetail graft llama-tiny-trained --set 'layers.*.mixer.mask=[causal, {kind: window, size: 64, keep: 4}]' -o windowed
"""

from __future__ import annotations

import dataclasses as dc
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Group
from rich.table import Table
from rich.text import Text

from dovetail.cli.flags import BatchSize, InDir, InFile, Length, LoadFlags, OutDir, Seed, Sets, Swaps
from dovetail.cli.output import print_error, print_json, print_note, to_json
from dovetail.cli.shown import shown
from dovetail.look.bar import bar as blocks

if TYPE_CHECKING:
    from dovetail.datasets.corpus import Batch, Corpus
    from dovetail.io.untrusted import Directory
    from dovetail.model import Model, ModelModule
    from dovetail.surgery import Diff
    from dovetail.text.tokenizer import Tokenizer
    from dovetail.training.metrics import StepMetrics

BAR = 32  # characters of the longest bar
LEVELS = "▁▂▃▄▅▆▇█"


@dc.dataclass
class Command(LoadFlags):
    """The model, the changes, the training after them, and the output."""

    directory: tyro.conf.Positional[InDir]
    """A model directory, in Dovetail's or Hugging Face's layout."""
    set: Sets = ()
    """Change a field: --set layers.*.mixer.kv_heads=1; may be given many times."""
    swap: Swaps = ()
    """Change a part in every layer: --swap position=alibi; may be given many times, applied before --set."""
    layers: str | None = None
    """The old layers that make up the new model: 0-3,3,5 are six layers, layer 3 twice. --set then counts the new ones."""
    redraw: bool = False
    """Initialize a tensor where no map from the old one is known."""
    text: InFile | None = None
    """A UTF-8 text file: the loss is measured on its last twentieth, --heal trains on the rest."""
    heal: float | None = None
    """Train for this many minutes on the text."""
    out: Annotated[OutDir | None, tyro.conf.arg(aliases=["-o"])] = None
    """The model directory to write; DIRECTORY-grafted by default."""
    hf: bool = False
    """Write Hugging Face's layout, in the family of the source or the first family that can express the spec."""
    family: str | None = None
    """With --hf: the family to write, one of those that `dovetail port` lists."""
    force: bool = False
    """Replace an existing model directory."""
    seed: Seed = 0
    """The seed of new weights and of the batches."""
    batch: BatchSize = 8
    """Sequences per step."""
    length: Length = 128
    """Tokens per sequence."""
    learning_rate: float = 1e-3
    """The peak learning rate of --heal; much lower (1e-5) for a large model."""
    json: bool = False
    """Print one JSON object."""

    def run(self) -> int | None:
        """Graft, evaluate, train, write, print."""
        from dovetail.cli.loading import shown_loading
        from dovetail.io.model_dir import must_be_free
        from dovetail.io.untrusted import Directory
        from dovetail.port.load import load, origin
        from dovetail.port.write import family_for
        from dovetail.surgery.graft import graft

        if problem := self._problem():
            print_error(problem)
            return 2
        out = self.out or Path(os.path.relpath(f"{os.path.abspath(self.directory)}-grafted"))
        must_be_free(out, self.force)
        source = Directory(self.directory)
        old = origin(source).spec
        spec, picks = self._changed(old)
        family = family_for(spec, source, self.family) if self.hf else None  # refused now, not after an hour of training
        trial = None if self.text is None else self._trial(old, spec)
        with shown_loading(self.directory.name) as watch:
            model = load(self.directory, watch=watch)
        losses = {} if trial is None else {"before": trial.loss(model)}
        grafted, result = graft(model, spec, picks=picks, redraw=self.redraw, seed=self.seed)
        del model
        history: list[StepMetrics] = []
        if trial is not None:
            losses["after"] = trial.loss(grafted)
        if trial is not None and self.heal is not None:
            try:
                history = trial.heal(grafted, self.heal, self.learning_rate)
            except KeyboardInterrupt:
                print_note("interrupted while training; nothing was written")
                return 130
            losses["healed"] = _last(history)
        self._write(grafted, source, out, family, history)
        if self.json:
            print_json(_report(out, family, result, losses, history))
        else:
            written = Text(f"\nwritten to {out}" + (f" in Hugging Face layout, as {family}" if family else ""))
            shown(lambda _: Group(view_result(self.directory.name, out.name, result, losses, history), written))
        return 0

    def _problem(self) -> str | None:
        """Return what is wrong with the flags, or None."""
        for name in ("heal", "batch", "length", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                return f"--{name.replace('_', '-')}: {value} is not above 0"
        if self.heal is not None and self.text is None:
            return "--heal: needs a text to train on; give --text"
        if self.family is not None and not self.hf:
            return "--family: needs --hf"
        if not (self.set or self.swap or self.layers):
            return "no change is given; give --set, --swap or --layers"
        return None

    def _changed(self, old: Model) -> tuple[Model, tuple[int, ...] | None]:
        """Return the new spec, and the old layer of each of its layers."""
        from dovetail.io.spec import changed
        from dovetail.surgery import parse_picks, picked

        picks = None if self.layers is None else parse_picks(self.layers, len(old.layers))
        return changed(old if picks is None else picked(old, picks), self.set, self.swap), picks

    def _trial(self, old: Model, new: Model) -> Trial:
        """Return the text, tokenized and checked against both specs."""
        from dovetail.account import longest_length
        from dovetail.core.errors import SpecError
        from dovetail.datasets.corpus import Corpus, read_corpus
        from dovetail.text.tokenizer import Tokenizer
        from dovetail.training.objective import check_learns_text

        assert self.text is not None
        tokenizer = Tokenizer.load(self.directory)
        ids = tokenizer.encode(read_corpus(self.text))
        for spec in (old, new):
            check_learns_text(spec)
            if len(ids) and int(ids.max()) >= spec.vocab:
                problem = f"the text has token {int(ids.max())}; the vocabulary has {spec.vocab} tokens"
                raise SpecError("vocab", problem, f"keep {tokenizer.size}, or leave --text out")
            longest = longest_length(spec)
            if longest is not None and self.length > longest:
                raise SpecError("--length", f"{self.length} tokens; the limit of the model is {longest}")
        corpus = Corpus.cut(ids, self.length, name=str(self.text))
        return Trial(corpus, list(corpus.validation(self.batch, self.length)), tokenizer, self.batch, self.length, self.seed)

    def _write(self, model: ModelModule, source: Directory, out: Path, family: str | None, history: list[StepMetrics]) -> None:
        from dovetail.io.model_files import LOSSES_FILE
        from dovetail.port.write import write_own, write_theirs

        beside = {LOSSES_FILE: "".join(f"{to_json(dc.asdict(metrics))}\n" for metrics in history).encode()} if history else {}
        if family is None:
            write_own(model, source, out, beside, keep_foreign=True)  # files that appeared during --heal
        else:
            write_theirs(model, source, out, family, beside, keep_foreign=True)


@dc.dataclass(frozen=True)
class Trial:
    """A text to evaluate models on and to train them with."""

    corpus: Corpus
    held_out: list[Batch]
    tokenizer: Tokenizer
    batch: int
    length: int
    seed: int

    def loss(self, model: ModelModule) -> float:
        """Return the held-out loss in nats per token."""
        from dovetail.training.loop import evaluate
        from dovetail.training.objective import text_objective

        return evaluate(model, self.held_out, text_objective(model.part, self.tokenizer)[0], self.seed)

    def heal(self, model: ModelModule, minutes: float, rate: float) -> list[StepMetrics]:
        """Train for some minutes on the text that is not held out."""
        from dovetail.training.loop import train
        from dovetail.training.objective import text_objective
        from dovetail.training.plan import Plan

        def batches(step: int) -> Batch:
            return self.corpus.batch(self.seed, step, self.batch, self.length)

        plan = Plan(minutes=minutes, learning_rate=rate, seed=self.seed)
        return train(model, batches, text_objective(model.part, self.tokenizer)[0], plan, self.held_out)


def _last(history: list[StepMetrics]) -> float:
    """Return the held-out loss at the end of a run, which is always evaluated."""
    last = history[-1].val_loss
    assert last is not None
    return last


def _report(
    out: Path, family: str | None, result: Diff, losses: dict[str, float], history: list[StepMetrics]
) -> dict[str, Any]:
    from dovetail.core.fold import parameters

    report: dict[str, Any] = {"directory": str(out), "family": family}
    report["parameters"] = {"before": parameters(result.a), "after": parameters(result.b)}
    report["loss"] = losses
    if history:
        report["healing"] = {
            "steps": history[-1].step,
            "tokens": history[-1].tokens,
            "seconds": round(history[-1].seconds, 1),
            "held_out": [metrics.val_loss for metrics in history if metrics.val_loss is not None],
        }
    return {**report, **result.to_dict()}


# -- the printed view -----------------------------------------------------------------------------------------------------


def view_result(before: str, after: str, result: Diff, losses: dict[str, float], history: list[StepMetrics]) -> Group:
    """Return the view: the status of the tensors, then the losses."""
    from dovetail.api.diff_view import diff_view
    from dovetail.core.fold import parameters

    counts = [parameters(spec) for spec in (result.a, result.b)]
    sizes = Text(f"{counts[0]:,} → {counts[1]:,} parameters" if counts[0] != counts[1] else f"{counts[0]:,} parameters", "dim")
    lines: list[Text | Table | Group] = [diff_view(result, (before, after)), Text(), sizes]
    if losses:
        lines += [Text(), Text("loss on the held-out text, nats per token", "bold"), loss_table(losses, history)]
    return Group(*lines)


def loss_table(losses: dict[str, float], history: list[StepMetrics]) -> Table:
    """A bar for each loss, its difference from the first, and the losses during training."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    styles = {"before": "green", "after": "red", "healed": "cyan"}
    most = max(losses.values())
    for name, loss in losses.items():
        gap = loss - losses["before"]
        note = f"{gap:+.3f}" if name != "before" else ""
        if name == "healed":
            note += f"   {history[-1].step:,} steps in {history[-1].seconds:.0f} s  " + sparkline(
                [losses["after"], *(p.val_loss for p in history if p.val_loss is not None)]
            )
        table.add_row(Text(f"  {name}"), Text(f"{loss:.3f}", "bold"), Text(bar(loss / most), styles[name]), Text(note, "dim"))
    return table


def bar(fraction: float) -> str:
    """A bar of up to BAR characters; a full one where the loss is not finite."""
    return blocks(fraction if math.isfinite(fraction) else 1.0, BAR)


def sparkline(values: list[float]) -> str:
    """One character per value, the highest the tallest."""
    low, high = min(values), max(values)
    return "".join(LEVELS[round((value - low) / ((high - low) or 1.0) * 7)] for value in values)
