"""How well `dovetail verify` locates and names mistakes that nobody chose: mechanical mutations of transformers' own source.

    python benchmarks/blind.py [--json] [--quick] [--seed N] [--table FILE]

transformers makes one tiny random model of each of 5 families. One site of its installed modeling file is changed
(blind_sites.py): kind, site and layer are drawn by the seed, kinds with the same probability. The changed classes replace ONE
layer and hold its weights, so that the first bad layer is known by construction. A mutation counts if the model still runs, in
float32 and float64, its logits are finite, and some float64 logit changes by more than 1e-6; else another site of the kind is
drawn. Then `dovetail.verify` compares the model directory, run by us, with a function that returns the changed model of
transformers.

    first bad layer named right    fraction of the mutated models
    part named right               fraction of the mutated models: the part that computes the first bad tap is the one whose
                                   code is changed, by class: attention with its rotary tables and functions, feed-forward with
                                   its experts and router, norm, or the layer's own code with what the statement calls
    misses                         fraction of the mutated models that were called equal or rounding, or had no verdict
    cause named                    fraction of the mutated models; most mutations are in no list of causes
    cause named right              fraction of the causes that were named: cause and changed statement have a class in common.
                                   Classes: rotary, norm, scale, soft-cap, mask, activation, heads, weights, residual, router;
                                   of a statement by the words of its names, of a cause by its name (blind_rules.py)
    false alarms                   fraction of the families whose unchanged model, built in the same way, was called two
                                   functions

The rules of parts and causes were written before the first score was taken. That was of seed 1, after which names are swapped
like with like, a kind is tried until one of its mutations counts, and a model without a verdict is a miss. The published figure
is taken with a seed that was not used before, and nothing is changed for it. No row has a goal: it is published as it is.
"""

from __future__ import annotations

import json
import random
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from blind_rules import classes_of_cause, classes_of_site, parts_of_site, parts_of_tap
from blind_sites import ROTARY, ModelingFile, Site, classes, file_of, sites
from measure import Row, arguments, progress, report
from rich.console import Console
from rich.table import Table
from seeded_bugs import layers
from torch import Tensor, nn
from verify import named, write_model

import dovetail
from dovetail.base.errors import DovetailError
from dovetail.proof.compare.check import Verdict
from dovetail.proof.compare.float64 import float32_islands_widened
from dovetail.proof.compare.transformers_side import transformers
from dovetail.views.verdict import within

SEED = 20_261_118
FAMILIES = ("llama", "qwen3", "gemma2", "mixtral", "gpt2")
PER_FAMILY = 8
CHANGE = 1e-6  # the least change of a logit in float64
DTYPES = (torch.float64, torch.float32)
TOKENS = (2, 41)


class Original:
    """The tiny model of a family, from which changed ones are built."""

    def __init__(self, family: str, seed: int, place: Path) -> None:
        self.family, self.directory = family, write_model(family, seed, place)
        self.config = transformers().AutoConfig.from_pretrained(self.directory)
        self.weights = dict(transformers().AutoModelForCausalLM.from_pretrained(self.directory).state_dict())
        self.file = file_of(self.build())
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(self.config.vocab_size, TOKENS, generator=generator)
        self.logits = {dtype: self.run(self.build, dtype) for dtype in DTYPES}

    def build(self) -> Any:
        """The model of transformers, in the default dtype."""
        eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
        model = transformers().AutoModelForCausalLM.from_config(self.config, **eager)
        model.load_state_dict(self.weights)
        return model.eval()

    def factory(self, changed: dict[str, type[nn.Module]], layer: int) -> Callable[[], nn.Module]:
        """A function that returns the model with one layer of the changed classes."""

        def build() -> nn.Module:
            model = self.build()
            make: Any = changed[self.file.layer]
            other = make(model.config, layer_idx=layer)
            other.load_state_dict(layers(model)[layer].state_dict())
            if self.file.rotary is not None:
                tables: Any = changed[self.file.rotary]
                _with_rotary(other, tables(config=model.config))
            layers(model)[layer] = other
            return model.eval()

        return build

    @torch.no_grad()
    def run(self, build: Callable[[], nn.Module], dtype: torch.dtype) -> Tensor:
        """The logits of a model in a dtype."""
        with float32_islands_widened(dtype):
            return build().to(dtype)(self.tokens).logits

    def outcome(self, build: Callable[[], nn.Module]) -> str:
        """`changed`, or why the mutation does not count."""
        try:
            logits = {dtype: self.run(build, dtype) for dtype in DTYPES}
        except Exception:  # whatever the changed code raises
            return "raised"
        if any(found.shape != self.logits[dtype].shape for dtype, found in logits.items()):
            return "raised"
        if not all(found.isfinite().all() for found in logits.values()):
            return "not finite"
        change = (logits[DTYPES[0]] - self.logits[DTYPES[0]]).abs().max().item()
        return "changed" if change > CHANGE else "no effect"


def _with_rotary(layer: nn.Module, tables: nn.Module) -> None:
    """Let one layer read cos and sin from its own tables."""
    layer.add_module(ROTARY, tables)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, "position_embeddings": tables(args[0], kwargs["position_ids"])}

    layer.register_forward_pre_hook(hook, with_kwargs=True)


def drawn(original: Original, count: int, draw: random.Random, rejected: Counter[str]) -> list[tuple[Site, int, Any]]:
    """(site, layer, factory) of mutations that count."""
    by_kind: dict[str, list[Site]] = {}
    for site in sites(original.file):
        by_kind.setdefault(site.kind, []).append(site)
    found: list[tuple[Site, int, Any]] = []
    while len(found) < count and any(by_kind.values()):
        kind = by_kind[draw.choice(sorted(name for name, some in by_kind.items() if some))]
        found += _first_that_counts(original, kind, draw, rejected)
    return found


