"""Law 26, quantized: a quantized model equals the dense model of its decoded weights, on every path.

    x decode(encode(W))ᵀ   =   the quantized leaf of W                    fused kernels within a stated bound (`bounded`)
    |w − decode(encode(w))|  is the distance to the nearest level, and the levels cover the group: at most half a step
    encode(decode(t)) = t   on the same grid               declared tensors are the stored ones, bit for bit and in size
    rows decode as they do among copies of themselves: what fills up a block of scales, or of codes, changes no grid

Every matrix of a spec is quantized, neighbors in different formats, and compared with a model that stores the decoded matrices
(and, where a format rounds activations, reads rounded ones):
the reference kernels and the fast ones, the loss and its gradients, a KV cache fed token by token. The readers of files and the
layouts of other libraries have tests of their own (tests/quantization).
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.model.construction import generator
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.linear import Dense, Linear, Rows
from dovetail.ops.attend import using
from dovetail.ops.formats import kernels
from dovetail.ops.formats.format import CODES, Format, Grid
from dovetail.ops.formats.kinds import FP8, NF4, Int4, Int8
from dovetail.proof.laws.case import IDENTITY, Case, NotApplicable, law, perturbed
from dovetail.proof.laws.replaced import paths
from dovetail.weights.quantization.leaf import QuantizedLeaf, store_quantized
from dovetail.weights.quantization.recipe import candidates, leaf_at, put_leaf, quantized_leaves, tied_to

COARSEST = 0.8  # · 2^(−bits / 2): the largest error of a normal matrix, relative to it, in root mean squares
LARGEST = 12  # inputs per group: a few groups in the small matrices of a law
PACKED = (Int8(), Int4(group=32), Int4(group=64, zero_point=True))  # formats with a fast kernel
PACKED_ROWS, PACKED_OUT, PACKED_INP = (1, 3, 8, 64), 58, 192
ALONE, COPIES = 2, 256  # rows, and copies of them: more scales than any format stores together
ROUNDING = 1e-6  # of a value in units of its scale: codes of fp8 are rounded from float32


def formats_for(inp: int) -> list[Format]:
    """Every format that a row of `inp` inputs can take, with groups that divide it."""
    group = max(n for n in range(1, min(LARGEST, inp) + 1) if inp % n == 0)
    four: list[Format] = [
        Int4(group=group),
        Int4(group=group, zero_point=True),
        NF4(group=group),
        NF4(group=group, double=True),
    ]
    return [*four, Int8(), Int8(group=group), FP8(), FP8(per="tensor"), Int8(dynamic=True)]


def recipe_for(case: Case) -> dict[str, Format]:
    """One format per matrix, neighbors different."""
    recipe = {}
    for i, (path, d) in enumerate(candidates(case.spec).items()):
        offered = formats_for(d.weight.shape(d.scope)[-1])
        recipe[path] = offered[(i + case.seed) % len(offered)]
    return recipe


def quantized_model(case: Case, recipe: dict[str, Format]) -> ModelModule:
    """The model with every matrix of the recipe in its format."""
    model = perturbed(case.spec, case.seed)
    for path, format in recipe.items():
        put_leaf(model, case.spec, path, format, format.encode(leaf_at(model, path).weight.detach()))
    return model


class Rounding(Dense):
    """A dense W; each token is rounded to the nearest of 255 even levels up to its largest value, which x Wᵀ then reads."""

    exact = frozenset({"grouped"})

    def multiply(self, leaf: Linear, x: Tensor, ctx: Ctx | None) -> Tensor:
        return super().multiply(leaf, _rounded(x), ctx)

    def grouped(self, leaf: Linear, x: Tensor, rows: Rows, ctx: Ctx | None) -> Tensor:
        return super().grouped(leaf, _rounded(x), rows, ctx)


def _rounded(x: Tensor) -> Tensor:
    step = x.detach().abs().amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny) / 127
    return x + ((x / step).round() * step - x).detach()


def decoded_model(case: Case, quantized: ModelModule) -> ModelModule:
    """The dense model of the decoded matrices."""
    model = perturbed(case.spec, case.seed)
    for path, leaf in quantized_leaves(quantized):
        dense = leaf_at(model, path)
        dense.weight.data.copy_(leaf.format.decode(leaf.stored(), leaf.shape[-1]))
        if leaf.format.rounds_inputs:
            for same in (path, *tied_to(case.spec, path)):  # a dense layer that shares weights has leaves of its own
                leaf_at(model, same).storage = Rounding()
    return model


@law(
    26,
    "quantized",
    "a quantized model equals the dense model of its decoded weights; each value has the nearest level",
    covers="values",
    budget=1.5,
)
def quantized(case: Case) -> None:
    """Compare codes with their levels, and a quantized model with a dense one of the decoded matrices."""
    recipe = recipe_for(case)
    if not recipe:
        raise NotApplicable("no matrix that may be quantized")
    model, plain = quantized_model(case, recipe), perturbed(case.spec, case.seed)
    with torch.no_grad():
        for path, leaf in quantized_leaves(model):
            _nearest(case, path, leaf_at(plain, path), leaf.format, leaf.stored())
            _copies(case, path, leaf_at(plain, path).weight, leaf.format)
        dense = decoded_model(case, model)
        got, want = (paths(case.of(one)) for one in (model, dense))
        for name, output in got.items():
            case.same(output, want[name], f"{name}: quantized leaves and the dense model of their decoded matrices")
    _gradients(case, model, dense)
    if case.turn("packed"):
        _packed(case)


@torch.no_grad()
def _packed(case: Case) -> None:
    """The fast kernels, on sizes that they have to pad, against the reference, and after other codes were loaded."""
    draw = generator(case.seed, "packed")
    for format in PACKED:
        leaf, other = (_random_leaf(format, draw) for _ in range(2))
        x = torch.randn(max(PACKED_ROWS), leaf.shape[-1], generator=draw, dtype=torch.float64).bfloat16()
        for rows in PACKED_ROWS:
            _as_exact(case, leaf, x[:rows], f"{format}, {rows} rows")
            _as_exact(case, leaf, x[:rows].float() * 1.1, f"{format}, {rows} rows of float32")
        leaf.leaf.load_state_dict(other.leaf.state_dict())
        _as_exact(case, leaf, x[:1], f"{format}, after other codes were loaded")


def _random_leaf(format: Format, draw: torch.Generator) -> QuantizedLeaf:
    w = torch.randn(PACKED_OUT, PACKED_INP, generator=draw, dtype=torch.float64).bfloat16()
    w *= torch.linspace(0.5, 2, PACKED_INP).bfloat16()  # scales differ by group
    leaf = Linear(w.shape)
    leaf.weight = torch.nn.Parameter(w + 0.1)  # zero points differ from the center
    return store_quantized(leaf, format, format.encode(leaf.weight.detach()))


def _as_exact(case: Case, leaf: QuantizedLeaf, x: Tensor, what: str) -> None:
    """Each kernel within its bound, and the leaf, which uses one of them (ops/formats/kernels.py)."""
    format, (out, inp) = leaf.format, leaf.shape
    weight = format.decode(leaf.stored(), inp).double()
    exact = x.double() @ weight.T
    with using("reference"):
        slow = leaf.leaf(x).double()
    bound = 4 * (slow - exact).abs().max() + 4 * torch.finfo(x.dtype).eps * exact.abs().max()
    sizes = x.double().abs().amax(-1, keepdim=True) * weight.abs().sum(-1)
    able = [kernel for kernel in kernels.KERNELS if kernel.takes(format, leaf.shape, x.dtype)]
    outputs = [("the leaf", able[0] if able else None, leaf.leaf(x))]
    for kernel in able:
        if kernel.rows is None or len(x) <= kernel.rows:
            operands = kernels.prepared(kernel, format, leaf.stored(), inp)
            outputs.append((type(kernel).__name__, kernel, kernels.product(kernel, format, operands, x, out)))
    for name, kernel, y in outputs:
        most = bound + (0.0 if kernel is None else kernel.rounding(x.dtype)) * sizes
        case.true(bool(((y.double() - exact).abs() <= most).all()), f"{what}: {name} is not as exact as the reference")


def _nearest(case: Case, path: str, leaf: Linear, format: Format, tensors: dict[str, Tensor]) -> None:
    """The codes of one matrix: each the nearest level of a grid that covers the group, and the same when encoded again."""
    w, inp = leaf.weight.detach(), leaf.in_features
    decoded, grid = format.decode(tensors, inp).double(), format.grid(tensors)
    for name, declared in format.tensors(w.shape).items():
        case.true(
            (declared.shape, declared.dtype) == (tensors[name].shape, tensors[name].dtype), f"{path}.{name}: not as declared"
        )
    scale = grid.scale.double()[..., None]
    scale = torch.where(scale > 0, scale, 1.0)
    error = (format.grouped(w) - format.grouped(decoded)).abs() / scale
    distance, half = _distances(format, format.grouped(w) / scale, grid)
    slack = ROUNDING * distance.new_ones(()).maximum(error + format.grouped(decoded).abs() / scale)
    case.true(bool((error <= distance + slack).all()), f"{path}: a value of {format} is not at the nearest level")
    case.true(
        bool((error <= half + 0.02).all()), f"{path}: {format} is off by {float((error - half).max()):.2g} steps more than half"
    )
    rms, limit = float((w - decoded).norm() / w.norm()), COARSEST * 2 ** (-format.bits / 2)
    case.true(
        rms <= limit, f"{path}: {format} has an error of {rms:.2g} of the weights, over {limit:.2g}: its steps are too wide"
    )
    again = format.encode(decoded, tensors)[CODES]
    case.same(again.float(), tensors[CODES].float(), f"{path}: codes of {format}, encoded again", IDENTITY)


def _copies(case: Case, path: str, weight: Tensor, format: Format) -> None:
    """The first rows of a matrix by themselves, and among copies of them."""
    few = weight.flatten(0, -2)[:ALONE]
    alone, among = (format.decode(format.encode(rows), few.shape[-1]) for rows in (few, few.repeat(COPIES, 1)))
    case.same(alone, among[: len(few)], f"{path}: rows in {format}, and the same rows among copies", IDENTITY)


def _distances(format: Format, units: Tensor, grid: Grid) -> tuple[Tensor, Tensor]:
    """For values in units of their scale: how far the nearest level is, and half the gap between the levels beside it."""
    levels = format.levels(grid.zero)
    levels = levels.expand(*units.shape, -1) if levels.dim() == 1 else levels[..., None, :].expand(*units.shape, -1)
    above = torch.searchsorted(levels.contiguous(), units[..., None].contiguous()).clamp(1, levels.shape[-1] - 1)
    high, low = levels.gather(-1, above)[..., 0], levels.gather(-1, above - 1)[..., 0]
    return torch.minimum((units - low).abs(), (units - high).abs()), (high - low) / 2


def _gradients(case: Case, model: ModelModule, dense: ModelModule) -> None:
    """The gradients of what is not quantized."""
    found = []
    for one in (model, dense):
        run = case.of(one)
        output = run.run()
        weights = torch.randn(output.shape, generator=generator(case.seed, "quantized"), dtype=output.dtype)
        found.append(run.gradients((output * weights).sum()))
    for name, gradient in found[0].items():
        case.same(gradient, found[1][name], f"gradient of {name} through quantized leaves and dense ones")
