"""The memory of 64 sequences in pages and in slices, and which keys two policies of eviction leave to each query."""

import torch

import dovetail as dt
from dovetail.decoding.eviction import Eviction, evicting
from dovetail.state.slots import Paged

N, BUDGET, PAGE, LONGEST, SEQUENCES = 20, 8, 16, 2048, 64
SPEC = "{width: 8, vocab: 8, layers: [{mixer: {heads: 1}, ffn: null}]}"


def data():
    """Tokens of memory, and rows of 0 and 1 by policy."""
    lengths = torch.randint(100, 2001, (SEQUENCES,), generator=torch.Generator().manual_seed(0)).tolist()
    slots = Paged(rows=SEQUENCES, capacity=LONGEST, page=PAGE)
    for row, n in enumerate(lengths):
        slots.reserve([row], [0], [n])
    memory = {"tokens": sum(lengths), "pages of 16": PAGE * sum(map(len, slots.owned)), "slices of 2,048": SEQUENCES * LONGEST}
    grids = {}
    for policy in ("oldest", "sinks"):
        model = evicting(dt.build(SPEC), Eviction(policy, BUDGET))
        probs = model.trace(torch.zeros(1, N, dtype=torch.long), "*.pattern")["layers.0.mixer.pattern"][0, 0]
        grids[policy] = ["".join("1" if weight > 0 else "0" for weight in row) for row in probs]
    return {"memory": memory, "grids": grids}


def draw(figure, data):
    """Three panels: bars, and two grids."""
    memory, *grids = figure.subplots(1, 3)
    values = list(data["memory"].values())
    bars = memory.barh(list(data["memory"]), values, color=["#8a90a0", "#2f5fb3", "#d9822b"])
    bars[2].set_hatch("//")
    bars[2].set_edgecolor("white")
    for place, value in enumerate(values):
        memory.text(value, place, f" {value:,}", va="center", fontsize=9)
    memory.set(title="memory, in tokens", xlim=(0, 185_000))
    memory.set_xticks([])
    memory.invert_yaxis()
    for axes, (policy, rows) in zip(grids, data["grids"].items(), strict=True):
        axes.pcolormesh(
            [[int(c) for c in row] for row in rows], cmap="Blues", vmin=0, vmax=1.4, edgecolors="white", linewidth=0.5
        )
        axes.invert_yaxis()
        axes.set(title=f"{policy}, {BUDGET} entries", aspect="equal", xlabel="key", ylabel="query")
        axes.set_xticks([0.5, N - 0.5], ["0", str(N - 1)])
        axes.set_yticks([0.5, N - 0.5], ["0", str(N - 1)])
