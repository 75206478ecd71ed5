"""train: train a model on text, labeled rows, tagged words or pairs, in a directory that a run can be resumed from."""

from __future__ import annotations

import contextlib
import dataclasses as dc
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dovetail.api.arguments import Changes, SpecLike, silent
from dovetail.api.models import load
from dovetail.api.options import (
    ONLY,
    REPLACE_MODEL,
    SWAP,
    BatchSize,
    Count,
    InFile,
    Length,
    SampleTokens,
    Seed,
    Steps,
)
from dovetail.api.run_file import accepts_run_file
from dovetail.api.train_steps import check_options, chosen_precision, last_step, named_spec, plot_losses, refuse_weights
from dovetail.api.training_options import (
    ADAPTER,
    DATA,
    EPOCHS,
    FROM,
    LABELS,
    LOG,
    OBJECTIVE,
    OUT,
    PAIRS,
    PIPELINE,
    PRECISION,
    RECOMPUTE,
    RING,
    SCHEDULE,
    SET,
    SHARDS,
    SPEC,
    TAGS,
    TOKENIZER,
)
from dovetail.api.training_run import TrainingRun
from dovetail.core.errors import UsageError
from dovetail.core.fold import parameters
from dovetail.core.memory import check_memory
from dovetail.core.option import Option, checks_options
from dovetail.core.part import plain
from dovetail.core.termination import Interrupt, delaying
from dovetail.disk.model_files import PLOT_FILE, RUN_FILE, SAMPLES_FILE
from dovetail.parallel.layout import Axes
from dovetail.training.metrics import LogKind, logs_of
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
from dovetail.training.settings import check_recorded, run_data
from dovetail.views.progress import TrainingProgress

if TYPE_CHECKING:
    from dovetail.transformer import Transformer
    from dovetail.weights.adapters.attach import Applied
    from dovetail.weights.adapters.kind import AdapterKind

MINUTES = 5.0  # of a run without an end
ADAPTER_RATE = 10  # times the learning rate of full fine-tuning (Schulman et al. 2025)
BYTES_PER_PARAMETER = 16  # float32 weight and gradient, and AdamW's two moments


