"""The losses of preference tuning and of GRPO equal those of trl, by trl's own code: bash benchmarks/peers/make tuning."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import Tensor

from dovetail.data.corpus import Batch
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.loss import IGNORED
from dovetail.text.conversation import Encoded
from dovetail.training.grpo import Grpo, Sampler
from dovetail.training.preference import Dpo, Ipo, Kto, Orpo, Scores, two_sided

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".peers" / "tuning" / "bin" / "python"
READY = (PYTHON.parents[1] / "ready").exists()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(not READY, reason="bash benchmarks/peers/make tuning")]
VOCAB = 11


def pairs() -> dict[str, Any]:
    draw = torch.Generator().manual_seed(3)
    names = ("chosen", "rejected", "reference_chosen", "reference_rejected")
    found: dict[str, Any] = {name: (-8 * torch.rand(5, generator=draw, dtype=torch.float64) - 0.1).tolist() for name in names}
    found |= {f"{name}_tokens": torch.randint(1, 8, (5,), generator=draw).tolist() for name in names[:2]}
    return {**found, "beta": 0.3, "good": [True, False, True, True, False]}


def side(given: dict[str, Any], name: str) -> Scores:
    values = (given[name], given[f"reference_{name}"], given[f"{name}_tokens"])
    return Scores(*(torch.tensor(one, dtype=torch.float64) for one in values))


def texts() -> dict[str, Any]:
    """Pairs of token ids with prompts of some tokens; chosen texts of one length, of which the mean per row is that of all."""
    draw = torch.Generator().manual_seed(5)

    def tokens(count: int) -> list[int]:
        return torch.randint(1, VOCAB, (count,), generator=draw).tolist()

    prompts = [tokens(count) for count in (2, 3, 4)]
    chosen = [prompt + tokens(8 - len(prompt)) for prompt in prompts]
    rejected = [prompt + tokens(count) for prompt, count in zip(prompts, (5, 1, 3), strict=True)]
    table = torch.randn(VOCAB, VOCAB, generator=draw, dtype=torch.float64).tolist()
    return {"chosen": chosen, "rejected": rejected, "starts": [len(one) for one in prompts], "table": table, "beta": 0.3}


def groups() -> Iterator[dict[str, Any]]:
    """Rollouts with ratios on both sides of the clip, with and without a reference."""
    draw = torch.Generator().manual_seed(7)
    for kl in (0.0, 0.2):
        policy = -2 * torch.rand(4, 6, generator=draw, dtype=torch.float64)
        old, reference = (policy + 0.3 * torch.randn(4, 6, generator=draw, dtype=torch.float64) for _ in range(2))
        lengths = torch.tensor([6, 2, 5, 1])
        found = {"policy": policy, "old": old, "reference": reference, "mask": (torch.arange(6) < lengths[:, None]).long()}
        found["advantages"] = torch.randn(4, generator=draw, dtype=torch.float64)
        yield {**{name: one.tolist() for name, one in found.items()}, "kl": kl, "clip": 0.2}


@pytest.fixture(scope="module")
def theirs() -> dict[str, Any]:
    """The losses by the code of trl."""
    script = Path(__file__).with_name("trl_losses.py")
    given = json.dumps({"pairs": pairs(), "texts": texts(), "grpo": list(groups())})
    done = subprocess.run([PYTHON, script], input=given, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def same(ours: Tensor, of: Tensor, want: dict[str, Any], bound: float) -> None:
    """Compare a loss and its gradient, relative to the largest value."""
    (gradient,) = torch.autograd.grad(ours, of)
    assert ours.item() == pytest.approx(want["value"], rel=bound)
    expected = torch.tensor(want["gradient"], dtype=torch.float64)
    assert expected.abs().max() > 1e-3
    assert (gradient - expected).abs().max() <= bound * expected.abs().max()


def test_losses_are_those_of_trl(theirs: dict[str, Any]) -> None:
    given = pairs()
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


def test_the_text_term_of_orpo_and_its_whole_loss_are_those_of_trl(theirs: dict[str, Any]) -> None:
    given = texts()
    table = torch.tensor(given["table"], dtype=torch.float64, requires_grad=True)

    def log_probs(tokens: Tensor, labels: Tensor, ctx: Ctx) -> Tensor:
        found = table[tokens].log_softmax(-1).gather(-1, labels.clamp_min(0)[..., None])[..., 0]
        return found.masked_fill(labels == IGNORED, 0)

    sides = [
        [Encoded(np.array(row), np.arange(len(row)) >= start) for row, start in zip(given[name], given["starts"], strict=True)]
        for name in ("chosen", "rejected")
    ]
    batch, model = two_sided(*sides, np.arange(3), 16), cast("ModelModule", SimpleNamespace(log_probs=log_probs))
    text = Orpo(beta=0.0).pair_losses(model, batch, 0, False).losses.mean()
    same(text, table, theirs["orpo_text"]["text"], 1e-12)
    whole = Orpo(beta=given["beta"]).pair_losses(model, batch, 0, False).losses.mean()
    same(whole, table, theirs["orpo_text"]["whole"], 1e-6)  # trl computes the odds in float32


def test_the_loss_of_grpo_is_that_of_trl(theirs: dict[str, Any]) -> None:
    for given, want in zip(groups(), theirs["grpo"], strict=True):
        names = ("policy", "old", "reference", "advantages")
        policy, old, reference, advantages = (torch.tensor(given[name], dtype=torch.float64) for name in names)
        policy.requires_grad_()
        mask = torch.tensor(given["mask"]).bool()
        clipped = ((policy.detach() - old).exp() - 1).abs()[mask] > given["clip"]
        assert clipped.any()
        assert not clipped.all()
        labels = torch.zeros(mask.shape, dtype=torch.long).masked_fill(~mask, IGNORED)
        extra = {"old": old, "advantages": advantages, **({"reference": reference} if given["kl"] else {})}
        batch = Batch(torch.zeros_like(labels), labels, TokenLayout.whole(*mask.shape), extra=extra)
        sampler = cast("Sampler", SimpleNamespace(temperature=1.0))
        objective = Grpo(clip_ratio=given["clip"], kl=given["kl"], sampler=sampler)
        model = cast("ModelModule", SimpleNamespace(log_probs=lambda *_, policy=policy: policy))
        same(objective(model, batch, 0, False).mean(), policy, want, 1e-12)
