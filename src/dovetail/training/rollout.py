"""Rollouts: completions that the model samples itself, with the log-prob of every token as it was sampled.

    u = draw(seed, row, position)        token = the first whose cumulative prob exceeds u        no generator, no state

Prompts are prefilled once and forked to the rows of their group. A row's tokens are a function of the weights, the seed, its
number and its prompt: not of its neighbors (law 21).

Verifiable rewards: (prompt, completion, fields of the row) -> a number. Registered by name; a file never names code.

exact_answer   1 where the completion is the `answer` of the row, white space aside
digit_sum      1 where the completion is the sum of the digits in the prompt
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dovetail.base.errors import UsageError, names_or_nearest
from dovetail.decoding.generation import check_generates
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.host import read
from dovetail.nn.module import evaluating
from dovetail.nn.random import draw, streams, words
from dovetail.state.pool import Pool

STREAM = "rollouts"


class SampledAnswer(NamedTuple):
    """A completion: its token ids, the end token included where it came to one, and the log-prob of each."""

    tokens: list[int]
    log_probs: list[float]


@torch.no_grad()
def roll_out(
    model: ModelModule,
    prompts: Sequence[Sequence[int]],
    group: int,
    max_tokens: int,
    temperature: float,
    stop: Collection[int],
    seed: int,
) -> list[SampledAnswer]:
    """Sample `group` completions of every prompt; those of a prompt follow each other. Temperature 0 is greedy."""
    check_generates(model.part)
    device, count, lengths = model.device, len(prompts) * group, [len(prompt) for prompt in prompts]
    pool = Pool(model.part, count, max(lengths) + max_tokens, dtype=model.dtype, device=device)
    result = [SampledAnswer([], []) for _ in range(count)]
    stream, alive = streams(torch.tensor(seed), [STREAM])[0].to(device), list(range(count))
    with evaluating(model):
        logits = _prefill(model, pool, prompts, group)
        for place in range(max_tokens):
            rows = torch.tensor(alive, device=device)
            uniform = words(draw(stream, rows, torch.full_like(rows, place)))[0].double() * 2.0**-32
            tokens, log_probs = _choose(logits, temperature, uniform)
            for row, token, log_prob in zip(alive, read(tokens), log_probs.tolist(), strict=True):
                result[row].tokens.append(token)
                result[row].log_probs.append(log_prob)
            going = [i for i, row in enumerate(alive) if result[row].tokens[-1] not in stop]
            alive = [alive[i] for i in going]
            if not alive or place + 1 == max_tokens:
                break
            step = pool.step(alive, [1] * len(alive))
            ctx = Ctx(layout=step.layout, views=step.views, ranks=model.ranks)
            logits = model.next_logits(tokens[going][:, None], ctx)[:, -1]
    return result


def _prefill(model: ModelModule, pool: Pool, prompts: Sequence[Sequence[int]], group: int) -> Tensor:
    """Read every prompt once, and fork it to its group; return the logits (rows, vocab) after the prompts."""
    lengths = [len(prompt) for prompt in prompts]
    leaders = [i * group for i in range(len(prompts))]
    tokens = torch.zeros(len(prompts), max(lengths), dtype=torch.long, device=model.device)
    for i, one in enumerate(prompts):
        tokens[i, : len(one)] = torch.tensor(one)
    step = pool.step(leaders, lengths)
    x, ctx = model.hidden(tokens, Ctx(layout=step.layout, views=step.views, ranks=model.ranks))
    last = x[torch.arange(len(prompts), device=x.device), torch.tensor(lengths, device=x.device) - 1]
    logits = model.head(last[:, None], ctx)[:, 0]
    for leader in leaders:
        for row in range(leader + 1, leader + group):
            pool.fork(leader, row)
    return logits.repeat_interleave(group, 0)


def _choose(logits: Tensor, temperature: float, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """(rows,) a token of each row, and its log-prob."""
    if temperature == 0:
        tokens = logits.argmax(-1)
        return tokens, torch.zeros_like(uniform)
    scores = torch.log_softmax((logits.float() if logits.dtype.itemsize < 4 else logits) / temperature, -1)
    upto = scores.double().exp().cumsum(-1)
    tokens = torch.searchsorted(upto, (uniform * upto[:, -1])[:, None], right=True)[:, 0].clamp_max(logits.shape[-1] - 1)
    return tokens, scores.gather(-1, tokens[:, None])[:, 0]


Reward = Callable[[str, str, Mapping[str, Any]], float]
REWARDS: dict[str, Reward] = {}


def register_reward(reward: Reward, name: str | None = None) -> str:
    """Register a reward under a name, by default its import path; return the name."""
    name = name or f"{reward.__module__}:{reward.__qualname__}"
    REWARDS[name] = reward
    return name


def imported_reward(path: str) -> str:
    """Import and register the reward `module:function`; return its name. For Python calls alone, never for what a file says."""
    module, _, function = path.partition(":")
    try:
        return register_reward(getattr(importlib.import_module(module), function), path)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"--reward: {path} cannot be imported ({error})") from error


def reward_named(name: str | None) -> Reward:
    """Return a registered reward."""
    if name is None or name not in REWARDS:
        hint = names_or_nearest(name or "", REWARDS, "rewards")
        raise UsageError(f"--reward: {'give one' if name is None else f'unknown reward {name!r}'}; {hint}")
    return REWARDS[name]


def checked(reward: Reward, prompt: str, completion: str, fields: Mapping[str, Any], where: str) -> float:
    """The reward of a completion; raise UsageError where it is no finite number."""
    value = float(reward(prompt, completion, fields))
    if not math.isfinite(value):
        raise UsageError(f"--reward: is {value} for {where}; return a finite number")
    return value


def exact_answer(prompt: str, completion: str, fields: Mapping[str, Any]) -> float:
    """1 where the completion is the answer."""
    return float(completion.strip() == str(fields.get("answer", "")).strip() != "")


def digit_sum(prompt: str, completion: str, fields: Mapping[str, Any]) -> float:
    """1 where the completion is the sum of the digits in the prompt."""
    return float(completion.strip() == str(sum(int(sign) for sign in prompt if sign.isdigit())))


for _reward in (exact_answer, digit_sum):
    register_reward(_reward, _reward.__name__)
