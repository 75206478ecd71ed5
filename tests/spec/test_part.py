"""Parts as plain data: legal and illegal values, with paths in errors; changing a spec by path; the registry."""

from __future__ import annotations

import dataclasses as dc
import inspect
from collections.abc import Iterator
from typing import Any

import pytest

from dovetail.base.errors import SpecError
from dovetail.files.spec import from_yaml, to_yaml
from dovetail.nn.groups import Mask, Norm, Position
from dovetail.spec.part import KINDS, Part, from_data, plain, register, walk, walk_spec

SMALL = """
width: 28
vocab: 62
layers:
  - {repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}
  - {mixer: {heads: 6, kv_heads: 2, head: 12, mask: [causal, {kind: window, size: 5}]}, ffn: {kind: mlp, hidden: 36}}
"""


def refusal(text: str) -> SpecError:
    with pytest.raises(SpecError) as refused:
        from_yaml(text)
    return refused.value


# -- reading


@pytest.mark.parametrize(
    ("text", "path", "problem"),
    [
        ("layerz: []", "layerz", "model has no such field"),
        ("layers: [{}, {mixer: {hedas: 2}}]", "layers.1.mixer.hedas", "attention has no such field"),
        ("layers: [{mixer: attenshun}]", "layers.0.mixer", "no part is called 'attenshun'"),
        ("layers: [{mixer: rmsnorm}]", "layers.0.mixer", "rmsnorm is a norm, not a mixer"),
        ("layers: [{mixer: {position: {scaling: {factor: 2.0}}}}]", "layers.0.mixer.position.scaling", "no kind is given"),
        ("layers: [{mixer: 3}]", "layers.0.mixer", "expected a mixer, got 3"),
        ("layers: [{wire: null}]", "layers.0.wire", "expected a wire, got None"),
        ("layers: [{mixer: {heads: 8.0}}]", "layers.0.mixer.heads", "8.0 is not a whole number"),
        ("layers: [{mixer: {heads: true}}]", "layers.0.mixer.heads", "True is not a whole number"),
        ("layers: [{mixer: {heads: null}}]", "layers.0.mixer.heads", "None is not a whole number"),
        ("layers: [{mixer: {kv_heads: two}}]", "layers.0.mixer.kv_heads", "'two' is not a whole number or null"),
        ("layers: [{mixer: {bias: 1}}]", "layers.0.mixer.bias", "1 is not true or false"),
        ("layers: [{mixer: {scale: big}}]", "layers.0.mixer.scale", "'big' is not a number or null"),
        ("layers: [{mixer: {position: {pairs: odd}}}]", "layers.0.mixer.position.pairs", "'odd' is not one of half, adjacent"),
        (
            "layers: [{mixer: {mask: [causal, {kind: window, sise: 3}]}}]",
            "layers.0.mixer.mask.masks.1.sise",
            "window has no such field",
        ),
        (
            "layers: [{mixer: {position: {scaling: {kind: longrope, short: [1.0, long]}}}}]",
            "layers.0.mixer.position.scaling.short.1",
            "'long' is not a number",
        ),
        ("width: 28\nencoder: {widht: 22}", "encoder.widht", "model has no such field"),
        ("- width", "", "a model is a mapping, not ['width']"),
        ("dovetail: 2", "dovetail", "format 2 is not known"),
    ],
)
def test_every_refusal_names_its_path(text: str, path: str, problem: str) -> None:
    refused = refusal(text)
    assert refused.path == path
    assert problem in refused.problem


def test_an_error_lists_the_alternatives() -> None:
    assert refusal("layers: [{norm: xyz}]").remedy == f"kinds: {', '.join(kinds('norm'))}"
    assert refusal("layers: [{norm: rmsnrm}]").remedy == "did you mean rmsnorm?"
    assert refusal("layers: [{norm: {kind: rmsnorm, epz: 1.0}}]").remedy == "did you mean eps?"
    assert refusal("layers: [{norm: {kind: rmsnorm, color: 1.0}}]").remedy == "fields: eps, plus_one, scale, groups"


def kinds(group: str) -> list[str]:
    return sorted(kind for kind, cls in KINDS.items() if cls.group == group)


@pytest.mark.parametrize("text", ["kind: [a]", "layers: [{mixer: {kind: {a: b}}}]"])
def test_a_kind_that_is_not_a_string_is_refused(text: str) -> None:
    assert "no part is called" in refusal(text).problem


def test_short_forms() -> None:
    assert from_data("rmsnorm", Norm) == from_data({"kind": "rmsnorm"}, Norm) == KINDS["rmsnorm"]()
    window = KINDS["window"](size=5)
    assert from_data(["causal", {"kind": "window", "size": 5}], Mask) == KINDS["causal"]() & window
    assert from_data({"any": ["causal", {"kind": "window", "size": 5}]}, Mask) == KINDS["causal"]() | window
    assert from_data(["causal"], Mask) == KINDS["causal"]()
    assert from_data({"base": 100}, Position, default="rope") == KINDS["rope"](base=100.0)  # a field knows its usual kind


def test_a_whole_number_serves_as_a_number() -> None:
    base = from_data({"kind": "rope", "base": 500000}, Position).base
    assert (base, type(base)) == (500000.0, float)


def test_defaults_are_not_written_and_all_else_is() -> None:
    assert KINDS["rmsnorm"]().to_data() == "rmsnorm"
    assert KINDS["rmsnorm"](eps=0.1).to_data() == {"kind": "rmsnorm", "eps": 0.1}
    made = KINDS["attention"](heads=6, bias=True, position=KINDS["alibi"](), mask=KINDS["causal"]() & KINDS["window"](size=5))
    masks = ["causal", {"kind": "window", "size": 5}]
    assert made.to_data() == {"kind": "attention", "heads": 6, "bias": True, "position": "alibi", "mask": masks}
    assert plain((KINDS["rmsnorm"](), 3)) == ["rmsnorm", 3]


