"""The losses of preference tuning equal those of trl, by trl's own code: bash benchmarks/peers/make tuning."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from dovetail.training.preference import Dpo, Ipo, Kto, Orpo, Scores

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".peers" / "tuning" / "bin" / "python"
READY = (PYTHON.parents[1] / "ready").exists()


def pairs() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(3)
    names = ("chosen", "rejected", "reference_chosen", "reference_rejected")
    found: dict[str, Any] = {name: (-8 * torch.rand(5, generator=draw, dtype=torch.float64) - 0.1).tolist() for name in names}
    found |= {f"{name}_tokens": torch.randint(1, 8, (5,), generator=draw).tolist() for name in names[:2]}
    return {**found, "beta": 0.3, "good": [True, False, True, True, False]}


def side(given: dict[str, Any], name: str) -> Scores:
    values = (given[name], given[f"reference_{name}"], given[f"{name}_tokens"])
    return Scores(*(torch.tensor(one, dtype=torch.float64) for one in values))


@pytest.mark.slow
@pytest.mark.skipif(not READY, reason="bash benchmarks/peers/make tuning")
def test_losses_are_those_of_trl() -> None:
    given = pairs()
    script = Path(__file__).with_name("trl_losses.py")
    done = subprocess.run([PYTHON, script], input=json.dumps({"pairs": given}), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    theirs = json.loads(done.stdout.splitlines()[-1])
    chosen, rejected = side(given, "chosen"), side(given, "rejected")
    for kind in (Dpo, Ipo):
        ours = float(kind(beta=given["beta"]).losses(chosen, rejected).mean())
        assert ours == pytest.approx(theirs[kind.name], rel=1e-12), kind.name
    # trl computes the odds in float32
    assert float(Orpo(beta=given["beta"]).losses(chosen, rejected).mean()) == pytest.approx(theirs["orpo"], rel=1e-6)
    margins = torch.tensor(given["chosen"], dtype=torch.float64) - torch.tensor(given["rejected"], dtype=torch.float64)
    assert float(-torch.nn.functional.logsigmoid(margins).mean()) == pytest.approx(theirs["reward"], rel=1e-12)
    kto = Kto(beta=given["beta"], desirable=1.5, undesirable=0.5)
    losses, _ = kto.losses(chosen, rejected.ratio, torch.tensor(given["good"]))
    assert float(losses.mean()) == pytest.approx(theirs["kto"], rel=1e-12)
