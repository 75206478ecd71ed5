"""The numbers of the front page, read from docs/figures: value, commit and command of each.

    python docs/front_numbers.py            print the table
    python docs/front_numbers.py --write    put it into README.md

A number is stated only if every goal that it rests on holds; otherwise this fails, and another number must be chosen.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
FIGURES = ROOT / "docs/figures"
BEGIN, END = "<!-- numbers -->\n", "<!-- end of numbers -->"
SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


class Rows(dict[str, Any]):
    """The rows of a figure by name."""

    def ending(self, end: str) -> list[dict[str, Any]]:
        """The rows whose name ends so; each that has a goal must hold."""
        rows = [row for name, row in self.items() if name.endswith(end)]
        if not rows or any(row["goal"] is not None and row["holds"] is not True for row in rows):
            raise ValueError(f"{end}: no such row, or a goal that does not hold")
        return rows

    def sum(self, end: str) -> int:
        """The sum of the values of these rows."""
        return round(sum(row["value"] for row in self.ending(end)))


class Number(NamedTuple):
    """A statement, the figure it is read from, and how."""

    figure: str
    text: str
    values: Callable[[Rows, dict[str, Any]], dict[str, object]]


def faults(rows: Rows, _: dict[str, Any]) -> dict[str, object]:
    """Distinct causes of wrong results in classes of transformers."""
    tried = {role: rows.sum(f"{role}: classes built tiny and tried") for role in ("causal", "encoder", "decoder", "source")}
    return {"faults": rows.sum("distinct causes: wrong result"), **tried, "halves": tried["decoder"] + tried["source"]}


def bugs(rows: Rows, _: dict[str, Any]) -> dict[str, object]:
    """Where `verify` places mutations of modeling code that its authors did not choose."""
    models = rows.sum("mutated models")
    return {
        "models": models,
        "right": round(rows.ending("first bad layer named right")[0]["value"] * models),
        "alarms": rows.sum("false alarms"),
    }


def seeded(_: Rows, result: dict[str, Any]) -> dict[str, object]:
    """Seeded bugs of Dovetail itself that a law catches."""
    return {"caught": sum(row["caught"] for row in result["rows"]), "bugs": len(result["rows"])}


def servers(rows: Rows, _: dict[str, Any]) -> dict[str, object]:
    """Law runs on servers, and alarms where a server is right."""
    each = Rows((name, row) for name, row in rows.items() if "," in name)  # the others are sums
    names = {name.partition(",")[0] for name in each if name.endswith("clean law runs")}
    return {"alarms": each.sum("false alarms"), "runs": each.sum("clean law runs"), "servers": len(names)}


def layouts(rows: Rows, _: dict[str, Any]) -> dict[str, object]:
    """Training over ranks against training on one."""
    differences = [row["value"] for row in rows.ending("loss − that of one rank")]
    mantissa, _, exponent = f"{max(differences):.1e}".partition("e")
    return {"layouts": len(differences), "largest": f"{mantissa} · 10{str(int(exponent)).translate(SUPERSCRIPT)}"}


def kills(rows: Rows, _: dict[str, Any]) -> dict[str, object]:
    """Training that is killed, and started again by the same command."""
    return {
        "kills": rows.sum("the same command again: kills"),
        "differing": rows.sum("another sha256 of the weights than the unbroken run"),
    }


NUMBERS = (
    Number(
        "foreign",
        "**{faults} distinct faults** with wrong results in transformers 5.22.2, in {causal} causal language models, {encoder} "
        "encoders and {halves} halves of encoder–decoders ([list](docs/foreign.md))",
        faults,
    ),
    Number(
        "blind",
        "**{right} of {models}** random mutations of modeling code placed by `verify` in the first bad layer; "
        "{alarms} false alarms",
        bugs,
    ),
    Number("mutants", "**{caught} of {bugs}** bugs seeded into Dovetail caught by the law that is named with each", seeded),
    Number("servers", "**{alarms} false alarms** in {runs} law runs on {servers} servers, with tiny models", servers),
    Number(
        "dist",
        "**{layouts} layouts** of two and four ranks on one machine train as one rank does: "
        "losses differ by at most {largest} in float64",
        layouts,
    ),
    Number(
        "faults",
        "**{differing} weights** differ from those of an unbroken run after {kills} times `kill -9` and the same command again",
        kills,
    ),
)


def table(figures: Path = FIGURES) -> str:
    """The rows in markdown."""
    lines = ["| number | measured at | command |", "|---|---|---|"]
    for number in NUMBERS:
        data = json.loads((figures / f"{number.figure}.json").read_text(encoding="utf-8"))
        result, taken = data["result"], data["taken"]
        rows = Rows((row["name"], row) for row in result["rows"])
        command = taken["command"].partition(";")[0]
        text = number.text.format(**number.values(rows, result))
        lines.append(f"| {text} | [{taken['commit']}](docs/figures/{number.figure}.json) | `{command}` |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print the table, or write it into the README."""
    if "--write" not in sys.argv[1:]:
        sys.stdout.write(table())
        return
    readme = ROOT / "README.md"
    before, _, rest = readme.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    readme.write_text(before + BEGIN + table() + END + after, encoding="utf-8")


if __name__ == "__main__":
    main()
