"""train: train a model on text, labeled rows, tagged words or pairs, in a directory that a run can be resumed from."""

from __future__ import annotations

import contextlib
import dataclasses as dc
import math
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec as find_module
from pathlib import Path
from typing import Any

import torch

from dovetail.api.arguments import NamedSpec, SpecLike, check_positive, read_spec, silent
from dovetail.api.models import load
from dovetail.api.run_file import accepts_run_file
from dovetail.api.train_from import Start
from dovetail.api.training_run import TrainingRun
from dovetail.core.count import read_count
from dovetail.core.errors import FileError, UsageError, install_command
from dovetail.core.fold import parameters
from dovetail.core.memory import check_memory
from dovetail.core.part import plain
from dovetail.core.termination import delaying
from dovetail.decoding.generation import Sampling
from dovetail.disk.model_files import PLOT_FILE, RUN_FILE, SAMPLES_FILE, TOKENIZER_FILE
from dovetail.disk.untrusted import PICKLES, Directory
from dovetail.files.model_dir import must_be_free
from dovetail.files.spec import SPEC_FILE, Changes, to_yaml
from dovetail.parallel.layout import Axes
from dovetail.training.loop import Interrupt, train as train_loop
from dovetail.training.metrics import LogKind, StepMetrics, logs_of
from dovetail.training.objective import Setup, TuningData
from dovetail.training.plan import (
    CHECKPOINT_MINUTES,
    KEEP,
    TIMEOUT,
    OptimizerKind,
    Plan,
    Precision,
    PrecisionChoice,
    Recompute,
    ScheduleKind,
)
from dovetail.training.ranks import ranks_of_run
from dovetail.training.record import write_initial
from dovetail.training.run import Run, open_run
from dovetail.training.samples import Samples, check_samples, sample_text
from dovetail.training.settings import check_recorded, read_run, run_data
from dovetail.training.source import Shape, TokenizerKind
from dovetail.training.speed import faster_precision, speed_of
from dovetail.training.step import DTYPES, computing_in
from dovetail.training.task import generation_files, objective_kind, read_source, reads_of, spec_for
from dovetail.training.trainable import train_only, weights_named
from dovetail.transformer import Transformer
from dovetail.views.curve import draw_losses
from dovetail.weights.adapters.attach import Applied, attach, match, read_adapter
from dovetail.weights.adapters.kind import AdapterKind
from dovetail.weights.adapters.storage import Base, Fingerprint, fingerprint
from dovetail.weights.surgery.resize import with_tied_scale

MINUTES = 5.0  # of a run without an end
ADAPTER_RATE = 10  # times the learning rate of full fine-tuning (Schulman et al. 2025)
BYTES_PER_PARAMETER = 16  # float32 weight and gradient, and AdamW's two moments


