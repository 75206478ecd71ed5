"""Find what the heads, channels, layers and experts of a model do on a text, each with its evidence and with a line of Python
that tests it by an intervention; or without a text, what a training run did: spikes, and what its checkpoints show.

    dovetail look llama-tiny-trained --text plays.txt
    dovetail look runs/small
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dovetail.api.arguments import silent
from dovetail.api.models import load
from dovetail.api.options import InDir, InFile, Length, Seed
from dovetail.api.result import Result
from dovetail.base.errors import FileError, UsageError
from dovetail.base.option import Option
from dovetail.disk.model_files import LOSSES_FILE, RUN_FILE
from dovetail.views.blocks import PAGE_WIDTH, View, result_page
from dovetail.views.look import checkpoint_table, record_lines, trait_lines, trait_table
from dovetail.views.page import Page

if TYPE_CHECKING:
    from dovetail.look.findings import Finding
    from dovetail.training.dynamics import CheckpointState, Spike
    from dovetail.training.record import RunRecord


@dc.dataclass(frozen=True, repr=False)
class TraitReport(Result):
    """The traits of a model."""

    directory: Path
    text: Path
    tokens: tuple[int, int]  # rows and tokens of a row
    findings: tuple[Finding, ...]
    checked: dict[str, int]  # trait -> number of heads, channels, layers or units
    skipped: dict[str, str]  # trait -> why it was not looked for
    setup: str  # the Python that the tests of the findings follow

    def to_dict(self) -> dict[str, Any]:
        findings = [dc.asdict(finding) for finding in self.findings]
        return {**dc.asdict(self), "directory": str(self.directory), "text": str(self.text), "findings": findings}

    def view(self, width: int) -> View:
        return [self._size(), "", *trait_lines(self.findings), *self._rest()]

    def page(self) -> Page:
        return result_page(f"dovetail look {self.directory.name}", [self._size(), trait_table(self.findings), *self._rest()])

    def _size(self) -> str:
        rows, length = self.tokens
        return f"{self.directory}: {len(self.findings)} findings in {rows} rows of {length} tokens of {self.text}"

    def _rest(self) -> list[View]:
        skipped: list[View] = [f"{name}: not tested: {why}" for name, why in self.skipped.items()]
        return [*skipped, "", f"To run a line in Python, first:  {self.setup}"] if self.findings else skipped


@dc.dataclass(frozen=True, repr=False)
class RunReport(Result):
    """What a training run did."""

    record: RunRecord
    spikes: tuple[Spike, ...]
    checkpoints: tuple[CheckpointState, ...]
    note: str  # why there is nothing on checkpoints
    threshold: float  # of induction

    @property
    def induction_step(self) -> int | None:
        """The first checkpoint with an induction head."""
        return next((c.step for c in self.checkpoints if c.induction is not None and c.induction >= self.threshold), None)

    def to_dict(self) -> dict[str, Any]:
        history = self.record.history
        return {
            **self.record.to_dict(),
            "grad_norm": history[-1].grad_norm if history else None,
            "spikes": [spike._asdict() for spike in self.spikes],
            "checkpoints": [state._asdict() for state in self.checkpoints],
            "induction_step": self.induction_step,
            "note": self.note,
        }

    def view(self, width: int) -> View:
        blocks = record_lines(self.record, self.spikes, width)
        if self.record.history:
            blocks += ["", checkpoint_table(self.checkpoints) if self.checkpoints else self.note]
        if self.checkpoints and any(c.induction is not None for c in self.checkpoints):
            step, first = self.induction_step, self.checkpoints[0].step
            when = f"by step {step:,}" if step == first else f"at step {step:,}" if step is not None else "in no checkpoint"
            blocks.append(f"an induction head (at least {self.threshold:g} on repeated random tokens) appears {when}")
        return blocks

    def page(self) -> Page:
        return result_page(f"dovetail look {self.record.place.name}", self.view(PAGE_WIDTH))


def report(
    model: Annotated[
        str | Path, InDir("A model directory with a tokenizer.json; or the directory of a training run.", argument=True)
    ],
    *,
    text: Annotated[
        str | Path | None, InFile("A UTF-8 text that the model reads; without it, the training run is read.")
    ] = None,
    rows: Annotated[int, Option("Rows of the text to read.", low=1, high=1024)] = 8,
    length: Annotated[int, Length("Tokens per row.")] = 128,
    seed: Annotated[int, Seed("The seed of shuffled texts.")] = 0,
    progress: Callable[..., None] | None = None,
) -> TraitReport | RunReport:
    """Return the traits of a model on a text, as `dt.look.traits` finds them, or without a text, what a training run did.

    A finding has a score, a threshold, a null distribution and a false-alarm rate, and the line of Python that tests it by an
    intervention. Of a run: loss, gradient norm, their spikes, and of each checkpoint that is kept the size of its updates,
    row entropy, balance of experts, and the step at which an induction head appears.
    """
    place, progress = Path(model), progress or silent
    if text is None:
        return _of_run(place, progress)
    import dovetail.look as look
    from dovetail.nn.finite import check_weights

    module, path = load(place), Path(text)
    check_weights(module, module.spec)
    if module.tokenizer is None:
        raise FileError(f"{place}: has no tokenizer.json, so no text can be read; call dt.look.traits(model, ids)")
    ids = look.token_rows(module.tokenizer, path, rows, length)
    findings = look.traits(module, ids, seed=seed, progress=lambda done, total: progress(done, total, "layers"))
    setup = (
        f"import dovetail as dt; from pathlib import Path; model = dt.load({str(place)!r}); "
        f"ids = dt.look.token_rows(model.tokenizer, Path({str(path)!r}), {rows}, {length})"
    )
    size = (int(ids.shape[0]), int(ids.shape[1]))
    return TraitReport(place, path, size, tuple(findings), findings.checked, findings.skipped, setup)


def _of_run(place: Path, progress: Callable[..., None]) -> RunReport:
    if not ((place / RUN_FILE).is_file() and (place / LOSSES_FILE).is_file()):
        raise UsageError(f"{place}: is not the directory of a training run; give --text FILE to look at a model")
    from dovetail.look.judging import THRESHOLDS
    from dovetail.training.dynamics import checkpoint_states, spikes
    from dovetail.training.record import read_record

    record, note = read_record(place), "no checkpoint is kept; --keep and --checkpoint-minutes of train keep more"
    try:
        states = checkpoint_states(place, record.spec, lambda done, total: progress(done, total, "checkpoints"))
    except FileError as error:  # of a run that trains an adapter, or damaged
        states, note = [], f"checkpoints are not read: {error}"
    return RunReport(record, tuple(spikes(record.history)), tuple(states), note, THRESHOLDS["induction"])
