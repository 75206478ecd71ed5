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
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dovetail.api.arguments import Changes, SpecLike, read_spec
from dovetail.api.models import load, save
from dovetail.api.options import LAYERS, OUR_MODEL, REPLACE_MODEL, SWAP, InFile, Length, OutDir, Seed, Sets
from dovetail.api.result import INTERRUPTED, Result
from dovetail.base.errors import UsageError
from dovetail.base.option import BatchSize, Option
from dovetail.base.termination import Interrupt, delaying
from dovetail.disk.model_files import LOSSES_FILE
from dovetail.disk.untrusted import Directory
from dovetail.spec.fold import parameters
from dovetail.training.metrics import StepMetrics, to_jsonl
from dovetail.training.plan import Plan
from dovetail.views.bar import loss_table
from dovetail.views.blocks import View, styled
from dovetail.views.progress import TrainingProgress

if TYPE_CHECKING:
    from dovetail.api.spec_diff import SpecDiff
    from dovetail.hf.load import Watch
    from dovetail.model.model import Model
    from dovetail.model.transformer import Transformer


@dc.dataclass(frozen=True, repr=False, eq=False)
class GraftResult(Result):
    """The changed model, the status of each tensor, and its losses in nats per token."""

    model: Transformer
    diff: SpecDiff
    loss: dict[str, float]  # before, after, healed: on held-out text, as far as they were measured
    history: tuple[StepMetrics, ...] = ()  # of the training after the change
    directory: Path | None = None  # the directory that was written
    family: str | None = None  # in Hugging Face layout: its family
    interrupted: bool = False  # Ctrl-C ended the training early

    @property
    def exit_code(self) -> int:
        return INTERRUPTED if self.interrupted else 0

    @property
    def remark(self) -> str:
        if not self.interrupted:
            return ""
        step = f" after step {self.history[-1].step} of the training" if self.history else ""
        return f"interrupted{step}" + (f"; the model is in {self.directory}" if self.directory is not None else "")

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {"directory": None if self.directory is None else str(self.directory), "family": self.family}
        data["parameters"] = {"before": parameters(self.diff.a), "after": parameters(self.diff.b)}
        data["loss"] = self.loss
        if self.history:
            last = self.history[-1]
            losses = [metrics.val_loss for metrics in self.history if metrics.val_loss is not None]
            data["healing"] = {
                "steps": last.step,
                "tokens": last.tokens,
                "seconds": round(last.seconds, 1),
                "held_out": losses,
                "interrupted": self.interrupted,
            }
        return {**data, **self.diff.to_dict()}

    def view(self, width: int) -> View:
        from dovetail.views.diff import diff_view

        counts = [parameters(spec) for spec in (self.diff.a, self.diff.b)]
        sizes = f"{counts[0]:,} → {counts[1]:,} parameters" if counts[0] != counts[1] else f"{counts[0]:,} parameters"
        lines = [diff_view(self.diff, self.diff.names), "", styled((sizes, "dim"))]
        if self.loss:
            heading = styled(("loss on the held-out text, nats per token", "bold"))
            lines += ["", heading, loss_table(self.loss, self.history)]
        if self.directory is not None:
            layout = f" in Hugging Face layout, as {self.family}" if self.family else ""
            lines.append(f"\nwritten to {self.directory}{layout}")
        return lines


