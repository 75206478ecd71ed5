"""Impulse responses of one real state and of a fresh S4, and a value that is kept over noise with and without selection."""

import torch

import dovetail as dt

N, LONG, MODES = 40, 400, (1, 12)


def data():
    """Responses, and two states over 40 steps."""
    impulse = torch.zeros(LONG, dtype=torch.float64)
    impulse[0] = 1.0
    model = dt.build(
        "{width: 3, vocab: 2, layers: [{mixer: {kind: s4, inner: 3, state_size: 32}, ffn: null}]}", dtype="float64"
    )
    s4 = next(module for name, module in model.named_modules() if name == "layers.0.mixer")
    with torch.no_grad():
        log_a = s4.discrete()[0][int(s4.step_log.argmin())]  # of the slowest channel
    modes = torch.exp(log_a[:, None] * torch.arange(LONG)).real
    x = torch.randn(N, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x[0] = 2.0
    delta = torch.zeros(N, dtype=torch.float64)
    delta[0] = 8.0  # take the first token, skip all others
    h, selective = torch.zeros((), dtype=torch.float64), []
    for x_t, d in zip(x, delta, strict=True):
        h = torch.exp(-d) * h + (1 - torch.exp(-d)) * x_t
        selective.append(float(h))
    return {
        "one state, a = 0.9": dt.scan(impulse, 0.9, 0.5).tolist(),
        "S4": [modes[i].tolist() for i in MODES],
        "input": x.tolist(),
        "fixed": dt.scan(x, 0.9, 0.1).tolist(),
        "slow": dt.scan(x, 0.99, 0.5).tolist(),
        "selective": selective,
    }


def draw(figure, data):
    """Two panels: responses, and states."""
    response, states = figure.subplots(1, 2)
    response.plot(data["one state, a = 0.9"], "--", color="#d9822b", label="one state, a = 0.9")
    for mode, row, style in zip(MODES, data["S4"], ("-", "-."), strict=True):
        response.plot(row, style, color="#2f5fb3", linewidth=1.2, label=f"S4, state {mode}")
    response.set(xlabel="step", ylabel="output", title="response to an impulse")
    states.plot(data["input"], ".", color="#8a90a0", label="input")
    states.plot(data["fixed"], "s--", color="#d9822b", markersize=3, label="fixed, a = 0.9")
    states.plot(data["slow"], "^:", color="#3a8f5c", markersize=3, label="fixed, a = 0.99")
    states.plot(data["selective"], "o-", color="#2f5fb3", markersize=3, label="selective")
    states.set(xlabel="step", ylabel="state", title="a 2, and then noise", ylim=(-3.2, 5.8))
    response.set_ylim(-1.75, 1.1)
    response.legend(frameon=False, loc="lower center")
    states.legend(frameon=False, ncols=2, loc="upper center", fontsize=9)
