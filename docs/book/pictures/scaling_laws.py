"""The law of loss by size and tokens: curves of equal compute, and the 245 runs that it was fitted to."""

from pathlib import Path

from dovetail.experiments.scaling import FLOPS_PER_PARAMETER, ScalingLaw, read_sized_runs

LAW = ScalingLaw(1.8172, 482.01, 2085.43, 0.3478, 0.3658)  # Besiroglu et al. 2024
RUNS = Path(__file__).parents[3] / "tests/data/chinchilla.csv"
COMPUTES = (1e20, 1e21, 1e22)
SIZES = [1e8 * 10 ** (i / 8) for i in range(21)]
EVERY = 3  # runs drawn


def data():
    """By compute, the loss at each size and the best size; of the runs, compute, loss and the law's loss."""
    curves = {}
    for flops in COMPUTES:
        size, tokens = LAW.optimal(flops)
        losses = [LAW.loss(size, flops / FLOPS_PER_PARAMETER / size) for size in SIZES]
        curves[f"{flops:.0e}"] = {"loss": losses, "best": [size, LAW.loss(size, tokens)]}
    runs = read_sized_runs(RUNS)[::EVERY]
    return {"curves": curves, "runs": [[LAW.loss(run.parameters, run.tokens), run.loss] for run in runs]}


def draw(figure, data):
    """Two panels: loss by size, and loss of runs by that of the law."""
    curves, runs = figure.subplots(1, 2)
    styles = (("-", "#2f5fb3"), ("--", "#d9822b"), ("-.", "#3a8f5c"))
    for (flops, row), (style, color) in zip(data["curves"].items(), styles, strict=True):
        curves.plot(SIZES, row["loss"], style, color=color, label=f"10$^{{{flops[-2:]}}}$ FLOPs")
        curves.plot(*row["best"], "o", color="#1f2430", markersize=5)
    curves.set(xscale="log", ylim=(2.1, 3.6), xlabel="parameters", ylabel="loss, nats per token", title="equal compute")
    curves.legend(frameon=False, loc="upper center", fontsize=8)
    runs.plot(*zip(*data["runs"], strict=True), "x", color="#2f5fb3", markersize=4)
    ends = (2.1, 4.0)
    runs.plot(ends, ends, ":", color="#1f2430")
    runs.set(xlim=ends, ylim=ends, xlabel="loss by the law", ylabel="loss of the run", title="the runs of Chinchilla")
