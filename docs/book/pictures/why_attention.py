"""The alignment of a trained reversal, and what a linear readout recovers from the last state of a random recurrent network."""

import torch
import torch.nn.functional as F

import dovetail as dt

SPEC = """
width: 32
vocab: 16
position: learned
encoder: {width: 32, vocab: 16, position: learned, layers: [{mixer: null, ffn: {hidden: 32}}], head: null}
layers: [{mixer: null, cross: additive_attention, ffn: null}]
"""
LENGTH, TOKENS, STATE, ROWS = 16, 8, 32, 4000


def data():
    """The weights of a learned alignment, and by distance the accuracy of two readouts."""
    return {"weights": alignment(), **readouts()}


def alignment(n=8, steps=60):
    """(n, n) attention weights after learning to reverse n tokens."""
    torch.manual_seed(0)
    model = dt.build(SPEC, dtype="float64")  # repeatable on other machines
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for _ in range(steps):
        source = torch.randint(1, 16, (16, n))
        target = source.flip(1)
        before = F.pad(target[:, :-1], (1, 0))
        loss = F.cross_entropy(model(before, source=source).mT, target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    tap = "layers.0.cross.pattern"
    weights = model.trace(before[:1], tap, source=source[:1])[tap][0, 0]
    return [[float(weight) for weight in row] for row in weights]


def readouts():
    """Accuracy, by distance from the end, of a linear readout of the last state, and of the aligned state."""
    draw = torch.Generator().manual_seed(0)
    tokens = torch.randint(TOKENS, (2 * ROWS, LENGTH), generator=draw)
    w_in = torch.randn(TOKENS, STATE, generator=draw, dtype=torch.float64)
    w = 0.9 * torch.linalg.qr(torch.randn(STATE, STATE, generator=draw, dtype=torch.float64))[0]
    h, states = torch.zeros(2 * ROWS, STATE, dtype=torch.float64), []
    for t in range(LENGTH):
        h = torch.tanh(h @ w + w_in[tokens[:, t]])
        states.append(h)
    last = [accuracy(h, tokens[:, t]) for t in reversed(range(LENGTH))]
    aligned = [accuracy(states[t], tokens[:, t]) for t in reversed(range(LENGTH))]
    return {"last": last, "aligned": aligned}


def accuracy(x, y):
    """Of the least-squares readout of y from x, fitted on the first half and measured on the second, with two digits."""
    x = F.pad(x, (0, 1), value=1.0)
    readout = torch.linalg.lstsq(x[:ROWS], F.one_hot(y[:ROWS], TOKENS).to(x)).solution
    return round(float(((x[ROWS:] @ readout).argmax(-1) == y[ROWS:]).double().mean()), 2)


def draw(figure, data):
    """Two panels: the alignment, and the bottleneck."""
    grid, lines = figure.subplots(1, 2)
    grid.pcolormesh(data["weights"], cmap="Blues", vmin=0, vmax=1, edgecolors="white", linewidth=0.6)
    grid.invert_yaxis()
    grid.set(title="learned alignment", xlabel="source token", ylabel="output token", aspect="equal")
    grid.set_xticks([0.5, 7.5], ["0", "7"])
    grid.set_yticks([0.5, 7.5], ["0", "7"])
    distance = range(len(data["last"]))
    lines.plot(distance, data["aligned"], "s--", color="#d9822b", label="aligned state")
    lines.plot(distance, data["last"], "o-", color="#2f5fb3", label="last state")
    lines.axhline(1 / TOKENS, color="#8a90a0", linestyle=":", label="chance")
    lines.set(ylim=(0, 1.05), xlabel="updates between token and last state", ylabel="accuracy", title="recovered by a readout")
    lines.legend(frameon=False, loc="center left", bbox_to_anchor=(0.45, 0.62))
