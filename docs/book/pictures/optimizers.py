"""Four schedules of the learning rate, and how far one step of AdamW moves a layer's output at growing width."""

import torch

import dovetail as dt
from dovetail.training.optim import Optimizer
from dovetail.training.plan import Plan

SCHEDULES = ("cosine", "linear", "wsd", "constant")
STEPS = 200
WIDTHS = (32, 64, 128, 256)
INITS = {"one learning rate for all": "normal", "µP": "{kind: mup, base_width: 32}"}
SPEC = """
width: {width}
vocab: 64
init: {init}
head: {{kind: lm, tied: false}}
layers: [{{mixer: {{heads: {heads}, head: 16}}, ffn: {{hidden: {hidden}}}}}]
"""


def moved(width, init):
    """The root mean square by which one step changes what the feed-forward adds to the stream."""
    model = dt.build(SPEC.format(width=width, init=init, heads=width // 16, hidden=4 * width)).double()
    ids = torch.randint(0, 64, (8, 16), generator=torch.Generator().manual_seed(0))
    at = "layers.0.ffn_add"
    before = model.trace(ids, at)[at]
    optimizer = Optimizer(model)
    optimizer.set_lr(0.01)
    model.loss(ids).backward()
    optimizer.step()
    return float((model.trace(ids, at)[at] - before).pow(2).mean().sqrt())


def data():
    """By schedule, the learning rate of each fourth step; by initialization, the change of an output at each width."""
    plans = {name: Plan(steps=STEPS, learning_rate=1.0, schedule=name, warmup=0.1, quiet=True) for name in SCHEDULES}
    rates = {name: [plan.lr(step) for step in range(0, STEPS, 4)] for name, plan in plans.items()}
    return {"rate": rates, "moved": {name: [moved(width, init) for width in WIDTHS] for name, init in INITS.items()}}


def draw(figure, data):
    """Two panels of lines."""
    rate, change = figure.subplots(1, 2)
    styles = (("-", "#2f5fb3"), ("--", "#d9822b"), ("-.", "#3a8f5c"), (":", "#1f2430"))
    for (name, row), (style, color) in zip(data["rate"].items(), styles, strict=True):
        rate.plot(range(0, STEPS, 4), row, style, color=color, label=name)
    rate.set(xlabel="step", ylabel="÷ the peak", title="learning rate", ylim=(0, 1.05))
    for (name, row), (style, color) in zip(data["moved"].items(), (("o-", "#2f5fb3"), ("s--", "#d9822b")), strict=True):
        change.plot(WIDTHS, [value / row[0] for value in row], style, color=color, label=name, markersize=4)
    change.set(xscale="log", yscale="log", xlabel="width", ylabel="÷ that at width 32", title="change of an output in one step")
    change.set_xticks(WIDTHS, [str(width) for width in WIDTHS])
    change.set_yticks((1, 4, 16), ("1", "4", "16"))
    change.minorticks_off()
    for axes in (rate, change):
        axes.legend(frameon=False, fontsize=8)
