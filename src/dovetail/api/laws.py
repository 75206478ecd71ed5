"""laws: check the laws on all parts, on one spec, on a model of another library, on a running server, or test them with seeded
bugs."""

from __future__ import annotations

import dataclasses as dc
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from dovetail.api.arguments import SpecLike, read_spec, silent
from dovetail.api.result import Result
from dovetail.core.dtypes import dtype_name
from dovetail.core.errors import SpecError, UsageError
from dovetail.core.extensions import load_parts
from dovetail.core.printable import printable
from dovetail.io.spec import Changes, to_yaml
from dovetail.lawbook import mutate
from dovetail.lawbook.foreign.laws import Found
from dovetail.lawbook.outcome import Outcome
from dovetail.lawbook.seeded.run import run_seeded
from dovetail.lawbook.served import run as served
from dovetail.lawbook.sides import SERVER, SPEC, Side, SideKind, kind_of, server_side, spec_side
from dovetail.lawbook.suite import run_suite
from dovetail.look.console import plain_table
from dovetail.text.tokenizer import Tokenizer

Progress = Callable[[int, int, str], None]  # (done, in all, the current law or the last failure)
Announce = Callable[[str], None]
MOST_FAILURES = 10  # that a terminal shows
MARKS = {"passed": ("✓", "green"), "failed": ("✗", "red"), "not applicable": ("–", "dim")}


class LawsResult(Result):
    """What the laws found."""

    @property
    @abstractmethod
    def failed(self) -> bool:
        """Whether a law fails, or no law fails on a seeded bug; the exit code is then 1."""


@dc.dataclass(frozen=True, repr=False)
class ModelLaws(LawsResult):
    """The laws on one model."""

    name: str
    rows: tuple[Outcome | Found, ...]
    statements: Mapping[str, str]  # law -> what it states
    about: Mapping[str, Any]  # further fields of `to_dict`

    @property
    def failures(self) -> tuple[Outcome | Found, ...]:
        """The rows of the laws that fail."""
        return tuple(row for row in self.rows if row.state == "failed")

    @property
    def failed(self) -> bool:
        return bool(self.failures)

    def to_dict(self) -> dict[str, Any]:
        return {**self.about, "failed": len(self.failures), "laws": [dc.asdict(row) for row in self.rows]}

    def view(self, width: int) -> RenderableType:
        table = plain_table("mark", "law", "statement")
        for row in self.rows:
            mark, style = MARKS.get(row.state, ("~", "yellow"))
            statement = Text(self.statements[row.law])
            if row.detail:
                statement.append(f"\n{row.detail}", "dim")
            table.add_row(Text(f" {mark}", style), row.law, statement)
        return Group(Text(self.name, "bold"), table)


@dc.dataclass(frozen=True, repr=False)
class SuiteLaws(LawsResult):
    """Every law on every sampled spec."""

    data: dict[str, Any]

    @property
    def failed(self) -> bool:
        return bool(self.data["failed"])

    def to_dict(self) -> dict[str, Any]:
        return self.data

    def view(self, width: int) -> RenderableType:
        data = self.data
        title = f"{data['cells']} cells: {data['specs']} specs × {data['laws']} laws, {data['parts']} parts"
        columns = ("passed", "excepted", "failed", "not applicable", "seconds")
        table = Table(title=title)
        table.add_column("law")
        for column in columns:
            table.add_column(column, justify="right")
        for name, row in data["by_law"].items():
            passed = row["cells"] - row["failed"] - row["excepted"]
            cells = (passed, row["excepted"], row["failed"], row["not_applicable"], f"{row['seconds']:.1f}")
            table.add_row(Text(name, "red" if row["failed"] else "green"), *map(str, cells))
        lines: list[RenderableType] = [table]
        if "pairs_covered" in data:
            covered, excepted = f"{data['pairs_covered']:.1%}", f"{data['excepted_share']:.1%}"
            lines.append(Text(f"pairs covered: {covered}   excepted: {excepted}   {data['seconds']:.0f} s"))
        for name, times in data["over_budget"].items():
            lines.append(Text(f"{name}: {times['seconds_per_spec']} s per spec, the budget is {times['budget']} s", "yellow"))
        for failure in data["failures"][:MOST_FAILURES]:
            lines += [Text.assemble((failure["law"], "red"), f": {failure['detail']}"), Text(failure["spec"], "dim")]
        return Group(*lines)


@dc.dataclass(frozen=True, repr=False)
class SeededLaws(LawsResult):
    """The seeded bugs, or random mutations of the code, and the law that catches each."""

    data: dict[str, Any]
    random: bool  # random mutations: some cannot be caught, so a survivor is not a failure

    @property
    def failed(self) -> bool:
        return self.data["caught"] != self.data["mutants"] and not self.random

    def to_dict(self) -> dict[str, Any]:
        return self.data

    def view(self, width: int) -> RenderableType:
        table = plain_table("mark", "name", "law")
        for row in self.data["rows"]:
            mark = Text(" caught", "green") if row["caught"] else Text(" not caught", "red")
            table.add_row(mark, Text(row["name"]), Text(row.get("by", ""), "dim"))
        return Group(table, Text(f"{self.data['caught']} of {self.data['mutants']} caught"))


