"""The gradient of the last output at earlier inputs, by distance, of one layer of each kind before training."""

import torch

import dovetail as dt

N = 24
SEEDS = 3
MIXERS = {"RNN": "rnn", "GRU": "gru", "LSTM": "lstm", "attention": "{kind: attention, position: none}"}


def gradients(mixer):
    """The mean of log10 of the gradient norm, by distance from 1, relative to that at distance 1."""
    logs = torch.zeros(N, dtype=torch.float64)
    for seed in range(SEEDS):
        model = dt.build(f"{{width: 64, vocab: 62, layers: [{{mixer: {mixer}, ffn: null}}]}}", dtype="float64", seed=seed)
        ids = torch.randint(0, 62, (1, N), generator=torch.Generator().manual_seed(seed))
        trace = model.trace(ids, "embedded", "head.logits", grad=True)
        last = trace["head.logits"][0, -1]
        (last.square().sum() + last.sum()).backward()
        logs += trace["embedded"].grad[0].norm(dim=-1).log10() / SEEDS
    by_distance = logs[:-1].flip(0)
    return (by_distance - by_distance[0]).tolist()


def data():
    """By kind, the curve."""
    return {name: gradients(mixer) for name, mixer in MIXERS.items()}


def draw(figure, data):
    """One panel."""
    axes = figure.subplots(1, 1)
    styles = (("^:", "#3a8f5c"), ("v-.", "#a34fa3"), ("s--", "#d9822b"), ("o-", "#2f5fb3"))
    for (name, row), (style, color) in zip(data.items(), styles, strict=True):
        axes.semilogy(range(1, N), [10**x for x in row], style, color=color, markersize=4, label=name)
    axes.set(xlabel="tokens between input and output", ylabel="gradient norm, 1 at distance 1")
    axes.set_title("gradient of the last output, before training")
    axes.legend(frameon=False, loc="lower left")
