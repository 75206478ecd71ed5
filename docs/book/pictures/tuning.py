"""What is trained under LoRA by its rank, and the loss of DPO by the margin of a pair."""

import torch

import dovetail as dt
from dovetail.training.preference import Dpo, Scores

RANKS = (1, 2, 4, 8, 16, 32, 64)
SPEC = "{width: 4096, vocab: 8, layers: [{mixer: {heads: 32, kv_heads: 8}, ffn: {hidden: 14336}}], head: null}"  # of Llama 3 8B
LAYERS = 32
TARGETS = {"queries and values": ["q", "v"], "all matrices": []}
MARGINS = [i / 4 for i in range(-24, 25)]


def trained(rank, targets):
    """Millions of trained numbers in all 32 layers; one is built, without values."""
    model = dt.build(SPEC, device="meta")
    dt.attach(model, {"kind": "lora", "rank": rank, **({"targets": targets} if targets else {})})
    return LAYERS * sum(p.numel() for p in model.parameters() if p.requires_grad) / 1e6


def data():
    """By targets, millions of trained numbers at each rank; the loss of DPO and its slope at each margin."""
    zero = torch.zeros(len(MARGINS))
    margins = torch.tensor(MARGINS, requires_grad=True)
    losses = Dpo(beta=1.0).losses(Scores(margins, zero, zero), Scores(zero, zero, zero))
    (slope,) = torch.autograd.grad(losses.sum(), margins)
    sizes = {name: [trained(rank, targets) for rank in RANKS] for name, targets in TARGETS.items()}
    return {"trained": sizes, "loss": losses.tolist(), "push": (-slope).tolist()}


def draw(figure, data):
    """Two panels of lines."""
    sizes, loss = figure.subplots(1, 2)
    for (name, row), (style, color) in zip(data["trained"].items(), (("o-", "#2f5fb3"), ("s--", "#d9822b")), strict=True):
        sizes.plot(RANKS, row, style, color=color, label=name, markersize=4)
    sizes.set(xscale="log", yscale="log", xlabel="rank", ylabel="million numbers", title="LoRA of an 8 B model: trained")
    sizes.set_xticks(RANKS, [str(rank) for rank in RANKS])
    sizes.minorticks_off()
    loss.plot(MARGINS, data["loss"], "-", color="#2f5fb3", label="loss")
    loss.plot(MARGINS, data["push"], "--", color="#d9822b", label="push: minus its slope")
    loss.axvline(0, color="#8a90a0", linewidth=0.8)
    loss.set(xlabel="margin: chosen over rejected", title="DPO")
    for axes in (sizes, loss):
        axes.legend(frameon=False)
