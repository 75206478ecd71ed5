"""The decode state of hybrids by length, and the pairs that states of several sizes recall."""

import torch

import dovetail as dt
from dovetail.spec.fold import state_values

TOKENS = [2**i for i in range(10, 18)]
PAIRS, SIZES, ROWS = 64, (8, 16, 32, 64, 128, 256), 30
LAYERS = {
    "space": "space: {mixer: {kind: mamba2, head: 64, state_size: 128}}",
    "full": "full: {mixer: {heads: 16, kv_heads: 4, head: 128}}",
}


def state(every):
    """Megabytes by length of 32 layers, one of `every` with attention; 0: none."""
    pattern = ["full"] if every == 1 else ["space"] * ((every or 4) - 1) + ["full" if every else "space"]
    layers = ", ".join(LAYERS[name] for name in sorted(set(pattern)))
    spec = dt.from_yaml(f"{{width: 2048, layers: [{{repeat: 32, pattern: [{', '.join(pattern)}], {layers}}}]}}")
    first, second = state_values(spec, 0), state_values(spec, 1)
    return [2 * (first + n * (second - first)) / 1e6 for n in TOKENS]


def recalled():
    """The share of 64 stored pairs whose value is the nearest to what is read, by the channels of the keys."""
    draw, shares = torch.Generator().manual_seed(0), []
    values = torch.nn.functional.one_hot(torch.arange(PAIRS)).double()
    for size in SIZES:
        keys = torch.nn.functional.normalize(torch.randn(ROWS, PAIRS, size, generator=draw, dtype=torch.float64), dim=-1)
        read = keys @ (keys.mT @ values)  # of the state: keys × values
        shares.append(float(((read - values).abs().amax(-1) < 0.5).double().mean()))
    return shares


def data():
    """By kind."""
    names = {"attention in all layers": 1, "in one of 4": 4, "in one of 8": 8, "in none": 0}
    return {"state": {name: state(every) for name, every in names.items()}, "recalled": recalled()}


def draw(figure, data):
    """Two panels."""
    state, recall = figure.subplots(1, 2)
    styles = (("o-", "#2f5fb3"), ("s--", "#d9822b"), ("^:", "#3a8f5c"), ("x-", "#8a90a0"))
    for (name, row), (style, color) in zip(data["state"].items(), styles, strict=True):
        state.loglog(TOKENS, row, style, color=color, markersize=4, label=name)
    state.set(xlabel="tokens", ylabel="MB", title="decode state of 32 layers")
    state.set_xticks([1024, 8192, 65536], ["1,024", "8,192", "65,536"])
    recall.semilogx(SIZES, data["recalled"], "s--", color="#d9822b", base=2, markersize=4, label="state")
    recall.axhline(1, color="#2f5fb3", label="cache")
    recall.axvline(PAIRS, color="#8a90a0", linestyle=":", label="as many channels as pairs")
    recall.set_xticks(SIZES, [str(n) for n in SIZES])
    recall.set(xlabel="channels of the keys", ylabel="share", title="recalled of 64 pairs", ylim=(0, 1.1))
    for axes in (state, recall):
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=9)
