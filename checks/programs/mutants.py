"""Known bugs, put back one at a time: how many programs find each.

A mutant is data: in the source of a function, `old` becomes `new`. Where `old` does not occur exactly once, it is stale, and
that is an error.
"""

from __future__ import annotations
import __future__ as future

import dataclasses as dc
import inspect
import sys
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

from checks.programs.frame import Failure, run, sample
from checks.programs.kinds import kind_of

MOST = 500  # programs within which a mutant must be found


@dc.dataclass(frozen=True)
class Mutant:
    """A bug: `function` is `name` or `Class.name` in `module`; `kind` are the programs that must find it."""

    name: str
    kind: str
    module: str
    function: str
    old: str
    new: str


RUNNER, ENGINE = "dovetail.serving.runner", "dovetail.serving.engine"
MUTANTS = (
    Mutant(
        "A13: a row keeps its own copy of a known block",
        "engine",
        RUNNER,
        "Runner._share",
        "self.slots.share(one.row, pages)",
        "pass",
    ),
    Mutant(
        "A14: a chunk is shortened below the prefix",
        "engine",
        RUNNER,
        "Runner.cut",
        "return max(n, self.pool.ahead - one.computed)",
        "return n",
    ),
    Mutant(
        "A16: a prefix mask without causal decodes",
        "engine",
        "dovetail.nn.softmax",
        "SoftmaxMixer.ahead",
        'if self.order() == "both":',
        "if False:",
    ),
    Mutant(
        "A17: drafts for angles that depend on the length",
        "engine",
        ENGINE,
        "Engine.__init__",
        "if self.runner.whole:",
        "if False:",
    ),
    Mutant(
        "A17: a preempted continuation is computed at once",
        "engine",
        RUNNER,
        "Runner.cut",
        "return max(one.prompt - one.computed, 1)",
        "return one.left",
    ),
    Mutant("A19: weights written to in place", "engine", "dovetail.serving.recovery", "Weights.written", "!=", "is None is"),
    Mutant("A19: training mode", "engine", RUNNER, "check_served", "if model.training:", "if False:"),
    Mutant(
        "A20: an interrupted call is not recovered from",
        "engine",
        "dovetail.serving.recovery",
        "Change.__enter__",
        "if self.open:",
        "if False:",
    ),
    Mutant(
        "a resumed request is queued as youngest",
        "engine",
        "dovetail.serving.schedule",
        "Schedule.preempt",
        "self.add(one)",
        "self.waiting.append(one)",
    ),
    Mutant(
        "a shared page is written to",
        "engine",
        "dovetail.state.slots",
        "Paged.reserve",
        "self.uses[owned[-1]] > 1",
        "self.uses[owned[-1]] > 2",
    ),
)


@contextmanager
def planted(mutant: Mutant) -> Iterator[None]:
    """Within this context the bug is there."""
    owner = import_module(mutant.module)
    *classes, name = mutant.function.split(".")
    for each in classes:
        owner = getattr(owner, each)
    function = vars(owner)[name]
    source = textwrap.dedent(inspect.getsource(function))
    if source.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.name}: stale; {mutant.function} has {source.count(mutant.old)} times {mutant.old!r}")
    names = vars(import_module(mutant.module))
    made: dict[str, object] = {}
    flags = future.annotations.compiler_flag
    exec(compile(source.replace(mutant.old, mutant.new), f"<{mutant.name}>", "exec", flags), names, made)
    places = [(owner, function)]
    if not classes:  # other modules import a function by name
        places += [(module, function) for module in _users(mutant.module, name, function)]
    for place, _ in places:
        setattr(place, name, made[name])
    try:
        yield
    finally:
        for place, old in places:
            setattr(place, name, old)


def _users(module: str, name: str, function: object) -> list[object]:
    own = sys.modules[module]
    return [
        other
        for path, other in list(sys.modules.items())
        if path.startswith("dovetail.") and other is not own and vars(other).get(name) is function
    ]


def found(mutant: Mutant, seed: int = 0, most: int = MOST) -> tuple[int, Failure] | None:
    """The number of programs that were run until one failed, and why it failed; None where none of `most` did."""
    kind = kind_of(mutant.kind)
    with planted(mutant):
        for number in range(most):
            if (failure := run(kind, sample(kind, seed, number))) is not None:
                return number + 1, failure
    return None
