"""Oracles of state spaces: the response to an impulse. With a = 0.9, b = 0.5, c = 1 it is 0.5, 0.45, 0.405, 0.3645, …"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator

import torch

from dovetail.nn.rows import sequence_rows
from dovetail.ops.implementation import using
from dovetail.ops.scan import decay, selective, state_space
from dovetail.ops.scan.conv import causal_conv
from dovetail.parts.mixer.mamba2 import PROJECTIONS
from dovetail.parts.mixer.s4 import hippo_legs, initial_frequencies
from dovetail.proof.laws.oracle import Comparison, alone, ctx, numbers, oracle, part, row

IMPULSE = [0.5, 0.45, 0.405, 0.3645, 0.32805, 0.295245]
ONE = 1.2784645427610738  # silu of this is 1
TWO = 2.2177151057570903  # silu of this is 2
LOG_A = -2.2503673273124454  # ln(−ln 0.9): with a step of 1 the decay is 0.9
STEP_ONE = 0.5413248546129181  # softplus of this is 1


@oracle("mamba2")
def impulse() -> Iterator[Comparison]:
    """One value of state; the biases make B, C and the gate 1; the norm has an eps so large that it does nothing."""
    spec = part("mamba2", inner=1, head=1, state_size=1, conv_size=2, bias=True, norm=part("rmsnorm", eps=1e16))
    zero, one, current = [[0.0]], [[1.0]], [[0.0, 1.0]]
    weights = {
        **{f"{name}.weight": zero for name in ("z", "b", "c", "dt")},
        "x.weight": one,
        "o.weight": one,
        "z.bias": [ONE],
        "x.bias": [0.0],
        "b.bias": [0.0],
        "c.bias": [0.0],
        "o.bias": [0.0],
        **{f"conv_{name}": current for name in ("x", "b", "c")},
        "conv_x_bias": [0.0],
        "conv_b_bias": [ONE],
        "conv_c_bias": [ONE],
        "dt_bias": [STEP_ONE],
        "a_log": [LOG_A],
        "skip": [0.0],
        "norm.scale": [1e8],
    }
    y = alone(spec, weights, embed=1)(numbers([[[1.0]] + [[0.0]] * 5]), ctx(6))[0, :, 0]  # silu(1) = 0.7310585786300049
    yield Comparison("impulse response", y * (0.5 / 0.7310585786300049), IMPULSE)
    yield Comparison("the impulse itself: silu(1)", alone(spec, weights, embed=1)(numbers([[[1.0]]]), ctx(1)), [[[0.73105858]]])
    # a step of 2, input 1: the decay is 0.81, the input adds 2·silu(1)
    longer = {**weights, "dt_bias": [1.8545865421312038]}
    y = alone(spec, longer, embed=1)(numbers([[[1.0], [0.0]]]), ctx(2))[0, :, 0]
    yield Comparison("a longer step adds more and decays more", y, [1.46211716, 1.18431490])
    skipping = alone(spec, {**weights, "skip": [3.0]}, embed=1)(numbers([[[1.0]]]), ctx(1))
    yield Comparison("the skip adds 3·silu(1)", skipping, [[[2.92423431]]])
    gated = alone(spec, {**weights, "z.bias": [TWO]}, embed=1)(numbers([[[1.0]]]), ctx(1))
    yield Comparison("a gate of 2 doubles it", gated, [[[1.46211716]]])
    least = alone(dc.replace(spec, dt_min=2.0), weights, embed=1)(numbers([[[1.0], [0.0]]]), ctx(2))[0, :, 0]
    yield Comparison("a step of 1 clamped to 2", least, [1.46211716, 1.18431490])
    most = alone(dc.replace(spec, dt_max=1.0), longer, embed=1)(numbers([[[1.0]] + [[0.0]] * 5]), ctx(6))[0, :, 0]
    yield Comparison("a step of 2 clamped to 1", most * (0.5 / 0.7310585786300049), IMPULSE)


@oracle("mamba2")
def gate_and_norm() -> Iterator[Comparison]:
    """One token and four heads: B, C, x and Δ are 1, so y = 1 + D = (1, 2, 3, 4); the gate is (2, 1, 1, 2), o sums by powers
    of ten. Each of the five projections is divided by its multiplier, which gives the same only before what follows it."""
    weights = {
        "z.weight": [[TWO], [ONE], [ONE], [TWO]],
        "x.weight": [[ONE]] * 4,
        "b.weight": [[ONE]] * 2,
        "c.weight": [[ONE]] * 2,
        "dt.weight": [[STEP_ONE]] * 4,
        "o.weight": [[1.0, 10.0, 100.0, 1000.0]],
        "conv_x": [[0.0, 1.0]] * 4,
        "conv_b": [[0.0, 1.0]] * 2,
        "conv_c": [[0.0, 1.0]] * 2,
        "dt_bias": [0.0] * 4,
        "a_log": [LOG_A] * 4,
        "skip": [0.0, 1.0, 2.0, 3.0],
    }
    bare = part("mamba2", inner=4, head=1, state_size=1, groups=2, conv_size=2, conv_bias=False, norm=None)
    scale, x = {"norm.scale": [1.0] * 4}, numbers([[[1.0]]])
    yield Comparison("without a norm: 2 + 20 + 300 + 8000", alone(bare, weights, embed=1)(x, ctx(1)), [[[8322.0]]])
    factors = dict(zip(PROJECTIONS, (0.5, 2.0, 4.0, 0.25, 0.8), strict=True))
    divided = {f"{n}.weight": [[v / f for v in row] for row in weights[f"{n}.weight"]] for n, f in factors.items()}
    multiplied = alone(dc.replace(bare, multipliers=tuple(factors.values())), {**weights, **divided}, embed=1)(x, ctx(1))
    yield Comparison("multipliers", multiplied, [[[8322.0]]])
    norm = part("rmsnorm", eps=0.1)  # of (2, 2, 3, 8): over √(20.25 + 0.1)
    whole = alone(dc.replace(bare, norm=norm), {**weights, **scale}, embed=1)(x, ctx(1))
    yield Comparison("a norm over all heads", whole, [[[1844.78392095]]])
    norm = dc.replace(norm, groups=2)  # (2, 2) over √(4 + 0.1), (3, 8) over √(36.5 + 0.1)
    grouped = alone(dc.replace(bare, norm=norm), {**weights, **scale}, embed=1)(x, ctx(1))
    yield Comparison("a norm per group", grouped, [[[1382.81270575]]])
    first = alone(dc.replace(bare, norm=norm, norm_before_gate=True), {**weights, **scale}, embed=1)(x, ctx(1))
    yield Comparison("before the gate: (1, 2) over √2.6, (3, 4) over √12.6", first, [[[2351.90392555]]])


@oracle("mamba2")
def forms() -> Iterator[Comparison]:
    """The recurrence in both forms, and a convolution that continues from its state."""
    q, k, v = (
        torch.ones(1, 6, 1, 1, dtype=torch.float64),
        torch.ones(1, 6, 1, 1, dtype=torch.float64),
        numbers([0.5] + [0.0] * 5),
    )
    g, empty = numbers([-0.10536051565782628] * 6).view(1, 6, 1), torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    for form in (decay.naive, decay.chunked):
        y, state = form(q, k, v.view(1, 6, 1, 1), g, None, empty)
        yield Comparison(form.__name__, y.flatten(), IMPULSE)
        yield Comparison(f"{form.__name__}: state", state.flatten(), [0.295245])
    # 1·x + 10·x₋₁ + 100·x₋₂
    weight, seq = numbers([[100.0, 10.0, 1.0]]), sequence_rows(row(2))
    y, conv_state = causal_conv(numbers([[[1.0], [2.0]]]), weight, None, seq, None)
    yield Comparison("a convolution", y.flatten(), [1.0, 12.0])
    y, conv_state = causal_conv(numbers([[[3.0]]]), weight, numbers([0.5]), sequence_rows(row(1, start=2)), conv_state)
    yield Comparison("continued", y.flatten(), [123.5])
    yield Comparison("conv state", conv_state.flatten(), [2.0, 3.0])
    first = part("mamba2", inner=6, head=2)
    scope = first.axes(alone(part("rmsnorm"), {"scale": [1.0]}, embed=1).scope.add(embed=3))
    yield Comparison("inner width: twice the width", float(part("mamba2", head=2).axes(scope).size("heads")), 3.0)
    yield Comparison("initial decays", first.constant("a_log", scope).exp(), [1.0, 8.5, 16.0])
    steps = torch.nn.functional.softplus(first.constant("dt_bias", scope))
    yield Comparison("initial steps", steps, [0.001, 0.01, 0.1], near=1e-5)


# -- Mamba -----------------------------------------------------------------------------------------------------------------


@oracle("mamba")
def impulse_of_one_channel() -> Iterator[Comparison]:
    """Two channels: the first has the impulse; the second is always 1, and B and C are projections of it."""
    spec = part("mamba", inner=2, state_size=1, rank=1, conv_size=2, bias=True)
    weights = {
        "z.weight": [[0.0], [0.0]],
        "z.bias": [ONE, ONE],
        "x.weight": [[1.0], [0.0]],
        "x.bias": [0.0, ONE],
        "low.weight": [[0.0, 0.0]],
        "b.weight": [[0.0, 1.0]],
        "c.weight": [[0.0, 1.0]],
        "dt.weight": [[0.0], [0.0]],
        "dt_bias": [STEP_ONE, STEP_ONE],
        "o.weight": [[1.0, 0.0]],
        "o.bias": [0.0],
        "conv": [[0.0, 1.0], [0.0, 1.0]],
        "conv_bias": [0.0, 0.0],
        "a_log": [[LOG_A], [LOG_A]],
        "skip": [0.0, 0.0],
    }
    y = alone(spec, weights, embed=1)(numbers([[[1.0]] + [[0.0]] * 5]), ctx(6))[0, :, 0]  # silu(1) = 0.7310585786300049
    yield Comparison("impulse response", y * (0.5 / 0.7310585786300049), IMPULSE)
    skipping = alone(spec, {**weights, "skip": [3.0, 0.0]}, embed=1)(numbers([[[1.0]]]), ctx(1))
    yield Comparison("the skip adds 3·silu(1)", skipping, [[[2.92423431]]])


@oracle("mamba")
def mamba_of_the_reference() -> Iterator[Comparison]:
    """Four tokens through transformers' MambaMixer with these weights; all sizes differ."""
    spec = part("mamba", inner=3, state_size=2, rank=1, conv_size=2)
    weights = {
        "x.weight": [[0.5, -1.0], [1.0, 0.25], [-0.75, 0.5]],
        "z.weight": [[1.0, 0.5], [-0.5, 2.0], [0.25, -1.5]],
        "conv": [[0.5, 1.0], [-1.0, 0.75], [0.25, -0.5]],
        "conv_bias": [0.1, -0.2, 0.3],
        "low.weight": [[0.5, -0.25, 1.0]],
        "b.weight": [[1.0, 0.5, -1.0], [-0.5, 2.0, 0.25]],
        "c.weight": [[0.75, 1.0, 0.5], [1.5, -1.0, 2.0]],
        "dt.weight": [[0.5], [-1.0], [2.0]],
        "dt_bias": [0.2, -0.3, 0.1],
        "a_log": [[0.0, 0.5], [-0.5, 1.0], [0.3, -1.0]],
        "skip": [1.0, 0.5, -2.0],
        "o.weight": [[1.0, -0.5, 0.25], [0.5, 1.5, -1.0]],
    }
    y = alone(spec, weights, embed=2)(numbers([[[1.0, 2.0], [0.5, -1.0], [-1.5, 1.0], [2.0, 0.0]]]), ctx(4))
    want = [[0.42361067, -1.29093366], [-0.74060946, 3.01989101], [0.33876736, -0.72263230], [0.76714050, -0.70997317]]
    yield Comparison("four tokens", y[0], want, near=1e-7)
    scope = spec.axes(alone(part("rmsnorm"), {"scale": [1.0]}, embed=1).scope.add(embed=2))
    yield Comparison("initial decays", spec.constant("a_log", scope).exp(), [[1.0, 2.0]] * 3)
    steps = torch.nn.functional.softplus(spec.constant("dt_bias", scope))
    yield Comparison("initial steps", steps, [0.001, 0.01, 0.1], near=1e-5)
    wide = part("mamba").axes(scope.add(embed=768))
    yield Comparison("sizes of the first Mamba", [wide.size("inner"), wide.size("rank"), wide.size("state")], [1536, 48, 16])