def graft(
    model: Annotated[str | Path | Transformer, OUR_MODEL],
    spec: SpecLike | None = None,
    *,
    set: Annotated[Changes, Sets("Change a field: --set layers.*.mixer.kv_heads=1; may be given many times.")] = (),
    swap: Annotated[Changes, SWAP] = (),
    layers: Annotated[str | Sequence[int] | None, LAYERS] = None,
    redraw: Annotated[bool, Option("Initialize a tensor if no map from the old one is known.")] = False,
    text: Annotated[
        str | Path | None, InFile("A UTF-8 text file: the loss is measured on its last twentieth, --heal trains on the rest.")
    ] = None,
    heal: Annotated[float | None, Option("Train for N minutes on the text.", low=0.0, above=True)] = None,
    out: Annotated[str | Path | None, OutDir("The model directory to write; DIRECTORY-grafted by default.", short="-o")] = None,
    hf: Annotated[
        bool, Option("Write Hugging Face's layout, in the family of the source or the first family that can express the spec.")
    ] = False,
    family: Annotated[str | None, Option("With --hf: the family to write, one of those that `dovetail port` lists.")] = None,
    force: Annotated[bool, REPLACE_MODEL] = False,
    seed: Annotated[int, Seed("The seed of new weights and of the batches.")] = 0,
    batch: Annotated[int, BatchSize("Sequences per step.")] = 8,
    length: Annotated[int, Length("Tokens per sequence.")] = 128,
    learning_rate: Annotated[
        float, Option("The peak learning rate of --heal; much lower (1e-5) for a large model.", low=0.0, above=True)
    ] = 1e-3,
    quiet: bool = False,
    watch: Watch | None = None,
) -> GraftResult:
    """Return a model of another spec with the weights of `model`: kept, transformed, or initialized where they are new.

    `model` is a built model or a model directory. The new spec is `spec`, or the old one after `layers` (the old layers that
    make up the new model: "0-3,3,5"), `swap` and `set`. A tensor that cannot be carried over raises SpecError, unless `redraw`
    initializes it. With `text` (a file) the loss is measured on its last twentieth, and `heal` trains for that many minutes on
    the rest. `out` is the directory to write, with `hf` in Hugging Face layout. Kept weights are shared with a built model.
    """
    from dovetail.api.spec_diff import with_names
    from dovetail.files.model_dir import must_be_free
    from dovetail.hf.origin import origin
    from dovetail.hf.write import family_for
    from dovetail.model.transformer import Transformer
    from dovetail.text.tokenizer import Tokenizer
    from dovetail.training.trial import Trial
    from dovetail.weights.surgery.transfer import graft as graft_model

    _check_options(spec is not None or bool(set or swap or layers), text, heal, hf, family)
    place = None if out is None else Path(out)
    if place is not None:
        must_be_free(place, force)
    source = None if isinstance(model, Transformer) else Directory(model)
    old = model.spec if isinstance(model, Transformer) else origin(Directory(model)).spec
    new, picks = _new_spec(old, spec, layers, set, swap)
    if hf and source is None:
        raise UsageError("--hf: needs a model directory, whose config names the family; save the model first")
    family = family_for(new, source, family) if hf and source is not None else None  # refused before an hour of training
    tokenizer = model.tokenizer if isinstance(model, Transformer) else None
    trial = None
    if text is not None:
        if tokenizer is None and not isinstance(model, Transformer):
            tokenizer = Tokenizer.load(Path(model))
        trial = Trial.open((old, new), text, tokenizer, batch, length, seed)
    before = model if isinstance(model, Transformer) else load(model, watch=watch)
    losses = {} if trial is None else {"before": trial.loss(before)}
    grafted, rows = graft_model(before, new, picks=picks, redraw=redraw, seed=seed)
    assert isinstance(grafted, Transformer)
    grafted.vocabulary = before.vocabulary
    names = ("model" if isinstance(model, Transformer) else Path(model).name, "changed" if place is None else place.name)
    del before
    history: list[StepMetrics] = []
    with Interrupt() as interrupted:
        if trial is not None:
            losses["after"] = trial.loss(grafted)
        if trial is not None and heal is not None:
            plan = Plan(minutes=heal, learning_rate=learning_rate, seed=seed, quiet=quiet)
            with TrainingProgress(quiet) as show:
                history = trial.heal(grafted, plan, interrupted, show)
            losses["healed"] = history[-1].val_loss or math.nan
    if place is not None:
        with delaying() if interrupted.received else nullcontext():  # what was trained so far
            _write(grafted, source, place, family, history)
    result = with_names(rows, names)
    return GraftResult(grafted, result, losses, tuple(history), place, family, interrupted.received)


def _check_options(changed: bool, text: str | Path | None, heal: float | None, hf: bool, family: str | None) -> None:
    if heal is not None and text is None:
        raise UsageError("--heal: needs a text to train on; give --text")
    if family is not None and not hf:
        raise UsageError("--family: needs --hf")
    if not changed:
        raise UsageError("no change is given; give --set, --swap or --layers")


def _new_spec(
    old: Model, spec: SpecLike | None, layers: str | Sequence[int] | None, set: Changes, swap: Changes
) -> tuple[Model, tuple[int, ...] | None]:
    """Return the new spec, and the old layer of each of its layers."""
    from dovetail.files.spec import changed
    from dovetail.weights.surgery import parse_picks, picked

    picks = parse_picks(layers, len(old.layers)) if isinstance(layers, str) else None if layers is None else tuple(layers)
    if spec is not None:
        return read_spec(spec).after(set, swap).spec, picks
    return changed(old if picks is None else picked(old, picks), set, swap), picks


def _write(model: Transformer, source: Directory | None, out: Path, family: str | None, history: list[StepMetrics]) -> None:
    from dovetail.hf.write import model_pieces, write_own, write_theirs

    beside = {LOSSES_FILE: to_jsonl(history).encode()} if history else {}
    if source is None:
        save(model, out)
    elif family is None:
        write_own(model, source, out, beside, keep_foreign=True)  # files that appeared while it trained
    else:
        write_theirs(model.part, model_pieces(model), source, out, family, beside, keep_foreign=True)
