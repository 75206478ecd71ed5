"""The error of random features against softmax attention, and what a state of 32 by 32 recalls of stored pairs."""

import math

import torch

import dovetail as dt

FEATURES = (16, 64, 256, 1024, 4096)
PAIRS = (4, 8, 16, 32, 64, 128)
DRAWS, D = 20, 32


def features(x, v, exact, m, draw):
    """The relative error of attention by m random features."""
    w = torch.randn(16, m, generator=draw, dtype=torch.float64)
    phi = [torch.exp(y / 2 @ w - (y / 2).square().sum(-1, keepdim=True) / 2) for y in x]  # 16 ** 0.25 is 2
    weights = phi[0] @ phi[1].T
    return float((weights @ v / weights.sum(-1, keepdim=True) - exact).norm() / exact.norm())


def data():
    """Relative errors of outputs, and of values that are read back."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(64, 16, generator=draw, dtype=torch.float64) for _ in range(3))
    error = {}
    for length in (2, 4):  # of a query or a key, about
        x, exact = (length / 4 * q, length / 4 * k), dt.attention(length / 4 * q, length / 4 * k, v)
        error[str(length)] = [sum(features(x, v, exact, m, draw) for _ in range(DRAWS)) / DRAWS for m in FEATURES]
    recall = {"state": [], "attention": []}
    for n in PAIRS:
        keys = torch.nn.functional.normalize(torch.randn(DRAWS, n, D, generator=draw, dtype=torch.float64), dim=-1)
        values = torch.randn(DRAWS, n, D, generator=draw, dtype=torch.float64)
        state = keys.mT @ values
        recall["state"].append(float((keys @ state - values).norm() / values.norm()))
        recall["attention"].append(float((dt.attention(keys, keys, values, scale=40.0) - values).norm() / values.norm()))
    return {"error": error, "recall": recall}


def draw(figure, data):
    """Two panels."""
    error, recall = figure.subplots(1, 2)
    looks = (("o-", "#2f5fb3"), ("^-.", "#3a8f5c"))
    for (length, row), (style, color) in zip(data["error"].items(), looks, strict=True):
        error.loglog(FEATURES, row, style, color=color, markersize=4, label=f"queries and keys of length {length}")
    first = data["error"]["2"][0]
    error.loglog(FEATURES, [first * math.sqrt(FEATURES[0] / m) for m in FEATURES], ":", color="#8a90a0", label="1/√m")
    error.set(xlabel="random features m", ylabel="error ÷ output", title="random features and softmax")
    error.set_xticks(FEATURES, [f"{m:,}" for m in FEATURES])
    error.set_yticks([0.02, 0.05, 0.1, 0.2, 0.5, 1], ["0.02", "0.05", "0.1", "0.2", "0.5", "1"])
    error.minorticks_off()
    recall.semilogx(PAIRS, data["recall"]["state"], "s--", color="#d9822b", base=2, markersize=4, label="state of 32 × 32")
    recall.semilogx(PAIRS, data["recall"]["attention"], "o-", color="#2f5fb3", base=2, markersize=4, label="attention")
    recall.set_xticks(PAIRS, [str(n) for n in PAIRS])
    recall.set(xlabel="stored pairs", ylabel="error ÷ value", title="values read back", ylim=(-0.05, None))
    for axes in (error, recall):
        axes.legend(frameon=False, fontsize=9)
