"""Time and workspace of every mixer as a function of the sequence length, and its speed-up over its reference implementation.

Each mixer runs alone, at about the same width, forward and backward on one sequence in fp32. A slope of 1 is linear growth, 2
quadratic growth. Recurrences are also timed token by token (the reference implementation) and in chunks, after their outputs
were compared; and the grouped matmul of experts against a loop over experts, on tokens sorted by expert.

    python benchmarks/mixers.py [--rounds 3] [--plot docs/figures/mixers.png] [--json]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from math import log
from pathlib import Path
from typing import Any

import torch
from measure import Goal, Row, agree, arguments, middle, progress, report, seconds, taking_turns
from memory import Alive
from torch import Tensor, nn

from dovetail import Ctx, TokenLayout, from_yaml
from dovetail.model.construction import build
from dovetail.ops.expert import grouped, looped
from dovetail.ops.implementation import using

WIDTH, HEADS, HEAD = 128, 4, 32
LINEAR = Goal(high=1.15)
MIXERS: dict[str, tuple[str, Goal | None]] = {
    "full attention": (f"{{kind: attention, heads: {HEADS}}}", None),
    "window 256": (f"{{kind: attention, heads: {HEADS}, mask: [causal, {{kind: window, size: 256}}]}}", LINEAR),
    "linear": (f"{{kind: linear_attention, heads: {HEADS}}}", LINEAR),
    "gated linear": (f"{{kind: gla, heads: {HEADS}}}", LINEAR),
    "gated delta": (f"{{kind: gated_deltanet, heads: {HEADS}}}", LINEAR),
    "rwkv": (f"{{kind: rwkv6, heads: {HEADS}}}", LINEAR),
    "mamba": ("{kind: mamba, inner: 128}", LINEAR),
    "mamba2": (f"{{kind: mamba2, inner: 128, head: {HEAD}, state_size: 32}}", LINEAR),
    "s4": ("{kind: s4}", LINEAR),
    "gru": ("{kind: gru}", LINEAR),
    "native sparse": (f"{{kind: nsa, heads: {HEADS}}}", None),
}
SEQUENTIAL = ("mamba2", "gated linear")  # mixers whose speed-up over token by token has a goal


def mixer(text: str, width: int) -> nn.Module:
    """The module of one mixer in a model of one layer."""
    spec = from_yaml(f"{{dovetail: 1, width: {width}, vocab: 8, layers: [{{mixer: {text}, ffn: null}}], head: null}}")
    return build(spec).layers[0].mixer  # type: ignore[no-any-return]


class Timed:
    """One mixer on one sequence of n tokens."""

    def __init__(self, module: nn.Module, n: int, width: int) -> None:
        torch.manual_seed(0)
        self.module, self.n = module, n
        self.x = torch.randn(1, n, width, requires_grad=True)
        self.g = torch.randn(1, n, width)

    def forward(self) -> Tensor:
        """The output (1, n, width)."""
        return self.module(self.x, Ctx(layout=TokenLayout.whole(1, self.n)))

    def step(self) -> None:
        """Forward and backward, gradients of the weights included."""
        torch.autograd.grad(self.forward(), (self.x, *self.module.parameters()), self.g, allow_unused=True)

    def workspace(self) -> int:
        """The peak of allocated bytes in a step, beyond the input."""
        with Alive(self.x, self.g, *self.module.parameters()) as alive:
            self.step()
        return alive.peak


def slope(sizes: Sequence[int], values: Sequence[float]) -> float:
    """The slope of log value over log size: 1 for linear growth."""
    return statistics.linear_regression([log(n) for n in sizes], [log(value) for value in values]).slope


def growth(name: str, text: str, goal: Goal | None, sizes: Sequence[int], rounds: int, width: int) -> tuple[list[Row], Any]:
    """The rows of one mixer, and its median times and workspaces for the figure."""
    cases = [Timed(mixer(text, width), n, width) for n in sizes]
    times: list[list[float]] = []
    with progress(name, rounds + 1) as tick:
        for _ in range(rounds + 1):
            times.append([seconds(case.step) for case in cases])
            tick()
    value, spread = middle([slope(sizes, taken) for taken in times[1:]])
    used = [case.workspace() for case in cases]
    span = f"n = {sizes[0]} … {sizes[-1]}"
    rows = [
        Row(f"time, slope in {span}: {name}", value, goal, spread),
        Row(f"workspace, slope in {span}: {name}", slope(sizes, used)),
    ]
    return rows, ([statistics.median(taken) for taken in zip(*times[1:], strict=True)], used)


def gain(name: str, text: str, n: int, rounds: int, width: int) -> Row:
    """Time token by token ÷ time in chunks, forward."""
    case = Timed(mixer(text, width), n, width)

    @torch.no_grad()
    def naive() -> Tensor:
        with using("reference"):
            return case.forward()

    @torch.no_grad()
    def fast() -> Tensor:
        return case.forward()

    agree(name, fast(), naive(), 1e-3)
    with progress(f"{name}: sequential ÷ chunked", rounds + 1) as tick:
        value, spread = middle(taking_turns(fast, naive, rounds, tick))
    return Row(f"time sequential ÷ chunked at n = {n}: {name}", value, Goal(low=10.0), spread)


def experts(dtype: torch.dtype, tokens: int, count: int, width: int, hidden: int, rounds: int) -> Row:
    """Time of a loop over experts ÷ time of the grouped matmul, forward and backward, on sorted tokens."""
    torch.manual_seed(0)
    x = torch.randn(tokens, width, dtype=dtype, requires_grad=True)
    weights = torch.randn(count, hidden, width, dtype=dtype, requires_grad=True)
    g = torch.randn(tokens, hidden, dtype=dtype)
    ends = (torch.arange(1, count + 1) * tokens // count).to(torch.int32)

    def run(form: Callable[..., Tensor]) -> tuple[Tensor, ...]:
        y = form(x, weights, ends)
        return y, *torch.autograd.grad(y, (x, weights), g)

    for ours, theirs in zip(run(grouped), run(looped), strict=True):
        agree(f"experts in {dtype}", ours.float(), theirs.float(), 2e-2)
    name = str(dtype).removeprefix("torch.")
    with progress(f"experts, {name}", rounds + 1) as tick:
        value, spread = middle(taking_turns(lambda: run(grouped), lambda: run(looped), rounds, tick))
    return Row(f"time of a loop over experts ÷ grouped matmul, {name}", value, Goal(low=1.0), spread)


def draw(path: Path, sizes: Sequence[int], curves: dict[str, Any]) -> None:
    """Time and workspace against n, both axes logarithmic."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(11, 4.6), layout="constrained")
    marks, colors = "os^vD<>pPX*", plt.get_cmap("tab20").colors  # type: ignore[attr-defined]
    for i, (name, (times, used)) in enumerate(curves.items()):
        for axis, values in zip(axes, ([1e3 * t for t in times], [b / 1e6 for b in used]), strict=True):
            axis.loglog(sizes, values, marker=marks[i % len(marks)], color=colors[i % len(colors)], markersize=4, label=name)
    for axis, what in zip(axes, ("milliseconds, forward and backward", "workspace, MB"), strict=True):
        axis.set_xlabel("tokens")
        axis.set_title(what, fontsize=10)
        axis.set_xticks(sizes, [f"{n // 1024}k" if n >= 1024 else str(n) for n in sizes])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1.0, 0.5))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of each figure")
    parser.add_argument("--plot", type=Path, help="draw time and workspace against n to this PNG")
    flags: argparse.Namespace = parser.parse_args()
    torch.set_num_threads(flags.threads)
    quick = flags.quick
    sizes = (32, 64, 128) if quick else (1024, 2048, 4096, 8192, 16384)
    rounds = 1 if quick else flags.rounds
    rows: list[Row] = []
    curves: dict[str, Any] = {}
    for name, (text, goal) in MIXERS.items():
        more, curves[name] = growth(name, text, goal, sizes, rounds, WIDTH)
        rows += more
    for name in SEQUENTIAL:
        rows.append(gain(name, MIXERS[name][0], 64 if quick else 4096, rounds, WIDTH))
    for dtype in (torch.float32, torch.bfloat16):
        shape = (64, 4, 16, 32) if quick else (4096, 16, 256, 512)
        rows.append(experts(dtype, *shape, rounds if quick else 3 * rounds))
    if flags.plot is not None:
        draw(flags.plot, sizes, curves)
    report(rows, flags.json)


if __name__ == "__main__":
    main()
