"""What a token costs in the KV cache of a model of Llama 3's 70 B: with all heads, in groups, with one, and as a latent."""

import dovetail as dt

MIXER = "layers.*.mixer"
LATENT = {"kind": "mla", "heads": 64, "kv_rank": 512, "nope": 128, "rope": 64, "value": 128}
DESIGNS = {
    "MHA, 64 KV heads": {f"{MIXER}.kv_heads": 64},
    "GQA, 8 KV heads": {},
    "MQA, 1 KV head": {f"{MIXER}.kv_heads": 1},
    "MLA, latent of 512 + 64": {MIXER: LATENT},
}
LENGTHS = [1024 * 2**i for i in range(8)]


def data():
    """By design: kilobytes per token in 16 bits, and gigabytes per sequence by its length."""
    by_design = {}
    for name, changes in DESIGNS.items():
        each = 2 * dt.show("llama-3-70b", set=changes).to_dict()["state_values_per_token"]
        by_design[name] = {"kB per token": each / 1e3, "GB": [each * length / 1e9 for length in LENGTHS]}
    return by_design


def draw(figure, data):
    """Two panels: bytes per token, and gigabytes by length."""
    each, total = figure.subplots(1, 2)
    colors, styles = ("#2f5fb3", "#d9822b", "#8a90a0", "#3a8f5c"), ("o-", "s--", "^:", "d-.")
    names = [name.split(",")[0] for name in data]
    values = [row["kB per token"] for row in data.values()]
    each.barh(names, values, color=colors)
    for place, value in enumerate(values):
        each.text(value * 1.15, place, f"{value:,.0f} kB", va="center", fontsize=9)
    each.invert_yaxis()
    each.set(xscale="log", xlim=(10, 40_000), xlabel="kB per token", title="KV cache per token")
    for row, name, color, style in zip(data.values(), data, colors, styles, strict=True):
        total.plot(LENGTHS, row["GB"], style, color=color, label=name, markersize=4)
    total.set(xscale="log", yscale="log", xlabel="tokens", ylabel="GB", ylim=(0.02, 20_000), title="KV cache per sequence")
    total.set_xticks(LENGTHS[::2], [f"{length // 1024}k" for length in LENGTHS[::2]])
    total.minorticks_off()
    total.legend(frameon=False, fontsize=8)
