"""A model that learned to name the previous token: the map of a head, and what each head looks at and contributes."""

import torch
import torch.nn.functional as F

import dovetail as dt

N, HEADS, STEPS = 12, 4, 80
SPEC = "{width: 32, vocab: 16, layers: [{mixer: {heads: 4}, ffn: null}], head: {kind: lm, tied: false}}"


def data():
    """The weights of the head that matters most, and by head: weight on the previous token, rise of the loss."""
    torch.manual_seed(0)
    model = dt.build(SPEC, dtype="float64")  # repeatable on other machines
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for _ in range(STEPS):
        ids = torch.randint(1, 16, (16, N))
        loss = F.cross_entropy(model(ids)[:, 1:].mT, ids[:, :-1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    ids = torch.randint(1, 16, (64, N))
    pattern = model.trace(ids, "*.pattern")["layers.0.mixer.pattern"]

    def loss_of(patch):
        logits = model.trace(ids, "head.logits", patch=patch)["head.logits"]
        return float(F.cross_entropy(logits[:, 1:].mT, ids[:, :-1]))

    effects = [loss_of({f"layers.0.mixer.z[head={head}]": 0.0}) - loss_of({}) for head in range(HEADS)]
    best = max(range(HEADS), key=effects.__getitem__)
    return {
        "weights": [[round(float(w), 3) for w in row] for row in pattern[0, best]],
        "head": best,
        "previous": [round(float(x), 3) for x in pattern.diagonal(-1, -2, -1).mean((0, 2))],
        "effect": [round(effect, 3) for effect in effects],
    }


def draw(figure, data):
    """Two panels: a grid, and bars."""
    grid, bars = figure.subplots(1, 2)
    grid.pcolormesh(data["weights"], cmap="Blues", vmin=0, vmax=1, edgecolors="white", linewidth=0.5)
    grid.invert_yaxis()
    grid.set(title=f"weights of head {data['head']}", xlabel="key", ylabel="query", aspect="equal")
    grid.set_xticks([0.5, N - 0.5], ["0", str(N - 1)])
    grid.set_yticks([0.5, N - 0.5], ["0", str(N - 1)])
    places = range(HEADS)
    bars.bar([p - 0.2 for p in places], data["previous"], 0.4, color="#2f5fb3", label="weight on the previous token")
    bars.bar(
        [p + 0.2 for p in places],
        data["effect"],
        0.4,
        color="#d9822b",
        hatch="//",
        edgecolor="white",
        label="rise of the loss, nats",
    )
    bars.set_xticks(places, [f"head {p}" for p in places])
    bars.set(title="map and intervention", ylim=(0, 1.35 * max(data["previous"] + data["effect"])))
    bars.legend(frameon=False, fontsize=9)
