"""Hold every part to its laws, in every wiring it can take part in; or one model, also one that is not ours; or plant known
bugs and see that the laws catch them.

    dovetail laws llama-tiny --swap position=alibi
    dovetail laws py:model.py:tiny --only causal padded
"""

from __future__ import annotations

import dataclasses as dc
import sys
from typing import Annotated, Any

import tyro

from dovetail.cli.flags import LoadFlags, Seed, Sets, Spec, Swaps
from dovetail.cli.output import SafeConsole, print_json
from dovetail.core.errors import SpecError


@dc.dataclass
class Command(LoadFlags):
    """Laws on all wirings (default), on one SPEC, on a model that is not ours, or on planted bugs (--mutants)."""

    spec: Annotated[Spec | None, tyro.conf.Positional] = None
    """A preset, .yaml or model directory: only this one is tried. `hf:DIR` is run by transformers, `py:file.py:factory` is any
    nn.Module that takes token ids: both are held to the laws that need no declarations."""
    set: Sets = ()
    """Change a field of SPEC first: --set layers.*.mixer.kv_heads=1; may be given many times."""
    swap: Swaps = ()
    """Change a part of SPEC wherever it stands: --swap position=alibi; may be given many times, and comes before --set."""
    only: tuple[str, ...] = ()
    """On one model, these laws alone."""
    as_is: bool = False
    """With hf: and py:, do not perturb initial weights, which hide bugs. The weights of a checkpoint are never perturbed."""
    quick: bool = False
    """A few wirings that hold every kind; under a minute."""
    mutants: bool = False
    """Plant each named bug and see that the law named with it fails."""
    random: int | None = None
    """With --mutants: this many mechanical mutations of parts/ and ops/ instead."""
    seed: Seed = 0
    """Draws other wirings, weights and mutations."""
    json: bool = False
    """Print plain data."""

    def run(self) -> int:
        """The exit code: 1 where a law fails or a bug lives."""
        foreign = self.spec is not None and self.spec.startswith(("hf:", "py:"))
        if (self.set or self.swap) and (self.spec is None or foreign or self.mutants):
            raise SpecError("--set, --swap", "change a spec, and none is given", "name one: dovetail laws SPEC --swap …")
        if self.mutants:
            return self.print_mutants()
        if self.spec is None:
            return self.print_all()
        return self.print_foreign(self.spec) if foreign else self.print_one(self.spec)

    def print_all(self) -> int:
        """All wirings."""
        from dovetail.lawbook.suite import run_suite

        with progress("laws") as told:
            report = run_suite(self.quick, self.seed, told, self.load)
        data = report.data()
        if self.quick:
            data.pop("pairs_covered")  # a few wirings cover no such thing
        self.show(data, lambda: table(data))
        return 1 if data["failed"] else 0

    def print_one(self, name: str) -> int:
        """One spec."""
        from dovetail.io.spec import changed, to_yaml
        from dovetail.lawbook.case import LAWS, chosen
        from dovetail.lawbook.suite import try_spec
        from dovetail.port.load import find_spec

        names = chosen(LAWS, self.only)
        with progress("laws") as told:
            rows = []
            text = to_yaml(changed(find_spec(name), self.set, self.swap))
            for i, law in enumerate(names):
                told(i, len(names), law)
                rows += try_spec(text, [law], self.seed)
        failed = [row for row in rows if row.state == "failed"]
        data = {"spec": name, "failed": len(failed), "laws": [dc.asdict(row) for row in rows]}
        title = "  ".join([name, *(f"--swap {it}" for it in self.swap), *(f"--set {it}" for it in self.set)])
        self.show(data, lambda: one(title, rows, {law.name: law.says for law in LAWS.values()}))
        return 1 if failed else 0

    def print_foreign(self, name: str) -> int:
        """One model that is not ours."""
        from dovetail.lawbook.foreign.laws import FOREIGN, laws_on, told_names
        from dovetail.lawbook.foreign.opening import opened

        names, rows = told_names(self.only), []
        with progress("laws") as told:
            case = opened(name, seed=self.seed, as_is=self.as_is)
            for i, law in enumerate(names):
                told(i, len(names), law)
                rows += laws_on(case, [law])
        failed = [row for row in rows if row.state == "failed"]
        how = {"dtype": str(case.dtype).removeprefix("torch."), "tolerance": case.tolerance}
        data = {"model": case.label, "failed": len(failed), **how, "laws": [dc.asdict(row) for row in rows]}
        title = f"{case.label}  ({how['dtype']}, equal to {case.tolerance:g} of their scale)"
        self.show(data, lambda: one(title, rows, {law.name: law.says for law in FOREIGN.values()}))
        return 1 if failed else 0

    def print_mutants(self) -> int:
        """Planted bugs."""
        from dovetail.lawbook import mutate
        from dovetail.lawbook.seeded import run

        with progress("mutants") as told:
            data = mutate.run_random(self.random, self.seed, told) if self.random else run.run_seeded(told, self.quick)
        self.show(data, lambda: bugs(data))
        return 0 if data["caught"] == data["mutants"] or self.random else 1

    def show(self, data: Any, view: Any) -> None:
        """JSON or a table."""
        if self.json:
            print_json(data, indent=1)
        else:
            view()


