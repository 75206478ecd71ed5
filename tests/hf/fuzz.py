"""Configs that someone got wrong or made to hurt: real ones of every family with some fields spoilt, the same for a number."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from typing import Any

from transformers import AutoConfig

from dovetail.hf.dialect import DIALECTS

SIZES = (-1, 0, 1, 3, 7, 255, 10**4, 10**6, 2**31, 10**9, 10**12, 2**53, 2**63, 10**30)
NUMBERS = (0.0, -0.0, 0.5, -1.5, 1e-320, 1e308, float("inf"), float("-inf"), float("nan"), 1e12)
OTHERS: tuple[Any, ...] = (
    None, True, False, "", "x", "relu", "../../etc/passwd", "9" * 5000, "\ud7ff\0", "__class__", [], [0] * 3000, [None],
    ["full_attention"], [[[[]]]], {}, {"factor": -1}, {"rope_type": "yarn", "factor": 1e308}, {"kind": "attention"},
    {"": {"": {}}}, [{"a": 1}] * 40,
)  # fmt: skip


def real_configs() -> list[dict[str, Any]]:
    """The config that the reference writes for each family, as plain data."""
    return [json.loads(AutoConfig.for_model(name).to_json_string(use_diff=False)) for name in DIALECTS]


def spoilt(real: list[dict[str, Any]], number: int) -> dict[str, Any]:
    """The config of this number."""
    draw = random.Random(number)
    config = copy.deepcopy(real[number % len(real)])
    for _ in range(draw.choice([1, 1, 1, 2, 3])):
        _spoil(config, draw, real)
    return config


def _spoil(config: dict[str, Any], draw: random.Random, real: list[dict[str, Any]]) -> None:
    here = config
    name = draw.choice(sorted(here))
    if isinstance(here[name], dict) and here[name] and draw.random() < 0.8:  # inside rope_parameters and their like
        here = here[name]
        name = draw.choice(sorted(here))
    what = draw.random()
    if what < 0.35:
        here[name] = draw.choice(SIZES)
    elif what < 0.5:
        here[name] = draw.choice(NUMBERS)
    elif what < 0.75:
        here[name] = copy.deepcopy(draw.choice(OTHERS))
    elif what < 0.85:
        del here[name]
    elif what < 0.95:
        other = draw.choice(real)
        from_there = draw.choice(sorted(other))
        here[draw.choice([name, from_there])] = copy.deepcopy(other[from_there])
    else:
        here[name + draw.choice(["_", "s", "\n", "." * 300])] = here.pop(name)


def cases(count: int) -> Iterator[tuple[int, str]]:
    """(number, text of config.json)."""
    real = real_configs()
    for number in range(count):
        yield number, json.dumps(spoilt(real, number))
