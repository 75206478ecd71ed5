"""TrainJob: a run of `train` with its data, model and directory opened; it trains, writes the model and returns the run."""

from __future__ import annotations

import dataclasses as dc
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib.util import find_spec as find_module
from pathlib import Path
from typing import Any

import torch

from dovetail.api.arguments import silent
from dovetail.api.models import load
from dovetail.api.train_task import JobOptions, Task, read_task
from dovetail.api.training_run import TrainingRun
from dovetail.base.errors import install_command
from dovetail.base.memory import check_memory
from dovetail.base.termination import Interrupt, delaying
from dovetail.decoding.generation import Sampling, Vocabulary
from dovetail.disk.model_files import PLOT_FILE, RUN_FILE, SAMPLES_FILE
from dovetail.disk.untrusted import Directory
from dovetail.files.spec import SPEC_FILE, to_yaml
from dovetail.hf.files import read_vocabulary
from dovetail.model.transformer import Transformer
from dovetail.spec.fold import parameters
from dovetail.spec.part import plain
from dovetail.text.tokenizer import Tokenizer
from dovetail.training.loop import train as train_loop
from dovetail.training.metrics import StepMetrics, faster_precision, logs_of, speed_of
from dovetail.training.objective import SEQUENCES, Objective, Setup, TuningData
from dovetail.training.optim import train_only
from dovetail.training.plan import (
    Plan,
    Precision,
    PrecisionChoice,
)
from dovetail.training.ranks import JobRanks, ranks_of_run
from dovetail.training.record import write_initial
from dovetail.training.run import RunDirectory, open_run
from dovetail.training.samples import Samples, check_samples, sample_text
from dovetail.training.settings import check_recorded, read_run, run_data
from dovetail.training.source import BatchShape, Source, TokenizerKind
from dovetail.training.step import DTYPES, Trainer, computing_in
from dovetail.training.task import generation_files, read_source
from dovetail.views.curve import draw_losses
from dovetail.views.progress import TrainingProgress
from dovetail.weights.adapters.attach import Applied, attach, match
from dovetail.weights.adapters.storage import Base, Fingerprint, fingerprint

BYTES_PER_PARAMETER = 16  # float32 weight and gradient, and AdamW's two moments


