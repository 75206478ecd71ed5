"""Specs of whole models: swapping parts, short forms of layers, and the original Transformer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from dovetail.base.errors import InputError, SpecError
from dovetail.files.spec import changed, from_yaml, load_spec, to_yaml
from dovetail.model.construction import build
from dovetail.model.model import Model
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.spec.layers import expand
from dovetail.spec.part import KINDS, walk_spec

SMALL = "width: 28\nvocab: 62\nlayers: [{repeat: 3, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]\n"


def positions(spec: Model) -> dict[str, str]:
    return {path: part.kind for path, part in walk_spec(spec) if part.group == "position"}


# -- swap


def test_a_position_fills_its_own_site_and_clears_the_others() -> None:
    spec = from_yaml(SMALL)
    inside = positions(spec.swap("position", KINDS["alibi"]()))
    assert inside == {"position": "none", **{f"layers.{i}.mixer.position": "alibi" for i in range(3)}}
    stream = positions(spec.swap("position", KINDS["learned"](length=64)))
    assert stream == {"position": "learned", **{f"layers.{i}.mixer.position": "none" for i in range(3)}}
    assert set(positions(spec.swap("position", KINDS["none"]())).values()) == {"none"}


def test_data_round_trips_to_the_same_spec() -> None:
    spec = from_yaml(SMALL)
    assert spec.swap("position", KINDS["sinusoidal"]()).swap("position", KINDS["rope"]()) == spec


def test_encoder_and_decoder_get_it_cross_attention_never() -> None:
    spec = load_spec("transformer-2017-tiny")
    assert any("cross" in path for path in positions(spec))
    for kind in ("alibi", "rope", "sinusoidal", "none"):
        swapped = spec.swap("position", KINDS[kind]())
        for path, found in positions(swapped).items():
            assert found == "none" or "cross" not in path
        assert sum(found == kind for found in positions(swapped).values()) >= 2  # both stacks
        assert from_yaml(to_yaml(swapped)) == swapped


def test_a_group_is_swapped_everywhere_and_empty_fields_stay_empty() -> None:
    spec = from_yaml(SMALL).set("layers.1.mixer.qk_norm", "rmsnorm")
    norms = [part for _, part in walk_spec(spec.swap("norm", KINDS["layernorm"](shift=False))) if part.group == "norm"]
    assert norms == [KINDS["layernorm"](shift=False)] * 5  # three blocks, the last norm, one QK-norm
    assert spec.swap("norm", KINDS["layernorm"]()).layers[0].mixer.qk_norm is None
    assert spec.swap("ffn", KINDS["mlp"](hidden=36)).layers[2].ffn == KINDS["mlp"](hidden=36)


def test_a_path_is_swapped_there_alone() -> None:
    spec = from_yaml(SMALL).swap("layers.1.mixer.position", KINDS["alibi"]())
    assert [block.mixer.position.kind for block in spec.layers] == ["rope", "alibi", "rope"]


def test_the_command_line_swaps_before_it_sets() -> None:
    spec = changed(from_yaml(SMALL), ["layers.*.mixer.position.base=100"], ["position=rope"])
    assert spec.layers[2].mixer.position == KINDS["rope"](base=100.0)
    with pytest.raises(SpecError, match=r"groups: mixer, position"):
        changed(from_yaml(SMALL), swaps=["color=rope"])
    with pytest.raises(SpecError, match=r"rmsnorm is a norm, not a position"):
        changed(from_yaml(SMALL), swaps=["position=rmsnorm"])


# -- layers written short


def test_a_pattern_cycles_through_the_repeats() -> None:
    spec = from_yaml("""
width: 28
layers:
  - repeat: 5
    pattern: [local, local, full]
    local: {mixer: {heads: 2, mask: [causal, {kind: window, size: 5}]}}
    full: {mixer: {heads: 2}}
    norm: layernorm
