"""The gradient at the scores of one query; and the gradient norms at scores and values as the softmax saturates."""

import torch

import dovetail as dt

FACTORS = (0.25, 1.0, 2.0, 4.0, 8.0, 16.0, 64.0, 256.0)


def data():
    """Weights and gradient of six keys with the values 0 to 5; by factor of the scores the largest weight and two norms."""
    draw = torch.Generator().manual_seed(3)
    scores, values = torch.randn(6, generator=draw, dtype=torch.float64), torch.arange(6, dtype=torch.float64)
    a = scores.softmax(-1)
    mean = a @ values
    query = {"weights": a.tolist(), "mean": float(mean), "gradient": (a * (values - mean)).tolist()}
    q, k, v, g = (torch.randn(64, 16, 16, generator=draw, dtype=torch.float64) for _ in range(4))
    rows = []
    for factor in FACTORS:
        a = dt.attention_weights(q, k, scale=factor / 4)  # 4 is √d
        da = g @ v.mT
        ds = a * (da - (da * a).sum(-1, keepdim=True))
        norms = {"scores": float(ds.norm()), "values": float((a.mT @ g).norm())}
        rows.append({"largest": float(a.amax(-1).mean()), **norms})
    return {"query": query, "rows": rows}


def draw(figure, data):
    """Two panels: one query, and saturation."""
    bars, norms = figure.subplots(1, 2)
    query, rows = data["query"], data["rows"]
    keys = range(6)
    bars.bar([x - 0.2 for x in keys], query["weights"], 0.4, color="#8a90a0", label="weight")
    bars.bar([x + 0.2 for x in keys], query["gradient"], 0.4, color="#d9822b", hatch="//", edgecolor="white", label="gradient")
    bars.axvline(query["mean"], color="#2f5fb3", linestyle="--", label="output")
    bars.axhline(0, color="black", linewidth=0.6)
    bars.set(xlabel="value of the key", title="gradient at the scores")
    bars.legend(frameon=False, loc="lower right")
    largest = [row["largest"] for row in rows]
    norms.plot(largest, [row["values"] for row in rows], "^--", color="#2f5fb3", label="at the values")
    norms.plot(largest, [row["scores"] for row in rows], "o-", color="#d9822b", label="at the scores")
    norms.set(xlim=(0, 1), ylim=(0, None), xlabel="mean of the largest of 16 weights", ylabel="norm", title="gradients")
    norms.legend(frameon=False, loc="upper left")