@dc.dataclass(frozen=True)
class TrainJob:
    """A run before its first step."""

    task: Task
    options: JobOptions
    plan: Plan
    ranks: JobRanks
    source: Source
    objective: Objective
    model: Transformer
    base: str  # the fingerprint of the weights that an adapter is trained on
    run: RunDirectory | None
    interrupted: Interrupt
    say: Callable[[str], None]

    @staticmethod
    def of(arguments: Mapping[str, Any], stack: ExitStack) -> TrainJob:
        """Open the job that arguments of `train` describe, every one of which is given."""
        say, data = arguments["note"] or silent, arguments["data"]
        files = {name: arguments[name] for name in ("text", "data", "task", "labels", "tags", "pairs", "chats")}
        files["data"] = [data] if isinstance(data, str) else list(data)
        settings: dict[str, Any] = dict(arguments["options"] or {})
        if arguments["beams"] is not None:
            settings["beams"] = arguments["beams"]
        task = read_task(
            arguments["spec"],
            (arguments["set"], arguments["swap"]),
            arguments["from_"],
            arguments["adapter"],
            arguments["only"],
            arguments["objective"],
            settings,
            files,
            say,
        )
        return TrainJob.open(task, JobOptions.read(arguments), say, stack)

    @staticmethod
    def open(task: Task, options: JobOptions, say: Callable[[str], None], stack: ExitStack) -> TrainJob:
        """Join the ranks, read the data, build the model and prepare the directory; the stack closes what is opened."""
        count, tokens = parameters(task.spec), options.batch * options.length
        needed = BYTES_PER_PARAMETER * count + 4 * tokens * task.spec.vocab // options.compute.micro_batches
        check_memory(needed, f"training {count:,} parameters on {options.batch:,} × {options.length:,} tokens per step")
        plan, logs = options.plan(task), logs_of(options.logs)
        ranks = stack.enter_context(ranks_of_run(**vars(options.parallel)))
        if options.sample.sample_every:
            check_samples(task.kind, ranks)
        resumed = None if options.force else options.place
        precision: Precision = ranks.on_first_rank(lambda: chosen_precision(options.compute.precision, resumed))
        plan = dc.replace(plan, precision=precision, quiet=options.quiet or not ranks.first)
        say = say if ranks.first else silent
        source, recorded = _read_data(task, options, ranks, say)
        if options.epochs is not None and source.epoch is not None:
            last = max(1, round(options.epochs * source.epoch))
            plan = dc.replace(plan, steps=min(last, plan.steps or last), minutes=options.minutes)
        objective = task.kind.of(task.spec, source.tokenizer, options.length).configured(task.settings)
        model, base = _build(task, plan, ranks, say)
        interrupted, run = stack.enter_context(Interrupt()), None
        if (place := options.place) is not None:
            files = {} if task.start is None else task.start.files()
            files |= {SPEC_FILE: to_yaml(task.spec), **generation_files(source.tokenizer, objective), **source.files}
            keys = run_data(_keys(task, options, plan, source), recorded)
            if ranks.on_first_rank(lambda: open_run(place, keys, files, options.force)):
                say(f"{place}: resuming")
            run = stack.enter_context(RunDirectory(place, plan, ranks, options.checkpoint_minutes, options.keep, logs))
            if ranks.count == 1:  # no rank holds more than its shard
                write_initial(place, model)
        setup = Setup(model, place, options.seed, ranks, lambda: computing_in(model, precision, ranks), load)
        objective, source = objective.prepare(source, setup)
        return TrainJob(task, options, plan, ranks, source, objective, model, base, run, interrupted, say)

    def train(self) -> TrainingRun:
        """Train, write the model, and return it with its metrics and a sample."""
        task, source, ranks, place, sample = self.task, self.source, self.ranks, self.options.place, self.options.sample
        sampling = Sampling(temperature=sample.temperature, seed=self.options.seed)
        with TrainingProgress(self.plan.quiet) as show:
            history = train_loop(
                self.model,
                source.batch,
                self.objective,
                self.plan,
                source.held_out,
                self.interrupted,
                self.run,
                ranks,
                self._samples(sampling),
                source.where,
                self._speed(),
                show=show,
            )
        stopped = ranks.any(self.interrupted.received)  # Ctrl-C may have reached one rank alone
        if self.run is not None and place is not None:
            with delaying():
                if task.adapter is None or task.start is None:
                    self.run.write_model(task.spec)
                else:
                    self.run.write_adapter(task.adapter, Base(str(task.start.place), self.base))
                ranks.on_first_rank(lambda: plot_losses(history, place / PLOT_FILE, task.title, self.say))
        self.model.vocabulary = self._vocabulary()
        result = TrainingRun(task.name, self.model, source.tokenizer, tuple(history), stopped, place, prompt=sample.prompt)
        if not task.kind.generates or source.tokenizer is None:
            return result
        bits = source.bits_per_byte(result.held_out_loss or math.nan)
        if ranks.count > 1 or stopped:  # a model over several ranks is sampled from its directory
            return dc.replace(result, held_out_bits_per_byte=bits)
        text = sample_text(self.model, source.tokenizer, sample.prompt, sample.sample, sampling, self.say)
        return dc.replace(result, held_out_bits_per_byte=bits, sample=text)

    def timed_steps(self) -> Callable[[], float]:
        """Return a function that trains for one more step, and returns its seconds per token."""
        trainer, steps = Trainer(self.model, self.objective, self.plan, self.ranks, self.source.where), itertools.count()

        def timed() -> float:
            if self.interrupted():
                raise KeyboardInterrupt
            step, start = next(steps), time.perf_counter()
            tokens = trainer.step(self.source.batch(step), step, self.plan.lr(step)).tokens
            return (time.perf_counter() - start) / tokens

        return timed

    def _vocabulary(self) -> Vocabulary:
        """The tokenizer, end tokens and template that the model is saved with."""
        if self.options.place is not None:
            return read_vocabulary(Directory(self.options.place))
        start = Vocabulary() if self.task.start is None else self.task.start.vocabulary()
        end = self.objective.generation().get("eos_token_id")
        return dc.replace(start, tokenizer=self.source.tokenizer, stop=start.stop if end is None else start.stop | {end})

    def _samples(self, sampling: Sampling) -> Samples | None:
        sample, tokenizer, place = self.options.sample, self.source.tokenizer, self.options.place
        if not sample.sample_every or tokenizer is None:
            return None
        path = None if place is None else place / SAMPLES_FILE
        return Samples(tokenizer, sample.prompt, sample.sample, sampling, sample.sample_every, path, self.say)

    def _speed(self) -> Any:
        if self.task.kind.reads not in SEQUENCES or self.task.spec.encoder is not None:
            return None  # not every token of a batch is multiplied by the same weights
        dtype = DTYPES[self.plan.precision] or torch.float32
        return speed_of(self.task.spec, self.options.length, dtype, self.model.device, self.ranks.count)