def laws(
    spec: SpecLike | None = None,
    *,
    set: Changes = (),
    swap: Changes = (),
    only: Sequence[str] = (),
    as_is: bool = False,
    quick: bool = False,
    mutants: bool = False,
    random: int | None = None,
    seed: int = 0,
    load: Sequence[str] = (),
    record: str | Path | None = None,
    model: str | None = None,
    key: str | None = None,
    tokenizer: str | Path | None = None,
    dtype: str | None = None,
    exact: bool = False,
    against: str | None = None,
    announce: Announce | None = None,
    progress: Progress | None = None,
) -> LawsResult:
    """Check the laws, and return what failed.

    With a spec (a preset, a path, YAML text or an object), the laws run on that model alone; `hf:DIR` and `py:FILE.py:FACTORY`
    name a model of another library, on which the laws run that need no declarations. Without one, they run on sampled specs
    that cover every pair of parts, or on a few (`quick`). `mutants` seeds each known bug instead and checks that a law fails;
    with `random`, so many random mutations of the code. `load` are files or modules that register parts of your own. On
    sampled specs, `record` is a file that outcomes are appended to: the same call continues a run that was killed.

    `http://HOST/v1` is a running OpenAI-compatible server. `model` is its name there, `key` is sent as a bearer token,
    `tokenizer` is a directory for a server that takes text alone, `dtype` what it computes in where it is known, `exact` says
    that it promises batch invariance, and `against` is a second server without speculation. `announce` gets one line, before
    the first law, with the number of requests and tokens and the estimated time.
    """
    load_parts(load)
    kind = kind_of(spec) if isinstance(spec, str) else SPEC
    given = {"--model": model, "--key": key, "--tokenizer": tokenizer, "--dtype": dtype, "--against": against, "--exact": exact}
    if kind is not SERVER and (flags := [flag for flag, value in given.items() if value]):
        raise UsageError(f"{flags[0]}: is for a server, and none is given; name one: dovetail laws http://HOST/v1")
    if (set or swap) and (spec is None or kind is not SPEC or mutants):
        raise SpecError("--set, --swap", "change a spec, and none is given", "name one: dovetail laws SPEC --swap …")
    report = progress or silent
    if record is not None and (spec is not None or mutants):
        raise UsageError("--record: outcomes are recorded for all sampled specs; leave out the spec and --mutants")
    if mutants:
        data = mutate.run_random(random, seed, report) if random else run_seeded(report, quick)
        return SeededLaws(data, random is not None)
    if spec is None:
        return _on_all(quick, seed, report, record)
    names = kind.law_names(only)  # before anything is opened
    if isinstance(spec, str) and kind is SERVER:
        if against is not None and kind_of(against) is not SERVER:
            raise UsageError(f"--against: {printable(against)} is not the URL of a server; write http://HOST/v1")
        case = served.opened(
            spec,
            model=model,
            key=key,
            tokenizer=None if tokenizer is None else Tokenizer.load(tokenizer),
            dtype=None if dtype is None else dtype_name(dtype),
            exact=exact,
            against=against,
            seed=seed,
        )
        return _on_server(spec, case, names, announce or _unheard, report)
    if isinstance(spec, str) and kind is not SPEC:
        return _on_side(kind.open(spec, seed=seed, as_is=as_is), kind, names, report)
    name, changed, _ = read_spec(spec).after(set, swap)
    return _on_side(spec_side(name, to_yaml(changed), seed), SPEC, names, report)


def _on_all(quick: bool, seed: int, progress: Progress, record: str | Path | None) -> SuiteLaws:
    data = run_suite(quick, seed, progress, record=record).data()
    if quick:
        data.pop("pairs_covered")  # a few specs do not cover the pairs
    return SuiteLaws(data)


def _on_side(side: Side, kind: SideKind, names: Sequence[str], progress: Progress) -> ModelLaws:
    rows: list[Outcome | Found] = []
    for i, law in enumerate(names):
        progress(i, len(names), law)
        rows.append(side.test(law))
    return ModelLaws(side.title, tuple(rows), kind.statements, side.about)


def _unheard(line: str) -> None:
    """Announce to nobody."""


def _on_server(url: str, case: served.Served, names: Sequence[str], announce: Announce, progress: Progress) -> ModelLaws:
    plan = served.rehearsed(case, names)
    announce(f"{printable(url)}: {plan.line()}")
    asked, law = case.door.requests, "the server's own noise"
    case.door.sent = lambda: progress(min(case.door.requests - asked, plan.requests), plan.requests, law)
    side, rows = server_side(url, served.calibrated(case)), list[Outcome | Found]()
    for law in names:
        rows.append(side.test(law))
    about = {**side.about, "announced": plan.data(), "requests": case.door.requests}
    return ModelLaws(side.title, tuple(rows), SERVER.statements, about)
