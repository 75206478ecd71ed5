"""A mixture of experts: total and active parameters by the number of experts, and the load of a router with a balance loss."""

import torch

import dovetail as dt

EXPERTS = (4, 8, 16, 32)
STEPS = 25
SPEC = """
width: 32
vocab: 64
layers:
- mixer: {{heads: 2}}
  ffn: {{kind: moe, experts: 8, hidden: 32, router: {{kind: softmax_router, top_k: 2, balance_loss: {loss}}}}}
"""


def loads(balance_loss):
    """By step: the load of the busiest of 8 experts, as a multiple of the mean, from a router that prefers two of them."""
    ids = torch.randint(0, 64, (8, 32), generator=torch.Generator().manual_seed(0))
    model, router = dt.build(SPEC.format(loss=balance_loss)).double().train(), "layers.0.ffn.router"
    mean = model.trace(ids, "layers.0.ffn_norm.out")["layers.0.ffn_norm.out"].mean((0, 1))
    with torch.no_grad():
        model.get_parameter(f"{router}.out.weight")[:2] += mean / mean.norm()
    optimizer, busiest = torch.optim.SGD(model.parameters(), 0.3), []
    for _ in range(STEPS):
        load = torch.bincount(model.trace(ids, f"{router}.chosen")[f"{router}.chosen"].flatten(), minlength=8)
        busiest.append(float(load.max() / load.double().mean()))
        optimizer.zero_grad()
        model.loss(ids).backward()
        optimizer.step()
    return busiest


def data():
    """The parameters of Mixtral with other numbers of experts, in billions, and the loads without and with a balance loss."""
    shown = [dt.show("mixtral-8x7b", set={"layers.*.ffn.experts": experts}).to_dict() for experts in EXPERTS]
    counts = [{"total": row["parameters"] / 1e9, "active": row["active_parameters"] / 1e9} for row in shown]
    return {"counts": counts, "without": loads(0.0), "with": loads(0.1)}


def draw(figure, data):
    """Two panels: parameters, and the load of the busiest expert."""
    counts, load = figure.subplots(1, 2)
    places = range(len(EXPERTS))
    total, active = ([row[name] for row in data["counts"]] for name in ("total", "active"))
    counts.bar([place - 0.2 for place in places], total, 0.4, color="#2f5fb3", label="total")
    counts.bar([place + 0.2 for place in places], active, 0.4, color="#d9822b", hatch="//", edgecolor="white", label="active")
    for place, value in zip(places, total, strict=True):
        counts.text(place - 0.2, value + 3, f"{value:.1f}", ha="center", fontsize=9)
    counts.set_xticks(places, [str(experts) for experts in EXPERTS])
    counts.set(xlabel="experts per layer, 2 per token", ylabel="billion parameters", title="parameters", ylim=(0, 205))
    load.plot(data["without"], "o-", color="#2f5fb3", markersize=3, label="no balance loss")
    load.plot(data["with"], "s--", color="#d9822b", markersize=3, label="balance loss")
    load.axhline(1, color="#8a90a0", linestyle=":")
    load.set(xlabel="step", ylabel="× the mean load", title="load of the busiest of 8 experts", ylim=(0, None))
    for axes in (counts, load):
        axes.legend(frameon=False, loc="upper left" if axes is counts else "center right")
