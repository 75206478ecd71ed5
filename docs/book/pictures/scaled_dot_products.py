"""Why √d: scores of random queries and keys spread as √d, and the softmax of unscaled scores puts its weight on one key."""

import torch

SIZES = (4, 16, 64, 256)


def data():
    """By head size: the standard deviation of the scores, and the mean of the largest of 16 weights, unscaled and scaled."""
    draw = torch.Generator().manual_seed(0)
    rows = []
    for d in SIZES:
        q, k = (torch.randn(4096, n, d, generator=draw, dtype=torch.float64) for n in (1, 16))
        scores = (q * k).sum(-1)
        largest = [float((scores * scale).softmax(-1).amax(-1).mean()) for scale in (1.0, d**-0.5)]
        rows.append({"d": d, "std": float(scores.std()), "unscaled": largest[0], "scaled": largest[1]})
    return rows


def draw(figure, data):
    """Two panels: the spread of the scores, and the largest weight."""
    spread, weight = figure.subplots(1, 2)
    sizes = [row["d"] for row in data]
    spread.plot(sizes, [row["std"] for row in data], "o-", color="#2f5fb3", label="q · k")
    spread.plot(sizes, [row["std"] / row["d"] ** 0.5 for row in data], "s--", color="#d9822b", label="q · k / √d")
    spread.set(xscale="log", yscale="log", xlabel="head size d", ylabel="standard deviation", title="spread of the scores")
    weight.plot(sizes, [row["unscaled"] for row in data], "o-", color="#2f5fb3", label="unscaled")
    weight.plot(sizes, [row["scaled"] for row in data], "s--", color="#d9822b", label="scaled")
    weight.set(xscale="log", ylim=(0, 1), xlabel="head size d", ylabel="weight", title="largest of 16 weights")
    for axes in (spread, weight):
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
        axes.legend(frameon=False)
