"""Oracles of initialization: the standard deviations of the weights of a small model, computed from its sizes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from dovetail.model.construction import build
from dovetail.nn.module import tensor_at
from dovetail.nn.random import GAMMA, mix, words as split_words
from dovetail.proof.laws.oracle import Comparison, oracle, part
from dovetail.spec.fold import declared

ASKED = ("embed.table", "layers.0.mixer.q.weight", "layers.0.mixer.o.weight", "layers.2.ffn.down.weight", "head.out.weight")


def _model(init: Any) -> Any:
    """Width 28, heads 6 of 12, ffn 44, 12 layers, an untied head."""
    mixer = part("attention", heads=6, kv_heads=2, head=12)
    block = part("block", mixer=mixer, ffn=part("glu", hidden=44))
    return part("model", width=28, vocab=62, layers=(block,) * 12, head=part("lm", tied=False), init=init)


def _spreads(init: Any) -> list[float]:
    stds = {d.path: d.scope.init.std(d.weight, d.scope) for d in declared(_model(init)) if d.weight.init == "normal"}
    return [stds[path] for path in ASKED]


@oracle("normal")
def normal() -> Iterator[Comparison]:
    """GPT-2: 0.02, and 0.02/√(2·12) = 0.0040824829 on o and down, which write to the residual stream."""
    yield Comparison("GPT-2", _spreads(part("normal")), [0.02, 0.02, 0.0040824829, 0.0040824829, 0.02])
    yield Comparison("one spread", _spreads(part("normal", spread=0.05, residual=False)), [0.05] * 5)
    table = tensor_at(build(_model(part("normal", spread=0.05))), "embed.table")
    yield Comparison("62·28 values of standard deviation 0.05", table.std(), 0.05, near=0.05)


@oracle("normal")
def bits() -> Iterator[Comparison]:
    """The sequence of SplitMix64 from 0: mix(γ), mix(2γ), mix(3γ), as its authors' code prints it."""
    got = mix(torch.arange(1, 4) * GAMMA)
    words = [[0xE220A839, 0x7B1DCDAF], [0x6E789E6A, 0xA1B965F4], [0x06C45D18, 0x8009454F]]
    yield Comparison("SplitMix64", torch.stack(split_words(got), -1), words, near=0)


@oracle("fan_in")
def fan_in() -> Iterator[Comparison]:
    """gain/√inputs: 1/√28 = 0.1889822365 for q and the head, 1/√72 = 0.1178511302 for o, 1/√44 = 0.1507556723 for down."""
    expected = [1.0, 0.1889822365, 0.1178511302, 0.1507556723, 0.1889822365]
    yield Comparison("gain 1", _spreads(part("fan_in")), expected)
    yield Comparison("gain ½ on q and o", _spreads(part("fan_in", gain=0.5))[1:3], [0.0944911183, 0.0589255651])


@oracle("mup")
def mup() -> Iterator[Comparison]:
    """0.02·√(256/inputs): √(256/28) = 3.0237157841, √(256/72) = 1.8856180832, √(256/44) = 2.4120907566; tables 0.02."""
    yield Comparison("base 256", _spreads(part("mup"))[:4], [0.02, 0.0604743157, 0.0377123617, 0.0482418151])
    yield Comparison("base 64, q", _spreads(part("mup", base_width=64))[1], 0.0302371578)
