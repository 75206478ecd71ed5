"""A seeded bug (mutant): its name, the law that must fail, and the patch that seeds it; and the verdict of a law on it.

    bug = Mutant("a token sees the next one", "causal", instead(Causal, "visible", causal_sees_the_next))
    with bug.seed():
        assert verdict(bug.law, bug.spec)
    assert not verdict(bug.law, bug.spec)

A law that has never failed proves nothing, so a package that adds a law or a part tests it like this. The bugs of Dovetail's
own code are in its repository (checks/mutants).
"""

from __future__ import annotations

import dataclasses as dc
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from types import FunctionType
from typing import Any
from unittest.mock import patch

from torch import Tensor

from dovetail.files.spec import from_yaml, to_yaml
from dovetail.model.model import Model
from dovetail.ops import attend
from dovetail.proof.laws import sharded
from dovetail.proof.laws.case import LAWS, RELATION, Case
from dovetail.proof.laws.law import NotApplicable
from dovetail.proof.laws.oracle import ORACLES, check_oracles
from dovetail.proof.laws.suite import OWN_NUMBER
from dovetail.spec.part import walk_spec

BASE = """
width: 28
vocab: 62
layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]
head: {kind: lm, tied: false}
"""
Seed = Callable[[], AbstractContextManager[Any]]  # a function that seeds a bug for as long as its context lasts


def spec(width: int = 28, **mixer: Any) -> Model:
    """A small Llama with these fields of its mixers set."""
    model = from_yaml(BASE).set("width", width)
    for name, value in mixer.items():
        model = model.set(f"layers.*.mixer.{name}", value)
    return model


@dc.dataclass(frozen=True)
class Mutant:
    """A bug: its name, the law that must fail, the context manager that seeds it, the spec it is tested on, and the public
    report of the same bug, if there is one."""

    name: str
    law: str
    seed: Seed
    spec: Model = dc.field(default_factory=spec)
    report: str = ""


def kernel(name: str, run: Callable[..., Tensor]) -> Seed:
    """Replace the function of one attention backend."""
    backends = [backend._replace(run=run) if backend.name == name else backend for backend in attend.BACKENDS]
    return lambda: patch.object(attend, "BACKENDS", backends)


def instead(owner: Any, name: str, new: Any) -> Seed:
    """Replace the attribute `name` of a class or module; TypeError where a function does not take the arguments of the one that
    it replaces: every law would see that, and the bug would count as caught."""
    old = getattr(owner, name)
    if (
        isinstance(old, FunctionType)
        and isinstance(new, FunctionType)
        and not (_takes(new, old, True) or _takes(new, old, False))
    ):
        raise TypeError(f"{new.__name__} does not take the arguments of {owner.__name__}.{name}{inspect.signature(old)}")
    return lambda: patch.object(owner, name, new)


def _takes(new: FunctionType, old: FunctionType, optional: bool) -> bool:
    """Whether `new` takes the arguments of `old`: with the optional ones, or without."""
    given = [one for one in inspect.signature(old).parameters.values() if optional or one.default is one.empty]
    positional = [one for one in given if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    try:
        inspect.signature(new).bind(*positional, **{one.name: one for one in given if one.kind is one.KEYWORD_ONLY})
    except TypeError:
        return False
    return True


def verdict(law: str, model: Model, in_ranks: Seed | None = None) -> str:
    """The message with which the law fails on a model, empty where it holds; NotApplicable where it does not apply.

    The caller seeds the bug in this process. `in_ranks` seeds it in the ranks of the sharded law: a function that can be
    pickled, or a partial of one.
    """
    if law == OWN_NUMBER:
        kinds = {part.kind for _, part in walk_spec(model) if part.kind in ORACLES}
        return "; ".join(str(failure) for failure in check_oracles(sorted(kinds))[:1])
    if law == "sharded":
        return _sharded(model, in_ranks)
    outcome = LAWS.test(law, Case(model))
    if outcome.state == "not applicable":
        raise NotApplicable(outcome.detail)
    return outcome.detail if outcome.state == "failed" else ""


def _sharded(model: Model, in_ranks: Seed | None) -> str:
    """The sharded law with the bug seeded in the ranks themselves."""
    results = sharded.worse(sharded.the_pair().run(compare_seeded, in_ranks, to_yaml(model)))
    for how, result in results.items():
        name, gap = result.worst
        if not gap <= RELATION:
            return f"{how}, {name} differs by {gap:.3g}"
    return ""


def compare_seeded(seed: Seed | None, text: str) -> dict[str, sharded.Compared]:
    """The job of one rank: compare the whole model with the sharded ones, with a bug seeded."""
    with nullcontext() if seed is None else seed():
        return sharded.compare(text, 0, tuple(sharded.WAYS))