@accepts_run_file
def train(
    spec: SpecLike | None = None,
    text: str | Path | None = None,
    *,
    data: str | Sequence[str] = (),
    labels: str | Path | None = None,
    tags: str | Path | None = None,
    pairs: str | Path | None = None,
    chats: str | Path | None = None,
    objective: str | None = None,
    options: Mapping[str, Any] | None = None,
    from_: str | Path | None = None,
    adapter: AdapterKind | str | Mapping[str, Any] | None = None,
    only: str | Sequence[str] = (),
    minutes: float | None = None,
    steps: int | None = None,
    epochs: float | None = None,
    out: str | Path | None = None,
    force: bool = False,
    seed: int = 0,
    set: Changes = (),
    swap: Changes = (),
    tokens: float | str | None = None,
    tokenizer: TokenizerKind = "byte_pair",
    batch: int = 8,
    length: int = 128,
    learning_rate: float | None = None,
    schedule: ScheduleKind = Plan.schedule,
    warmup: float = Plan.warmup_fraction,
    floor: float = Plan.floor,
    cooldown: float = Plan.cooldown,
    optimizer: OptimizerKind = Plan.optimizer,
    betas: tuple[float, float] = Plan.betas,
    momentum: float = Plan.momentum,
    weight_decay: float = Plan.weight_decay,
    clip: float = Plan.clip,
    ema: float | None = None,
    micro_batches: int = 1,
    precision: PrecisionChoice = Plan.precision,
    compile: bool = False,
    recompute: Recompute = Plan.recompute,
    shards: int | None = None,
    sequence: int = 1,
    ring: bool = False,
    tensor: int = 1,
    pipeline: int = 1,
    evals: int = Plan.evals,
    beams: int | None = None,
    checkpoint_minutes: float = CHECKPOINT_MINUTES,
    keep: int = KEEP,
    log: LogKind | Sequence[LogKind] = (),
    timeout: float = TIMEOUT,
    prompt: str = "The ",
    sample: int = 160,
    sample_every: int = 0,
    temperature: float = 0.8,
    recorded: Mapping[str, Any] | None = None,
    quiet: bool = False,
    note: Callable[[str], None] | None = None,
) -> TrainingRun:
    """Train a model on a text file, token shards, labeled rows, tagged words or pairs; return it with its metrics.

    Weights are random, or with `from_` those of a model directory or of a run, together with its spec (if none is given) and
    tokenizer. `spec` may be a run file: YAML with these parameters as keys, which arguments of the call override.

    `adapter` trains an adapter on the frozen weights of `from_`: `lora`, `dora`, `ia3`, or a mapping such as
    `{"kind": "lora", "rank": 8, "targets": ["q", "v"]}`. Checkpoints hold only the adapter, and the directory becomes an
    adapter directory, which `load` opens with its base. The learning rate is then 10 times as large by default.

    `only` are patterns of the weights to train, by their paths: `layers.*.mixer.prefix_*`; all others stay as they are.

    A tokenizer of the spec's vocabulary size is trained on the text; the last 5 % of the tokens are held out. `data` are
    directories of `build_data`, `DIR` or `DIR=WEIGHT`; their tokenizer and held-out documents are used. `labels` is a file of
    labeled texts (JSON Lines) or images (.npz), `tags` one of words with a tag each, `pairs` one of pairs of texts, `chats` one
    of tuning rows (see `tune`); a tenth of their rows is held out. For tags a head that the initial weights do not have is
    initialized anew. `objective` names one of `dovetail.training.task.OBJECTIVES`, or of `TUNING` for chats, which has settings
    by name in `options`; by default it follows from the spec and the data.

    The run ends after `tokens` (2e8 or "200M"), `steps`, `epochs` (of rows) or about as many `minutes` (5 by default); two runs
    of equal steps and seed are bit-equal. The learning rate rises over the fraction `warmup` of the run, then follows the
    schedule. `precision` "auto" is bf16 where this machine multiplies faster in it. `quiet` shows no progress; `note` is called
    with lines about the text and the spec. At every `sample_every`-th eval a sample is generated; `beams` is a setting of
    translation, the beams of its search at evals.

    `out` is the directory to train in: spec, tokenizer, settings (a run file), metrics of each step, checkpoints every
    `checkpoint_minutes`, and at the end the weights and a plot of the losses. The same call again resumes a run that was
    interrupted or killed, and ends with the weights of the unbroken run. Ctrl-C ends the run after the current step, with a
    checkpoint and the weights so far; `interrupted` is true. On several ranks, one that dies, or does not answer within
    `timeout` seconds, ends all of them; `tensor` of them share each layer (tensor parallelism), `sequence` have a chunk of
    every row each (with `ring`, keys and values go round them, else they are gathered), `pipeline` have some of the layers
    each, and the others have rows of their own: FSDP shards the weights over these, or over `shards` of them, each group a
    replica of the others (HSDP; with 1, DDP). `log` also writes the metrics for TensorBoard or Weights & Biases. `recorded` are
    digests in a run file: data that has changed since under the same name is refused.
    """
    check_positive({"batch": batch, "length": length, "keep": keep, "micro_batches": micro_batches, "timeout": timeout})
    axes: Axes = {"shards": shards, "sequence": sequence, "tensor": tensor, "pipeline": pipeline, "ring": ring}
    check_positive({"shards": shards, "sequence": sequence, "tensor": tensor, "pipeline": pipeline})
    if ring and sequence == 1:
        raise UsageError("--ring: there is one chunk of every row; also give --sequence")
    if length % sequence:
        raise UsageError(f"--sequence: {sequence} does not divide sequences of {length} tokens; change --length")
    _check_options({"temperature": temperature, "sample": sample, "sample-every": sample_every, "seed": seed}, prompt)
    settings = {**(options or {}), **({} if beams is None else {"beams": beams})}
    say = note or silent
    start = None if from_ is None else Start.open(from_)
    kind_of_adapter = None if adapter is None else read_adapter(adapter)
    if kind_of_adapter is not None and start is None:
        raise UsageError("--adapter: an adapter is trained on the weights of a model; give it with --from")
    chosen_weights = (only,) if isinstance(only, str) else tuple(only)
    if chosen_weights and kind_of_adapter is not None:
        raise UsageError("--only: with --adapter only the adapter is trained; give its targets")
    if learning_rate is None:
        learning_rate = Plan.learning_rate * (1 if kind_of_adapter is None else ADAPTER_RATE)
    name, changed, directory = _named(spec, start).after(set, swap)
    if directory is not None:
        _refuse_weights(directory)
    changed, fresh = spec_for(changed, objective)
    places = [data] if isinstance(data, str) else list(data)
    given = {"text": text, "data": places, "labels": labels, "tags": tags, "pairs": pairs, "chats": chats}
    kind = objective_kind(changed, reads_of(given), objective)
    if start is not None:
        if fresh is None and kind.fresh is not None and start.replaces(kind.fresh, changed):
            fresh = kind.fresh
            if kind_of_adapter is not None:
                raise UsageError(f"--adapter: the {fresh} is new, and would stay random; train the model without it first")
            say(f"{fresh}: other weights than those of {start.place}, initialized anew")
        start.check_fits(changed, fresh)
    trained = weights_named(changed, chosen_weights)
    if fresh is not None and trained is not None and not any(d.path.startswith(f"{fresh}.") for d in trained):
        raise UsageError(f"--only: the {fresh} is new, and would stay random; also name its weights: '{fresh}.*'")
    place = None if out is None else Path(out)
    kinds: tuple[LogKind, ...] = (log,) if isinstance(log, str) else tuple(log)
    if kinds and place is None:
        raise UsageError("--log: give a directory to train in (-o)")
    logs = logs_of(kinds)
    if place is not None and not (place / RUN_FILE).is_file():
        must_be_free(place, force)
    if tokens is not None and kind.reads != "text":
        raise UsageError(f"--tokens: the rows of --{kind.reads} differ in length; give --steps or --minutes")
    if (scaled := with_tied_scale(changed)) != changed:
        say(f"µP multiplies the logits of a tied head by base_width/width: --set head.scale={plain(scaled.head)['scale']:g}")
    needed = BYTES_PER_PARAMETER * parameters(changed) + 4 * batch * length * changed.vocab // micro_batches
    check_memory(needed, f"training {parameters(changed):,} parameters on {batch:,} × {length:,} tokens per step")
    end = _last_step(steps, tokens, batch * length)
    check_positive({"epochs": epochs})
    if epochs is not None and kind.reads == "text":
        raise UsageError("--epochs: are of rows; give --steps or --tokens")
    try:
        plan = Plan(
            steps=end,
            minutes=MINUTES if minutes is None and end is None else minutes,
            schedule=schedule,
            learning_rate=learning_rate,
            warmup_fraction=warmup,
            floor=floor,
            cooldown=cooldown,
            optimizer=optimizer,
            betas=(betas[0], betas[1]),
            momentum=momentum,
            weight_decay=weight_decay,
            clip=clip,
            ema=ema,
            micro_batches=micro_batches,
            compile=compile,
            recompute=recompute,
            seed=seed,
            evals=evals,
            quiet=quiet,
        )
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    with contextlib.ExitStack() as stack:
        ranks = stack.enter_context(ranks_of_run(timeout, **axes))
        if sample_every:
            check_samples(kind, ranks)
        chosen: Precision = ranks.first_does(lambda: _precision(precision, None if force else place))
        plan = dc.replace(plan, precision=chosen, quiet=quiet or not ranks.first)
        say = say if ranks.first else silent
        shape = Shape(batch, length, seed, ranks.data_rank, ranks.data_count)
        encoder = tokenizer if start is None or places or not changed.embed.token_ids else start.for_text()
        tuning = None if start is None or chats is None else TuningData(start.vocabulary(), str(start.place), settings)
        classes = () if start is None or fresh is not None else start.class_names()
        source = read_source(kind, changed, encoder, shape, say, given, tuning, classes)
        if epochs is not None and source.epoch is not None:
            last = max(1, round(epochs * source.epoch))
            plan = dc.replace(plan, steps=min(last, end or last), minutes=minutes)
        found = {"data": source.recorded()}
        if start is not None:
            start.check_tokenizer(source.tokenizer, source.name, kind.special(length))
            found["from"] = ranks.first_does(start.recorded)
        check_recorded(recorded or {}, found)
        learned = kind.of(changed, source.tokenizer, length).configured(settings)
        counts = f"{source.tokens + source.held_out_tokens:,} {source.unit}, {source.held_out_tokens:,} held out"
        say(f"{name}: {parameters(changed):,} parameters, {kind.task}; {counts}")
        applied: list[Applied] = []

        def attached(one: Transformer) -> None:
            if kind_of_adapter is not None:
                applied.append(attach(one, kind_of_adapter, seed=seed))
            if trained is not None:
                train_only(one, trained)

        if start is not None and start.quantized and kind_of_adapter is not None and ranks.count == 1:  # QLoRA
            model = load(start.place)
            known = fingerprint(model, changed)
            attached(model.to(torch.float32))
        else:
            model, found_base = ranks.build(changed, seed, DTYPES[chosen], prepare=attached), Fingerprint()
            if start is not None:
                with start.weights(fresh) as weights:
                    ranks.set_weights(model, found_base.watch(weights) if applied else weights)
            known = found_base.value()
        if trained is not None:
            say(f"trains {len(trained):,} weights, {sum(d.size for d in trained):,} parameters; the others stay as they are")
        for one in applied:
            match(model)
            say(str(one))
        interrupted, run = stack.enter_context(Interrupt()), None
        if place is not None:
            keys = {"spec": plain(changed), **source.settings, "from": None if start is None else str(start.place)}
            keys |= {} if kind_of_adapter is None else {"adapter": plain(kind_of_adapter)}
            keys |= {"only": list(chosen_weights)} if chosen_weights else {}
            keys |= {"objective": kind.name, "options": settings or None, "batch": batch, "length": length, **plan.settings()}
            keys |= {
                **axes,
                "checkpoint_minutes": checkpoint_minutes,
                "keep": keep,
                "timeout": timeout,
                "log": list(kinds),
            }
            keys |= {"prompt": prompt, "sample": sample, "sample_every": sample_every, "temperature": temperature}
            carried = {} if start is None else start.files()
            files = {**carried, SPEC_FILE: to_yaml(changed), **generation_files(source.tokenizer, learned), **source.files}
            if ranks.first_does(lambda: open_run(place, run_data(keys, found), files, force)):
                say(f"{place}: resuming")
            run = stack.enter_context(Run(place, plan, ranks, checkpoint_minutes, keep, logs))
            if ranks.count == 1:  # no rank holds more than its shard
                write_initial(place, model)
        learned, source = learned.prepare(
            source, Setup(model, place, seed, ranks, lambda: computing_in(model, chosen, ranks), load)
        )
        sampling, samples = Sampling(temperature=temperature, seed=seed), None
        if sample_every and source.tokenizer is not None:
            path = None if place is None else place / SAMPLES_FILE
            samples = Samples(source.tokenizer, prompt, sample, sampling, sample_every, path, say)
        speed = None
        if kind.reads == "text" and changed.encoder is None:  # where every token of a batch is multiplied by the same weights
            speed = speed_of(changed, length, DTYPES[chosen] or torch.float32, model.device, ranks.count)
        history = train_loop(
            model, source.batch, learned, plan, source.held_out, interrupted, run, ranks, samples, source.where, speed
        )
        stopped = ranks.any(interrupted.received)  # Ctrl-C may have reached one rank alone
        if run is not None and place is not None:
            with delaying():
                if kind_of_adapter is None or start is None:
                    run.write_model(changed)
                else:
                    run.write_adapter(kind_of_adapter, Base(str(start.place), known))
                title = f"{name} on {Path(text or labels or tags or pairs or chats or places[0]).name}"
                ranks.first_does(lambda: _plot(history, place / PLOT_FILE, title, say))
    result = TrainingRun(name, model, source.tokenizer, tuple(history), stopped, place, prompt=prompt)
    if not kind.generates or source.tokenizer is None:
        return result
    bits = source.bits_per_byte(result.held_out_loss or math.nan)
    alone = ranks.count == 1 and not stopped  # a model over several ranks is sampled from its directory
    written = sample_text(model, source.tokenizer, prompt, sample, sampling, say) if alone else None
    return dc.replace(result, held_out_bits_per_byte=bits, sample=written)


