"""OptionGroup: options that belong together. Python gives them as one value; each has a flag and a key of a run file.

    def train(…, *, optimizer: Optimizer | OptimizerKind = Optimizer()): …

    train(…, optimizer=Optimizer("muon", momentum=0.9))     train(…, optimizer="muon")     --optimizer muon --momentum 0.9

The fields of a group are declared as parameters are (base/option.py). A parameter that is called like the first field of its
group also takes the value of that field.
"""

from __future__ import annotations

import dataclasses as dc
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

from dovetail.base.errors import UsageError

P = ParamSpec("P")
R = TypeVar("R")


@dc.dataclass(frozen=True)
class OptionGroup:
    """The base of groups: frozen dataclasses whose fields are options with defaults."""


def groups_of(function: Callable[..., Any]) -> dict[str, OptionGroup]:
    """Return the groups that a function takes, by parameter, with their defaults."""
    parameters = inspect.signature(function).parameters
    return {name: each.default for name, each in parameters.items() if isinstance(each.default, OptionGroup)}


def grouped(function: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a call with the options of each group as one value."""
    values = dict(values)
    for name, default in groups_of(function).items():
        fields = [field.name for field in dc.fields(default)]
        group = values.pop(name, default)
        if not isinstance(group, OptionGroup):
            if name != fields[0]:
                kind = type(default).__name__
                raise UsageError(f"{name}: {group!r} is no {kind}; give {kind}({fields[0]}=…)")
            group = dc.replace(default, **{name: group})
        values[name] = dc.replace(group, **{field: values.pop(field) for field in fields if field in values})
    return values


def ungrouped(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call with the options of each group one by one."""
    flat: dict[str, Any] = {}
    for name, value in values.items():
        flat |= vars(value) if isinstance(value, OptionGroup) else {name: value}
    return flat


def accepts_groups(function: Callable[P, R]) -> Callable[P, R]:
    """Let the options of groups be given one by one, as the command line gives them."""
    if not groups_of(function):
        return function

    @functools.wraps(function)
    def call(*args: P.args, **keywords: P.kwargs) -> R:
        return function(*args, **grouped(function, keywords))  # pyright: ignore[reportCallIssue]

    return call
