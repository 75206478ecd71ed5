"""The KV cache of Llama 3 70B by tokens and KV heads, and the forecast of a prompt and of a decode step of Llama 3 8B."""

import dataclasses as dc

import dovetail as dt
from dovetail.planning.device import devices
from dovetail.planning.serving import Load, prefill_seconds, step_seconds
from dovetail.spec.fold import state_values

TOKENS = [2**i for i in range(10, 18)]
PASS = [1, 4, 16, 64, 256, 512, 1024, 2048]
LOAD = Load(prompt=1024, answer=256, weights="bf16", cache="bf16", gap=1.0)


def data():
    """Gigabytes by KV heads, and milliseconds by the tokens of a pass."""
    spec = dt.load_spec("llama-3-70b")
    sizes = {}
    for heads in (64, 8, 1):
        per_token = 2 * state_values(spec.set("layers.*.mixer.kv_heads", heads), 1)
        sizes[str(heads)] = [per_token * n / 1e9 for n in TOKENS]
    small, h100 = dt.load_spec("llama-3-8b"), devices()["h100"]
    prefill = [1e3 * prefill_seconds(small, h100, dc.replace(LOAD, prompt=n), 1) for n in PASS]
    decode = [step_seconds(small, h100, LOAD, 1, n) for n in PASS]
    return {"cache": sizes, "prefill": prefill, "decode": [1e3 * time for time, _ in decode], "bound": decode[-1][1]}


def draw(figure, data):
    """Two panels: bytes, and times."""
    cache, time = figure.subplots(1, 2)
    styles = (("o-", "#2f5fb3"), ("s--", "#d9822b"), ("^:", "#3a8f5c"))
    for (heads, sizes), (style, color) in zip(data["cache"].items(), styles, strict=True):
        cache.loglog(
            TOKENS, sizes, style, color=color, markersize=4, label=f"{heads} KV head{'s' if heads != '1' else ''}", base=2
        )
    cache.axhline(80, color="#8a90a0", linestyle=":")
    cache.set(xlabel="tokens", ylabel="GB", title="KV cache of Llama 3 70B")
    cache.set_yscale("log")
    cache.set_xticks([1024, 8192, 65536], ["1,024", "8,192", "65,536"])
    time.loglog(PASS, data["decode"], "s--", color="#d9822b", markersize=4, label="decode step of n sequences")
    time.loglog(PASS, data["prefill"], "o-", color="#2f5fb3", markersize=4, label="prompt of n tokens")
    time.set(xlabel="n", ylabel="ms", title="Llama 3 8B on an H100")
    time.set_xticks([1, 16, 256, 2048], ["1", "16", "256", "2,048"])
    time.set_yticks([5, 10, 50, 100], ["5", "10", "50", "100"])
    for axes in (cache, time):
        axes.minorticks_off()
        axes.legend(frameon=False, fontsize=9)
