"""Oracles of linear attention, GLA, gated DeltaNet and RWKV-6, computed by hand.

An input of two channels is (signal, 1): projections that must be equal for every token read the second channel.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterator

import torch

from dovetail.ops.scan import delta, gated
from dovetail.parts.mixer.gated_deltanet import _unit
from dovetail.proof.laws.oracle import Comparison, alone, ctx, eye, numbers, oracle, part
from dovetail.spec.scope import Scope

ONE = 1.2784645427610738  # silu of this is 1
LOG_A = -2.2503673273124454  # ln(−ln 0.9): e^{−e^{this}} = 0.9
STEP_ONE = 0.5413248546129181  # softplus of this is 1
HALF = 0.5493061443340549  # tanh of this is 0.5
LOG_9, LOG_5 = -0.10536051565782628, -0.6931471805599453  # ln 0.9, ln 0.5
FOUR = [[[0.5, 1.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]]  # an impulse of 0.5, and 1 beside it
NO_NORM = {"eps": 1e16}  # so wide that it does nothing, with a scale of 1e8


@oracle("elu_features", "relu_features", "random_features")
def features() -> Iterator[Comparison]:
    """The features of a few numbers."""
    x = numbers([-1.0, 0.0, 2.0])
    yield Comparison("elu + 1", alone(part("elu_features"), head=3).key(x), [0.36787944, 1.0, 3.0])
    yield Comparison("relu + 1/4", alone(part("relu_features", floor=0.25), head=3).key(x), [0.25, 0.25, 2.25])
    module = alone(part("random_features", features=2), head=2, features=2)
    module.directions = numbers([[1.0, 0.0], [0.0, 2.0]])
    # times e: the longest direction is 2, so keys are divided by e^{2²/4}
    keys = module.key(numbers([[1.0, 0.0], [0.0, 2.0]])) * 2.718281828459045
    yield Comparison("e^{ω·x − |x|²/2}/√2", keys, [[1.15115920, 0.49652225], [0.17190949, 4.96691294]])
    long = module.key(numbers([50.0, 0.0])) * 1.1420073898156842e26  # times e^60
    yield Comparison("a key of large norm: e^{−60}/√2", long, [0.70710678, 0.70710678])
    query = module.query(numbers([1.0, 0.0]))  # 1/√2, and that times e^{−2^{−1/4}}
    yield Comparison("of a query, the largest is 1/√2", query, [0.70710678, 0.30499192])


@oracle("random_features")
def directions() -> Iterator[Comparison]:
    """Directions are orthogonal, have the norms of normal vectors, and their products approximate softmax."""
    spec = part("random_features", features=3)
    directions = spec.constant("directions", alone(spec, head=3, features=3).scope)
    yield Comparison("orthogonal", (directions @ directions.T).fill_diagonal_(1.0), eye(3), near=1e-9)
    spec = part("random_features", features=20000)
    directions = spec.constant("directions", alone(spec, head=2, features=20000).scope)
    yield Comparison("|ω|² on average: 2", directions.square().sum(-1).mean(), 2.0, near=0.03)
    yield Comparison("|ω|⁴ on average: 8", directions.square().sum(-1).square().mean(), 8.0, near=0.06)
    # q = [1, 0], K = [[1, 0], [0, 1], [1, 1]], V = [10, 20, 60]: softmax gives 32.033
    module = alone(spec, head=2, features=20000)
    weights = module.query(numbers([1.0, 0.0])) @ module.key(numbers([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]])).T
    z = (weights * numbers([10.0, 20.0, 60.0])).sum() / weights.sum()
    yield Comparison("softmax, approximately", z, 32.033363, near=0.02)


@oracle("linear_attention")
def sums() -> Iterator[Comparison]:
    """φ = elu + 1, everything else the identity."""
    weights = {f"{name}.weight": [[1.0]] for name in "qkvo"}
    y = alone(part("linear_attention", heads=1), weights, embed=1)(numbers([[[1.0], [0.0], [-1.0]]]), ctx(3))[0, :, 0]
    yield Comparison("1, 2/3, (2 − 1/e)/(3 + 1/e)", y, [1.0, 0.66666667, 0.48461371])
    weights = {f"{name}.weight": eye(2) for name in "qkvo"}
    y = alone(part("linear_attention", heads=1), weights, embed=2)(numbers([[[1.0, 0.0], [0.0, 2.0]]]), ctx(2))[0, 1]
    yield Comparison("weights 5/15 and 10/15", y, [0.33333333, 1.33333333])
    biased = {**weights, **{f"{name}.bias": [0.0, 0.0] for name in "qk"}, "v.bias": [3.0, 0.0], "o.bias": [0.0, 7.0]}
    y = alone(part("linear_attention", heads=1, bias=True), biased, embed=2)(numbers([[[1.0, 0.0], [0.0, 2.0]]]), ctx(2))[0, 1]
    yield Comparison("biases", y, [3.33333333, 8.33333333])
    two = alone(part("linear_attention", heads=2), weights, embed=2)(numbers([[[1.0, 0.0], [0.0, 2.0]]]), ctx(2))[0, 1]
    yield Comparison("two heads: weights 2/3 and 1/3, 1/4 and 3/4", two, [0.66666667, 1.5])


@oracle("gla")
def channels() -> Iterator[Comparison]:
    """An impulse in two key channels with decays 0.9 and 0.5."""
    spec = part("gla", heads=1, key_size=2, value_size=1, rank=1, gate_normalizer=2.0, norm=part("rmsnorm", **NO_NORM))
    weights = {
        "q.weight": [[0.0, 1.4142135623730951]] * 2,  # √2 undoes 1/√key
        "k.weight": [[0.0, 1.0]] * 2,
        "v.weight": [[1.0, 0.0]],
        "gate.weight": [[0.0, ONE]],
        "fade_down.weight": [[0.0, 1.0]],
        "fade_up.weight": [[0.0], [0.0]],
        "fade_up.bias": [1.4500101755059984, -1.0986122886681098],  # σ: 0.81 and 0.25, whose roots are 0.9 and 0.5
        "norm.scale": [1e8],
        "o.weight": [[1.0], [0.0]],
    }
    y = alone(spec, weights, embed=2)(numbers(FOUR), ctx(4))[0, :, 0]
    yield Comparison("(0.9ᵗ + 0.5ᵗ)/2", y, [1.0, 0.7, 0.53, 0.427])
    y = alone(spec, {**weights, "gate.weight": [[0.0, 2.0]]}, embed=2)(numbers(FOUR), ctx(4))[0, :, 0]
    yield Comparison("an output gate of silu(2) = 1.76159416", y, [1.76159416, 1.23311591, 0.93364490, 0.75220070])
    # a data-dependent decay: the logit of the second channel falls by 1 where the signal is 0.5
    moved = {**weights, "fade_down.weight": [[2.0, 0.0]], "fade_up.weight": [[0.0], [-1.0]]}
    y = alone(spec, moved, embed=2)(numbers([[[0.5, 1.0], [0.5, 1.0]]]), ctx(2))[0, :, 0]
    # √σ(−1.0986123 − 1) = 0.33050230: 0.5 · (0.9 + 0.33050230 + 2)
    yield Comparison("data-dependent decay", y, [1.0, 1.61525115])
    scope = part("gla", heads=3).axes(Scope(sizes={"embed": 24}))
    yield Comparison("a key head is half as wide as a value head", [scope.size("key"), scope.size("value")], [4, 8], near=0)


@oracle("gla", "rwkv6")
def gated_forms() -> Iterator[Comparison]:
    """The recurrence in both forms, without and with a bonus of 3 for the current token."""
    one = torch.ones(1, 4, 1, 2, dtype=torch.float64)
    v, g = numbers([0.5, 0.0, 0.0, 0.0]).view(1, 4, 1, 1), numbers([[LOG_9, LOG_5]] * 4).view(1, 4, 1, 2)
    empty = torch.zeros(1, 1, 2, 1, dtype=torch.float64)
    for form in (gated.naive, gated.chunked):
        y, state = form(one, one, v, g, None, None, empty)
        yield Comparison(form.__name__, y.flatten(), [1.0, 0.7, 0.53, 0.427])
        yield Comparison(f"{form.__name__}: state", state.flatten(), [0.3645, 0.0625])
        y, state = form(one, one, v, g, numbers([[3.0, 3.0]]), None, empty)
        yield Comparison(f"{form.__name__}: with a bonus", y.flatten(), [3.0, 1.0, 0.7, 0.53])
        yield Comparison(f"{form.__name__}: state with a bonus", state.flatten(), [0.3645, 0.0625])


@oracle("gated_deltanet")
def corrections() -> Iterator[Comparison]:
    """The same key twice with β = ½ and values 4, then 10; then another key."""
    k, q = numbers([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]), numbers([[1.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    v, beta, empty = numbers([4.0, 10.0, 8.0]), numbers([0.5, 0.5, 1.0]), torch.zeros(1, 1, 2, 1, dtype=torch.float64)
    for log_decay, outputs in ((0.0, [2.0, 6.0, 14.0]), (LOG_5, [2.0, 5.5, 13.5])):
        g = numbers([0.0, log_decay, 0.0])
        for form in (delta.naive, delta.chunked):
            y, state = form(
                q.view(1, 3, 1, 2), k.view(1, 3, 1, 2), v.view(1, 3, 1, 1), g.view(1, 3, 1), beta.view(1, 3, 1), None, empty
            )
            yield Comparison(f"{form.__name__}", y.flatten(), outputs)
            yield Comparison(f"{form.__name__}: state", state.flatten(), [outputs[1], 8.0])


@oracle("gated_deltanet")
def delta_rule() -> Iterator[Comparison]:
    """q and k are large, so that eps does not matter when they are normalized; β = ½, a = 0.9: an impulse decays by 0.45."""
    spec = part("gated_deltanet", heads=1, key_size=1, value_size=1, conv_size=2, norm=part("rmsnorm", **NO_NORM))
    weights = {
        "q.weight": [[0.0, 1e3]],
        "k.weight": [[0.0, 1e3]],
        "v.weight": [[2.0, 0.0]],
        "z.weight": [[0.0, ONE]],
        "b.weight": [[0.0, 0.0]],
        "a.weight": [[0.0, 0.0]],
        **{f"conv_{name}": [[0.0, 1.0]] for name in "qkv"},
        "fade_bias": [STEP_ONE],
        "a_log": [LOG_A],
        "norm.scale": [1e8],
        "o.weight": [[1.0], [0.0]],
    }
    y = alone(spec, weights, embed=2)(numbers(FOUR), ctx(4))[0, :3, 0]
    yield Comparison("silu(1)/2 · 0.45ᵗ", y, [0.36552929, 0.16448818, 0.07401968])
    y = alone(spec, {**weights, "z.weight": [[0.0, 2.0]]}, embed=2)(numbers(FOUR), ctx(4))[0, :3, 0]
    yield Comparison("an output gate of silu(2) = 1.76159416", y, [0.64391426, 0.28976142, 0.13039264])
    late = {**weights, "conv_v": [[1.0, 0.0]]}
    y = alone(spec, late, embed=2)(numbers(FOUR), ctx(4))[0, :3, 0]
    yield Comparison("a convolution of the previous token", y, [0.0, 0.36552929, 0.16448818])
    yield Comparison("keys have norm 1", _unit(numbers([[3.0, 4.0], [6e3, 8e3]])), [[0.6, 0.8], [0.6, 0.8]], 1e-6)
    first = part("gated_deltanet", heads=3, key_size=1, value_size=1)
    decays = first.constant("a_log", alone(spec, weights, embed=2).scope.add(heads=3)).exp()
    yield Comparison("initial decays", decays, [1.0, 8.5, 16.0])


@oracle("rwkv6")
def time_mix() -> Iterator[Comparison]:
    """One key channel with decay 0.9, a bonus of 3, and a norm whose large eps leaves only the subtraction of the mean."""
    spec = part("rwkv6", heads=1, mix_rank=1, decay_rank=1, eps=1e16)
    zero_matrix, zeros = [[0.0], [0.0]], [0.0, 0.0]
    weights = {
        "r.weight": [[0.0, 1.0], [0.0, 0.0]],
        "k.weight": [[0.0, 1.0], [0.0, 0.0]],
        "v.weight": [[1.0, 0.0], [0.0, 0.0]],
        "g.weight": [[0.0, ONE]] * 2,
        "mix_down.weight": [[0.0, 0.0]] * 5,
        **{f"mix_{name}.weight": zero_matrix for name in "rkvwg"},
        **{f"mu_{name}": zeros for name in "xrkvwg"},
        "fade_down.weight": [[0.0, 1.0]],
        "fade_up.weight": zero_matrix,
        "fade": [LOG_A, LOG_A],
        "bonus": [3.0, 3.0],
        "scale": [2e8, 2e8],
        "shift": zeros,
        "o.weight": [[1.0, 0.0], [0.0, 0.0]],
    }

    def output(**changed: object) -> torch.Tensor:
        return alone(spec, {**weights, **changed}, embed=2)(numbers(FOUR), ctx(4))[0, :, 0]

    yield Comparison("the bonus, then the decaying state", output(), [1.5, 0.5, 0.45, 0.405])
    gated = output(**{"g.weight": [[0.0, 2.0]] * 2})
    yield Comparison("an output gate of silu(2) = 1.76159416", gated, [2.64239123, 0.88079708, 0.79271737, 0.71344563])
    yield Comparison("token shift: the value of the previous token", output(mu_v=[1.0, 0.0]), [0.0, 1.5, 0.5, 0.45])
    # the rows of M are r, k, v, w, g: a data-dependent ½ of the previous token
    chosen = {"mix_down.weight": [*[[0.0, 0.0]] * 2, [0.0, HALF], *[[0.0, 0.0]] * 2], "mix_v.weight": [[1.0], [0.0]]}
    yield Comparison("half of the previous token's value", output(**chosen), [0.75, 1.0, 0.475, 0.4275])
    # tanh(1e3) = 1, so that the decay is 0.9² = 0.81
    faster = {"fade_down.weight": [[0.0, 1e3]], "fade_up.weight": [[0.6931471805599453], [0.0]]}
    yield Comparison("data-dependent decay", output(**faster), [1.5, 0.5, 0.405, 0.32805])
    yield Comparison("scale and shift", output(scale=[4e8, 0.0], shift=[1.0, 5.0]), [4.0, 2.0, 1.9, 1.81])
    scope = alone(spec, weights, embed=2).scope.add(embed=4, heads=2, head=2)
    yield Comparison("initial λ", spec.constant("fade", scope), [-6.0, -3.68268472, -2.23551022, -1.0])
    yield Comparison("initial μ", spec.constant("mu_k", scope), [1.0, 0.75, 0.5, 0.25])
    second = dc.replace(scope, layer=1, depth=3)  # of three layers: exponents 0.7 + 1.3/2 and 1 − 1/3
    yield Comparison("initial λ of layer 1", spec.constant("fade", second), [-6.0, -4.86536465, -3.10767691, -1.0])
    yield Comparison("initial μ of layer 1", spec.constant("mu_k", second), [1.0, 0.60314974, 0.37003947, 0.17451819])
