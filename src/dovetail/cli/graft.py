"""Change a trained model: keep what can be kept, carry over what can be carried, start what is new.

Heads pooled, a longer text by YaRN, a window with its first tokens kept, layers left out or repeated, another vocabulary, a
head of its own: whatever --set, --swap and --layers can say. With --text the loss on the last twentieth of it is told before
and after, and --heal trains on the rest. A tensor that no map is known for stops it, with its path, unless --redraw.

    dovetail graft llama-tiny-trained --set 'layers.*.mixer.kv_heads=1' --text plays.txt --heal 1
    dovetail graft llama-tiny-trained --layers 0-3,3-5 -o deeper --hf
    dovetail graft llama-tiny-trained --set 'layers.*.mixer.mask=[causal, {kind: window, size: 64, keep: 4}]' -o windowed
"""

from __future__ import annotations

import dataclasses as dc
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro
from rich.console import Group
from rich.table import Table
from rich.text import Text

from dovetail.cli.diff import view
from dovetail.cli.output import print_json, to_json
from dovetail.cli.shown import shown
from dovetail.look.bar import bar as blocks

if TYPE_CHECKING:
    from dovetail.datasets.corpus import Batch, Corpus
    from dovetail.io.untrusted import Directory
    from dovetail.model import Model, ModelModule
    from dovetail.surgery import Diff
    from dovetail.text.tokenizer import Tokenizer
    from dovetail.training.loop import Point

BAR = 32  # characters of the longest loss
LEVELS = "▁▂▃▄▅▆▇█"


