"""How well `dovetail verify` finds planted bugs, and how seldom it cries wolf.

    python benchmarks/verify.py [--json] [--quick] [--table FILE]

Tiny random models of eleven families are made by transformers and run by us and by it. Clean pairs in float32 and bfloat16 must
be equal. Then one bug is planted in transformers' side (seeded_bugs.py), in one layer, and verify is asked where and why. Rows:

    first bad layer named right    of the corrupted models, the share whose layer (or embedding, or head) is right
    misses                         of the corrupted models, the share that was called equal
    false alarms                   of the clean pairs, the share that was called structural or outside its envelope
    cause named right              of the corrupted models
"""

from __future__ import annotations

import copy
import json
import random
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from measure import Goal, Row, arguments, progress, tell
from rich.console import Console
from rich.table import Table
from seeded_bugs import BUGS, FAMILIES, Bug
from torch import nn

from dovetail.verification.check import Verdict, verify
from dovetail.verification.prompt import random_prompt
from dovetail.verification.sides import NativeSide
from dovetail.verification.transformers_side import TransformersSide, transformers

SEED = 20_000  # other seeds than those the envelopes were calibrated with
CORRUPTED, CLEAN = 240, 200
DTYPES = (torch.float32, torch.bfloat16)


def written(name: str, seed: int, place: Path) -> Path:
    """A tiny random model of a family, saved by transformers; its weights are far from any first values."""
    library = transformers()
    family, fields = FAMILIES[name]
    torch.manual_seed(seed)
    model: Any = library.AutoModelForCausalLM.from_config(library.AutoConfig.for_model(family, **fields))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            noise = torch.randn(tensor.shape, generator=generator)
            tensor.copy_(tensor + 0.3 * noise if tensor.dim() == 1 else 0.25 * noise)
    there = place / f"{name}-{seed}"
    model.save_pretrained(there)
    return there


