"""Parameter and FLOP arithmetic: well-known figures follow from the declared weights."""

from __future__ import annotations

import pytest

from dovetail.files.spec import from_yaml, load_spec
from dovetail.model.model import Model
from dovetail.spec.fold import attention_flops, matmul_flops, parameters


def test_seven_billion_is_6_74_billion() -> None:
    assert parameters(load_spec("llama-7b")) == 6_738_415_616


def layer(width: int, groups: int, ffn: str = "null") -> Model:
    return from_yaml(
        f"{{width: {width}, vocab: 1, head: null, layers: [{{mixer: {{heads: 16, kv_heads: {groups}}}, ffn: {ffn}}}]}}"
    )


@pytest.mark.parametrize(
    ("groups", "ffn", "times"),
    [(16, "null", 2.0), (4, "null", 1.25), (16, "{kind: mlp, bias: false}", 6.0)],
)
def test_attention_overtakes_the_projections(groups: int, ffn: str, times: float) -> None:
    """4n²d against 8nd² with full heads: at n = 2d; at 1.25d where g = h/4; against a 4d ffn too at 6d."""
    width = 1024
    spec, n = layer(width, groups, ffn), int(times * width)
    assert attention_flops(spec, n)[0] == n * matmul_flops(spec)
    assert attention_flops(spec, n - 1)[0] < (n - 1) * matmul_flops(spec)
    assert attention_flops(spec, n + 1)[0] > (n + 1) * matmul_flops(spec)


def test_a_token_costs_twice_its_weights_forward() -> None:
    """2·N a token forward (6·N with backward), the embedding table apart: it is looked up, not multiplied."""
    spec = load_spec("llama-3-8b")
    norms = 65 * 4096
    assert matmul_flops(spec) == 2 * (parameters(spec) - 128256 * 4096 - norms)
