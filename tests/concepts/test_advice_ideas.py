"""Advice: each rule of thumb is reported where a spec breaks it, and a common spec gets no advice."""

from __future__ import annotations

import pytest

from dovetail.files.spec import changed, from_yaml, load_spec
from dovetail.spec.check import advice, check

HEALTHY = from_yaml("{width: 512, vocab: 100, layers: [{repeat: 4, mixer: {heads: 8, kv_heads: 2}}]}")
ENCODER = from_yaml(
    """
width: 512
vocab: 100
position: sinusoidal
layers: [{repeat: 4, mixer: {heads: 8, mask: full, position: none}, ffn: mlp}]
"""
)
LEARNED = changed(HEALTHY, ["layers.*.mixer.position=none", "position={kind: learned, length: 1024}"])
WINDOW = "layers.*.mixer.mask=[causal, {{kind: window, size: {size}, keep: {keep}}}]"

GIVEN = {
    "a head of 16": (HEALTHY, ["layers.*.mixer.head=16"], None, "layers.0.mixer.head", "16 is outside the usual 32 to 128"),
    "a head of 256": (HEALTHY, ["layers.*.mixer.head=256"], None, "layers.0.mixer.head", "256 is outside the usual 32 to 128"),
    "no position in an encoder": (ENCODER, ["position=none"], None, "position", "cannot tell word order"),
    "windows too short": (HEALTHY, [WINDOW.format(size=100, keep=4)], 1000, "layers", "windows reach 397 tokens back in all"),
    "deep post-norm": (HEALTHY, ["layers.*.wire=post_norm"], None, "layers.0.wire", "of post-norm train badly without warm-up"),
    "plain ffn not 4d": (ENCODER, ["layers.*.ffn.hidden=1000"], None, "layers.0.ffn.hidden", "is not the usual 4·width = 2048"),
    "gated ffn not 8d/3": (HEALTHY, ["layers.*.ffn.hidden=512"], None, "layers.0.ffn.hidden", "far from the usual 8·width/3"),
    "too few learned positions": (LEARNED, [], 2048, "position.length", "1024 learned positions are fewer than 2048"),
    "no sinks when streaming": (
        HEALTHY,
        [WINDOW.format(size=600, keep=0)],
        2000,
        "layers.0.mixer.mask",
        "without `keep` drops",
    ),
}


@pytest.mark.parametrize("name", GIVEN)
def test_advice_is_given(name: str) -> None:
    spec, sets, length, path, said = GIVEN[name]
    if name == "deep post-norm":
        spec = from_yaml("{width: 512, vocab: 100, layers: [{repeat: 24, mixer: {heads: 8}}]}")
    spec = changed(spec, sets)
    check(spec)  # advice never stops anyone
    found = advice(spec, length)
    assert [where for where, _ in found] == [path]
    assert said in found[0][1].problem


@pytest.mark.parametrize(
    ("spec", "length"),
    [
        (HEALTHY, 100_000),
        (ENCODER, 100_000),
        (LEARNED, 1024),
        (changed(HEALTHY, [WINDOW.format(size=300, keep=4)]), 1197),  # 4·(300 − 1) + 1
        (changed(HEALTHY, [WINDOW.format(size=600, keep=0)]), 600),  # never slides
        (changed(HEALTHY, ["layers.*.wire=post_norm"]), None),  # four layers are not deep
        (load_spec("llama-3-8b"), 8192),
        (load_spec("gpt2"), 1024),
        (load_spec("transformer-2017-base"), 1024),
        (load_spec("vit-base"), 197),
    ],
)
def test_a_healthy_spec_is_left_in_peace(spec: object, length: int | None) -> None:
    assert advice(spec, length) == []  # type: ignore[arg-type]
