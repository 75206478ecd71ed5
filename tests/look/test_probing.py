from __future__ import annotations

import pytest
import torch
from tiny import MODEL
from torch import Tensor

import dovetail as dt
from dovetail.base.errors import InputError
from dovetail.look.probing import probe

DRAW = torch.Generator().manual_seed(0)
ROWS = torch.randint(0, 62, (60, 9), generator=DRAW)
LABELS = torch.randint(0, 2, (60, 9), generator=DRAW)
DIRECTION = torch.randn(28, generator=DRAW, dtype=torch.float64)


def planted(x: Tensor) -> Tensor:
    """The activation, with the label along a direction."""
    return x + (2 * LABELS[..., None] - 1) * DIRECTION


def test_a_planted_feature_is_found_and_one_that_is_not_there_is_not() -> None:
    done: list[tuple[int, int]] = []
    over = ["layers.1.in", "layers.0.in"]
    found = probe(MODEL, ROWS, LABELS, over, patch={"layers.1.in": planted}, progress=lambda *n: done.append(n))
    there, absent = found["layers.1.in"], found["layers.0.in"]
    assert there.accuracy > 0.97
    assert there.selectivity > 0.25
    assert abs(absent.accuracy - 0.5) < 0.15
    assert there.tokens == 15 * 9
    assert done == [(1, 2), (2, 2)]
    with torch.no_grad():
        run = dt.look.trace(MODEL, ROWS, "layers.1.in", patch={"layers.1.in": planted})["layers.1.in"]
        assert float((there(run).argmax(-1) == LABELS).float().mean()) > 0.97
        without = {"layers.1.in": dt.look.project_out(there.direction(1, 0))}
        again = dt.look.trace(MODEL, ROWS, "layers.1.in", patch=without)["layers.1.in"]
    assert float((there(again).argmax(-1) == LABELS).float().mean()) < 0.65  # the direction is what it read


def test_the_control_task_tells_memory_from_meaning() -> None:
    """A label that is a function of the token id can be read off embeddings, and so can a random one."""
    rows = ROWS % 28
    found = probe(MODEL, rows, rows % 2, "embedded", decay=1e-4)["embedded"]
    assert found.accuracy > 0.95
    assert found.control > 0.95
    assert abs(found.selectivity) < 0.05


def test_some_tokens_and_the_axes_of_heads() -> None:
    last = torch.full_like(LABELS, -100)
    last[:, -1] = LABELS[:, -1]
    found = probe(MODEL, ROWS, last, ["layers.2.mixer.z", "layers.2.mixer.z[head=3]"])
    assert found["layers.2.mixer.z"].weight.shape == (2, 6 * 12)
    assert found["layers.2.mixer.z[head=3]"].weight.shape == (2, 12)
    assert found["layers.2.mixer.z"].tokens == 15


def test_what_cannot_be_probed_is_refused() -> None:
    with pytest.raises(InputError, match="labels: have the shape"):
        probe(MODEL, ROWS, LABELS[:, :3], "layers.1.in")
    with pytest.raises(InputError, match="needs a value for each token"):
        probe(MODEL, ROWS, LABELS, "layers.1.in[pos=-1]")
    with pytest.raises(InputError, match="two classes"):
        probe(MODEL, ROWS, torch.zeros_like(LABELS), "layers.1.in")
