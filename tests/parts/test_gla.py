"""Gated linear attention: the whole mixer against its formula written out in numpy."""

import numpy as np
import pytest
import torch

from dovetail.base.errors import SpecError
from dovetail.files.spec import from_yaml
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.case import perturbed
from dovetail.spec.check import check
from dovetail.spec.fold import state_values

HEADS, KEY, VALUE, N = 2, 5, 6, 19


def spec(**changed: object):
    fields = {
        "kind": "gla",
        "heads": HEADS,
        "key_size": KEY,
        "value_size": VALUE,
        "rank": 3,
        "gate_normalizer": 4.0,
        **changed,
    }
    layer = ", ".join(f"{name}: {value}" for name, value in fields.items())
    return from_yaml(f"{{width: 28, vocab: 62, layers: [{{mixer: {{{layer}}}, ffn: null}}], head: null}}")


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


def test_it_is_the_formula() -> None:
    mixer = perturbed(spec()).layers[0].mixer
    x = torch.randn(1, N, 28, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w = {name: p.detach().numpy() for name, p in mixer.named_parameters()}
    u = x[0].numpy()
    q, k = ((u @ w[f"{name}.weight"].T).reshape(N, HEADS, KEY) for name in "qk")
    v, gate = ((u @ w[f"{name}.weight"].T).reshape(N, HEADS, VALUE) for name in ("v", "gate"))
    low = u @ w["fade_down.weight"].T @ w["fade_up.weight"].T + w["fade_up.bias"]
    a = (sigmoid(low) ** (1 / 4.0)).reshape(N, HEADS, KEY)
    y = np.zeros((N, HEADS, VALUE))
    for head in range(HEADS):
        memory = np.zeros((KEY, VALUE))
        for t in range(N):
            memory = np.diag(a[t, head]) @ memory + np.outer(k[t, head], v[t, head])
            y[t, head] = q[t, head] @ memory / np.sqrt(KEY)
    y = y / np.sqrt((y**2).mean(-1, keepdims=True) + 1e-5) * w["norm.scale"]
    want = (y * gate * sigmoid(gate)).reshape(N, -1) @ w["o.weight"].T
    got = mixer(x, Ctx(layout=TokenLayout.whole(1, N)))[0].detach().numpy()
    assert np.abs(got - want).max() < 1e-12


def test_state_is_key_by_value_and_independent_of_n() -> None:
    assert state_values(spec(), 10) == state_values(spec(), 10_000) == HEADS * KEY * VALUE


def test_errors_name_the_field() -> None:
    for bad, field in (
        ({"gate_normalizer": 0.0}, "gate_normalizer"),
        ({"rank": 0}, "rank"),
        ({"heads": 4, "key_size": "null"}, "heads"),
    ):
        with pytest.raises(SpecError, match=f"layers.0.mixer.{field}"):
            check(spec(**bad))