def _read_data(
    task: Task, options: JobOptions, ranks: JobRanks, say: Callable[[str], None]
) -> tuple[Source, Mapping[str, Mapping[str, Any]]]:
    """Return the data of a run, with digests of it and of the initial weights."""
    start, spec = task.start, task.spec
    shape = BatchShape(options.batch, options.length, options.seed, ranks.data_rank, ranks.data_count)
    encoder: TokenizerKind | Tokenizer = options.tokenizer
    if start is not None and not task.files["data"] and spec.embed.token_ids:
        encoder = start.for_text()
    tuning = None
    if start is not None and task.files["chats"] is not None:
        tuning = TuningData(start.vocabulary(), str(start.place), task.settings)
    classes = () if start is None or task.fresh is not None else start.class_names()
    source = read_source(task.kind, spec, encoder, shape, say, task.files, tuning, classes)
    recorded = {"data": source.recorded()}
    if start is not None:
        start.check_tokenizer(source.tokenizer, source.name, task.kind.special(options.length))
        recorded["from"] = ranks.on_first_rank(start.recorded)
    check_recorded(options.recorded or {}, recorded)
    held_out = f"{source.held_out_tokens:,}"
    counts = f"{source.tokens + source.held_out_tokens:,} {source.unit}, {held_out} held out"
    if not source.tokens:
        counts = f"every batch is new, {held_out} {source.unit} are held out"
    say(f"{task.name}: {parameters(spec):,} parameters, {task.kind.task}; {counts}")
    return source, recorded


def _build(task: Task, plan: Plan, ranks: JobRanks, say: Callable[[str], None]) -> tuple[Transformer, str]:
    """Return the model with its initial weights, and the fingerprint of those that an adapter is trained on."""
    start, trained, applied = task.start, task.trained, list[Applied]()

    def prepare(model: Transformer) -> None:
        if task.adapter is not None:
            applied.append(attach(model, task.adapter, seed=plan.seed))
        if trained is not None:
            train_only(model, trained)

    if start is not None and start.quantized and task.adapter is not None and ranks.count == 1:  # QLoRA
        model = load(start.place)
        base = fingerprint(model, task.spec)
        prepare(model.to(torch.float32))
    else:
        model, watched = ranks.build(task.spec, plan.seed, DTYPES[plan.precision], prepare=prepare), Fingerprint()
        if start is not None:
            with start.weights(task.fresh) as weights:
                ranks.set_weights(model, watched.watch(weights) if applied else weights)
        base = watched.value()
    if trained is not None:
        say(f"trains {len(trained):,} weights, {sum(d.size for d in trained):,} parameters; the others stay as they are")
    for adapter in applied:
        match(model)
        say(str(adapter))
    return model, base


def _keys(task: Task, options: JobOptions, plan: Plan, source: Source) -> dict[str, Any]:
    """The keys of the run file."""
    return {
        "spec": plain(task.spec),
        **source.settings,
        "from": None if task.start is None else str(task.start.place),
        "adapter": None if task.adapter is None else plain(task.adapter),
        "only": list(task.only) or None,
        "objective": task.kind.name,
        "options": task.settings or None,
        **{name: getattr(options, name) for name in ("batch", "length", "checkpoint_minutes", "keep")},
        "log": list(options.logs),
        **plan.settings(),
        **vars(options.parallel),
        **vars(options.sample),
    }


def chosen_precision(choice: PrecisionChoice, place: Path | None) -> Precision:
    """Return the precision of a run: `auto` is that of a run that is resumed, else what this machine multiplies faster in."""
    if choice != "auto":
        return choice
    if place is not None and (place / RUN_FILE).is_file():
        return read_run(place).get("precision", Plan.precision)
    return faster_precision(torch.device("cpu"))


def plot_losses(history: Sequence[StepMetrics], path: Path, title: str, note: Callable[[str], None]) -> None:
    """Plot the losses of a run to a file, with matplotlib."""
    if find_module("matplotlib") is None:
        note(f"the losses are not plotted without matplotlib: {install_command('plots')}")
    else:
        draw_losses(list(history), path, title)