@oracle("mamba")
def selective_forms() -> Iterator[Comparison]:
    """The recurrence in both forms: an impulse in two values of state with decays 0.9 and 0.5."""
    x, step = numbers([0.5] + [0.0] * 5).view(1, 6, 1), torch.ones(1, 6, 1, dtype=torch.float64)
    a = numbers([[-0.10536051565782628, -0.6931471805599453]])
    b, first, second = (numbers([row] * 6)[None] for row in ([1.0, 1.0], [1.0, 0.0], [0.0, 1.0]))
    for scan in (selective.naive, selective.chunked):
        y, state = scan(x, step, a, b, first, None, torch.zeros(1, 1, 2, dtype=torch.float64))
        yield Comparison(scan.__name__, y.flatten(), IMPULSE)
        yield Comparison(f"{scan.__name__}: state", state.flatten(), [0.295245, 0.015625])
        y, _ = scan(x, step, a, b, second, None, torch.zeros(1, 1, 2, dtype=torch.float64))
        yield Comparison(f"{scan.__name__}: the second value", y.flatten(), [0.5, 0.25, 0.125, 0.0625, 0.03125, 0.015625])


# -- S4 --------------------------------------------------------------------------------------------------------------------


@oracle("s4")
def one_real_number() -> Iterator[Comparison]:
    """ā = 0.9 and c b̄ = 0.5: the same impulse as a recurrence, in chunks and as a convolution."""
    log_a, b, c = (torch.complex(numbers([[v]]), numbers([[0.0]])) for v in (-0.10536051565782628, 0.5, 1.0))
    u, seq = numbers([1.0] + [0.0] * 5).view(1, 6, 1), sequence_rows(row(6))
    with using("reference"):
        yield Comparison("a recurrence", state_space.space_scan(u, log_a, b, c, seq, None)[0].flatten(), IMPULSE)
    empty = torch.zeros(1, 1, 1, dtype=torch.complex128)
    y, state = state_space.chunked(u, log_a, b, c, None, None, empty)
    yield Comparison("in chunks", y.flatten(), IMPULSE)
    yield Comparison("in chunks: state", state.real.flatten(), [0.295245])
    y, state = state_space.convolved(u, log_a, b, c, empty)
    yield Comparison("a convolution", y.flatten(), IMPULSE)
    yield Comparison("a convolution: state", state.real.flatten(), [0.295245])
    y, state = state_space.convolved(u * 0, log_a, b, c, empty + 1)
    yield Comparison("a convolution: outputs from an initial state", y.flatten(), [0.9, 0.81, 0.729, 0.6561, 0.59049, 0.531441])
    yield Comparison("a convolution: that state afterwards", state.real.flatten(), [0.531441])


