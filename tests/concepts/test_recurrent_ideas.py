"""Recurrent mixers compared with attention: the size of the state, and how far back a gradient reaches."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from dovetail.files.spec import from_yaml, load_spec
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx, Listener
from dovetail.nn.layout import TokenLayout
from dovetail.spec.fold import state_values

RECURRENT = ("rnn", "lstm", "gru", "mamba", "mamba2", "s4")


def one_layer(mixer: str) -> str:
    return f"{{width: 64, vocab: 62, layers: [{{mixer: {mixer}, ffn: null}}]}}"


@pytest.mark.parametrize("kind", RECURRENT)
def test_a_recurrent_state_has_the_same_size_after_ten_and_a_million_tokens(kind: str) -> None:
    spec = from_yaml(one_layer(kind))
    assert state_values(spec, 10) == state_values(spec, 1_000_000) > 0
    attention = from_yaml(one_layer("attention"))
    assert state_values(attention, 1_000_000) == 100_000 * state_values(attention, 10)


def test_only_the_attention_layers_of_a_hybrid_have_a_kv_cache() -> None:
    spec = load_spec("mamba2-hybrid-tiny")
    assert [block.mixer.kind for block in spec.layers] == ["mamba2", "mamba2", "mamba2", "attention"]
    a_token = state_values(spec, 1001) - state_values(spec, 1000)
    assert a_token == 2 * 2 * 28  # keys and values of two heads, one layer


def steepness(mixer: str, n: int = 24) -> float:
    """How the gradient of the last output falls with the distance of an input: the mean change of its logarithm a token."""
    logs = torch.zeros(n, dtype=torch.float64)
    for seed in range(4):
        model = build(from_yaml(one_layer(mixer)), dtype=torch.float64, seed=seed)
        seen: list[Tensor] = []

        def listen(_: str, x: Tensor, seen: list[Tensor] = seen) -> Tensor:
            seen.append(x.detach().requires_grad_())
            return seen[0]

        tokens = torch.randint(0, 62, (1, n), generator=torch.Generator().manual_seed(seed))
        out = model.hidden(tokens, Ctx(layout=TokenLayout.whole(1, n), taps=Listener({"embedded": listen})))[0]
        (grad,) = torch.autograd.grad(out[0, -1].square().sum() + out[0, -1].sum(), seen)
        logs += grad[0].norm(dim=-1).log() / 4
    return float(logs[2] - logs[-2]) / (n - 4)  # from the token before the last back to the third


def test_gradients_fall_fast_in_an_rnn_slower_in_an_lstm_and_not_in_attention() -> None:
    rnn, lstm, attention = (steepness(kind) for kind in ("rnn", "lstm", "{kind: attention, position: none}"))
    assert rnn < -1.0
    assert abs(lstm - math.log(0.7310585786)) < 0.05  # the forget gate starts at σ(1)
    assert abs(attention) < 0.05