def progress(what: str) -> Any:
    """A context that gives told(done, known, note): a bar on stderr with the time left."""
    import contextlib

    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    @contextlib.contextmanager
    def bar() -> Any:
        columns = (
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[note]}"),
        )
        with Progress(*columns, console=SafeConsole(file=sys.stderr), transient=True) as shown:
            task = shown.add_task(what, total=None, note="")
            yield lambda done, known, note: shown.update(task, completed=done, total=known, note=note)

    return bar()


def table(data: dict[str, Any]) -> None:
    """The whole suite on a terminal."""
    from rich.table import Table

    console = SafeConsole()
    shown = Table(title=f"{data['cells']} cells: {data['specs']} specs × {data['laws']} laws, {data['parts']} parts")
    for column in ("law", "held", "excepted", "failed", "not applicable", "seconds"):
        shown.add_column(column, justify="left" if column == "law" else "right")
    for name, row in data["by_law"].items():
        held = row["cells"] - row["failed"] - row["excepted"]
        color = "red" if row["failed"] else "green"
        cells = (held, row["excepted"], row["failed"], row["not_applicable"], f"{row['seconds']:.1f}")
        shown.add_row(f"[{color}]{name}[/]", *map(str, cells))
    console.print(shown)
    if "pairs_covered" in data:
        console.print(
            f"pairs covered: {data['pairs_covered']:.1%}   excepted: {data['excepted_share']:.1%}   {data['seconds']:.0f} s"
        )
    for name, times in data["over_budget"].items():
        console.print(f"[yellow]{name}[/]: {times['seconds_per_spec']} s per spec, the budget is {times['budget']} s")
    for failure in data["failures"][:10]:
        console.print(f"[red]{failure['law']}[/]: {failure['detail']}", markup=True, highlight=False)
        console.print(failure["spec"], style="dim", markup=False)


def one(name: str, rows: list[Any], says: dict[str, str]) -> None:
    """One spec on a terminal."""
    from rich.markup import escape

    marks = {"held": "[green]✓[/]", "failed": "[red]✗[/]", "not applicable": "[dim]–[/]"}
    console = SafeConsole()
    console.print(f"[bold]{escape(name)}[/]")
    for row in rows:
        console.print(f" {marks.get(row.state, '[yellow]~[/]')} {row.law:13} {escape(says[row.law])}", highlight=False)
        if row.detail:
            console.print(f"                 [dim]{escape(row.detail)}[/]", highlight=False)


def bugs(data: dict[str, Any]) -> None:
    """Planted bugs on a terminal."""
    from rich.markup import escape

    console = SafeConsole()
    for row in data["rows"]:
        mark = "[green]caught[/]" if row["caught"] else "[red]LIVES[/] "
        console.print(f" {mark}  {escape(row['name'])}  [dim]{escape(row.get('by', ''))}[/]", highlight=False)
    console.print(f"{data['caught']} of {data['mutants']} caught")