@oracle("s4")
def of_scipy() -> Iterator[Comparison]:
    """A = −0.5 + 2i, C = 0.3 − 0.7i, Δ = 0.25: scipy.signal's cont2discrete and dlsim on the same system in real numbers."""
    rules = {
        "zoh": [0.214284166886, 0.285298602136, -0.153546078797, -0.259656283287],
        "bilinear": [0.207213114754, 0.280156947057, -0.139092917909, -0.246571275415],
    }
    for discretization, want in rules.items():
        spec = part("s4", inner=1, state_size=1, discretization=discretization, act=part("identity"))
        weights = {
            "x.weight": [[1.0]],
            "o.weight": [[1.0]],
            "decay_log": [[-0.6931471805599453]],
            "turn": [[2.0]],
            "c": [[0.3, -0.7]],
            "step_log": [-1.3862943611198906],
            "skip": [0.0],
        }
        u = numbers([[[1.0], [0.0], [-2.0], [0.5]]])
        yield Comparison(discretization, alone(spec, weights, embed=1)(u, ctx(4)).flatten(), want)
        skipping = alone(spec, {**weights, "skip": [3.0]}, embed=1)(u, ctx(4)).flatten()
        yield Comparison(f"{discretization}: a skip of 3", skipping[1:3], [want[1], want[2] - 6.0])