class Remembered(NativeSide):
    """NativeSide, made once for each dtype."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.kept: dict[torch.dtype, Any] = {}

    def module(self, dtype: torch.dtype) -> Any:
        if dtype not in self.kept:
            self.kept[dtype] = super().module(dtype)
        return self.kept[dtype]


class Planted(TransformersSide):
    """TransformersSide, loaded once for each dtype and copied for each bug."""

    def __init__(self, directory: Path) -> None:
        self.kept: dict[torch.dtype | str, nn.Module] = {}
        self.bug: tuple[Bug, int, int] | None = None
        super().__init__(directory)

    def module(self, dtype: torch.dtype) -> nn.Module:
        if dtype not in self.kept:
            self.kept[dtype] = super().module(dtype)
        model = copy.deepcopy(self.kept[dtype])
        if self.bug is not None:
            bug, layer, seed = self.bug
            with torch.no_grad():
                bug.plant(model, layer, random.Random(seed))  # the same in every dtype
        return model


class Models:
    """The pairs, made when first asked for."""

    def __init__(self, place: Path) -> None:
        self.place, self.pairs = place, {}

    def pair(self, name: str, seed: int) -> tuple[Remembered, Planted]:
        if (name, seed) not in self.pairs:
            there = written(name, seed, self.place)
            self.pairs[name, seed] = Remembered(there), Planted(there)
        return self.pairs[name, seed]


def cases(count: int) -> list[tuple[Bug, str, int, int]]:
    """(bug, family, layer, seed): every bug in turn, over its families and all layers."""
    found, turn = [], 0
    while len(found) < count:
        for bug in BUGS[: count - len(found)]:
            family = bug.families[turn % len(bug.families)]
            layer = (turn + turn // len(bug.families)) % 4
            if bug.kind == "window off by one" and family == "gemma2":
                layer = 2 * (layer // 2)  # every second layer slides
            found.append((bug, family, layer, SEED + turn % 3))
        turn += 1
    return found


def named(verdict: Verdict) -> str:
    """What verify calls the cause."""
    if verdict.cause is not None:
        return verdict.cause.name
    return "other numbers in the weights" if verdict.weights else "–"


def run(corrupted: int, clean: int) -> tuple[list[Row], list[dict[str, Any]]]:
    told: list[dict[str, Any]] = []
    alarms = 0
    with tempfile.TemporaryDirectory() as place, progress("verify", corrupted + clean) as tick:
        models, names = Models(Path(place)), list(FAMILIES)
        for i in range(clean):
            a, b = models.pair(names[i % len(names)], SEED + i // len(names) % 10)
            assert a.spec is not None
            b.bug = None
            verdict = verify(a, b, random_prompt(a.spec, seed=i), dtype=DTYPES[i % 2], why=False)
            alarms += verdict.status != "equal"
            if verdict.status != "equal":
                told.append(
                    {
                        "kind": "clean",
                        "family": a.label,
                        "said": verdict.status,
                        "first": verdict.first and verdict.first.address,
                    }
                )
            tick()
        for i, (bug, family, layer, seed) in enumerate(cases(corrupted)):
            a, b = models.pair(family, seed)
            assert a.spec is not None
            b.bug = (bug, layer, i)
            verdict = verify(a, b, random_prompt(a.spec, seed=i))
            where = f"layers.{layer}" if bug.shows == "layer" else bug.shows
            cause = named(verdict) if verdict.status == "structural" else "–"
            told.append(
                {
                    "kind": bug.kind,
                    "family": family,
                    "where": where,
                    "said": verdict.status,
                    "layer": verdict.layer,
                    "cause": cause,
                    "missed": verdict.status != "structural",
                    "layer_right": verdict.status == "structural" and verdict.layer == where,
                    "cause_right": cause in bug.causes,
                }
            )
            tick()
    bugs = [one for one in told if one["kind"] != "clean"]
    share = {what: sum(one[what] for one in bugs) / len(bugs) for what in ("layer_right", "missed", "cause_right")}
    rows = [
        Row("first bad layer named right", share["layer_right"], Goal(low=0.95)),
        Row("misses", share["missed"], Goal(high=0.02)),
        Row("false alarms", alarms / clean, Goal(high=0.01)),
        Row("cause named right", share["cause_right"], Goal(low=0.80)),
        Row("corrupted models", len(bugs)),
        Row("clean pairs", clean),
        Row("kinds of bugs", len({one["kind"] for one in bugs})),
    ]
    return rows, told


def by_kind(told: list[dict[str, Any]]) -> list[tuple[str, int, int, int, int, str]]:
    """(kind, models, layer right, missed, cause right, what else it was called) of every kind of bug."""
    rows = []
    for kind in dict.fromkeys(one["kind"] for one in told if one["kind"] != "clean"):
        mine = [one for one in told if one["kind"] == kind]
        wrong = sorted({one["cause"] for one in mine if not one["cause_right"]})
        sums = [sum(one[what] for one in mine) for what in ("layer_right", "missed", "cause_right")]
        rows.append((kind, len(mine), *sums, ", ".join(wrong)))
    return rows


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.set_defaults(threads=1)  # tiny models: a second thread only waits
    parser.add_argument("--table", type=Path, help="write every case as JSON, and the table by kind as Markdown beside it")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warnings.filterwarnings("ignore")
    rows, told = run(*((len(BUGS), 22) if given.quick else (CORRUPTED, CLEAN)))
    if given.table is not None:
        given.table.write_text(json.dumps(told, indent=1))
        lines = ["| bug | models | layer right | missed | cause right | called instead |", "|---|--:|--:|--:|--:|---|"]
        lines += [f"| {' | '.join(map(str, row))} |" for row in by_kind(told)]
        given.table.with_suffix(".md").write_text("\n".join(lines) + "\n")
    if not given.json:
        table = Table("bug", "models", "layer right", "missed", "cause right", "called instead")
        for row in by_kind(told):
            table.add_row(*map(str, row))
        Console(width=140).print(table)
    tell(rows, given.json)


if __name__ == "__main__":
    main()