""")
    assert [block.mixer.mask.reach() for block in spec.layers] == [5, 5, None, 5, 5]
    assert {block.norm.kind for block in spec.layers} == {"layernorm"}


def test_a_pattern_without_repeat_is_gone_through_once() -> None:
    spec = from_yaml("width: 28\nlayers: [{pattern: [a, b], a: {mixer: {heads: 2}}, b: {mixer: {heads: 7}}}, {repeat: 2}]")
    assert [block.mixer.heads for block in spec.layers] == [2, 7, 8, 8]


def test_the_fields_of_a_layer_override_the_common_ones() -> None:
    (own, common) = from_yaml("layers: [{pattern: [a, b], a: {norm: rmsnorm}, b: {}, norm: layernorm}]").layers
    assert (own.norm.kind, common.norm.kind) == ("rmsnorm", "layernorm")


def test_equal_neighbors_are_written_once() -> None:
    spec = from_yaml(SMALL).set("layers.2.mixer.kv_heads", 1)
    data = spec.to_data()["layers"]
    assert [entry.get("repeat", 1) for entry in data] == [2, 1]
    assert from_yaml(to_yaml(spec)) == spec
    assert Model(layers=(KINDS["block"](),)).to_data()["layers"] == [{"repeat": 1}]  # all defaults, and still a layer


@pytest.mark.parametrize(
    ("text", "path", "problem"),
    [
        ("layers: 3", "layers", "expected a list of layers, got 3"),
        ("layers: [3]", "layers.0", "expected a mapping, got 3"),
        ("layers: [{repeat: 0}]", "layers.0.repeat", "0 is not a whole number above 0"),
        ("layers: [{repeat: 20000}]", "layers.0.repeat", "20,000 layers"),
        ("layers: [{repeat: 1.5}]", "layers.0.repeat", "1.5 is not a whole number"),
        ("layers: [{}, {pattern: [a, b], a: {}}]", "layers.1.pattern", "'b' is not described"),
        ("layers: [{pattern: []}]", "layers.0.repeat", "0 is not a whole number"),
    ],
)
def test_short_forms_that_make_no_sense(text: str, path: str, problem: str) -> None:
    with pytest.raises(SpecError) as refused:
        from_yaml(text)
    assert (refused.value.path, problem in refused.value.problem) == (path, True)


@pytest.mark.parametrize("entry", [{"pattern": 3}, {"pattern": ["a"], "a": 5}, {"pattern": [["a"]]}])
def test_patterns_that_are_none_are_refused(entry: dict[str, object]) -> None:
    with pytest.raises(SpecError, match=r"layers\.0"):
        expand([entry])


# -- names and mappings in place of parts


def test_a_swap_takes_the_name_of_a_kind_or_a_mapping() -> None:
    spec = load_spec("llama-tiny")
    alibi = KINDS["alibi"]()
    assert spec.swap("position", "alibi") == spec.swap("position", alibi) != spec
    window = {"kind": "window", "size": 7}
    assert spec.swap("layers.*.mixer.mask", window).layers[0].mixer == spec.set("layers.*.mixer.mask", window).layers[0].mixer
    for _, part in walk_spec(spec.swap("position", {"kind": "rope", "base": 500.0}).swap("norm", "layernorm")):
        assert not any(isinstance(value, str) and value in KINDS for value in vars(part).values() if value != part.kind)


@pytest.mark.parametrize(
    ("change", "path"),
    [
        (lambda spec: spec.replace("layers.*.mixer.position", "alibi"), "layers.0.mixer.position"),
        (lambda spec: spec.replace("layers.*.mixer", KINDS["glu"]()), "layers.0.mixer"),
        (lambda spec: spec.swap("layers.*.mixer.position", KINDS["glu"]()), "layers.0.mixer.position"),
        (lambda spec: spec.replace("width", "64"), "width"),
        (lambda spec: spec.replace("layers", (KINDS["rope"](),)), "layers"),
        (lambda spec: KINDS["attention"](position="alibi"), "position"),
        (lambda spec: KINDS["rope"](base=float("nan")), "base"),
        (lambda spec: spec.set("layers.*.mixer.position.base", float("inf")), "layers.0.mixer.position.base"),
        (lambda spec: spec.swap("position", "ropes"), "layers.0.mixer.position"),
        (lambda spec: spec.swap("color", "rope"), "color"),
    ],
)
def test_no_field_takes_a_value_of_another_type(change: Callable[[Model], object], path: str) -> None:
    with pytest.raises(SpecError) as raised:
        change(load_spec("llama-tiny"))
    assert raised.value.path in (path, "")


def test_a_swap_keeps_the_fields_that_both_kinds_have() -> None:
    llama = load_spec("llama-3-8b")
    mla = llama.swap("mixer", "mla").layers[31].mixer
    old = llama.layers[31].mixer
    assert (mla.kind, mla.heads, mla.position, mla.mask) == ("mla", 32, old.position, old.mask)
    assert llama.swap("mixer", {"kind": "mla", "heads": 16}).layers[0].mixer.heads == 16
    assert llama.swap("mixer", KINDS["mla"]()).layers[0].mixer.heads == 8  # a part is taken as it is
    assert llama.swap("norm", "layernorm").norm.eps == llama.norm.eps
    lost = llama.swap_losses("layers.3.mixer", "mla")
    assert [str(one) for one in lost] == ["layers.3.mixer.kv_heads was 8; mla has no such field"]
    assert llama.swap_losses("norm", "layernorm") == []


# -- inputs and their layout


def test_a_layout_of_another_batch_size_is_refused_not_broadcast() -> None:
    model, tokens = build(load_spec("llama-tiny")), torch.zeros(3, 5, dtype=torch.long)
    for layout in (TokenLayout.whole(1, 5), TokenLayout.whole(3, 1), TokenLayout.flat([5, 5, 5])):
        with pytest.raises(InputError, match=r"inputs: the layout describes tokens of shape .*, but there are \(3, 5\)"):
            model(tokens, Ctx(layout=layout))


def test_a_layout_of_another_encoder_output_is_refused() -> None:
    model, tokens = build(load_spec("t5-tiny")), torch.zeros(2, 5, dtype=torch.long)
    output, _ = model.encode(tokens, Ctx(layout=TokenLayout.whole(2, 5)))
    ctx = Ctx(layout=TokenLayout.whole(2, 5), encoder_output=output, encoder_layout=TokenLayout.whole(1, 5))
    with pytest.raises(InputError, match=r"encoder output: the layout describes tokens of shape \(1, 5\)"):
        model(tokens, ctx)