def _first_that_counts(original: Original, kind: list[Site], draw: random.Random, rejected: Counter[str]) -> list[Any]:
    """One mutation of a kind that counts; none where no site is left."""
    while kind:
        site, layer = kind.pop(draw.randrange(len(kind))), draw.randrange(original.config.num_hidden_layers)
        build = _changed(original, original.file, site, layer)
        outcome = "raised" if build is None else original.outcome(build)
        if outcome == "changed":
            return [(site, layer, build)]
        rejected[outcome] += 1
    return []


def _changed(original: Original, file: ModelingFile, site: Site | None, layer: int) -> Callable[[], nn.Module] | None:
    try:
        return original.factory(classes(file, site), layer)
    except Exception:  # a class that cannot be defined
        return None


NOTHING = {"missed": True, **dict.fromkeys(("layer_right", "part_right", "cause_named", "cause_right"), False)}


def _site(original: Original, site: Site, layer: int) -> dict[str, Any]:
    """The mutation, without the source text."""
    place = {"family": original.family, "kind": site.kind, "line": site.line, "within": site.within}
    return {**place, "change": site.what.rpartition(": ")[2], "mutated_layer": layer}


def judged(original: Original, site: Site, layer: int, build: Any, seed: int) -> dict[str, Any]:
    """The verdict on one mutated model, and whether it is right."""
    try:
        verdict = dovetail.verify(str(original.directory), build, seed=seed).verdict
    except DovetailError as error:  # no verdict: a miss
        return {**_site(original, site, layer), "status": "error", "first": str(error), "cause": "–", **NOTHING}
    assert isinstance(verdict, Verdict)
    missed, cause = verdict.status in ("equal", "rounding"), named(verdict)
    where = verdict.layer == f"layers.{layer}" and not missed
    tap = "" if verdict.first is None else within(verdict.first.address)
    return {
        **_site(original, site, layer),
        "status": verdict.status,
        "first": None if verdict.first is None else verdict.first.address,
        "cause": cause,
        "missed": missed,
        "layer_right": where,
        "part_right": where and bool(parts_of_site(site.within, site.statement) & parts_of_tap(tap)),
        "cause_named": cause != "–",
        "cause_right": bool(classes_of_site(site.within, site.statement) & classes_of_cause(cause)),
    }


def run(seed: int, families: tuple[str, ...], count: int) -> tuple[list[Row], list[dict[str, Any]]]:
    """Mutate and verify; and verify every family unchanged."""
    cases: list[dict[str, Any]] = []
    alarms, rejected = 0, Counter[str]()
    with tempfile.TemporaryDirectory() as place, progress("blind", len(families) * (count + 1)) as tick:
        for family in families:
            draw = random.Random(f"{seed} {family}")
            original = Original(family, draw.randrange(2**31), Path(place))
            unchanged = _changed(original, original.file, None, draw.randrange(original.config.num_hidden_layers))
            alarms += dovetail.verify(str(original.directory), unchanged, seed=seed).failed
            tick()
            for site, layer, build in drawn(original, count, draw, rejected):
                cases.append(judged(original, site, layer, build, seed=len(cases)))
                tick()
    sums = {
        what: sum(one[what] for one in cases) for what in ("layer_right", "part_right", "missed", "cause_named", "cause_right")
    }
    rows = [
        Row("first bad layer named right", sums["layer_right"] / len(cases)),
        Row("part named right", sums["part_right"] / len(cases)),
        Row("misses", sums["missed"] / len(cases)),
        Row("cause named", sums["cause_named"] / len(cases)),
        Row("cause named right", sums["cause_right"] / max(1, sums["cause_named"])),
        Row("false alarms", alarms / len(families)),
        Row("mutated models", len(cases)),
        Row("families", len(families)),
        Row("seed", seed),
        *(Row(f"mutations drawn again: {name}", rejected[name]) for name in ("raised", "not finite", "no effect")),
    ]
    return rows, cases


def tallied(cases: list[dict[str, Any]], by: str) -> list[tuple[Any, ...]]:
    """(value of the column, models, layer right, part right, missed, cause named, cause right) for every value of a column."""
    rows: list[tuple[Any, ...]] = []
    for value in sorted({one[by] for one in cases}):
        mine = [one for one in cases if one[by] == value]
        columns = ("layer_right", "part_right", "missed", "cause_named", "cause_right")
        rows.append((value, len(mine), *(sum(one[column] for one in mine) for column in columns)))
    return rows


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.set_defaults(threads=1)  # a second thread does not help tiny models
    parser.add_argument("--seed", type=int, default=SEED, help="of models, mutations and layers")
    parser.add_argument("--table", type=Path, help="write every case as JSON")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    warnings.filterwarnings("ignore")
    rows, cases = run(given.seed, FAMILIES[:2] if given.quick else FAMILIES, 2 if given.quick else PER_FAMILY)
    if given.table is not None:
        given.table.write_text(json.dumps(cases, indent=1, ensure_ascii=False) + "\n")
    if not given.json:
        table = Table("mutation", "models", "layer right", "part right", "missed", "cause named", "cause right")
        for row in (*tallied(cases, "kind"), *tallied(cases, "family")):
            table.add_row(*map(str, row))
        Console(width=140).print(table)
    report(rows, given.json, {"transformers": transformers().__version__})


if __name__ == "__main__":
    main()
