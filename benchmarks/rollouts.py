"""How well `dovetail verify --rollouts` explains a gap between a sampler and a trainer.

    python benchmarks/rollouts.py [--json] [--quick] [--seed 0] [--only KIND] [--table FILE]

One hundred gaps of nine kinds are made on purpose (rollout_gaps.py), on tiny models of three families. Rows:

    right cause named first           fraction of the gaps; of truncation the right rule, of a rope base the field. Some
                                      samplers with settings run in bfloat16; where its rounding is the larger part, dtype
    largest error of the sum          how far the shares of a gap are from 1 in sum
    share of the settings             the largest error of a share of temperature and truncation, known from the sampler's
                                      own log-probs before them; gaps with settings
    wrong exit codes                  1 belongs to shift and structure, 0 to settings, rounding and stale weights
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch
from measure import Goal, Row, arguments, progress, report
from rich.console import Console
from rich.table import Table
from rollout_gaps import Gap, Maker, all_gaps

from dovetail.proof.compare.sides import ModelSide
from dovetail.proof.rollouts.check import explain_rollouts
from dovetail.proof.rollouts.file import read_rollouts

FAILS = ("shift", "rope base")
SETTINGS = ("temperature", "top_p", "top_k", "min_p")
QUICK = 9  # one of each kind, or so


def explained(gap: Gap, place: Path) -> dict[str, Any]:
    """Explain one gap; whether the answer is right, and the errors of its shares."""
    file = gap.write(place / "rollouts.jsonl")
    older = [ModelSide(model, f"older {k}") for k, model in enumerate(gap.older)]
    verdict = explain_rollouts(ModelSide(gap.trainer), str(file), read_rollouts(file), older=older)
    first, names, words = verdict.causes[0], gap.names, gap.words
    truth = settings_share(gap) if gap.kind in SETTINGS else 1.0
    if truth < 0.5:  # a sampler in bfloat16, whose rounding is the larger part
        names, words = ("dtype",), ""
    right = first.name in names and words in first.description
    shares = {one.name: one.share for one in verdict.causes}
    case: dict[str, Any] = {
        "kind": gap.kind,
        "family": gap.family,
        "detail": gap.detail,
        "right": right,
        "first": f"{first.name}: {first.description}",
        "status": verdict.status,
        "exit_right": verdict.failed == (gap.kind in FAILS),
        "sum": sum(shares.values()),
        "shares": shares,
        "mean_abs": verdict.statistics.mean_abs,
    }
    if gap.kind in SETTINGS:
        case["truth"] = truth
        case["settings_error"] = abs(shares.get("temperature", 0.0) + shares.get("truncation", 0.0) - truth)
    return case


def settings_share(gap: Gap) -> float:
    """The share of the settings, from the sampler's log-probs before and after them."""
    from dovetail.nn.ctx import Ctx
    from dovetail.nn.layout import TokenLayout

    sampler = torch.tensor([line["logprobs"] for line in gap.lines], dtype=torch.float64)
    raw = torch.tensor([line["raw"] for line in gap.lines], dtype=torch.float64)
    ids = torch.tensor([line["prompt_ids"] + line["completion_ids"] for line in gap.lines])
    with torch.no_grad():
        logits = gap.trainer(ids, Ctx(layout=TokenLayout.whole(*ids.shape))).double().log_softmax(-1)
    n = ids.shape[1] - sampler.shape[1]
    trainer = logits[:, n - 1 : -1].gather(2, ids[:, n:, None])[..., 0]
    delta = sampler - trainer
    return (((sampler - raw) * delta).sum() / delta.square().sum()).item()


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.set_defaults(threads=1)
    parser.add_argument("--seed", type=int, default=0, help="of the models, settings and tokens")
    parser.add_argument("--only", help="one kind of gap")
    parser.add_argument("--table", type=Path, help="write every case as JSON")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    maker = Maker(6, 24, given.seed) if given.quick else Maker(seed=given.seed)
    every = [(kind, make) for kind, make in all_gaps(maker) if given.only in (None, kind)]
    if given.quick:
        every = every[:: len(every) // QUICK]
    cases: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as place, progress("rollouts", len(every)) as tick:
        for _, make in every:
            cases.append(explained(make(), Path(place)))
            if given.table is not None:  # also where it is stopped
                given.table.write_text(json.dumps(cases, indent=1))
            tick()
    rows = [
        Row("right cause named first", sum(one["right"] for one in cases) / len(cases), Goal(low=0.9)),
        Row("largest error of the sum of shares", max(abs(one["sum"] - 1) for one in cases), Goal(high=0.05)),
        Row("largest error of a share of settings", max(one.get("settings_error", 0.0) for one in cases), Goal(high=0.05)),
        Row("wrong exit codes", sum(not one["exit_right"] for one in cases)),
        Row("gaps", len(cases)),
    ]
    kinds = dict.fromkeys(one["kind"] for one in cases)
    rows += [Row(f"{kind}, right", *_rate([one for one in cases if one["kind"] == kind])) for kind in kinds]
    if not given.json:
        table = Table("gap", "detail", "first", "status", "right")
        for one in cases:
            if not one["right"] or not one["exit_right"]:
                table.add_row(one["kind"], f"{one['family']} {one['detail']}", one["first"], one["status"], str(one["right"]))
        Console(width=180).print(table)
    report(rows, given.json)


def _rate(cases: list[dict[str, Any]]) -> tuple[float]:
    return (sum(one["right"] for one in cases) / len(cases),)


if __name__ == "__main__":
    main()
