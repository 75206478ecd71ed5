"""Task and options: what a run of `train` trains, and how, read before anything is built or written."""

from __future__ import annotations

import dataclasses as dc
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dovetail.api.arguments import Changes, NamedSpec, SpecLike, read_spec
from dovetail.api.train_from import Start
from dovetail.base.errors import FileError, UsageError
from dovetail.base.units import read_count
from dovetail.data.tasks.task import read_synthetic_task
from dovetail.disk.model_files import RUN_FILE, TOKENIZER_FILE
from dovetail.disk.untrusted import PICKLES, Directory
from dovetail.files.model_dir import must_be_free
from dovetail.files.spec import SPEC_FILE
from dovetail.model.model import Model
from dovetail.spec.fold import Declared
from dovetail.spec.part import plain
from dovetail.training.metrics import LogKind
from dovetail.training.objective import SEQUENCES, Objective
from dovetail.training.optim import weights_named
from dovetail.training.plan import (
    ADAPTER_RATE,
    ComputeOptions,
    OptimizerOptions,
    ParallelOptions,
    Plan,
    SampleOptions,
    ScheduleOptions,
)
from dovetail.training.source import TokenizerKind
from dovetail.training.task import objective_kind, reads_of, spec_for
from dovetail.weights.adapters.attach import read_adapter
from dovetail.weights.adapters.kind import AdapterKind
from dovetail.weights.surgery.resize import with_tied_scale

MINUTES = 5.0  # of a run without an end


@dc.dataclass(frozen=True)
class Task:
    """A spec, trained for an objective on data, from random weights or those of a start."""

    name: str
    spec: Model
    kind: type[Objective]
    settings: Mapping[str, Any]  # of the objective
    files: Mapping[str, Any]  # the data, by option
    start: Start | None
    fresh: str | None  # the part that the weights of the start do not have
    adapter: AdapterKind | None
    only: Sequence[str]  # patterns of the weights to train

    @property
    def trained(self) -> list[Declared] | None:
        """The weights to train; None: all, or an adapter."""
        return weights_named(self.spec, self.only)

    @property
    def title(self) -> str:
        """The title of a plot: llama-tiny on plays.txt."""
        data = next((value for name, value in self.files.items() if name != "data" and value), None)
        return f"{self.name} on {Path(str(data or self.files['data'][0])).name}"


@dc.dataclass(frozen=True)
class JobOptions:
    """How a task is trained: the options of `train` that are not its task, under their names."""

    steps: int | None
    minutes: float | None
    epochs: float | None
    tokens: float | str | None
    batch: int
    length: int
    tokenizer: TokenizerKind
    learning_rate: float | None
    schedule: ScheduleOptions
    optimizer: OptimizerOptions
    compute: ComputeOptions
    parallel: ParallelOptions
    sample: SampleOptions
    seed: int
    evals: int
    out: str | Path | None
    force: bool
    checkpoint_minutes: float
    keep: int
    log: LogKind | Sequence[LogKind]
    recorded: Mapping[str, Any] | None
    quiet: bool

    @staticmethod
    def read(arguments: Mapping[str, Any]) -> JobOptions:
        """Take the options from the arguments of `train`."""
        return JobOptions(**{field.name: arguments[field.name] for field in dc.fields(JobOptions)})

    def __post_init__(self) -> None:
        if self.parallel.ring and self.parallel.sequence == 1:
            raise UsageError("--ring: there is one chunk of every row; also give --sequence")
        if not self.sample.prompt:
            raise UsageError("--prompt: give at least one character")
        if self.length % self.parallel.sequence:
            remedy = f"does not divide sequences of {self.length} tokens; change --length"
            raise UsageError(f"--sequence: {self.parallel.sequence} {remedy}")
        if self.logs and self.place is None:
            raise UsageError("--log: give a directory to train in (-o)")
        if self.place is not None and not (self.place / RUN_FILE).is_file():
            must_be_free(self.place, self.force)

    @property
    def place(self) -> Path | None:
        """The directory to train in."""
        return None if self.out is None else Path(self.out)

    @property
    def logs(self) -> tuple[LogKind, ...]:
        """The further logs of metrics."""
        return (self.log,) if isinstance(self.log, str) else tuple(self.log)

    def plan(self, task: Task) -> Plan:
        """The plan of the run; `epochs` are counted when the data is read."""
        if self.tokens is not None and task.kind.reads not in SEQUENCES:
            raise UsageError(f"--tokens: the rows of --{task.kind.reads} differ in length; give --steps or --minutes")
        ends = [self.steps, None if self.tokens is None else math.ceil(read_count(self.tokens) / (self.batch * self.length))]
        end = min((steps for steps in ends if steps is not None), default=None)
        if self.epochs is not None and task.kind.reads in SEQUENCES:
            raise UsageError("--epochs: are of rows; give --steps or --tokens")
        rate = Plan.learning_rate * (1 if task.adapter is None else ADAPTER_RATE)
        try:
            return Plan(
                steps=end,
                minutes=MINUTES if self.minutes is None and end is None else self.minutes,
                learning_rate=rate if self.learning_rate is None else self.learning_rate,
                seed=self.seed,
                evals=self.evals,
                quiet=self.quiet,
                **{**vars(self.schedule), **vars(self.optimizer), **vars(self.compute)},
            )
        except ValueError as error:
            raise UsageError(f"--{error}") from error


