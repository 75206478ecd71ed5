"""Verifiable rewards: (prompt, completion, fields of the row) -> a number. Registered by name; a file never names code.

exact_answer   1 where the completion is the `answer` of the row, white space aside
digit_sum      1 where the completion is the sum of the digits in the prompt
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any

from dovetail.core.errors import UsageError
from dovetail.core.suggest import names_or_nearest

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
