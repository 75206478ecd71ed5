"""Positions: the score of two equal vectors by distance under RoPE, and what each stretching does to the frequencies."""

import torch

import dovetail as dt

PAIRS = 32
DISTANCES = [2**i for i in range(13)]
BASES = {"base 10,000": 1e4, "base 500,000": 5e5}
STRETCHED = {
    "interpolation": {"kind": "linear_scaling", "factor": 8.0},
    "NTK-aware": {"kind": "ntk", "factor": 8.0},
    "YaRN": {"kind": "yarn", "factor": 8.0, "original": 4096},
    "Llama 3": {"kind": "llama3", "factor": 8.0, "original": 4096},
}
SPEC = "{width: 64, vocab: 8, layers: [{mixer: {heads: 1, position: {kind: rope}}, ffn: null}]}"


def frequencies(**fields):
    """The rotary frequencies of a head of 64 channels."""
    spec = dt.from_yaml(SPEC).set("layers.*.mixer.position", {"kind": "rope", **fields})
    return dt.build(spec, dtype="float64").layers[0].mixer.position.frequency


def data():
    """By base, the mean score around each distance; by stretching, frequencies divided by those before."""
    ones = torch.ones(6000, 2 * PAIRS, dtype=torch.float64)
    scores = {}
    for name, base in BASES.items():
        turned = dt.rope(ones, dt.parts.Rope(base=base))
        score = turned @ turned[0] / (2 * PAIRS)
        scores[name] = [float(score[d : d + d // 4 + 1].mean()) for d in DISTANCES]
    plain = frequencies()
    return {"score": scores, "ratio": {name: (frequencies(scaling=how) / plain).tolist() for name, how in STRETCHED.items()}}


def draw(figure, data):
    """Two panels: scores by distance, and frequency ratios by pair."""
    score, ratio = figure.subplots(1, 2)
    for (name, row), (style, color) in zip(data["score"].items(), (("o-", "#2f5fb3"), ("s--", "#d9822b")), strict=True):
        score.plot(DISTANCES, row, style, color=color, label=name, markersize=4)
    score.axhline(0, color="#8a90a0", linewidth=0.8)
    score.set(xscale="log", xlabel="distance in tokens", ylabel="score, at distance 0: 1", title="RoPE: equal query and key")
    styles = (("-", "#2f5fb3"), ("--", "#d9822b"), ("-.", "#3a8f5c"), (":", "#1f2430"))
    for (name, row), (style, color) in zip(data["ratio"].items(), styles, strict=True):
        ratio.plot(row, style, color=color, label=name)
    ratio.set(ylim=(0, 1.08), xlabel="pair of channels, fast to slow", ylabel="new ÷ old frequency", title="stretched 8 times")
    score.legend(frameon=False)
    ratio.legend(frameon=False, loc="upper right", fontsize=8)
