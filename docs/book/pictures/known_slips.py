"""What is said over what is computed, and the reach of ALiBi added after and before scaling."""

import torch

import dovetail as dt
from dovetail.spec.fold import parameters, state_values

HEAD, SLOPE, TOKENS = 64, 0.5, 48


def data():
    """Ratios, and weights by distance."""
    ffn = "{kind: mlp, act: relu, hidden: 2048, bias: false}"
    layer = "{{width: 512, vocab: 9, layers: [{{mixer: {{heads: 8}}, ffn: {}}}]}}"
    with_ffn, without = (parameters(dt.from_yaml(layer.format(f))) for f in (ffn, "null"))
    small = dt.load_spec("llama-3-8b")
    d, kv, hidden = small.width, 8 * 128, 14336
    lora = len(small.layers) * (2 * (d + d) + 2 * (d + kv) + 3 * (d + hidden))
    said = {
        "FFN, weights": 4e6 / (with_ffn - without - 512),  # and a norm
        "Mixtral, parameters": 8 * 7e9 / parameters(dt.load_spec("mixtral-8x7b")),
        "LoRA, values": 3e6 / lora,
        "cache, bytes": 2.5e9 / (2 * state_values(dt.load_spec("llama-3-70b"), 8192)),
        "scores, bytes": 32e9 / (2 * 131_072**2),
    }
    zeros, distance = torch.zeros(TOKENS, dtype=torch.float64), torch.arange(TOKENS)
    after = (zeros - SLOPE * distance).softmax(-1)
    before = ((zeros - SLOPE * distance) / HEAD**0.5).softmax(-1)
    return {"said": said, "after": after.tolist(), "before": before.tolist()}


def draw(figure, data):
    """Two panels."""
    bars, curves = figure.subplots(1, 2)
    values = list(data["said"].values())
    bars.barh(list(data["said"]), values, color="#2f5fb3")
    for place, value in enumerate(values):
        bars.text(max(value, 1.0), place, f"  {value:.2f}", va="center", fontsize=9)
    bars.axvline(1, color="#1f2430", linestyle=":")
    bars.set(title="said ÷ computed", xlim=(0, 2.3))
    bars.invert_yaxis()
    curves.plot(data["after"], "o-", color="#2f5fb3", markersize=3, label="added to scaled scores")
    curves.plot(data["before"], "s--", color="#d9822b", markersize=3, label="added before scaling")
    curves.set(xlabel="tokens back", ylabel="weight", title="ALiBi, slope ½, heads of 64", ylim=(0, None))
    curves.legend(frameon=False)