@oracle("s4")
def hippo() -> Iterator[Comparison]:
    """A[n, k] = −√((2n+1)(2k+1)) below the diagonal, −(n+1) on it; eigenvalues of A + P Pᵀ, P = √(n + ½), by numpy."""
    want = [
        [-1.0, 0.0, 0.0, 0.0],
        [-1.7320508076, -2.0, 0.0, 0.0],
        [-2.2360679775, -3.8729833462, -3.0, 0.0],
        [-2.6457513111, -4.5825756950, -5.9160797831, -4.0],
    ]
    yield Comparison("HiPPO-LegS", hippo_legs(4), want)
    yield Comparison("legs: 6 eigenvalues", initial_frequencies("legs", 3), [0.471477337479, 2.468241051345, 10.951506527994])
    yield Comparison("lin: πn", initial_frequencies("lin", 3), [0.0, 3.1415926536, 6.2831853072])
    yield Comparison("inv: (6/π)(6/(2n+1) − 1)", initial_frequencies("inv", 3), [9.5492965855, 1.9098593171, 0.3819718634])
    spec = part("s4", inner=3, state_size=2)
    scope = spec.axes(alone(part("rmsnorm"), {"scale": [1.0]}, embed=1).scope)
    yield Comparison("initial steps", spec.constant("step_log", scope).exp(), [0.001, 0.01, 0.1])
    yield Comparison("initial decays", spec.constant("decay_log", scope).exp(), [[0.5, 0.5]] * 3)
    yield Comparison("initial frequencies", spec.constant("turn", scope), [[0.556501115084, 4.603293007067]] * 3)
