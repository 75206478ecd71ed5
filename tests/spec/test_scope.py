"""Scope: named sizes, generic axes, and the path of the same part in another layer."""

from __future__ import annotations

import pytest

from dovetail.spec.scope import Scope

ENV = Scope(sizes={"embed": 28, "heads": 6, "head": 12}, path="layers.3.mixer.position", stack="layers", layer=3, depth=5)


def test_sizes_multiply() -> None:
    assert ENV.size("embed") == 28
    assert ENV.size("heads", "head") == 72
    assert ENV.size() == 1


def test_a_generic_axis_is_bound_to_one_or_several() -> None:
    assert ENV.bind(dim="embed").size("dim") == 28
    both = ENV.bind(dim=("heads", "head"))
    assert both.size("dim") == 72
    assert both.names(("dim", "embed")) == ("heads", "head", "embed")


def test_a_scope_is_never_changed_but_copied() -> None:
    wider = ENV.add(ffn=44, embed=30)
    assert (wider.size("ffn"), wider.size("embed")) == (44, 30)
    assert ENV.size("embed") == 28
    with pytest.raises(KeyError, match="ffn"):
        ENV.size("ffn")


def test_copies_keep_the_rest() -> None:
    for copy in (ENV.add(ffn=44), ENV.bind(dim="embed"), ENV.at_path("elsewhere")):
        assert (copy.stack, copy.layer, copy.depth, copy.decodes, copy.init) == ("layers", 3, 5, True, None)
    assert ENV.at_path("elsewhere").path == "elsewhere"


def test_the_same_part_in_another_layer() -> None:
    assert ENV.in_layer(0) == "layers.0.mixer.position"
