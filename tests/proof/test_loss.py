"""Law 18, loss: its criteria, and the heads that it is tested on."""

import pytest
import torch
import torch.nn.functional as F

from checks.mutants.seeded.loss import with_head
from dovetail.nn.groups import Head
from dovetail.proof.laws import loss
from dovetail.proof.laws.case import Case
from dovetail.spec.part import KINDS

HEADS = sorted(kind for kind, cls in KINDS.items() if issubclass(cls, Head))


@pytest.mark.parametrize("kind", HEADS)
def test_it_holds_for_every_head(kind: str):
    case = Case(with_head(kind=kind))
    loss.loss(case)
    assert case.compared == 3


def test_the_criteria_are_those_of_torch():
    y, t = torch.randn(5, 7, dtype=torch.float64), torch.randn(5, 7, dtype=torch.float64)
    labels = torch.tensor([3, -100, 6, 0, -100])
    torch.testing.assert_close(loss.cross_entropy(y, labels), F.cross_entropy(y, labels, ignore_index=-100))
    torch.testing.assert_close(loss.cosine(y, t), (1 - F.cosine_similarity(y, t)).mean())
    torch.testing.assert_close(loss.mse(y, t), F.mse_loss(y, t))
