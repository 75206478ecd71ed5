"""Where the parameters of four models are, and what a token costs in one layer by the length of the text."""

import dovetail as dt

MODELS = {
    "2017 base, 63 M": ("transformer-2017-base", {"encoder.embed.shared": True, "head.tied": True}),
    "GPT-2, 124 M": ("gpt2", {}),
    "Llama 7B, 6.7 B": ("llama-7b", {}),
    "Llama 3 8B, 8.0 B": ("llama-3-8b", {}),
}
ROLES = {
    "embed": "tables",
    "head": "tables",
    "position": "tables",
    "mixer": "attention",
    "cross": "attention",
    "ffn": "feed-forward",
}
WIDTH = 1024
LAYER = "{width: 1024, vocab: 8, layers: [{mixer: {heads: 16, mask: full}, ffn: FFN}], head: null}"
LENGTHS = [256 * 2**i for i in range(7)]


def parts(tree):
    """(path, parameters) of the parts that no other part contains."""
    if not tree["children"] or tree["path"].split(".")[-1] in ROLES:
        return [(tree["path"], tree["parameters"])]
    return [part for child in tree["children"] for part in parts(child)]


def share(spec, changes):
    """The fraction of the parameters by role."""
    counts = dict.fromkeys([*ROLES.values(), "norms"], 0)
    for path, parameters in parts(dt.show(spec, set=changes).to_dict()["tree"]):
        counts[ROLES.get(path.split(".")[-1], "norms")] += parameters
    return {role: count / sum(counts.values()) for role, count in counts.items()}


def flops(ffn, length):
    """FLOPs per token of one layer: of matmuls with weights, and of scores and values."""
    cost = dt.show(LAYER.replace("FFN", ffn), length=length).to_dict()["flops_per_token"]
    return cost["matmul"] / 1e6, cost["attention"] / 1e6


def data():
    """The fractions of four models, and MFLOPs per token of a layer of width 1,024."""
    projections, _ = flops("null", 8)
    whole, _ = flops("{kind: mlp, bias: false}", 8)
    scores = [flops("null", length)[1] for length in LENGTHS]
    shares = {name: share(*model) for name, model in MODELS.items()}
    return {"share": shares, "projections": projections, "feed-forward": whole - projections, "scores": scores}


def draw(figure, data):
    """Two panels: stacked bars, and lines by length."""
    bars, cost = figure.subplots(1, 2)
    styles = {
        "tables": ("#8a90a0", ""),
        "attention": ("#2f5fb3", "//"),
        "feed-forward": ("#d9822b", ".."),
        "norms": ("#1f2430", ""),
    }
    for place, shares in enumerate(data["share"].values()):
        left = 0.0
        for role, (color, hatch) in styles.items():
            bars.barh(
                place, shares[role], left=left, color=color, hatch=hatch, edgecolor="white", label=None if place else role
            )
            left += shares[role]
    bars.set_yticks(range(len(data["share"])), data["share"])
    bars.invert_yaxis()
    bars.set(xlim=(0, 1), xlabel="fraction of the parameters", title="where the parameters are")
    bars.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.35, -0.2), ncols=4, fontsize=8, columnspacing=0.9)
    fixed = data["projections"] + data["feed-forward"]
    cost.plot(LENGTHS, data["scores"], "o-", color="#2f5fb3", markersize=4, label="scores and values")
    cost.axhline(data["projections"], color="#d9822b", linestyle="--", label="projections")
    cost.axhline(fixed, color="#1f2430", linestyle=":", label="projections and feed-forward")
    cost.set(xscale="log", xlabel="tokens", ylabel="MFLOPs per token", title="one layer of width 1,024")
    cost.set_xticks(LENGTHS[::2], [f"{length:,}" for length in LENGTHS[::2]])
    cost.minorticks_off()
    cost.legend(frameon=False, fontsize=8)
