"""How well `dovetail verify` finds seeded bugs, and how often it raises an alarm on a clean pair.

    python benchmarks/verify.py [--json] [--quick] [--table FILE] [--only clean|bugs] [--dtype float32|bfloat16|float16]

transformers makes tiny random models of 13 families; we and transformers run them. Clean pairs must be equal, in three dtypes,
with and without massive channels. Then one bug is seeded in transformers' side (seeded_bugs.py), in one layer. Rows:

    first bad layer named right    fraction of the models with a bug whose layer (or embedding, or head) is right
    misses                         fraction of the models with a bug that were called equal
    false alarms                   fraction of the clean pairs that were called two functions
    clean pairs called rounding    one function in float64, but one side rounds more than the other: no alarm
    cause named right              fraction of the models with a bug
"""

from __future__ import annotations

import copy
import itertools
import json
import random
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from measure import Goal, Row, arguments, progress, report
from rich.console import Console
from rich.table import Table
from seeded_bugs import BUGS, FAMILIES, Bug
from torch import nn

from dovetail.proof.compare.check import Verdict, verify
from dovetail.proof.compare.prompt import random_prompt
from dovetail.proof.compare.sides import NativeSide
from dovetail.proof.compare.transformers_side import TransformersSide, transformers

SEED = 20_000  # other seeds than those of benchmarks/envelope.py
CORRUPTED, SEEDS = 248, 4  # models with a bug; seeds of each family, dtype and kind of clean pairs: 13 · 3 · 2 · 4 = 312
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
MASSIVE, CHANNEL = 300.0, 5  # factor and number of the channel that a feed-forward makes massive


@torch.no_grad()
def write_model(name: str, seed: int, place: Path, *, massive: bool = False) -> Path:
    """Save a tiny random model of a family; its weights are far from initial ones."""
    library = transformers()
    family, fields = FAMILIES[name]
    torch.manual_seed(seed)
    model: Any = library.AutoModelForCausalLM.from_config(library.AutoConfig.for_model(family, **fields))
    generator = torch.Generator().manual_seed(seed)
    for path, tensor in model.named_parameters():
        noise = torch.randn(tensor.shape, generator=generator)
        tensor.copy_(tensor + 0.3 * noise if tensor.dim() == 1 else 0.25 * noise)
        if massive and path.endswith(("mlp.down_proj.weight", "mlp.c_proj.bias")):
            tensor[CHANNEL] *= MASSIVE
        elif massive and tensor.shape == (48,) and "norm" in path:
            tensor[CHANNEL] *= 0.01
    there = place / f"{name}-{seed}-{massive}"
    model.save_pretrained(there)
    return there


