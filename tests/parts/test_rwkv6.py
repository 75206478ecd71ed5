"""RWKV's time mix: the whole mixer against its formula written out in numpy."""

import numpy as np
import pytest
import torch

from dovetail.base.errors import SpecError
from dovetail.files.spec import from_yaml
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.case import perturbed
from dovetail.spec.check import check
from dovetail.spec.fold import state_values

HEADS, HEAD, N = 2, 5, 19


def spec(**changed: object):
    fields = {"kind": "rwkv6", "heads": HEADS, "head": HEAD, "mix_rank": 3, "decay_rank": 6, **changed}
    layer = ", ".join(f"{name}: {value}" for name, value in fields.items())
    return from_yaml(f"{{width: 28, vocab: 62, layers: [{{mixer: {{{layer}}}, ffn: null}}], head: null}}")


def test_it_is_the_formula() -> None:
    mixer = perturbed(spec()).layers[0].mixer
    x = torch.randn(1, N, 28, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    w = {name: p.detach().numpy() for name, p in mixer.named_parameters()}
    u, y = x[0].numpy(), np.zeros((N, HEADS, HEAD))
    before = np.concatenate([np.zeros((1, 28)), u[:-1]])
    m = np.tanh((u + (before - u) * w["mu_x"]) @ w["mix_down.weight"].T)
    mixed = {}
    for i, name in enumerate("rkvwg"):
        share = w[f"mu_{name}"] + m[:, 3 * i : 3 * i + 3] @ w[f"mix_{name}.weight"].T
        mixed[name] = u + (before - u) * share
    r, k, v = ((mixed[name] @ w[f"{name}.weight"].T).reshape(N, HEADS, HEAD) for name in "rkv")
    g = mixed["g"] @ w["g.weight"].T
    a = np.exp(-np.exp(w["fade"] + np.tanh(mixed["w"] @ w["fade_down.weight"].T) @ w["fade_up.weight"].T))
    a, bonus = a.reshape(N, HEADS, HEAD), w["bonus"].reshape(HEADS, HEAD)
    for head in range(HEADS):
        memory = np.zeros((HEAD, HEAD))
        for t in range(N):
            new = np.outer(k[t, head], v[t, head])
            y[t, head] = r[t, head] @ (memory + np.diag(bonus[head]) @ new)
            memory = np.diag(a[t, head]) @ memory + new
    y = (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 64e-5)
    want = ((y.reshape(N, -1) * w["scale"] + w["shift"]) * g / (1 + np.exp(-g))) @ w["o.weight"].T
    got = mixer(x, Ctx(layout=TokenLayout.whole(1, N)))[0].detach().numpy()
    assert np.abs(got - want).max() < 1e-12


def test_the_state_is_one_token_and_one_matrix_per_head() -> None:
    assert state_values(spec(), 10) == state_values(spec(), 10_000) == 28 + HEADS * HEAD * HEAD


def test_first_layers_decay_faster_than_last_ones() -> None:
    made = from_yaml("{width: 28, layers: [{repeat: 3, mixer: {kind: rwkv6, heads: 4}}]}")
    fades = [block.mixer.fade.mean().item() for block in build(made).layers]
    assert fades == sorted(fades, reverse=True)


def test_errors_name_the_field() -> None:
    for bad, field in (({"eps": 0.0}, "eps"), ({"decay_rank": 0}, "decay_rank"), ({"heads": 3, "head": "null"}, "heads")):
        with pytest.raises(SpecError, match=f"layers.0.mixer.{field}"):
            check(spec(**bad))
