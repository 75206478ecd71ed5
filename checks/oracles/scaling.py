"""Oracles of RoPE scaling, for a head of 8 (four pairs, base 10000: frequencies 1, 0.1, 0.01, 0.001 before scaling).

The numbers are those of transformers' ROPE_INIT_FUNCTIONS, except NTK-aware scaling, which it does not have: the base is
10000·2^(8/6) = 25198.42. Each goes through the module of a rope, which rotates by cos(p·f)·amplitude and sin(p·f)·amplitude.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor

from dovetail.proof.laws.oracle import Comparison, alone, numbers, oracle, part, row
from dovetail.spec.scope import Scope

LOOSE = 1e-6  # transformers computes these in float32


def _module(scaling: Any) -> Any:
    return alone(part("rope", scaling=scaling), head=8)


def _rotated(scaling: Any, length: int) -> Tensor:
    """(cos, sin)·amplitude of the four pairs at position 5 of a sequence of `length` tokens."""
    x = numbers([[[[1.0] * 4 + [0.0] * 4]] * length])
    return _module(scaling).rotate(x, row(length))[0, 5, 0]


@oracle("linear_scaling")
def linear() -> Iterator[Comparison]:
    """Position interpolation: every frequency over 4."""
    yield Comparison("factor 4", _module(part("linear_scaling", factor=4.0)).frequency, [0.25, 0.025, 0.0025, 0.00025], LOOSE)
    # cos and sin of 5·0.25, 5·0.025, 5·0.0025, 5·0.00025
    cos, sin = (
        [0.3153223624, 0.9921976672, 0.9999218760, 0.9999992188],
        [0.9489846194, 0.1246747334, 0.0124996745, 0.0012499997],
    )
    yield Comparison("at position 5", _rotated(part("linear_scaling", factor=4.0), 6), cos + sin)


@oracle("ntk")
def ntk() -> Iterator[Comparison]:
    """The lowest frequency is divided by exactly the factor, the highest is unchanged."""
    expected = [1.0, 0.0793700526, 0.0062996052, 0.0005]
    yield Comparison("factor 2", _module(part("ntk", factor=2.0)).frequency, expected, LOOSE)
    # with a single pair, d/(d − 2) is undefined
    problems = [len(part("ntk").check(Scope(sizes={"pair": pairs}))) for pairs in (1, 2, 3)]
    yield Comparison("problems with 1, 2, 3 pairs", problems, [1, 0, 0], near=0)


@oracle("dynamic_ntk")
def dynamic_ntk() -> Iterator[Comparison]:
    """Original length 8, factor 2: up to 8 unchanged; at 16 the base grows by 3^(8/6): 1, 0.0693361, 0.0048075, 0.00033333."""
    scaling = part("dynamic_ntk", factor=2.0, original=8)
    cos, sin = (
        [0.2836621855, 0.8775825619, 0.9987502604, 0.9999875000],
        [-0.9589242747, 0.4794255386, 0.0499791693, 0.0049999792],
    )
    yield Comparison("6 tokens", _rotated(scaling, 6), cos + sin)
    cos, sin = (
        [0.2836621855, 0.9405057379, 0.9997111134, 0.9999986111],
        [-0.9589242747, 0.3397778053, 0.0240351781, 0.0016666659],
    )
    yield Comparison("16 tokens", _rotated(scaling, 16), cos + sin, LOOSE)


@oracle("yarn")
def yarn() -> Iterator[Comparison]:
    """Factor 4: amplitude 0.1·ln 4 + 1 = 1.1386294361."""
    original = part("yarn", factor=4.0, original=2048)
    yield Comparison("2048 tokens", _module(original).frequency, [1.0, 0.1, 0.00625, 0.00025], LOOSE)
    ramp = part("yarn", factor=4.0, original=2048, truncate=False)
    yield Comparison("ends of the ramp not rounded", _module(ramp).frequency, [1.0, 0.1, 0.0050569717, 0.00025], LOOSE)
    short = part("yarn", factor=4.0, original=64, beta_fast=4.0, beta_slow=0.2)
    yield Comparison("betas 4 and 0.2", _module(short).frequency, [1.0, 0.0625, 0.0025, 0.00025], LOOSE)
    # base 10: the lowest frequency is so high that the ramp would end beyond d − 1 = 7, where it is cut; it begins at 0, so
    # 0, 1/7, 2/7, 3/7 of the way from 1, 10^−¼, 10^−½, 10^−¾ to a quarter of each
    wide = part("yarn", factor=4.0, original=1_000_000, beta_fast=159154.0)
    cut = [1.0, 0.5020904689, 0.2484646733, 0.1206689600]
    yield Comparison("a ramp cut at d − 1", alone(part("rope", base=10.0, scaling=wide), head=8).frequency, cut, LOOSE)
    # 1.1386294361 · (cos, sin) of 5, 0.5, 0.03125, 0.00125
    cos = [0.3229861143, 0.9992413376, 1.1380735100, 1.1386285466]
    sin = [-1.0918594061, 0.5458880307, 0.0355763788, 0.0014232864]
    yield Comparison("at position 5", _rotated(original, 6), cos + sin, LOOSE)
    sharp = part("yarn", factor=4.0, original=2048, attention=1.5)
    yield Comparison("amplitude 1.5, first pair", _rotated(sharp, 6)[0], 0.4254932782, LOOSE)


@oracle("llama3")
def llama3() -> Iterator[Comparison]:
    """Original length 1000: wavelengths 6.3 and 62.8 unchanged, 6283 over 8, 628 between: 0.01·(0.80281697/8 + 0.19718303)."""
    scaling = part("llama3", factor=8.0, original=1000, low=1.0, high=4.0)
    yield Comparison("factor 8", _module(scaling).frequency, [1.0, 0.1, 0.0029753523, 0.000125], LOOSE)


@oracle("longrope")
def longrope() -> Iterator[Comparison]:
    """Original length 8: to there the short list, beyond it the long one; amplitude √(1 + ln 4/ln 8) = 1.2909944487."""
    scaling = part("longrope", short=(1.0, 1.1, 1.2, 1.3), long=(2.0, 3.0, 4.0, 5.0), original=8, factor=4.0)
    # 1.2909944487 · (cos, sin) of 5·(1, 0.0909091, 0.0083333, 0.00076923), then of 5·(0.5, 0.0333333, 0.0025, 0.0002)
    cos, sin = (
        [0.3662063067, 1.1599077645, 1.2898739560, 1.2909849000],
        [-1.2379659153, 0.5668162353, 0.0537758721, 0.0049653510],
    )
    yield Comparison("8 tokens", _rotated(scaling, 8), cos + sin, LOOSE)
    cos, sin = (
        [-1.0342719603, 1.2731054376, 1.2908935911, 1.2909938032],
        [0.7726242158, 0.2141709864, 0.0161370104, 0.0012909942],
    )
    yield Comparison("9 tokens", _rotated(scaling, 9), cos + sin, LOOSE)
    yield Comparison("the constant frequencies", _module(scaling).frequency, [1.0, 0.0909090909, 0.0083333333, 0.0007692308])
    yield Comparison("amplitude given", part("longrope", attention=1.2).amplitude(), 1.2)


@oracle("proportional")
def proportional() -> Iterator[Comparison]:
    """The first half of four pairs turn by 1 and 0.1 as they do among four; pair i is the channels i and i + 4."""
    half = part("proportional", fraction=0.5)
    yield Comparison("a half", _module(half).frequency, [1.0, 0.1, 0.0, 0.0])
    # cos and sin of 5 and 0.5; the other pairs stay
    yield Comparison(
        "at position 5", _rotated(half, 6), [0.2836621855, 0.8775825619, 1.0, 1.0, -0.9589242747, 0.4794255386, 0.0, 0.0]
    )
    slow = part("proportional", fraction=0.75, factor=4.0)
    yield Comparison("three quarters, factor 4", _module(slow).frequency, [0.25, 0.025, 0.0025, 0.0])
    whole = part("proportional", fraction=1.0)
    yield Comparison("all pairs: plain RoPE", _module(whole).frequency, [1.0, 0.1, 0.01, 0.001])
    problems = [len(part("proportional").check(Scope(sizes={"pair": pairs}))) for pairs in (3, 4, 5)]
    yield Comparison("problems of a quarter of 3, 4, 5 pairs", problems, [1, 0, 0], near=0)
