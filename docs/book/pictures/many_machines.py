"""Memory per GPU when everything is sharded, and the idle fraction of a pipeline."""

import dovetail as dt

BYTES = 16  # per parameter: weight, gradient and two numbers of AdamW, of four bytes each
MODELS = ("llama-3-8b", "llama-3-70b", "llama-3-405b")
GPUS = [2**i for i in range(0, 13, 2)]
STAGES = (2, 4, 8, 16)
PIECES = [2**i for i in range(8)]


def data():
    """By model, gigabytes per GPU; by number of stages, the idle fraction at each number of micro-batches."""
    sizes = {name: dt.show(name).to_dict()["parameters"] for name in MODELS}
    memory = {name: [BYTES * size / gpus / 1e9 for gpus in GPUS] for name, size in sizes.items()}
    return {"memory": memory, "idle": {str(s): [(s - 1) / (m + s - 1) for m in PIECES] for s in STAGES}}


def draw(figure, data):
    """Two panels of lines."""
    memory, idle = figure.subplots(1, 2)
    styles = (("o-", "#2f5fb3"), ("s--", "#d9822b"), ("^-.", "#3a8f5c"), ("d:", "#1f2430"))
    for (name, row), (style, color) in zip(data["memory"].items(), styles, strict=False):
        memory.plot(GPUS, row, style, color=color, label=name, markersize=4)
    memory.axhline(80, color="#1f2430", linestyle=":", linewidth=1)
    memory.text(GPUS[-1], 95, "80 GB", ha="right", fontsize=8)
    memory.set(xscale="log", yscale="log", xlabel="GPUs", ylabel="GB per GPU", title="weights, gradients, AdamW")
    memory.set_xticks(GPUS[::2], [f"{gpus:,}" for gpus in GPUS[::2]])
    for (stages, row), (style, color) in zip(data["idle"].items(), styles, strict=True):
        idle.plot(PIECES, row, style, color=color, label=f"{stages} stages", markersize=4)
    idle.set(xscale="log", xlabel="micro-batches", ylabel="idle fraction", title="bubble of a pipeline", ylim=(0, 1))
    idle.set_xticks(PIECES[::2], [str(pieces) for pieces in PIECES[::2]])
    for axes in (memory, idle):
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=8)
