"""The frame of random programs: data, the runner, the shrinker, the printer.

    program = sample(kind, seed, number)         a function of these three
    failure = run(kind, program)                 None where every result was right
    program = shrink(kind, program, failure)     fewer and smaller steps that fail alike
    print(script(program, failure))              a script that replays it

To add a kind: derive from `Kind` in a file of its own, and name it in kinds.py. A step is `(call, arguments)`, with arguments
that are plain data, so that a program can be printed. The session of a kind must skip a step that makes no sense (an abort of
a request that was never added), since the shrinker deletes steps.
"""

from __future__ import annotations

import dataclasses as dc
import random
from collections.abc import Iterator, Mapping, Sequence
from pprint import pformat
from typing import Any, NoReturn

Step = tuple[str, dict[str, Any]]
RUNS = 300  # of a program while it is shrunk


class Wrong(Exception):
    """A result differs from that of a fresh object, or an invariant does not hold."""


@dc.dataclass(frozen=True)
class Program:
    """Calls on one object."""

    kind: str
    setup: Mapping[str, Any]  # the object, as plain data
    steps: tuple[Step, ...]
    origin: str = ""  # the seed and the number it was sampled with


@dc.dataclass(frozen=True)
class Failure:
    """Why a program failed, and at which step."""

    error: str  # the class of the exception
    message: str
    step: int  # its number; the number of steps where the last check failed

    def __str__(self) -> str:
        return f"{self.error} at step {self.step}: {self.message}"


class Session:
    """One object, and the record of the calls on it."""

    def do(self, call: str, **arguments: Any) -> None:
        """Run one step; raise Wrong where its result is wrong. Any other exception is a failure, too."""
        method = getattr(self, f"do_{call}", None)
        if method is None:
            raise TypeError(f"{type(self).__name__} has no method do_{call}")
        method(**arguments)

    def end(self) -> None:
        """Check what is known after the last step only."""


class Kind:
    """Samples programs, and runs them."""

    name: str
    share: float = 1.0  # of the programs of a run over all kinds, relative to other kinds

    def sample(self, rng: random.Random) -> tuple[dict[str, Any], list[Step]]:
        """The setup and the steps of a program."""
        raise NotImplementedError

    def start(self, setup: Mapping[str, Any]) -> Session:
        """A new object."""
        raise NotImplementedError

    def smaller(self, step: Step) -> Iterator[Step]:
        """Simpler steps to try in place of one, while a program is shrunk."""
        yield from ()


def sample(kind: Kind, seed: int, number: int) -> Program:
    """Program `number` of a kind."""
    setup, steps = kind.sample(random.Random(f"{kind.name} {seed} {number}"))
    return Program(kind.name, setup, tuple(steps), f"seed {seed}, program {number}")


def run(kind: Kind, program: Program) -> Failure | None:
    """Run a program; return why it failed, if it did."""
    at = 0
    try:
        session = kind.start(program.setup)
        for call, arguments in program.steps:
            session.do(call, **arguments)
            at += 1
        session.end()
    except Exception as error:
        message = str(error).strip() or repr(error)
        return Failure(type(error).__name__, message if len(message) < 1000 else f"{message[:1000]} …", at)
    return None


def shrink(kind: Kind, program: Program, failure: Failure, runs: int = RUNS) -> tuple[Program, Failure]:
    """A program with fewer and smaller steps that fails by the same class of exception; it is run up to `runs` times."""

    def fails(steps: Sequence[Step]) -> bool:
        nonlocal program, failure, runs
        runs -= 1
        tried = dc.replace(program, steps=tuple(steps))
        got = run(kind, tried)
        if got is None or got.error != failure.error:
            return False
        program, failure = tried, got
        return True

    fails(program.steps[: failure.step + 1])
    changed = True
    while changed and runs > 0:
        changed, size = False, max(len(program.steps) // 2, 1)
        while size and runs > 0:
            begin = 0
            while begin < len(program.steps) and runs > 0:
                if fails([*program.steps[:begin], *program.steps[begin + size :]]):
                    changed = True
                else:
                    begin += size
            size //= 2
        for i in range(len(program.steps)):
            for step in kind.smaller(program.steps[i]):
                if runs > 0 and fails([*program.steps[:i], step, *program.steps[i + 1 :]]):
                    changed = True
                    break
    return program, failure


def script(program: Program, failure: Failure) -> str:
    """A script that replays a program; it is run at the root of the repository."""
    steps = "".join(f"    {step!r},\n" for step in program.steps)
    setup = pformat(dict(program.setup), sort_dicts=False, width=110)
    why = str(failure).replace("\n", "\n# ")
    return (
        f"# {program.kind}, {program.origin}: {why}\n"
        f"from checks.programs.replay import replay\n\nsetup = {setup}\nreplay({program.kind!r}, setup, [\n{steps}])\n"
    )


def wrong(message: str) -> NoReturn:
    """Raise Wrong."""
    raise Wrong(message)
