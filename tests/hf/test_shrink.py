"""Every family shrinks to small sizes that it can express; relations between sizes stay."""

from __future__ import annotations

import pytest

from dovetail.base.errors import SpecError
from dovetail.files.spec import from_yaml, load_spec
from dovetail.hf.dialect import DIALECTS
from dovetail.hf.hf import to_hf
from dovetail.hf.resolved import explicit
from dovetail.hf.shrink import representative, shrink
from dovetail.hf.survey import typical
from dovetail.spec.fold import declared


@pytest.mark.parametrize("family", DIALECTS)
def test_every_family_has_a_small_model(family: str) -> None:
    spec = typical(family)
    small = shrink(spec, family)
    assert to_hf(small, family).dialect == family
    assert sum(d.size for d in declared(small)) < 600_000
    kinds = {(type(block.mixer), type(block.ffn)) for block in spec.layers}
    assert {(type(block.mixer), type(block.ffn)) for block in small.layers} == kinds


def test_relations_between_sizes_stay() -> None:
    full = shrink(load_spec("llama-tiny").set("layers.*.mixer.kv_heads", 1))
    assert full.layers[0].mixer.kv_heads == 1
    assert full.width == full.layers[0].mixer.heads * full.layers[0].mixer.head
    free = shrink(explicit(load_spec("llama-tiny")).set("layers.*.mixer.head", 100))
    assert free.width != free.layers[0].mixer.heads * free.layers[0].mixer.head


def test_as_many_layers_as_there_are_kinds_of_layers() -> None:
    layers = from_yaml("layers: [{repeat: 9, pattern: [a, a, b], a: {ffn: mlp}, b: {}}]").layers
    assert representative(layers) == layers[:3]
    assert len(representative(layers[:1] * 5)) == 2


def test_a_spec_that_no_family_can_express_is_refused_by_its_path() -> None:
    with pytest.raises(SpecError, match=r"embed_norm: layernorm cannot be written as"):
        shrink(load_spec("rwkv6-tiny"))
