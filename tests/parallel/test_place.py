"""Placements follow from declared axes: what is cut along what, and what cannot be."""

import pytest
from shard_specs import GPT2, WIRINGS, decoder

from dovetail.base.errors import SpecError
from dovetail.files.spec import from_yaml
from dovetail.parallel.placement import Cut, placed, tp_regions
from dovetail.spec.fold import declared


def cuts(text: str, ranks: int) -> dict[str, Cut | None]:
    """How every tensor of the first layer, and of none, is cut."""
    spec = from_yaml(text)
    return {d.path.removeprefix("layers.0."): cut for d, _, cut in placed(declared(spec), list(tp_regions(spec)), ranks)}


def test_axes_are_found_not_listed() -> None:
    found = {tp_region.path: tp_region for tp_region in tp_regions(from_yaml(WIRINGS["qk_norm"]))}
    assert list(found) == ["embed", "layers.0.mixer", "layers.0.ffn", "layers.1.mixer", "layers.1.ffn", "head"]
    assert {path for path, tp_region in found.items() if not tp_region.bounded} == {"embed", "head"}
    assert found["embed"].shared_out == found["head"].shared_out == {"vocab"}
    assert found["layers.0.mixer"].shared_out == {"heads", "kv_heads"}
    assert found["layers.0.mixer"].summed == {"heads"}
    assert found["layers.0.ffn"].shared_out == found["layers.0.ffn"].summed == {"ffn"}


def test_an_encoder_has_regions_too() -> None:
    paths = [tp_region.path for tp_region in tp_regions(from_yaml(WIRINGS["encoder_decoder"]))]
    assert "encoder.layers.1.mixer" in paths
    assert "layers.1.cross" in paths


@pytest.mark.parametrize(
    ("wiring", "path", "cut"),
    [
        ("llama", "mixer.q.weight", Cut(0, 2)),
        ("llama", "mixer.k.weight", Cut(0, 2)),
        ("llama", "mixer.o.weight", Cut(1, 2)),
        ("llama", "mixer.head_number", Cut(0, 2)),
        ("llama", "mixer.position.frequency", None),
        ("llama", "ffn.gate.weight", Cut(0, 2)),
        ("llama", "ffn.down.weight", Cut(1, 2)),
        ("llama", "mixer_norm.scale", None),
        ("llama", "embed.table", Cut(0, 2)),
        ("llama", "head.out.weight", Cut(0, 2)),
        ("gpt2", "head.bias", Cut(0, 2)),
        ("encoder", "head.dense.weight", None),
        ("encoder", "embed.type_table", None),
        ("encoder", "head.out.weight", Cut(0, 2)),
        ("gpt2", "mixer.qkv.weight", Cut(0, 2)),
        ("gpt2", "mixer.qkv.bias", Cut(0, 2)),
        ("gpt2", "mixer.o.bias", None),
        ("gpt2", "ffn.up.bias", Cut(0, 2)),
        ("gpt2", "ffn.down.bias", None),
        ("relative", "mixer.position.table", Cut(0, 2)),
        ("relative", "layers.1.mixer.position.table", Cut(0, 2)),
        ("alibi", "mixer.position.slope", Cut(0, 2)),
        ("qk_norm", "mixer.q_norm.scale", None),
        ("qk_norm_whole", "mixer.k_norm.scale", Cut(0, 2)),
        ("sink_gate_bias", "mixer.sink", Cut(0, 2)),
        ("one_kv_head", "mixer.k.weight", Cut(0, 1)),
        ("one_kv_head", "mixer.q.weight", Cut(0, 2)),
    ],
)
def test_what_is_cut_along_what(wiring: str, path: str, cut: Cut | None) -> None:
    assert cuts(WIRINGS[wiring], 2)[path] == cut


def test_ranks_that_share_a_key_head_take_the_same_piece() -> None:
    assert [Cut(0, 2).piece(rank, 6) for rank in range(6)] == [0, 0, 0, 1, 1, 1]
    assert [Cut(0, 6).piece(rank, 6) for rank in range(6)] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("text", "ranks", "path", "problem"),
    [
        (decoder().replace("vocab: 62", "vocab: 61"), 2, "embed.table", "vocab = 61 cannot be cut over 2"),
        (decoder().replace("vocab: 62", "vocab: 60"), 5, "layers.0.mixer.q.weight", "heads = 6 cannot be cut over 5"),
        (decoder(ffn="kind: glu, hidden: 43"), 2, "layers.0.ffn.gate.weight", "ffn = 43 cannot be cut over 2"),
        (
            decoder("kind: attention, heads: 6, kv_heads: 3, head: 12"),
            2,
            "layers.0.mixer.k.weight",
            "kv_heads = 3 cannot be cut",
        ),
        (decoder("kind: attention, heads: 6, kv_heads: 1, head: 12, packed: true"), 2, "layers.0.mixer.qkv.weight", "packs"),
        (GPT2.replace("heads: 6, ", "heads: 6, kv_heads: 2, ").replace("62", "60"), 6, "layers.0.mixer.qkv.weight", "packs"),
        (
            decoder("kind: attention, heads: 6, kv_heads: 1, head: 12, qk_norm: rmsnorm, qk_norm_whole: true"),
            2,
            "layers.0.mixer.k_norm",
            "more than once",
        ),
        (
            decoder(
                "kind: attention, heads: 6, kv_heads: 1, head: 12, qk_norm: {kind: rmsnorm, scale: false}, qk_norm_whole: true"
            ),
            2,
            "layers.0.mixer.k_norm",  # a norm without weights
            "more than once",
        ),
    ],
)
def test_what_cannot_be_cut(text: str, ranks: int, path: str, problem: str) -> None:
    with pytest.raises(SpecError) as error:
        cuts(text, ranks)
    assert error.value.path == path
    assert problem in error.value.problem
    assert error.value.remedy
