"""Sparse patterns over 64 tokens, and the pairs per token by length."""

import torch

import dovetail as dt

N = 64
SIZE = (8.0, 5.4)
LENGTHS = (64, 128, 256, 512, 1024)


def mask(name, n):
    """A pattern, by name, for n tokens."""
    step = round(n**0.5)
    blocks = {"any": [{"kind": "block_local", "size": 4, "back": 1}, {"kind": "global_tokens", "tokens": 4}]}
    return {
        "window of 9": ["causal", {"kind": "window", "size": 9}],
        "strided": ["causal", {"any": [{"kind": "window", "size": step}, {"kind": "strided", "step": step}]}],
        "dilated by 4": ["causal", {"kind": "dilated", "size": 9, "step": 4}],
        "Longformer": {"any": [{"kind": "window", "size": 5}, {"kind": "global_tokens", "tokens": 2}]},
        "BigBird": {"any": [*blocks["any"], {"kind": "random_blocks", "size": 4, "count": 2}]},
    }[name]


NAMES = ("window of 9", "dilated by 4", "strided", "Longformer", "BigBird")


def data():
    """Rows of 0 and 1 by pattern, and visible pairs per token by length."""
    grids, pairs = {}, {}
    for name in NAMES:
        seen = {n: dt.attention_weights(torch.zeros(n, 1), torch.zeros(n, 1), mask=mask(name, n)) > 0 for n in LENGTHS}
        grids[name] = ["".join("1" if cell else "0" for cell in row) for row in seen[N].tolist()]
        pairs[name] = [float(seen[n].sum()) / n for n in LENGTHS]
    return {"grids": grids, "pairs": pairs}


def draw(figure, data):
    """Five grids and one panel of lines."""
    *grids, lines = figure.subplots(2, 3).flat
    for axes, (name, rows) in zip(grids, data["grids"].items(), strict=True):
        cells = [[int(c) for c in row] for row in rows]
        axes.pcolormesh(cells, cmap="Blues", vmin=0, vmax=1.4, rasterized=True)
        axes.invert_yaxis()
        axes.set(title=f"{name}: {sum(map(sum, cells)) / N**2:.0%}", aspect="equal")
        axes.set_xticks([])
        axes.set_yticks([])
    styles = (("o-", "#2f5fb3"), ("x:", "#8a90a0"), ("s--", "#d9822b"), ("^-.", "#3a8f5c"), ("v-", "#a34fa3"))
    for (name, row), (style, color) in zip(data["pairs"].items(), styles, strict=True):
        lines.plot(LENGTHS, row, style, color=color, markersize=4, label=name)
    lines.set_xscale("log", base=2)
    lines.set_xticks(LENGTHS, [f"{n:,}" for n in LENGTHS], fontsize=8)
    lines.set(xlabel="tokens", title="pairs per token", ylim=(0, 78))
    lines.legend(frameon=False, fontsize=8)
