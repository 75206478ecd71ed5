"""Tokens per step by the number of drafts, formula and simulation; and the distribution of speculative samples."""

import torch

ACCEPTED = (0.9, 0.8, 0.5)
DRAFTS = range(9)
P, Q = (0.5, 0.3, 0.2), (0.2, 0.5, 0.3)
STEPS = 20_000


def data():
    """By acceptance, the formula and the mean of simulated steps; shares of tokens."""
    draw = torch.Generator().manual_seed(0)
    steps = {}
    for a in ACCEPTED:
        right = torch.rand(STEPS, max(DRAFTS), generator=draw) < a
        until = right.cumprod(-1)  # drafts before the first wrong one
        simulated = [1.0 + float(until[:, :k].sum(-1).double().mean()) for k in DRAFTS]
        steps[str(a)] = {"formula": [sum(a**i for i in range(k + 1)) for k in DRAFTS], "simulated": simulated}
    p, q = torch.tensor(P), torch.tensor(Q)
    drafts = torch.multinomial(q, 100_000, replacement=True, generator=draw)
    accepted = torch.rand(100_000, generator=draw) < (p / q)[drafts]
    others = torch.multinomial((p - q).clamp(min=0), 100_000, replacement=True, generator=draw)
    tokens = torch.where(accepted, drafts, others)
    return {"steps": steps, "model": P, "drafter": Q, "output": [float(x) for x in torch.bincount(tokens).double() / 100_000]}


def draw(figure, data):
    """Two panels: tokens per step, and bars."""
    steps, bars = figure.subplots(1, 2)
    styles = (("-", "o", "#2f5fb3"), ("--", "s", "#d9822b"), (":", "^", "#3a8f5c"))
    for (a, rows), (line, mark, color) in zip(data["steps"].items(), styles, strict=True):
        steps.plot(DRAFTS, rows["formula"], line, color=color, label=f"accepted: {a}")
        steps.plot(DRAFTS, rows["simulated"], mark, color=color, markersize=4)
    steps.set(xlabel="drafts per step", ylabel="tokens per step", title="what a step writes", ylim=(0, None))
    looks = (("model", "#2f5fb3", ""), ("drafter", "#8a90a0", ".."), ("output", "#d9822b", "//"))
    for i, (name, color, hatch) in enumerate(looks):
        places = [token + 0.27 * (i - 1) for token in range(3)]
        bars.bar(places, data[name], 0.25, color=color, hatch=hatch, edgecolor="white", label=name)
    bars.set_xticks(range(3), ["a", "b", "c"])
    bars.set(xlabel="token", ylabel="probability", title="sampled with drafts", ylim=(0, 0.62))
    for axes in (steps, bars):
        axes.legend(frameon=False, fontsize=9)