def read_task(
    spec: SpecLike | None,
    changes: tuple[Changes, Changes],
    from_: str | Path | None,
    adapter: AdapterKind | str | Mapping[str, Any] | None,
    only: str | Sequence[str],
    objective: str | None,
    settings: Mapping[str, Any],
    files: Mapping[str, Any],
    say: Callable[[str], None],
) -> Task:
    """Read the task that options name, with the changes `set` and `swap` of its spec."""
    start = None if from_ is None else Start.open(from_)
    kind_of_adapter = None if adapter is None else read_adapter(adapter)
    if kind_of_adapter is not None and start is None:
        raise UsageError("--adapter: an adapter is trained on the weights of a model; give it with --from")
    if only and kind_of_adapter is not None:
        raise UsageError("--only: with --adapter only the adapter is trained; give its targets")
    name, changed, directory = _named_spec(spec, start).after(*changes)
    if directory is not None:
        _refuse_weights(directory)
    changed, fresh = spec_for(changed, objective)
    kind = objective_kind(changed, reads_of(files), objective)
    if files["task"] is not None:
        files = {**files, "task": read_synthetic_task(files["task"])}
    if start is not None:
        if fresh is None and kind.fresh is not None and start.replaces(kind.fresh, changed):
            fresh = kind.fresh
            if kind_of_adapter is not None:
                raise UsageError(f"--adapter: the {fresh} is new, and would stay random; train the model without it first")
            say(f"{fresh}: other weights than those of {start.place}, initialized anew")
        start.check_fits(changed, fresh)
    patterns = (only,) if isinstance(only, str) else tuple(only)
    task = Task(name, changed, kind, settings, files, start, fresh, kind_of_adapter, patterns)
    if fresh is not None and task.trained is not None and not any(d.path.startswith(f"{fresh}.") for d in task.trained):
        raise UsageError(f"--only: the {fresh} is new, and would stay random; also name its weights: '{fresh}.*'")
    if (scaled := with_tied_scale(changed)) != changed:
        say(f"µP multiplies the logits of a tied head by base_width/width: --set head.scale={plain(scaled.head)['scale']:g}")
    return task


def _named_spec(spec: SpecLike | None, start: Start | None) -> NamedSpec:
    """Return the spec that is given, or that of the initial weights."""
    if spec is not None:
        return read_spec(spec)
    if start is None:
        raise UsageError("give a spec, or initial weights with --from")
    return NamedSpec(str(start.place), start.spec)


def _refuse_weights(place: Path) -> None:
    """Raise where the directory holds weights or a tokenizer: both would be discarded."""
    directory = Directory(place)
    present = [name for name in directory.names() if name.endswith((".safetensors", *PICKLES, TOKENIZER_FILE))]
    if present:
        spec = f"{place / SPEC_FILE}" if directory.has(SPEC_FILE) else "a preset or a .yaml file"
        raise FileError(
            f"{place}: holds {present[0]}, which train would discard: it starts with random weights and a tokenizer; "
            f"to continue from them, give it with --from; to train this architecture from scratch, give {spec}"
        )
