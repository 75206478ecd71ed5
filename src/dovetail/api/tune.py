"""tune: train a model further on chats, preferences or rewards; a thin caller of `train`, with the defaults of tuning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from dovetail.api.train import ADAPTER_RATE, train
from dovetail.api.training_run import TrainingRun
from dovetail.core.errors import UsageError
from dovetail.core.suggest import names_or_nearest
from dovetail.training.plan import Plan, PrecisionChoice, ScheduleKind
from dovetail.training.rewards import REWARDS, Reward, imported_reward, register_reward
from dovetail.training.task import TUNING

EPOCHS = 1.0  # where the run has no other end


def tune(
    model: str | Path,
    data: str | Path,
    method: str = "sft",
    *,
    adapter: str | Mapping[str, Any] | None = None,
    only: str | Sequence[str] = (),
    out: str | Path | None = None,
    force: bool = False,
    template: str | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    minutes: float | None = None,
    batch: int = 8,
    length: int = 512,
    learning_rate: float | None = None,
    schedule: ScheduleKind = Plan.schedule,
    warmup: float = 0.1,
    weight_decay: float = 0.0,
    micro_batches: int = 1,
    precision: PrecisionChoice = Plan.precision,
    seed: int = 0,
    evals: int = Plan.evals,
    beta: float | None = None,
    teacher: str | Path | None = None,
    direction: Literal["forward", "reverse"] | None = None,
    reward: str | Reward | None = None,
    group: int | None = None,
    max_tokens: int | None = None,
    temperature: float | None = None,
    clip_ratio: float | None = None,
    kl: float | None = None,
    quiet: bool = False,
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
    no pattern matches (prefix tuning: `layers.*.mixer.prefix_*`).

    `beta` is the strength of the reference in dpo, ipo, orpo and kto. Of grpo: `group` answers per prompt, of `max_tokens`
    tokens at most, sampled at `temperature`; `clip_ratio` bounds a step, `kl` weighs the divergence from the initial weights.
    `reward` is the name of a registered reward (`dovetail.training.rewards.REWARDS`), a function (prompt, completion, row) ->
    float, or its import path "module:function". `out` is a run directory as of `train`; the same call again resumes it.
    """
    if method not in TUNING:
        raise UsageError(f"--method: unknown method {method!r}; {names_or_nearest(method, TUNING, 'methods')}")
    settings = {"template": template, "beta": beta, "direction": direction, "group": group, "max_tokens": max_tokens}
    settings |= {"temperature": temperature, "clip_ratio": clip_ratio, "kl": kl, "reward": _named(reward)}
    settings["teacher"] = None if teacher is None else str(teacher)
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
        warmup=warmup,
        weight_decay=weight_decay,
        micro_batches=micro_batches,
        precision=precision,
        seed=seed,
        evals=evals,
        quiet=quiet,
        note=note,
    )


def _named(reward: str | Reward | None) -> str | None:
    """The name of a reward, which is registered where it is a function or its import path."""
    if reward is None or (isinstance(reward, str) and (reward in REWARDS or ":" not in reward)):
        return reward
    return imported_reward(reward) if isinstance(reward, str) else register_reward(reward)
