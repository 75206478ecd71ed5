"""Which input tokens an output depends on: in an encoder, in a decoder, and in a decoder that reads an encoder."""

import torch

import dovetail as dt

SIZE = (8.0, 3.0)
FFN = "ffn: {hidden: 32}"
ENCODER = f"{{width: 32, vocab: 50, layers: [{{mixer: {{heads: 2, mask: full}}, {FFN}}}], head: null}}"
SPECS = {
    "encoder": f"{{width: 32, vocab: 50, layers: [{{mixer: {{heads: 2, mask: full}}, {FFN}}}]}}",
    "decoder": f"{{width: 32, vocab: 50, layers: [{{mixer: {{heads: 2}}, {FFN}}}]}}",
    "encoder–decoder": f"{{width: 32, vocab: 50, encoder: {ENCODER}, layers: [{{mixer: {{heads: 2}}, cross: attention}}]}}",
}
SOURCE, TARGET = 6, 6


def reach(spec, tokens, **source):
    """Row by row: 1 if output i changes when input j does."""
    model = dt.build(spec, dtype="float64")
    inputs = [tokens, *source.values()]
    before = model(tokens, **source)
    columns = []
    for ids in reversed(inputs):  # the source first
        for j in range(ids.shape[1]):
            ids[0, j] += 1
            columns.append((model(tokens, **source) - before).abs().amax((0, 2)) > 1e-12)
            ids[0, j] -= 1
    return ["".join("1" if hit else "0" for hit in row) for row in torch.stack(columns, 1)]


def data():
    """By kind of model, the rows of 0 and 1."""
    ids = torch.arange(1, 9)[None]
    pair = (torch.arange(1, TARGET + 1)[None], torch.arange(20, 20 + SOURCE)[None])
    one = {name: reach(spec, ids.clone()) for name, spec in list(SPECS.items())[:2]}
    return {**one, "encoder–decoder": reach(SPECS["encoder–decoder"], pair[0], source=pair[1])}


def draw(figure, data):
    """Three grids."""
    panels = figure.subplots(1, 3)
    for axes, (name, rows) in zip(panels, data.items(), strict=True):
        grid = [[int(cell) for cell in row] for row in rows]
        axes.pcolormesh(grid, cmap="Blues", vmin=0, vmax=1.4, edgecolors="white", linewidth=0.8)
        axes.invert_yaxis()
        axes.set(title=name, aspect="equal", xlabel="input token", ylabel="output token")
        axes.set_xticks([0.5, len(grid[0]) - 0.5], ["0", str(len(grid[0]) - 1)])
        axes.set_yticks([0.5, len(grid) - 0.5], ["0", str(len(grid) - 1)])
    panels[2].axvline(SOURCE, color="#d9822b", linewidth=2)
    panels[2].set_xticks([SOURCE / 2, SOURCE + TARGET / 2], ["source", "target"])
    panels[2].set_xlabel("")
