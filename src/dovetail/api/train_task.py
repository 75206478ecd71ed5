"""Task: what a run of `train` trains, and the weights that it starts from, read before anything is built or written.

    DIR/model.safetensors                     ours, or in Hugging Face layout
    DIR/checkpoints/step-00000120/            where DIR is a run: its newest checkpoint that verifies, which may be newer

With a moving average in the checkpoint, its weights are taken, as they are saved at the end of a run.
"""

from __future__ import annotations

import contextlib
import dataclasses as dc
import math
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from dovetail.api.arguments import Changes, NamedSpec, SpecLike, read_spec
from dovetail.core.count import read_count
from dovetail.core.errors import FileError, UsageError
from dovetail.core.fold import Declared, declared
from dovetail.core.part import plain
from dovetail.decoding.generation import Vocabulary
from dovetail.disk.checksum import data_sha256, file_sha256
from dovetail.disk.model_files import QUANTIZATION_FILE, RUN_FILE, TOKENIZER_FILE
from dovetail.disk.untrusted import PICKLES, Directory
from dovetail.files.model_dir import must_be_free
from dovetail.files.spec import SPEC_FILE
from dovetail.hf.load import opened, origin
from dovetail.hf.vocabulary import class_names, read_vocabulary
from dovetail.hf.write import files_beside
from dovetail.model import Model
from dovetail.text.tokenizer import Tokenizer
from dovetail.training.checkpoint import CHECKPOINTS, Checkpoints, read_manifest
from dovetail.training.export import check_checkpoint, checkpoint_pieces
from dovetail.training.metrics import LogKind
from dovetail.training.objective import Objective
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
from dovetail.training.trainable import weights_named
from dovetail.weights.adapters.attach import read_adapter
from dovetail.weights.adapters.kind import AdapterKind
from dovetail.weights.surgery.resize import with_tied_scale

MINUTES = 5.0  # of a run without an end


@dc.dataclass(frozen=True)
class Start:
    """Where a run starts from."""

    place: Path
    spec: Model
    checkpoint: Path | None  # of a run; None: the weights of the directory
    tokenizer: Tokenizer | None

    @staticmethod
    def open(directory: str | Path) -> Start:
        """Read the spec and the tokenizer of a directory; its weights are read later."""
        where = Directory(Path(directory))
        newest = Checkpoints(where.place / CHECKPOINTS).latest() if where.has(RUN_FILE) and where.has(CHECKPOINTS) else None
        tokenizer = Tokenizer.load(where.place) if where.has(TOKENIZER_FILE) else None
        spec = origin(where).spec
        if newest is not None:
            check_checkpoint(newest, spec)
        return Start(where.place, spec, newest, tokenizer)

    @property
    def quantized(self) -> bool:
        """Whether its weights are stored in fewer bits."""
        return self.checkpoint is None and Directory(self.place).has(QUANTIZATION_FILE)

    def recorded(self) -> dict[str, Any]:
        """The name of the directory, and the SHA-256 of its weights."""
        if self.checkpoint is not None:
            files = {name: one["sha256"] for name, one in read_manifest(self.checkpoint).files.items()}
        else:
            names = [name for name in Directory(self.place).names() if name.endswith(".safetensors")]
            files = {name: file_sha256(self.place / name) for name in names}
        return {"name": str(self.place), "sha256": data_sha256(files)}

    def vocabulary(self) -> Vocabulary:
        """The tokenizer, end tokens and chat template of the directory, as far as it has them."""
        return read_vocabulary(Directory(self.place))

    def files(self) -> dict[str, bytes]:
        """The files to write beside the weights: tokenizer, chat template, generation settings."""
        return files_beside(Directory(self.place))

    def check_fits(self, spec: Model, fresh: str | None = None) -> None:
        """Raise FileError for the first weight of the spec that the directory does not have, or has in another shape; those of
        the part `fresh` are initialized anew."""
        theirs, ours = (
            {d.path: tuple(d.weight.shape(d.scope)) for d in declared(one) if d.weight.stored and not _within(d.path, fresh)}
            for one in (self.spec, spec)
        )
        for path in [*ours, *theirs]:
            a, b = theirs.get(path), ours.get(path)
            if a != b:
                problem = f"has no {path}" if a is None else f"has {path}, and the spec has not" if b is None else None
                problem = problem or f"has {path} of shape {list(a or ())}; the spec says {list(b or ())}"
                remedy = f"`dovetail graft {self.place}` carries weights over to another spec"
                raise FileError(f"{self.place}: {problem}; {remedy}")

    def replaces(self, part: str | None, spec: Model) -> bool:
        """Whether a part of the spec has other weights than that of the directory, by their names and shapes."""
        ours, theirs = (
            {(d.path, tuple(d.weight.shape(d.scope))) for d in declared(one) if d.weight.stored and _within(d.path, part)}
            for one in (spec, self.spec)
        )
        return ours != theirs

    def class_names(self) -> tuple[str, ...]:
        """The names of the classes of the head, as far as the directory has them."""
        return class_names(Directory(self.place))

    def for_text(self) -> Tokenizer:
        """The tokenizer that a text file is encoded by."""
        if self.tokenizer is None:
            raise FileError(f"{self.place}: holds no {TOKENIZER_FILE} to encode the text by; give token shards (--data)")
        return self.tokenizer

    def check_tokenizer(self, tokenizer: Tokenizer | None, data: str, special: Sequence[str] = ()) -> None:
        """Raise FileError where the data has another tokenizer than the weights, with the special tokens of the objective."""
        if self.tokenizer is None or tokenizer is None:
            return
        if self.tokenizer.with_special(special).to_json() != tokenizer.to_json():
            remedy = f"build the data with --tokenizer {self.place}"
            raise FileError(f"{data}: its tokenizer is not that of {self.place}; {remedy}")

    @contextlib.contextmanager
    def weights(self, fresh: str | None = None) -> Generator[Iterable[tuple[str, Tensor]]]:
        """(path, tensor) of every weight but those of the part `fresh`, each read when its turn comes."""
        if self.checkpoint is not None:
            pieces = checkpoint_pieces(self.checkpoint, self.spec)
            yield (pair for piece in pieces for pair in piece.make().items() if not _within(pair[0], fresh))
            return
        with opened(self.place) as files:
            yield (pair for pair in files.tensors if not _within(pair[0], fresh))


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
        return f"{self.name} on {Path(data or self.files['data'][0]).name}"


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
        if self.tokens is not None and task.kind.reads != "text":
            raise UsageError(f"--tokens: the rows of --{task.kind.reads} differ in length; give --steps or --minutes")
        ends = [self.steps, None if self.tokens is None else math.ceil(read_count(self.tokens) / (self.batch * self.length))]
        end = min((steps for steps in ends if steps is not None), default=None)
        if self.epochs is not None and task.kind.reads == "text":
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


def _within(path: str, part: str | None) -> bool:
    return part is not None and path.startswith(f"{part}.")
