"""The residual stream by depth at initialization: its standard deviation, and the cosine between it and the embedding."""

import torch

import dovetail as dt

LAYERS = 16
SPEC = """
width: 64
vocab: 128
embed: {{kind: tokens, scale_by_width: true}}
init: {{kind: normal, spread: 0.125, residual: {scaled}}}
layers: [{{repeat: 16, wire: {wire}, mixer: {{heads: 4}}, ffn: {{kind: mlp, act: relu}}}}]
"""
STREAMS = {"pre-norm": ("pre_norm", "false"), "pre-norm, 1/√(2L)": ("pre_norm", "true"), "post-norm": ("post_norm", "false")}


def data():
    """By model: the standard deviation of the residual stream at each layer, and its mean cosine with the embedding."""
    ids = torch.randint(0, 128, (4, 16), generator=torch.Generator().manual_seed(0))
    by_model = {}
    for name, (wire, scaled) in STREAMS.items():
        model = dt.build(SPEC.format(wire=wire, scaled=scaled)).double()
        acts = model.trace(ids, "layers.*.in")
        streams = [acts[f"layers.{i}.in"] for i in range(LAYERS)]
        cosines = [float(torch.cosine_similarity(x, streams[0], dim=-1).mean()) for x in streams]
        by_model[name] = {"std": [float(x.std()) for x in streams], "cosine": cosines}
    return by_model


def draw(figure, data):
    """Two panels: the spread of the stream, and what is left of the embedding in it."""
    spread, kept = figure.subplots(1, 2)
    styles = (("o-", "#2f5fb3"), ("s--", "#d9822b"), ("^:", "#8a90a0"))
    for (name, row), (style, color) in zip(data.items(), styles, strict=True):
        spread.plot(row["std"], style, color=color, label=name, markersize=4)
        kept.plot(row["cosine"], style, color=color, label=name, markersize=4)
    spread.set(ylim=(0, None), xlabel="layer", ylabel="standard deviation", title="spread of the stream")
    kept.set(ylim=(-0.05, 1.05), xlabel="layer", ylabel="cosine", title="cosine with the embedding")
    for axes in (spread, kept):
        axes.set_xticks(range(0, LAYERS, 5))
    spread.legend(frameon=False)