def _check_options(numbers: dict[str, float], prompt: str) -> None:
    """Raise UsageError for the first option with an impossible value; the plan checks the others."""
    for name, value in numbers.items():
        if not 0 <= value < math.inf:
            raise UsageError(f"--{name}: {value} is below 0")
    if not prompt:
        raise UsageError("--prompt: give at least one character")


def _last_step(steps: int | None, tokens: float | str | None, per_step: int) -> int | None:
    """Return the number of steps of a run, where steps or tokens end it."""
    try:
        count = read_count(tokens) if isinstance(tokens, str) else tokens
    except ValueError as error:
        raise UsageError(f"--tokens: {error}") from error
    check_positive({"tokens": count, "steps": steps})
    ends = [steps, None if count is None else math.ceil(count / per_step)]
    return min((one for one in ends if one is not None), default=None)


def _precision(choice: PrecisionChoice, place: Path | None) -> Precision:
    """Return the precision of a run: `auto` is that of a run that is resumed, else what this machine multiplies faster in."""
    if choice != "auto":
        return choice
    if place is not None and (place / RUN_FILE).is_file():
        return read_run(place).get("precision", Plan.precision)
    return faster_precision(torch.device("cpu"))


def _named(spec: SpecLike | None, start: Start | None) -> NamedSpec:
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
            f"to continue from them, give --from {place}; to train this architecture from scratch, give {spec}"
        )


def _plot(history: list[StepMetrics], path: Path, title: str, note: Callable[[str], None]) -> None:
    if find_module("matplotlib") is None:
        note(f"the losses are not plotted without matplotlib: {install_command('plots')}")
    else:
        draw_losses(history, path, title)