@accepts_run_file
@checks_options
def train(
    spec: Annotated[SpecLike | None, SPEC] = None,
    text: Annotated[str | Path | None, InFile("A UTF-8 text file to train on, best of some megabytes.")] = None,
    *,
    data: Annotated[str | Sequence[str], DATA] = (),
    labels: Annotated[str | Path | None, LABELS] = None,
    tags: Annotated[str | Path | None, TAGS] = None,
    pairs: Annotated[str | Path | None, PAIRS] = None,
    chats: str | Path | None = None,
    objective: Annotated[str | None, OBJECTIVE] = None,
    options: Mapping[str, Any] | None = None,
    from_: Annotated[str | Path | None, FROM] = None,
    adapter: Annotated[AdapterKind | str | Mapping[str, Any] | None, ADAPTER] = None,
    only: Annotated[str | Sequence[str], ONLY] = (),
    minutes: Annotated[
        float | None, Option("Train for about N minutes: the first steps are measured (default: 5, if no other end is given).")
    ] = None,
    steps: Annotated[int | None, Steps("Stop after N steps; two such runs with one seed are bit-equal.")] = None,
    epochs: Annotated[float | None, EPOCHS] = None,
    out: Annotated[str | Path | None, OUT] = None,
    force: Annotated[bool, REPLACE_MODEL] = False,
    seed: Annotated[int, Seed("The seed of initial weights, batches, dropout and the sample.")] = 0,
    set: Annotated[Changes, SET] = (),
    swap: Annotated[Changes, SWAP] = (),
    tokens: Annotated[float | str | None, Count("Stop after N tokens: 200M, 1.5B, 2e8.")] = None,
    tokenizer: Annotated[Literal["byte_pair", "wordpiece", "unigram", "characters", "words"], TOKENIZER] = "byte_pair",
    batch: Annotated[int, BatchSize("Sequences per step.")] = 8,
    length: Annotated[int, Length("Tokens per sequence.")] = 128,
    learning_rate: Annotated[
        float | None, Option("The peak learning rate, after the warm-up (default: 0.0025; with --adapter ten times as much).")
    ] = None,
    schedule: Annotated[ScheduleKind, SCHEDULE] = Plan.schedule,
    warmup: Annotated[
        float, Option("The fraction of the run over which the learning rate rises to its peak.")
    ] = Plan.warmup_fraction,
    floor: Annotated[float, Option("The last learning rate as a fraction of the peak.")] = Plan.floor,
    cooldown: Annotated[
        float, Option("The fraction of a run with the schedule wsd over which the learning rate decays.")
    ] = Plan.cooldown,
    optimizer: Annotated[
        OptimizerKind, Option("AdamW for all weights, or Muon for matrices and AdamW for the rest.")
    ] = Plan.optimizer,
    betas: Annotated[tuple[float, float], Option("Decay rates of AdamW's two moments (default: 0.9 0.95).")] = Plan.betas,
    momentum: Annotated[float, Option("Momentum of Muon.")] = Plan.momentum,
    weight_decay: Annotated[float, Option("Weight decay of matrices and tables.")] = Plan.weight_decay,
    clip: Annotated[float, Option("The largest gradient norm.")] = Plan.clip,
    ema: Annotated[float | None, Option("Save a moving average of the weights with this decay: 0.999.")] = None,
    micro_batches: Annotated[int, BatchSize("Compute a batch in N pieces, in less memory; the result is the same.")] = 1,
    precision: Annotated[PrecisionChoice, PRECISION] = Plan.precision,
    compile: Annotated[bool, Option("Compile each block: faster steps after a slow first one.")] = False,
    recompute: Annotated[Recompute, RECOMPUTE] = Plan.recompute,
    shards: Annotated[int | None, SHARDS] = None,
    sequence: Annotated[
        int, BatchSize("On several ranks: the number of ranks that each have a chunk of every row (context parallelism).")
    ] = 1,
    ring: Annotated[bool, RING] = False,
    tensor: Annotated[
        int, BatchSize("On several ranks: the number of ranks that share each layer (tensor and expert parallelism).")
    ] = 1,
    pipeline: Annotated[int, PIPELINE] = 1,
    evals: Annotated[int, Steps("Times per run that the held-out loss is measured.")] = Plan.evals,
    beams: Annotated[
        int | None, BatchSize("translation: beams of the search by which held-out pairs are decoded at evals (default: 4).")
    ] = None,
    checkpoint_minutes: Annotated[float, Option("Minutes between checkpoints.")] = CHECKPOINT_MINUTES,
    keep: Annotated[int, BatchSize("Checkpoints that stay; older ones are deleted.")] = KEEP,
    log: Annotated[LogKind | Sequence[LogKind], LOG] = (),
    timeout: Annotated[
        float,
        Option(
            "Seconds that a rank waits for the others before all of them end, with their stacks on stderr.", low=0.0, above=True
        ),
    ] = TIMEOUT,
    prompt: Annotated[str, Option("The prompt of the sample at the end.")] = "The ",
    sample: Annotated[int, SampleTokens("Tokens to generate at the end.")] = 160,
    sample_every: Annotated[int, Option("Also generate a sample at every N-th eval (samples.jsonl).")] = 0,
    temperature: Annotated[float, Option("The temperature of the sample; 0 picks the most probable token.")] = 0.8,
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
    import torch

    from dovetail.api.train_from import Start
    from dovetail.decoding.generation import Sampling
    from dovetail.files.model_dir import must_be_free
    from dovetail.files.spec import SPEC_FILE, to_yaml
    from dovetail.training.loop import train as train_loop
    from dovetail.training.metrics import speed_of
    from dovetail.training.objective import Setup, TuningData
    from dovetail.training.optim import train_only, weights_named
    from dovetail.training.ranks import ranks_of_run
    from dovetail.training.record import write_initial
    from dovetail.training.run import Run, open_run
    from dovetail.training.samples import Samples, check_samples, sample_text
    from dovetail.training.source import Shape
    from dovetail.training.step import DTYPES, computing_in
    from dovetail.training.task import generation_files, objective_kind, read_source, reads_of, spec_for
    from dovetail.weights.adapters.attach import attach, match, read_adapter
    from dovetail.weights.adapters.storage import Base, Fingerprint, fingerprint
    from dovetail.weights.surgery.resize import with_tied_scale

    axes: Axes = {"shards": shards, "sequence": sequence, "tensor": tensor, "pipeline": pipeline, "ring": ring}
    if ring and sequence == 1:
        raise UsageError("--ring: there is one chunk of every row; also give --sequence")
    if length % sequence:
        raise UsageError(f"--sequence: {sequence} does not divide sequences of {length} tokens; change --length")
    check_options({"temperature": temperature, "sample-every": sample_every}, prompt)
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
    name, changed, directory = named_spec(spec, start).after(set, swap)
    if directory is not None:
        refuse_weights(directory)
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
    end = last_step(steps, tokens, batch * length)
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
        chosen: Precision = ranks.first_does(lambda: chosen_precision(precision, None if force else place))
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
        with TrainingProgress(plan.quiet) as show:
            history = train_loop(
                model, source.batch, learned, plan, source.held_out, interrupted, run, ranks, samples, source.where, speed, show
            )
        stopped = ranks.any(interrupted.received)  # Ctrl-C may have reached one rank alone
        if run is not None and place is not None:
            with delaying():
                if kind_of_adapter is None or start is None:
                    run.write_model(changed)
                else:
                    run.write_adapter(kind_of_adapter, Base(str(start.place), known))
                title = f"{name} on {Path(text or labels or tags or pairs or chats or places[0]).name}"
                ranks.first_does(lambda: plot_losses(history, place / PLOT_FILE, title, say))
    result = TrainingRun(name, model, source.tokenizer, tuple(history), stopped, place, prompt=prompt)
    if not kind.generates or source.tokenizer is None:
        return result
    bits = source.bits_per_byte(result.held_out_loss or math.nan)
    alone = ranks.count == 1 and not stopped  # a model over several ranks is sampled from its directory
    written = sample_text(model, source.tokenizer, prompt, sample, sampling, say) if alone else None
    return dc.replace(result, held_out_bits_per_byte=bits, sample=written)
