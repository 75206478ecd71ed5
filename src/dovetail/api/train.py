"""train: train a model on text, a synthetic task, labeled rows, tagged words or pairs, in a directory that a run can be
resumed from.

It reads the task and the options, opens data, model and directory, and runs: api/train_task.py, api/train_job.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dovetail.api import training_options as of
from dovetail.api.arguments import Changes, SpecLike
from dovetail.api.options import ONLY, REPLACE_MODEL, SWAP, Count, InFile, Length, Seed, Steps
from dovetail.api.run_file import accepts_run_file
from dovetail.api.training_run import TrainingRun
from dovetail.base.option import BatchSize, Option, checks_options
from dovetail.training.metrics import LogKind
from dovetail.training.plan import (
    CHECKPOINT_MINUTES,
    KEEP,
    ComputeOptions,
    OptimizerKind,
    OptimizerOptions,
    ParallelOptions,
    Plan,
    SampleOptions,
    ScheduleKind,
    ScheduleOptions,
)

if TYPE_CHECKING:
    from dovetail.data.tasks.task import SyntheticTask
    from dovetail.weights.adapters.kind import AdapterKind


@accepts_run_file
@checks_options
def train(
    spec: Annotated[SpecLike | None, of.SPEC] = None,
    text: Annotated[str | Path | None, InFile("A UTF-8 text file to train on, best of some megabytes.")] = None,
    *,
    data: Annotated[str | Sequence[str], of.DATA] = (),
    task: Annotated[SyntheticTask | str | Mapping[str, Any] | None, of.TASK] = None,
    labels: Annotated[str | Path | None, of.LABELS] = None,
    tags: Annotated[str | Path | None, of.TAGS] = None,
    pairs: Annotated[str | Path | None, of.PAIRS] = None,
    chats: str | Path | None = None,
    objective: Annotated[str | None, of.OBJECTIVE] = None,
    options: Mapping[str, Any] | None = None,
    from_: Annotated[str | Path | None, of.FROM] = None,
    adapter: Annotated[AdapterKind | str | Mapping[str, Any] | None, of.ADAPTER] = None,
    only: Annotated[str | Sequence[str], ONLY] = (),
    minutes: Annotated[float | None, of.MINUTES] = None,
    steps: Annotated[int | None, Steps("Stop after N steps; two such runs with one seed are bit-equal.")] = None,
    epochs: Annotated[float | None, of.EPOCHS] = None,
    out: Annotated[str | Path | None, of.OUT] = None,
    force: Annotated[bool, REPLACE_MODEL] = False,
    seed: Annotated[int, Seed("The seed of initial weights, batches, dropout and the sample.")] = 0,
    set: Annotated[Changes, of.SET] = (),
    swap: Annotated[Changes, SWAP] = (),
    tokens: Annotated[float | str | None, Count("Stop after N tokens: 200M, 1.5B, 2e8.")] = None,
    tokenizer: Annotated[Literal["byte_pair", "wordpiece", "unigram", "characters", "words"], of.TOKENIZER] = "byte_pair",
    batch: Annotated[int, BatchSize("Sequences per step.")] = 8,
    length: Annotated[int, Length("Tokens per sequence.")] = 128,
    learning_rate: Annotated[float | None, of.LEARNING_RATE] = None,
    schedule: ScheduleOptions | ScheduleKind = ScheduleOptions(),
    optimizer: OptimizerOptions | OptimizerKind = OptimizerOptions(),
    compute: ComputeOptions = ComputeOptions(),
    parallel: ParallelOptions = ParallelOptions(),
    evals: Annotated[int, Steps("Times per run that the held-out loss is measured.")] = Plan.evals,
    beams: Annotated[int | None, of.BEAMS] = None,
    checkpoint_minutes: Annotated[float, Option("Minutes between checkpoints.")] = CHECKPOINT_MINUTES,
    keep: Annotated[int, BatchSize("Checkpoints that stay; older ones are deleted.")] = KEEP,
    log: Annotated[LogKind | Sequence[LogKind], of.LOG] = (),
    sample: SampleOptions | int = SampleOptions(),
    recorded: Mapping[str, Any] | None = None,
    quiet: bool = False,
    note: Callable[[str], None] | None = None,
) -> TrainingRun:
    """Train a model on text, token shards, a synthetic task, labeled rows, tagged words or pairs; return it with its metrics.

    Weights are random, or with `from_` those of a model directory or of a run, together with its spec (if none is given) and
    tokenizer. `spec` may be a run file: YAML with these parameters as keys, which arguments of the call override.

    `adapter` trains an adapter on the frozen weights of `from_`: `lora`, `dora`, `ia3`, or a mapping such as
    `{"kind": "lora", "rank": 8, "targets": ["q", "v"]}`. Checkpoints hold only the adapter, and the directory becomes an
    adapter directory, which `load` opens with its base. The learning rate is then 10 times as large by default.

    `only` are patterns of the weights to train, by their paths: `layers.*.mixer.prefix_*`; all others stay as they are.

    A tokenizer of the spec's vocabulary size is trained on the text; the last 5 % of the tokens are held out. `data` are
    directories of `build_data`, `DIR` or `DIR=WEIGHT`; their tokenizer and held-out documents are used. `task` is a synthetic
    task: `mqar`, or `{"kind": "mqar", "pairs": 8}`. `labels` is a file of labeled texts (JSON Lines) or images (.npz), `tags`
    one of words with a tag each, `pairs` one of pairs of texts, `chats` one of tuning rows (see `tune`); a tenth of their rows
    is held out. For tags a head that the initial weights do not have is initialized anew. `objective` names one of
    `dovetail.training.task.OBJECTIVES`, or of `TUNING` for chats, which has settings by name in `options`; by default it
    follows from the spec and the data.

    The run ends after `tokens` (2e8 or "200M"), `steps`, `epochs` (of rows) or about as many `minutes` (5 by default); two runs
    of equal steps and seed are bit-equal. `quiet` shows no progress; `note` gets lines of text; `beams` is of translation.

    `out` is the directory to train in: spec, tokenizer, settings (a run file), metrics of each step, checkpoints every
    `checkpoint_minutes`, and at the end the weights and a plot of the losses. The same call again resumes a run that was
    interrupted or killed, and ends with the weights of the unbroken run. Ctrl-C ends the run after the current step, with a
    checkpoint and the weights so far; `interrupted` is true. `log` also writes the metrics for TensorBoard or Weights & Biases.
    `recorded` are digests in a run file: data that has changed since under the same name is refused.
    """
    from dovetail.api.train_job import TrainJob

    with ExitStack() as stack:
        return TrainJob.of(locals(), stack).train()
