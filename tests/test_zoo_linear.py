"""The presets of linear attention and its relatives: parameter counts, and a state that does not grow with the sequence."""

import pytest

from dovetail.files.spec import load_spec
from dovetail.spec.fold import parameters, state_values

WIDTH, VOCAB, HIDDEN, LAYERS = 112, 512, 304, 4
REST = VOCAB * WIDTH + WIDTH + LAYERS * (2 * WIDTH + 3 * WIDTH * HIDDEN)  # table, last norm; norms and ffn of each layer
LORA = 12 * WIDTH + WIDTH * 12  # what says how much fades
COUNTS = {
    "linear-attention-tiny": REST + LAYERS * 4 * WIDTH**2,
    "performer-tiny": REST + LAYERS * 4 * WIDTH**2,
    # q and k half as wide; v, gate and out whole; a gate of rank 16 with a bias; a norm of one head
    "gla-tiny": REST + LAYERS * (4 * WIDTH**2 + 16 * WIDTH + 16 * 56 + 56 + 28),
    # a table of its own for the head; norms with shift, one more before the layers; r, k, v, g and out; five mixes of rank 8;
    # six μ, λ, bonus, scale and shift
    "rwkv6-tiny": 2 * VOCAB * WIDTH
    + 2 * (LAYERS * 2 + 2) * WIDTH
    + LAYERS * (5 * WIDTH**2 + 2 * 5 * 8 * WIDTH + LORA + 10 * WIDTH + 2 * WIDTH * 448 + 448 + WIDTH),
}
MEMORY = {
    "linear-attention-tiny": LAYERS * 4 * 28 * 29,
    "performer-tiny": LAYERS * 4 * 60 * 29,
    "gla-tiny": LAYERS * 4 * 14 * 28,
    "rwkv6-tiny": LAYERS * (WIDTH + 4 * 28 * 28),
}


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_the_arithmetic(name: str) -> None:
    assert parameters(load_spec(name)) == COUNTS[name]


@pytest.mark.parametrize("name", MEMORY)
def test_the_state_does_not_grow_with_the_sequence(name: str) -> None:
    assert state_values(load_spec(name), 100) == state_values(load_spec(name), 100_000) == MEMORY[name]


def test_of_a_hybrid_only_the_attention_layer_grows() -> None:
    spec = load_spec("gated-deltanet-hybrid-tiny")
    assert [block.mixer.kind for block in spec.layers] == ["gated_deltanet"] * 3 + ["attention"]
    fixed = 3 * (4 * 24 * 20 + 3 * (2 * 2 * 24 + 4 * 20))
    assert state_values(spec, 100) == fixed + 100 * 2 * 2 * 32
    assert state_values(spec, 1000) == fixed + 1000 * 2 * 2 * 32
