"""State spaces: an impulse that fades. With a = 0.9, b = 0.5, c = 1 it is 0.5, 0.45, 0.405, 0.3645, 0.32805, 0.295245."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dovetail.core.line import line_of
from dovetail.laws.oracle.registry import Comparison, oracle
from dovetail.laws.oracle.stand import alone, ctx, numbers, part, row
from dovetail.ops.scan import decay
from dovetail.ops.scan.conv import causal_conv

IMPULSE = [0.5, 0.45, 0.405, 0.3645, 0.32805, 0.295245]
ONE = 1.2784645427610738  # silu of this is 1
LOG_A = -2.2503673273124454  # ln(−ln 0.9): with a step of 1 the memory keeps 0.9
STEP_ONE = 0.5413248546129181  # softplus of this is 1


@oracle("mamba2")
def impulse() -> Iterator[Comparison]:
    """One number of memory; B, C and the gate held at 1 by their biases; a norm so wide that it does nothing."""
    spec = part("mamba2", inner=1, head=1, state_size=1, taps_wide=2, bias=True, norm=part("rms", eps=1e16))
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
    yield Comparison("what is left of an impulse", y * (0.5 / 0.7310585786300049), IMPULSE)
    yield Comparison("the impulse itself: silu(1)", alone(spec, weights, embed=1)(numbers([[[1.0]]]), ctx(1)), [[[0.73105858]]])
    # step twice as wide, input 1: keeps 0.81, adds 2·silu(1)
    wider = {**weights, "dt_bias": [1.8545865421312038]}
    y = alone(spec, wider, embed=1)(numbers([[[1.0], [0.0]]]), ctx(2))[0, :, 0]
    yield Comparison("a wider step writes more and keeps less", y, [1.46211716, 1.18431490])
    skipping = alone(spec, {**weights, "skip": [3.0]}, embed=1)(numbers([[[1.0]]]), ctx(1))
    yield Comparison("the skip adds 3·silu(1)", skipping, [[[2.92423431]]])


@oracle("mamba2")
def forms() -> Iterator[Comparison]:
    """The recurrence itself, in both forms, and a convolution across a call's edge."""
    q, k, v = (
        torch.ones(1, 6, 1, 1, dtype=torch.float64),
        torch.ones(1, 6, 1, 1, dtype=torch.float64),
        numbers([0.5] + [0.0] * 5),
    )
    g, empty = numbers([-0.10536051565782628] * 6).view(1, 6, 1), torch.zeros(1, 1, 1, 1, dtype=torch.float64)
    for form in (decay.naive, decay.chunked):
        y, left = form(q, k, v.view(1, 6, 1, 1), g, None, empty)
        yield Comparison(form.__name__, y.flatten(), IMPULSE)
        yield Comparison(f"{form.__name__}: left behind", left.flatten(), [0.295245])
    # 1·x + 10·x₋₁ + 100·x₋₂
    weight, line = numbers([[100.0, 10.0, 1.0]]), line_of(row(2))
    y, tail = causal_conv(numbers([[[1.0], [2.0]]]), weight, None, line, None)
    yield Comparison("a convolution", y.flatten(), [1.0, 12.0])
    y, tail = causal_conv(numbers([[[3.0]]]), weight, numbers([0.5]), line_of(row(1, start=2)), tail)
    yield Comparison("goes on", y.flatten(), [123.5])
    yield Comparison("its tail", tail.flatten(), [2.0, 3.0])
    first = part("mamba2", inner=6, head=2)
    env = first.axes(alone(part("rms"), {"scale": [1.0]}, embed=1).env.add(embed=3))
    yield Comparison("first decays", first.constant("a_log", env).exp(), [1.0, 8.5, 16.0])
    steps = torch.nn.functional.softplus(first.constant("dt_bias", env))
    yield Comparison("first steps", steps, [0.001, 0.01, 0.1], near=1e-5)