@dc.dataclass
class Command:
    """Which model, what is changed, how it is healed, where to."""

    directory: tyro.conf.Positional[Path]
    """A model directory: ours, or in Hugging Face layout."""
    set: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Change a field: --set layers.*.mixer.kv_heads=1; may be given many times."""
    swap: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """Change a part wherever it stands: --swap position=alibi; may be given many times, and comes before --set."""
    layers: str | None = None
    """The old layer that each new one is taken from: 0-3,3,5 has six, the fourth twice. --set then counts the new ones."""
    redraw: bool = False
    """Start a tensor anew where no map from the old one is known."""
    text: Path | None = None
    """A UTF-8 text to measure the loss on (its last twentieth) and to heal with (the rest)."""
    heal: float | None = None
    """Train this many minutes on the text."""
    out: Annotated[Path | None, tyro.conf.arg(aliases=["-o"])] = None
    """The model directory to write; DIRECTORY-grafted by default."""
    hf: bool = False
    """Write it in Hugging Face layout, in the family it came in or the first that can say all of it."""
    family: str | None = None
    """With --hf: the family to write it in, as `dovetail port` lists them."""
    force: bool = False
    """Replace the model directory where there is one."""
    seed: int = 0
    """What is new is drawn from it; so are the batches."""
    batch: int = 8
    """Windows a step."""
    length: int = 128
    """Tokens a window, of the loss and of the healing."""
    learning_rate: float = 1e-3
    """The peak while healing; much lower (1e-5) for a large model."""
    json: bool = False
    """One JSON object on stdout."""

    def run(self) -> int | None:
        """Graft, measure, heal, write, tell."""
        from dovetail.cli.loading import shown_loading
        from dovetail.io.model_dir import must_be_free
        from dovetail.io.untrusted import Directory
        from dovetail.port.load import load, origin
        from dovetail.port.write import family_for
        from dovetail.surgery.graft import graft

        if wrong := self._wrong():
            print(f"dovetail: {wrong}", file=sys.stderr)
            return 2
        out = self.out or Path(os.path.relpath(f"{os.path.abspath(self.directory)}-grafted"))
        must_be_free(out, self.force)
        source = Directory(self.directory)
        old = origin(source).spec
        spec, picks = self._changed(old)
        family = family_for(spec, source, self.family) if self.hf else None  # refused now, not after an hour of healing
        trial = None if self.text is None else self._trial(old, spec)
        with shown_loading(self.directory.name) as watch:
            model = load(self.directory, watch=watch)
        losses = {} if trial is None else {"before": trial.loss(model)}
        made, found = graft(model, spec, picks=picks, redraw=self.redraw, seed=self.seed)
        del model
        points: list[Point] = []
        if trial is not None:
            losses["after"] = trial.loss(made)
        if trial is not None and self.heal is not None:
            try:
                points = trial.heal(made, self.heal, self.learning_rate)
            except KeyboardInterrupt:
                print("stopped while healing; nothing is written", file=sys.stderr)
                return 130
            losses["healed"] = _last(points)
        self._write(made, source, out, family, points)
        if self.json:
            print_json(_report(out, family, found, losses, points))
        else:
            written = Text(f"\nwritten to {out}" + (f" in Hugging Face layout, as {family}" if family else ""))
            shown(lambda _: Group(told(self.directory.name, out.name, found, losses, points), written))
        return 0

    def _wrong(self) -> str | None:
        """The first flag that makes no sense."""
        for name in ("heal", "batch", "length", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                return f"--{name.replace('_', '-')}: {value} is not above 0"
        if self.heal is not None and self.text is None:
            return "--heal: give a --text to heal with"
        if self.family is not None and not self.hf:
            return "--family: is for --hf"
        if not (self.set or self.swap or self.layers):
            return "nothing is changed: give --set, --swap or --layers"
        return None

    def _changed(self, old: Model) -> tuple[Model, tuple[int, ...] | None]:
        """The new spec, and the old layer of each of its layers."""
        from dovetail.io.spec import changed
        from dovetail.surgery import parse_picks, picked

        picks = None if self.layers is None else parse_picks(self.layers, len(old.layers))
        return changed(old if picks is None else picked(old, picks), self.set, self.swap), picks

    def _trial(self, old: Model, new: Model) -> Trial:
        """The text as both models read it."""
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
                what = f"the text has token {int(ids.max())}, and the model knows {spec.vocab}"
                raise SpecError("vocab", what, f"keep {tokenizer.size}, or measure nothing: leave --text out")
            longest = longest_length(spec)
            if longest is not None and self.length > longest:
                raise SpecError("--length", f"{self.length} tokens are more than the {longest} that the model takes")
        corpus = Corpus.cut(ids, self.length, name=str(self.text))
        return Trial(corpus, list(corpus.validation(self.batch, self.length)), tokenizer, self.batch, self.length, self.seed)

    def _write(self, model: ModelModule, source: Directory, out: Path, family: str | None, points: list[Point]) -> None:
        from dovetail.port.write import write_own, write_theirs

        beside = {"loss.jsonl": "".join(f"{to_json(dc.asdict(point))}\n" for point in points).encode()} if points else {}
        if family is None:
            write_own(model, source, out, beside)
        else:
            write_theirs(model, source, out, family, beside)


@dc.dataclass(frozen=True)
class Trial:
    """A text to try models on and to heal them with."""

    corpus: Corpus
    held_out: list[Batch]
    tokenizer: Tokenizer
    batch: int
    length: int
    seed: int

    def loss(self, model: ModelModule) -> float:
        """Nats a token on what is held out."""
        from dovetail.training.loop import evaluate
        from dovetail.training.objective import text_objective

        return evaluate(model, self.held_out, text_objective(model.part, self.tokenizer)[0], self.seed)

    def heal(self, model: ModelModule, minutes: float, rate: float) -> list[Point]:
        """Train for some minutes on what is not held out."""
        from dovetail.training.loop import train
        from dovetail.training.objective import text_objective
        from dovetail.training.plan import Plan

        def batches(step: int) -> Batch:
            return self.corpus.batch(self.seed, step, self.batch, self.length)

        plan = Plan(minutes=minutes, learning_rate=rate, seed=self.seed)
        return train(model, batches, text_objective(model.part, self.tokenizer)[0], plan, self.held_out)


def _last(points: list[Point]) -> float:
    """The held-out loss at the end of a run, which is always taken."""
    last = points[-1].validation
    assert last is not None
    return last


def _report(out: Path, family: str | None, found: Diff, losses: dict[str, float], points: list[Point]) -> dict[str, Any]:
    from dovetail.core.fold import parameters

    report: dict[str, Any] = {"directory": str(out), "family": family}
    report["parameters"] = {"before": parameters(found.a), "after": parameters(found.b)}
    report["loss"] = losses
    if points:
        report["healing"] = {
            "steps": points[-1].step,
            "tokens": points[-1].tokens,
            "seconds": round(points[-1].seconds, 1),
            "held_out": [point.validation for point in points if point.validation is not None],
        }
    return {**report, **found.to_data()}


# -- for people -----------------------------------------------------------------------------------------------------


def told(before: str, after: str, found: Diff, losses: dict[str, float], points: list[Point]) -> Group:
    """The fates of the tensors, then the losses."""
    from dovetail.core.fold import parameters

    counts = [parameters(spec) for spec in (found.a, found.b)]
    sizes = Text(f"{counts[0]:,} → {counts[1]:,} parameters" if counts[0] != counts[1] else f"{counts[0]:,} parameters", "dim")
    shown: list[Text | Table | Group] = [view(before, after, found), Text(), sizes]
    if losses:
        shown += [Text(), Text("loss on the held-out text, nats a token", "bold"), loss_table(losses, points)]
    return Group(*shown)


def loss_table(losses: dict[str, float], points: list[Point]) -> Table:
    """A bar for each loss, its distance from the first, and how the healing went."""
    table = Table(box=None, pad_edge=False, show_header=False, padding=(0, 2, 0, 0))
    styles = {"before": "green", "after": "red", "healed": "cyan"}
    most = max(losses.values())
    for name, loss in losses.items():
        gap = loss - losses["before"]
        told = f"{gap:+.3f}" if name != "before" else ""
        if name == "healed":
            told += f"   {points[-1].step:,} steps in {points[-1].seconds:.0f} s  " + sparkline(
                [losses["after"], *(p.validation for p in points if p.validation is not None)]
            )
        table.add_row(Text(f"  {name}"), Text(f"{loss:.3f}", "bold"), Text(bar(loss / most), styles[name]), Text(told, "dim"))
    return table


def bar(share: float) -> str:
    """A share of BAR characters; all of them where a loss is no number."""
    return blocks(share if math.isfinite(share) else 1.0, BAR)


def sparkline(values: list[float]) -> str:
    """One character a value, the highest the tallest."""
    low, high = min(values), max(values)
    return "".join(LEVELS[round((value - low) / ((high - low) or 1.0) * 7)] for value in values)
