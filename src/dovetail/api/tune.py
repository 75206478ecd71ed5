"""Tune a model on chats, completions, preferences or rewards, by supervised learning, DPO, GRPO and other methods.

The data is JSON Lines. Messages are rendered by the model's own chat template, and only the answers are learned, with the
token that ends them: `dovetail data show DATA --model MODEL` prints which. The run directory is that of `dovetail train`:
settings, metrics, checkpoints, the model and a plot; the same command again resumes a run that was interrupted or killed.

    dovetail tune llama-tiny-trained --data chats.jsonl --template plain -o chat
    dovetail tune chat --data pairs.jsonl --method dpo --beta 0.1 -o preferred
    dovetail tune base --data sums.jsonl --method grpo --reward digit_sum --max-tokens 4 -o solver
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dovetail.api.checks import check_reward
from dovetail.api.options import ONLY, TEMPLATE, InDir, InFile, Length, NewTokens, OutDir, Seed, Steps
from dovetail.api.train import train
from dovetail.api.training_run import TrainingRun
from dovetail.base.errors import UsageError, names_or_nearest
from dovetail.base.option import BatchSize, Option
from dovetail.base.option_group import OptionGroup, accepts_groups
from dovetail.training.plan import (
    ADAPTER_RATE,
    ComputeOptions,
    OptimizerKind,
    OptimizerOptions,
    Plan,
    ScheduleKind,
    ScheduleOptions,
)

if TYPE_CHECKING:
    from dovetail.training.rollout import Reward

EPOCHS = 1.0  # where the run has no other end


@dc.dataclass(frozen=True)
class TuningOptions(OptionGroup):
    """Settings of the methods; each has defaults of its own. `reward` is the name of a registered reward
    (`dovetail.training.rollout.REWARDS`), a function (prompt, completion, row) -> float, or its path "module:function"."""

    template: Annotated[str | None, TEMPLATE] = None
    beta: Annotated[float | None, Option("dpo, ipo, orpo, kto: the strength of the reference (default: 0.1).")] = None
    teacher: Annotated[str | Path | None, InDir("distill: the model directory to learn from.")] = None
    direction: Annotated[
        Literal["forward", "reverse"] | None, Option("distill: the divergence to minimize (default: forward).")
    ] = None
    reward: Annotated[
        str | Reward | None,
        Option("grpo: digit_sum, or exact_answer, which compares with the field `answer` of a row.", check=check_reward),
    ] = None
    group: Annotated[int | None, BatchSize("grpo: answers per prompt (default: 8).")] = None
    max_tokens: Annotated[int | None, NewTokens("grpo: tokens of an answer at most (default: 64).")] = None
    temperature: Annotated[float | None, Option("grpo, distill: divides the logits (default: 1).")] = None
    clip_ratio: Annotated[float | None, Option("grpo: how far the ratio of a token's probs may move (default: 0.2).")] = None
    kl: Annotated[
        float | None,
        Option(
            "grpo: weight of the divergence from the initial weights (default: 0); above 0, a copy of them stays in memory."
        ),
    ] = None


@accepts_groups
def tune(
    model: Annotated[str | Path, InDir("The model directory to start from, ours or in Hugging Face layout.", argument=True)],
    data: Annotated[
        str | Path,
        InFile("JSON Lines: messages, prompt and completion, prompt with chosen and rejected, or prompts to answer."),
    ],
    method: Annotated[
        Literal["sft", "dpo", "ipo", "orpo", "kto", "reward", "grpo", "distill"], Option("How it is tuned.")
    ] = "sft",
    *,
    adapter: Annotated[str | Mapping[str, Any] | None, Option("Train an adapter (lora …) on the frozen weights.")] = None,
    only: Annotated[str | Sequence[str], ONLY] = (),
    out: Annotated[str | Path | None, OutDir("The run directory to write (default: MODEL-METHOD).", short="-o")] = None,
    force: Annotated[bool, Option("Replace an existing run.")] = False,
    epochs: Annotated[float | None, Option("Stop after N passes over the rows (default: 1, if no other end is given).")] = None,
    steps: Annotated[int | None, Steps("Stop after N steps.")] = None,
    minutes: Annotated[float | None, Option("Train for about N minutes.")] = None,
    batch: Annotated[int, BatchSize("Rows per step: packed conversations, pairs, or answers to prompts.")] = 8,
    length: Annotated[int, Length("Tokens per row at most; longer examples are left out.")] = 512,
    learning_rate: Annotated[
        float | None,
        Option("The peak learning rate (default: by the method, 1e-6 to 2e-5; ten times as large with an adapter)."),
    ] = None,
    schedule: ScheduleOptions | ScheduleKind = ScheduleOptions(warmup=0.1),
    optimizer: OptimizerOptions | OptimizerKind = OptimizerOptions(weight_decay=0.0),
    compute: ComputeOptions = ComputeOptions(),
    seed: Annotated[int, Seed("The seed of the order of rows, dropout and rollouts.")] = 0,
    evals: Annotated[int, Steps("Times per run that the held-out rows are measured.")] = Plan.evals,
    options: TuningOptions = TuningOptions(),
    quiet: Annotated[bool, Option("Show no progress.")] = False,
    note: Callable[[str], None] | None = None,
) -> TrainingRun:
    """Tune the model of a directory on a file of JSON Lines; return it with its metrics.

    method    rows                                                                       learning rate of all weights
    sft       {"messages": […]} or {"prompt": …, "completion": …}                        2e-5
    dpo, ipo  {"prompt": …, "chosen": …, "rejected": …}                                  1e-6
    orpo      the same; needs no reference                                               8e-6
    kto       {"prompt": …, "completion": …, "label": true}                              1e-6
    reward    as dpo; the head becomes one number per document                           1e-5
    grpo      {"prompt": …, …}; `reward` scores the answers of the model                 1e-6
    distill   as sft; `teacher` is a model directory of the same vocabulary              2e-5

    Strings are plain text; messages are rendered by the model's chat template, or by `template`: a file, or "plain". Only
    answers are learned, with the token that ends them. The run ends after `epochs` (1 by default), `steps` or `minutes`. With
    an `adapter` the other weights stay unchanged, and the default learning rate is ten times as large; with `only`, those that
    no pattern matches (prefix tuning: `layers.*.mixer.prefix_*`). `options` are settings of the method. `out` is a run
    directory as of `train`; the same call again resumes it.
    """
    from dovetail.training.task import TUNING

    if method not in TUNING:
        raise UsageError(f"--method: unknown method {method!r}; {names_or_nearest(method, TUNING, 'methods')}")
    settings = {**vars(options), "reward": _named(options.reward)}
    settings["teacher"] = None if options.teacher is None else str(options.teacher)
    rate = TUNING[method].tuning_rate * (1 if adapter is None else ADAPTER_RATE)
    return train(
        from_=model,
        adapter=adapter,
        only=only,
        chats=data,
        objective=method,
        options={name: value for name, value in settings.items() if value is not None},
        out=out,
        force=force,
        epochs=EPOCHS if epochs is None and steps is None and minutes is None else epochs,
        steps=steps,
        minutes=minutes,
        batch=batch,
        length=length,
        learning_rate=rate if learning_rate is None else learning_rate,
        schedule=schedule,
        optimizer=optimizer,
        compute=compute,
        seed=seed,
        evals=evals,
        quiet=quiet,
        note=note,
    )


def _named(reward: str | Reward | None) -> str | None:
    """The name of a reward, which is registered where it is a function or its import path."""
    from dovetail.training.rollout import REWARDS, imported_reward, register_reward

    if reward is None or (isinstance(reward, str) and (reward in REWARDS or ":" not in reward)):
        return reward
    return imported_reward(reward) if isinstance(reward, str) else register_reward(reward)
