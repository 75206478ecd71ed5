"""The largest tensor of plain and tiled attention, forward and backward, and what both read."""

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dovetail.nn.layout import TokenLayout
from dovetail.nn.view import Scoring
from dovetail.ops.attend import attend, using
from dovetail.spec.part import KINDS

TOKENS = (256, 512, 1024, 2048)
READ = (1024, 4096, 16384, 65536, 131072)
HEAD, FAST = 128, 100_000


class Largest(TorchDispatchMode):
    """The number of values of the largest tensor that is made."""

    values = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            self.values = max(self.values, tensor.numel() if isinstance(tensor, torch.Tensor) else 0)
        return out


def largest(backend, n):
    """Of one pass over n tokens, forward and backward, with one head of 8."""
    q, k, v = (torch.zeros(1, n, 1, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    layout, watch = TokenLayout.whole(1, n), Largest()
    with using(backend), watch:
        attend(q, k, v, Scoring(mask=KINDS["causal"](), scale=0.35, heads=torch.arange(1)), layout, layout).sum().backward()
    return watch.values


def data():
    """Values by kernel, and reads by formula."""
    made = {name: [largest(backend, n) for n in TOKENS] for name, backend in (("plain", "reference"), ("tiled", "tiled"))}
    return {"made": made, "plain reads": [float(n) ** 2 for n in READ], "tiled reads": [(n * HEAD) ** 2 / FAST for n in READ]}


def draw(figure, data):
    """Two panels: memory, and reads."""
    made, reads = figure.subplots(1, 2)
    looks = {"plain": ("s--", "#d9822b"), "tiled": ("o-", "#2f5fb3")}
    for name, (style, color) in looks.items():
        made.loglog(TOKENS, data["made"][name], style, color=color, markersize=4, label=name)
        reads.loglog(READ, data[f"{name} reads"], style, color=color, markersize=4, label=name)
    made.set(xlabel="tokens", ylabel="numbers", title="largest tensor")
    reads.set(xlabel="tokens", ylabel="numbers", title="reads per head")
    for axes, ticks in ((made, TOKENS), (reads, (1024, 8192, 65536))):
        axes.minorticks_off()
        axes.set_xticks(ticks, [f"{n:,}" for n in ticks])
        axes.legend(frameon=False)