class CachedNative(NativeSide):
    """A native side that builds its module once per dtype."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.modules: dict[torch.dtype, Any] = {}

    def module(self, dtype: torch.dtype) -> Any:
        if dtype not in self.modules:
            self.modules[dtype] = super().module(dtype)
        return self.modules[dtype]


class Seeded(TransformersSide):
    """A side of transformers that loads its module once per dtype, and copies it for each bug."""

    def __init__(self, directory: Path) -> None:
        self.modules: dict[torch.dtype | str, nn.Module] = {}
        self.bug: tuple[Bug, int, int] | None = None
        super().__init__(directory)

    def module(self, dtype: torch.dtype) -> nn.Module:
        if dtype not in self.modules:
            self.modules[dtype] = super().module(dtype)
        if self.bug is None:
            return self.modules[dtype]
        model = copy.deepcopy(self.modules[dtype])
        bug, layer, seed = self.bug
        with torch.no_grad():
            bug.plant(model, layer, random.Random(seed))  # the same in every dtype
        return model


class Models:
    """The pairs of sides, built on first use."""

    def __init__(self, place: Path) -> None:
        self.place, self.pairs = place, {}

    def pair(self, name: str, seed: int, *, massive: bool = False) -> tuple[CachedNative, Seeded]:
        key = (name, seed, massive)
        if key not in self.pairs:
            there = write_model(name, seed, self.place, massive=massive)
            self.pairs[key] = CachedNative(there), Seeded(there)
        return self.pairs[key]


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
    """The name of the cause in a verdict."""
    if verdict.status != "structural":
        return "–"
    if not verdict.deciding.across:
        return "cached decoding"
    if verdict.cause is not None:
        return verdict.cause.name
    if verdict.weights:
        return "other numbers in the weights"
    return "–" if verdict.deciding.name == "forward" else verdict.deciding.name


def clean_pairs(models: Models, seeds: int, dtypes: tuple[torch.dtype, ...], tick: Any) -> list[dict[str, Any]]:
    """The verdict of every clean pair."""
    cases = []
    for seed, name, massive, dtype in itertools.product(range(seeds), FAMILIES, (False, True), dtypes):
        a, b = models.pair(name, SEED + seed, massive=massive)
        assert a.spec is not None
        b.bug = None
        verdict = verify(a, b, random_prompt(a.spec, seed=seed), dtype=dtype, why=False)
        first = None if verdict.first is None else f"{verdict.deciding.name}, {verdict.first.address}"
        how = {"family": name, "massive": massive, "dtype": str(dtype), "seed": seed}
        cases.append({"kind": "clean", **how, "status": verdict.status, "first": first, "failed": verdict.failed})
        tick()
    return cases


def seeded_models(models: Models, count: int, tick: Any) -> list[dict[str, Any]]:
    """The verdict of every model with a bug."""
    found = []
    for i, (bug, family, layer, seed) in enumerate(cases(count)):
        a, b = models.pair(family, seed)
        assert a.spec is not None
        b.bug = (bug, layer, i)
        verdict = verify(a, b, random_prompt(a.spec, seed=i))
        where, cause = f"layers.{layer}" if bug.shows == "layer" else bug.shows, named(verdict)
        failed = verdict.status == "structural"
        found.append(
            {
                "kind": bug.kind,
                "family": family,
                "where": where,
                "status": verdict.status,
                "layer": verdict.layer,
                "cause": cause,
                "missed": not failed,
                "layer_right": failed and verdict.layer == where,
                "cause_right": cause in bug.causes,
            }
        )
        tick()
    return found


def run(corrupted: int, seeds: int, dtypes: tuple[torch.dtype, ...]) -> tuple[list[Row], list[dict[str, Any]]]:
    """All clean pairs and all models with a bug."""
    pairs = seeds * len(FAMILIES) * 2 * len(dtypes)
    with tempfile.TemporaryDirectory() as place, progress("verify", corrupted + pairs) as tick:
        models = Models(Path(place))
        clean, bugs = clean_pairs(models, seeds, dtypes, tick), seeded_models(models, corrupted, tick)
    rows = []
    if bugs:
        rate = {what: sum(one[what] for one in bugs) / len(bugs) for what in ("layer_right", "missed", "cause_right")}
        rows += [
            Row("first bad layer named right", rate["layer_right"], Goal(low=0.95)),
            Row("misses", rate["missed"], Goal(high=0.02)),
            Row("cause named right", rate["cause_right"], Goal(low=0.80)),
            Row("kinds of bugs", len({one["kind"] for one in bugs})),
        ]
    if clean:
        rows += [
            Row("false alarms", sum(one["failed"] for one in clean) / len(clean), Goal(high=0.0)),
            Row("clean pairs called rounding", sum(one["status"] == "rounding" for one in clean), Goal(high=3)),
        ]
    return [*rows, Row("corrupted models", len(bugs)), Row("clean pairs", len(clean))], [*clean, *bugs]


def by_kind(cases: list[dict[str, Any]]) -> list[tuple[str, int, int, int, int, str]]:
    """(kind, models, layer right, missed, cause right, other names) of every kind of bug."""
    rows = []
    for kind in dict.fromkeys(one["kind"] for one in cases if one["kind"] != "clean"):
        mine = [one for one in cases if one["kind"] == kind]
        wrong = sorted({one["cause"] for one in mine if not one["cause_right"]})
        sums = [sum(one[what] for one in mine) for what in ("layer_right", "missed", "cause_right")]
        rows.append((kind, len(mine), *sums, ", ".join(wrong)))
    return rows


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.set_defaults(threads=1)  # a second thread does not help tiny models
    parser.add_argument("--table", type=Path, help="write every case as JSON, and the table by kind as Markdown beside it")
    parser.add_argument("--only", choices=("clean", "bugs"), help="run one half")
    parser.add_argument("--dtype", choices=[str(dtype).removeprefix("torch.") for dtype in DTYPES], help="of clean pairs")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warnings.filterwarnings("ignore")
    corrupted, seeds = (len(BUGS), 1) if given.quick else (CORRUPTED, SEEDS)
    dtypes = (getattr(torch, given.dtype),) if given.dtype else (torch.bfloat16,) if given.quick else DTYPES
    rows, verdicts = run(0 if given.only == "clean" else corrupted, 0 if given.only == "bugs" else seeds, dtypes)
    if given.table is not None:
        given.table.write_text(json.dumps(verdicts, indent=1))
        lines = ["| bug | models | layer right | missed | cause right | called instead |", "|---|--:|--:|--:|--:|---|"]
        lines += [f"| {' | '.join(map(str, row))} |" for row in by_kind(verdicts)]
        given.table.with_suffix(".md").write_text("\n".join(lines) + "\n")
    for one in verdicts:
        if one["kind"] == "clean" and one["status"] != "equal":
            print(one, file=sys.stderr)
    if not given.json:
        table = Table("bug", "models", "layer right", "missed", "cause right", "called instead")
        for row in by_kind(verdicts):
            table.add_row(*map(str, row))
        Console(width=140).print(table)
    report(rows, given.json)


if __name__ == "__main__":
    main()