def test_text_and_back_is_the_same_spec() -> None:
    spec = from_yaml(SMALL)
    assert from_yaml(to_yaml(spec)) == spec


# -- changing


def test_replace_goes_by_path_and_leaves_the_old_spec_alone() -> None:
    spec = from_yaml(SMALL)
    new = spec.replace("layers.*.mixer.kv_heads", 1)
    assert [block.mixer.kv_heads for block in new.layers] == [1, 1, 1]
    assert [block.mixer.kv_heads for block in spec.layers] == [2, 2, 2]
    assert new.replace("layers.*.mixer.kv_heads", 2) == spec
    one = spec.replace("layers.1.ffn.hidden", lambda old: old + 1)
    assert [block.ffn.hidden for block in one.layers] == [44, 45, 36]


def test_a_star_is_one_component() -> None:
    spec = from_yaml(SMALL)
    with pytest.raises(SpecError, match=r"no field of \* matches"):
        spec.replace("*.kv_heads", 1)
    assert spec.set("layers.2.mixer.mask.masks.1.size", 7).layers[2].mixer.mask.reach() == 7


@pytest.mark.parametrize(
    ("layers", "hit"), [("1::2", [1]), ("::2", [0, 2]), (":-1", [0, 1]), ("-1:", [2]), ("1:", [1, 2]), ("::-1", [0, 1, 2])]
)
def test_layers_may_be_a_slice(layers: str, hit: list[int]) -> None:
    spec = from_yaml(SMALL)
    changed = spec.set(f"layers.{layers}.mixer.kv_heads", 1)
    assert [i for i, block in enumerate(changed.layers) if block.mixer.kv_heads == 1] == hit
    swapped = spec.swap(f"layers.{layers}.mixer", "mamba2")
    assert [i for i, block in enumerate(swapped.layers) if block.mixer.kind == "mamba2"] == hit


@pytest.mark.parametrize("layers", ["3:", "1:1", "::0"])
def test_a_slice_without_layers_is_an_error(layers: str) -> None:
    with pytest.raises(SpecError, match=f"no field of layers matches '{layers}'"):
        from_yaml(SMALL).set(f"layers.{layers}.mixer.kv_heads", 1)


def test_set_reads_as_the_field_declares() -> None:
    spec = from_yaml(SMALL)
    assert spec.set("layers.*.mixer.position", "alibi").layers[0].mixer.position == KINDS["alibi"]()
    assert spec.set("layers.*.mixer.position", {"base": 100}).layers[0].mixer.position == KINDS["rope"](base=100.0)
    assert spec.set("layers.0.mixer.mask", ["causal", {"kind": "window", "size": 3}]).layers[0].mixer.mask.reach() == 3
    with pytest.raises(SpecError, match=r"layers\.0\.mixer\.heads: 'six' is not a whole number"):
        spec.set("layers.*.mixer.heads", "six")


def test_a_path_that_matches_nothing_is_an_error() -> None:
    for path, problem, remedy in (
        ("color", "no field matches 'color'", "its fields are dropout, embed, "),
        ("layers.9.mixer", "no field of layers matches '9'", "its fields are 0"),
        ("width.size", "width holds no part, so it has no field size", ""),
        (
            "layers.0.mixer.position.scaling.factor",
            "layers.0.mixer.position.scaling holds no part, so it has no field factor",
            "",
        ),
    ):
        with pytest.raises(SpecError) as refused:
            from_yaml(SMALL).set(path, 1)
        assert (refused.value.path, refused.value.problem) == (path, problem)
        assert remedy in refused.value.remedy


def test_parts_are_frozen_and_equal_by_value() -> None:
    norm: Any = KINDS["rmsnorm"]()
    with pytest.raises(dc.FrozenInstanceError):
        norm.eps = 1.0
    assert norm == KINDS["rmsnorm"](eps=1e-5)
    assert hash(norm) == hash(KINDS["rmsnorm"]())
    assert norm.key != KINDS["rmsnorm"](eps=0.1).key


# -- the tree


def test_walk_is_over_modules_and_walk_spec_over_what_is_written() -> None:
    spec = from_yaml(SMALL)
    modules = [path for path, _, _ in walk(spec)]
    written = [path for path, _ in walk_spec(spec)]
    assert {"layers.0.mixer_norm", "layers.0.ffn_norm"} <= set(modules)  # one `norm:` field, two modules
    assert "layers.0.norm" in written
    assert "layers.0.norm" not in modules
    assert "layers.2.mixer.mask.masks.1" in written  # a mask has no module
    assert not [path for path in modules if "mask" in path]
    assert modules[0] == written[0] == ""
    assert len(modules) == len(set(modules))


def test_a_kind_belongs_to_one_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dovetail.spec.part.KINDS", dict(KINDS))

    class Mine(Norm):
        """A norm under a name that is taken."""

    with pytest.raises(SpecError, match=r"the kind 'rmsnorm' is registered twice: in dovetail\.parts\.norm and"):
        register("rmsnorm")(Mine)


def _below(cls: type) -> Iterator[type]:
    for sub in cls.__subclasses__():
        yield sub
        yield from _below(sub)


def test_the_contract_of_a_part_is_small() -> None:
    methods = {name for name, value in vars(Part).items() if not name.startswith("_") and inspect.isroutine(value)}
    overridden = {
        name for name in methods for cls in _below(Part) if name in vars(cls) and cls.__module__.startswith("dovetail")
    }
    assert len(methods) <= 26, sorted(methods)
    assert len(overridden) <= 16, sorted(overridden)
