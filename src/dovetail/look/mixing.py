"""How mixers mix tokens: attention patterns, effective attention of mixers without a softmax, rollout, routing of experts.

    y_i = Σ_j A_ij v_j          A of each head (rows, heads, n, n); of Mamba-1 and S4 of each channel (rows, channels, n, n)

A softmax computes A. A recurrent mixer whose `y` is linear in its values v, given its other activations, has one as well: its
scan, run on one-hot values, returns the columns of A. The channels of a head share A, so each carries another position.

    rollout = Π_l (½ Ā_l + ½ I)          Ā the mean over heads of |A|, rows scaled to sum to 1

Abnar & Zuidema 2020 (rollout); Kobayashi et al. 2020 (weighted by values); Ali et al. 2024 (attention of Mamba).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from dovetail.base.errors import InputError, SpecError
from dovetail.look.record import Trace
from dovetail.look.tracer import listened, trace
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx, Listener
from dovetail.nn.groups import Mixer
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import Module
from dovetail.spec.fold import taps
from dovetail.spec.part import walk

AT_ONCE = 2**24  # values per run of a scan
LOOSEST = 0.05  # of the scale: by how much `y` in bfloat16 may differ from the pattern's


class Heard(Listener):
    """Records activations by address in the order of the run, and the layouts of their tokens."""

    def __init__(self, addresses: set[str]) -> None:
        super().__init__({})
        self.addresses, self.layouts = addresses, dict[str, TokenLayout]()
        self.run: dict[str, Tensor] = {}

    def wants(self, address: str) -> bool:
        return address in self.addresses

    def edits(self, address: str) -> bool:
        return False

    def hear(self, address: str, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        if address in self.addresses and layout is not None:
            self.run[address], self.layouts[address] = x.detach(), layout
        return x


def mixers(spec: Model, layers: Sequence[int] | None = None) -> Iterator[tuple[str, Mixer]]:
    """(path, mixer) of each mixer of the layers (default: all); SpecError for one that has no pattern."""
    depth, declared = len(spec.layers), taps(spec)
    if wrong := [i for i in layers or () if not -depth <= i < depth]:
        raise SpecError(f"layers.{wrong[0]}", "there is no such layer", f"layers are 0 to {depth - 1}")
    wanted = range(depth) if layers is None else {i % depth for i in layers}
    mixing = dict[str, Mixer]()
    for path, part, _ in walk(spec):
        passes = any(isinstance(child, Mixer) for child in part.children().values())  # all tokens to another mixer
        if isinstance(part, Mixer) and not passes and path.startswith("layers."):
            mixing[path] = part
    with_pattern = {p for p, part in mixing.items() if f"{p}.pattern" in declared or (part.recurrent and part.values)}
    for path, part in mixing.items():
        if _layer(path) in wanted and path not in with_pattern:
            what = f"{part.kind} computes no attention pattern and is not linear in its values, so it has no effective one"
            others = {_layer(p) for p in with_pattern} - {_layer(p) for p in mixing if p not in with_pattern}
            known = (
                f"layers with a pattern: {', '.join(map(str, sorted(others)))}" if others else "all layers have such a mixer"
            )
            raise SpecError(path, what, known)
        if _layer(path) in wanted:
            yield path, part


def scans_with_heads(spec: Model) -> Iterator[tuple[str, Mixer]]:
    """(path, mixer) of each recurrent mixer of a layer that has effective attention by head."""
    declared = taps(spec)
    for path, part, _ in walk(spec):
        if isinstance(part, Mixer) and part.recurrent and part.values and path.startswith("layers."):
            if {declared.get(f"{path}.{part.values}"), declared.get(f"{path}.y")} == {"pos head channel"}:
                yield path, part


def _layer(path: str) -> int:
    return int(path.split(".")[1])


@torch.no_grad()
def patterns(
    model: ModelModule,
    tokens: Tensor,
    layers: Sequence[int] | None = None,
    *,
    weighted: bool = False,
    ctx: Ctx | None = None,
) -> Trace:
    """Return how much each token takes of each other one, by address: `layers.3.mixer.pattern` (rows, heads, n, n).

    A mixer without a softmax has effective attention: (rows, heads, n, n), or (rows, channels, n, n) where each channel has a
    state; it may be negative, and its rows do not sum to 1. With `weighted`, entry (i, j) is multiplied by the norm of the
    value of token j. `layers` defaults to all.
    """
    declared, chosen = taps(model.part), dict(mixers(model.part, layers))
    if weighted and (without := [path for path, part in chosen.items() if not part.values]):
        raise SpecError(without[0], "declares no tap of its values", "name the other layers, or leave out `weighted`")
    scans = {path for path in chosen if f"{path}.pattern" not in declared}
    wanted = {address for address in declared if address.rpartition(".")[0] in scans}
    wanted |= {f"{path}.{part.values}" for path, part in chosen.items() if weighted}
    heard = Heard(wanted | {f"{path}.pattern" for path in chosen})
    listened(model, tokens, heard, ctx)
    result = Trace()
    for path, part in chosen.items():
        pattern = effective(model, path, part, heard) if path in scans else heard.run[f"{path}.pattern"]
        if weighted:
            address = f"{path}.{part.values}"
            pattern = pattern * _norms(heard.run[address], declared[address].split(), pattern.shape[1])
        result[f"{path}.pattern"] = pattern
    return result


def _norms(values: Tensor, axes: Sequence[str], heads: int) -> Tensor:
    """(rows, heads, 1, n) the norm of each value."""
    if len(axes) == 3:  # of each head
        norms = values.norm(dim=-1).transpose(1, 2)
        return norms.repeat_interleave(heads // norms.shape[1], 1)[:, :, None]
    per_channel = axes[0] == "pos"  # else (key, channel): values that all heads share
    return values.abs().transpose(1, 2)[:, :, None] if per_channel else values.norm(dim=-1)[:, None, None]


def effective(model: ModelModule, path: str, part: Mixer, heard: Heard) -> Tensor:
    """Return the matrix (rows, heads or channels, n, n) that the scan at this path applied to its values in a run."""
    address, y, names = f"{path}.{part.values}", f"{path}.y", list(heard.run)
    given = [a for a in names[: names.index(y)] if a.rpartition(".")[0] == path and a != address]
    values, layout, module = heard.run[address], heard.layouts[address], model.get_submodule(path)
    assert isinstance(module, Module)
    if layout.order.dim() != 2:
        raise InputError(f"{path}.pattern: needs a batch (rows, n), not a flat one")
    rows, n = layout.order.shape
    per_head = values.dim() == 4
    count = values.shape[-1] if per_head else 1
    groups = -(-n // count)
    hot = torch.eye(groups * count, n, dtype=values.dtype, device=values.device).unflatten(0, (groups, count)).transpose(1, 2)
    hot = hot[:, :, None].expand(-1, -1, values.shape[2], -1) if per_head else hot.expand(-1, -1, values.shape[2])
    largest = max(heard.run[a][0].numel() for a in (address, *given))
    columns: list[Tensor] = []
    for some in hot.split(max(1, AT_ONCE // (rows * largest))):
        size, out = len(some), list[Tensor]()
        fixed = {a: heard.run[a].repeat_interleave(size, 0) for a in given}
        fixed[address] = some.repeat(rows, *[1] * (some.dim() - 1))
        order, seg = (x.repeat_interleave(size, 0) for x in (layout.order, layout.seg))
        whole = layout.start is not None
        repeated = TokenLayout.whole(rows * size, n, order.device) if whole else TokenLayout.of(order, seg)
        table = [(a, lambda _, x, v=v: v.to(x.dtype)) for a, v in fixed.items()]
        listener = Listener([*table, (y, lambda _, x, out=out: out.append(x))])
        module(
            values.new_zeros(rows * size, n, module.scope.size("embed")),
            Ctx(layout=repeated, taps=listener, ranks=model.ranks),
        )
        columns.append(out[0].unflatten(0, (rows, size)))
    every = torch.cat(columns, 1)  # (rows, groups, n, heads, count) or (rows, groups, n, channels)
    pattern = (every if per_head else every[..., None]).permute(0, 3, 2, 1, 4).flatten(-2)[..., :n]
    _check_linear(path, part, pattern, values if per_head else values[..., None], heard.run[y])
    return pattern


def _check_linear(path: str, part: Mixer, pattern: Tensor, values: Tensor, y: Tensor) -> None:
    """Raise where the values of the run, weighed by the pattern, are not the `y` of the run."""
    v = values.transpose(1, 2).to(pattern.dtype)
    got, scale = (pattern @ v).transpose(1, 2).reshape(y.shape), (pattern.abs() @ v.abs()).amax().clamp_min(1e-30)
    allowed = min(1e3 * torch.finfo(values.dtype).eps, LOOSEST)
    if not bool(((got - y).abs() <= allowed * scale).all()):
        what = f"{part.kind} declares that y is linear in {part.values!r}, but its scan on one-hot values gives another y"
        raise SpecError(path, what, "make every activation that y depends on a tap, or declare no `values`")


def rollout(model: ModelModule, tokens: Tensor, layers: Sequence[int] | None = None, *, ctx: Ctx | None = None) -> Tensor:
    """Return the attention rollout (rows, n, n): how much of each token reaches each other one through the layers in turn."""
    maps, by_layer = patterns(model, tokens, layers, ctx=ctx), dict[int, list[Tensor]]()
    for path, part in mixers(model.part, layers):
        if not part.reads_encoder():
            by_layer.setdefault(_layer(path), []).append(maps[f"{path}.pattern"].abs().mean(1))
    if not by_layer:
        raise SpecError("layers", "no mixer of these layers mixes the tokens of the residual stream", "name other layers")
    result: Tensor | None = None
    for _, each in sorted(by_layer.items()):
        mean = torch.stack([x / x.sum(-1, keepdim=True).clamp_min(1e-30) for x in each]).mean(0)
        step = (mean + torch.eye(mean.shape[-1], dtype=mean.dtype, device=mean.device)) / 2
        result = step if result is None else step @ result
    assert result is not None
    return result


def routing(model: ModelModule, tokens: Tensor, *, ctx: Ctx | None = None) -> Trace:
    """Return the weight of every expert for every token (rows, n, experts), 0 where the expert is not chosen, by the address of
    the router's weights: `layers.3.ffn.router.weights`."""
    paths = [a.rpartition(".")[0] for a, axes in taps(model.part).items() if a.endswith(".chosen") and axes == "pos choice"]
    if not paths:
        raise SpecError("layers", "the model has no router of experts", "use a model with `ffn: moe`")
    run = trace(model, tokens, *(f"{path}.{name}" for path in paths for name in ("chosen", "weights")), ctx=ctx)
    sizes = {path: scope.size("experts") for path, _, scope in walk(model.part) if path in paths}
    result = Trace()
    for path in paths:
        chosen, weights = run[f"{path}.chosen"], run[f"{path}.weights"]
        result[f"{path}.weights"] = weights.new_zeros(*weights.shape[:-1], sizes[path]).scatter_add(-1, chosen, weights)
    return result
