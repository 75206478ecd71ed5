"""The weight of one token among many by the gap of its score, and the rotary pairs that have turned by length."""

import math

import torch

import dovetail as dt
from dovetail.spec.part import KINDS

TOKENS = [10**i for i in range(1, 7)]
GAPS = (4.0, 8.0, 12.0)
LENGTHS = [2**i for i in range(4, 21, 2)]
HEAD = 128


def frequencies(base):
    """Radians per token of each pair of channels, read off a rotation by one position."""
    x = torch.zeros(2, HEAD, dtype=torch.float64)
    x[:, : HEAD // 2] = 1.0
    rotated = dt.rope(x, KINDS["rope"](base=base))[1]
    return torch.atan2(rotated[HEAD // 2 :], rotated[: HEAD // 2])


def data():
    """Weights by gap, and shares by base."""
    weights = {}
    for gap in GAPS:
        best = [torch.eye(1, n, dtype=torch.float64).T for n in TOKENS]  # 1 at one token, 0 at all others
        one = torch.ones(1, 1, dtype=torch.float64)
        weights[f"{gap:g}"] = [float(dt.attention(one, gap * x, x, scale=1.0)) for x in best]
    turned = {}
    for base in (10_000.0, 500_000.0):
        turns = 2 * math.pi / frequencies(base)
        turned[f"{base:,.0f}"] = [float((turns <= n).double().mean()) for n in LENGTHS]
    return {"weights": weights, "turned": turned}


def draw(figure, data):
    """Two panels."""
    weights, turned = figure.subplots(1, 2)
    styles = (("^:", "#3a8f5c"), ("s--", "#d9822b"), ("o-", "#2f5fb3"))
    for (gap, row), (style, color) in zip(data["weights"].items(), styles, strict=True):
        weights.semilogx(TOKENS, row, style, color=color, markersize=4, label=f"gap {gap}")
    weights.set(xlabel="tokens", ylabel="weight", title="weight of the best token", ylim=(-0.03, 1.03))
    for (base, row), (style, color) in zip(data["turned"].items(), styles[:0:-1], strict=True):
        turned.semilogx(LENGTHS, row, style, color=color, markersize=4, base=2, label=f"base {base}")
    turned.set(xlabel="tokens", ylabel="share of pairs", title="rotary pairs with a full turn", ylim=(0, 1.03))
    turned.set_xticks([16, 256, 4096, 65536, 2**20], ["16", "256", "4,096", "65,536", "1 M"])
    for axes in (weights, turned):
        axes.legend(frameon=False)
