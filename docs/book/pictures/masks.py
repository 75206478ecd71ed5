"""Masks over 16 tokens: where the attention weight is not 0."""

import torch

import dovetail as dt

N = 16
SIZE = (8.0, 5.4)
BAND = {"kind": "window", "size": 4}
MASKS = {
    "full": "full",
    "causal": "causal",
    "window of 4": ["causal", BAND],
    "window of 4, 2 sinks": ["causal", {**BAND, "keep": 2}],
    "prefix of 6": {"any": ["causal", {"kind": "prefix", "length": 6}]},
}
LENGTHS = (7, 4, 5)  # of packed documents


def data():
    """By mask, the rows of 0 and 1."""
    q, k = torch.randn(2, N, 4, generator=torch.Generator().manual_seed(0))
    grids = {name: dt.attention_weights(q, k, mask=mask) for name, mask in MASKS.items()}
    model = dt.build("{width: 8, vocab: 8, layers: [{mixer: {heads: 1}, ffn: null}]}")
    layout = dt.TokenLayout.packed([LENGTHS], N)
    probs = []
    listener = dt.Listener({"*.pattern": lambda _, value: probs.append(value)})
    model(torch.zeros(1, N, dtype=torch.long), dt.Ctx(layout=layout, taps=listener))
    grids["packed: " + ", ".join(map(str, LENGTHS))] = probs[0][0, 0]
    return {name: ["".join("1" if weight > 0 else "0" for weight in row) for row in grid] for name, grid in grids.items()}


def draw(figure, data):
    """Six grids."""
    panels = figure.subplots(2, 3).flat
    for axes, (name, rows) in zip(panels, data.items(), strict=True):
        grid = [[int(cell) for cell in row] for row in rows]
        axes.pcolormesh(grid, cmap="Blues", vmin=0, vmax=1.4, edgecolors="white", linewidth=0.6)
        axes.invert_yaxis()
        axes.set(title=f"{name}: {sum(map(sum, grid))}", aspect="equal", xlabel="key", ylabel="query")
        axes.set_xticks([0.5, 15.5], ["0", "15"])
        axes.set_yticks([0.5, 15.5], ["0", "15"])
