"""diff: ten pairs of specs with every status written out, and every transformation applied.

Sizes are all different: width 28, 6 heads of 12, 2 groups, ffn 44, vocabulary 62.
"""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dovetail.base.errors import FileError, SpecError
from dovetail.files.spec import changed, from_yaml, load_spec
from dovetail.model.construction import build
from dovetail.model.model import Model
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.spec.fold import declared
from dovetail.weights.surgery import Diff, apply, diff

SMALL = """
width: 28
vocab: 62
layers:
- repeat: 2
  mixer: {heads: 6, kv_heads: 2, head: 12}
  ffn: {hidden: 44}
"""
OLD = """
width: 30
vocab: 62
position: {kind: learned, length: 17}
layers:
- repeat: 2
  norm: layernorm
  mixer: {heads: 6, position: none, bias: true, out_bias: true}
  ffn: {kind: mlp, hidden: 44}
norm: layernorm
"""
RELATIVE = SMALL.replace("head: 12}", "head: 12, position: {kind: t5_bias, buckets: 8, max_distance: 16}}").replace(
    "repeat: 2", "repeat: 3"
)


def small(*sets: str, swap: Iterable[str] = (), of: str = SMALL) -> Model:
    return changed(from_yaml(of), sets, swap)


# Each pair: how b comes from a, and (pattern of "a -> b", status, words in `how`) for every row, the first match counts.
EVERY = ("*", "kept", "")
SCORES = ("layers.*.mixer.[qk].*", "reinterpreted")
PAIRS: dict[str, tuple[Model, Model, list[tuple[str, str, str]]]] = {
    "position": (
        small(),
        small(swap=["position=alibi"]),
        [(*SCORES, "reinterpreted: mixer.position: rope → alibi"), EVERY],
    ),
    "window, soft-cap, scale": (
        small("layers.*.mixer.mask=[causal, {kind: window, size: 5}]"),
        small("layers.*.mixer.softcap=3.0", "layers.1.mixer.scale=0.3"),
        [
            (
                "layers.0.mixer.[qk].*",
                "reinterpreted",
                "reinterpreted: mixer.mask: [causal, window(size 5)] → causal; mixer.softcap: none → 3",
            ),
            (
                "layers.1.mixer.[qk].*",
                "reinterpreted",
                "mixer.mask: [causal, window(size 5)] → causal; mixer.scale: none → 0.3; mixer.softcap: none → 3",
            ),
            EVERY,
        ],
    ),
    "act, norm eps, wire": (
        small(),
        small("layers.*.ffn.act=gelu", "norm.eps=0.1", "layers.1.wire=post_norm"),
        [
            ("layers.0.ffn.*", "reinterpreted", "reinterpreted: ffn.act: silu → gelu"),
            ("layers.1.ffn.*", "reinterpreted", "reinterpreted: wire: pre_norm → post_norm; ffn.act: silu → gelu"),
            ("layers.1.*", "reinterpreted", "reinterpreted: wire: pre_norm → post_norm"),
            ("norm.scale*", "reinterpreted", "reinterpreted: norm.eps: 1e-05 → 0.1"),
            EVERY,
        ],
    ),
    "fewer groups": (
        small("layers.*.mixer.kv_heads=6"),
        small("layers.0.mixer.kv_heads=2", "layers.1.mixer.kv_heads=1"),
        [
            ("layers.0.mixer.[kv].*", "transformed", "kv_heads 6 → 2: the mean of every 3"),
            ("layers.1.mixer.[kv].*", "transformed", "kv_heads 6 → 1: the mean of every 6"),
            EVERY,
        ],
    ),
    "more groups, and others": (
        small("layers.1.mixer.kv_heads=3"),
        small("layers.0.mixer.kv_heads=6", "layers.1.mixer.kv_heads=2"),
        [
            ("layers.0.mixer.[kv].*", "transformed", "kv_heads 2 → 6: each repeated 3 times"),
            ("layers.1.mixer.[kv].*", "transformed", "kv_heads 3 → 2: each repeated 2 times, then the mean of every 3"),
            EVERY,
        ],
    ),
    "packed": (
        small("layers.*.mixer.bias=true"),
        small("layers.*.mixer.bias=true", "layers.*.mixer.packed=true"),
        [
            ("layers.*.mixer.[qkv].weight -> layers.*.mixer.qkv.weight", "transformed", "packed into qkv.weight"),
            ("layers.*.mixer.[qkv].bias -> layers.*.mixer.qkv.bias", "transformed", "packed into qkv.bias"),
            EVERY,
        ],
    ),
    "split, with other groups": (
        small("layers.*.mixer.packed=true"),
        small("layers.1.mixer.kv_heads=1"),
        [
            ("layers.0.mixer.qkv.weight -> layers.0.mixer.[qkv].weight", "transformed", "split from qkv.weight"),
            ("layers.1.mixer.qkv.weight -> layers.1.mixer.q.weight", "transformed", "split from qkv.weight"),
            (
                "layers.1.mixer.qkv.weight -> layers.1.mixer.[kv].weight",
                "transformed",
                "split from qkv.weight; kv_heads 2 → 1: the mean of every 2",
            ),
            EVERY,
        ],
    ),
    "vocabulary, positions, tie, norm": (
        small(of=OLD),
        small("vocab=70", "position.length=11", "head.tied=false", swap=["norm=rmsnorm"], of=OLD),
        [
            ("embed.table -> embed.table", "transformed", "vocab: 8 rows added"),
            ("embed.table -> head.out.weight", "transformed", "a copy of embed.table of its own; vocab: 8 rows added"),
            ("position.table -> position.table", "transformed", "position: the last 6 rows removed"),
            ("*norm.scale -> *norm.scale", "reinterpreted", "reinterpreted: norm: layernorm → rmsnorm"),
            ("*norm.shift -> None", "dropped", "not in b"),
            EVERY,
        ],
    ),
    "tables of the layers, a layer less": (
        small(of=RELATIVE),
        from_yaml(RELATIVE.replace("repeat: 3", "repeat: 2").replace("max_distance: 16", "max_distance: 16, shared: false")),
        [
            ("layers.0.mixer.position.table -> layers.0.mixer.position.table", "kept", ""),
            (
                "layers.0.mixer.position.table -> layers.1.mixer.position.table",
                "transformed",
                "a copy of layers.0.mixer.position.table of its own",
            ),
            ("layers.2.* -> None", "dropped", "not in b"),
            EVERY,
        ],
    ),
    "another width, a gate, one layer more": (
        small(),
        from_yaml(SMALL.replace("repeat: 2", "repeat: 3").replace("width: 28", "width: 36").replace("12}", "12, gate: true}")),
        [
            ("None -> layers.2.*", "new", "initialized"),
            ("None -> layers.*.mixer.gate.weight", "new", "initialized"),
            ("*", "impossible", "embed 28 → 36"),
        ],
    ),
    "tied, one table for all layers, counted from 0, QK-norm": (
        from_yaml(RELATIVE.replace("max_distance: 16", "max_distance: 16, shared: false") + "head: {kind: lm, tied: false}\n"),
        small("norm.plus_one=true", "layers.2.mixer.qk_norm=rmsnorm", of=RELATIVE),
        [
            ("embed.table -> embed.table", "reinterpreted", "reinterpreted: head.out.weight is tied to it"),
            ("head.out.weight -> None", "dropped", "embed.table takes its place"),
            (
                "layers.0.mixer.position.table -> *",
                "reinterpreted",
                "reinterpreted: layers.1.mixer.position.table is tied to it; layers.2.mixer.position.table is tied to it",
            ),
            ("layers.[12].mixer.position.table -> None", "dropped", "layers.0.mixer.position.table takes its place"),
            ("None -> layers.2.mixer.[qk]_norm.scale", "new", "initialized"),
            ("layers.2.mixer.[qk].*", "reinterpreted", "reinterpreted: mixer.qk_norm: none → rmsnorm"),
            ("norm.scale -> norm.scale", "transformed", "-1: the neutral scale was 1, now 0"),
            EVERY,
        ],
    ),
}


def perturbed(spec: Model, seed: int = 0) -> nn.Module:
    """A float64 model whose norms and biases are not the neutral ones."""
    model = build(spec, dtype=torch.float64, seed=seed)
    draw = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=draw, dtype=torch.float64))
    return model


def stored(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach() for name, p in model.named_parameters()}


def carried(a: nn.Module, found: Diff) -> nn.Module:
    """A model of b with the tensors of a."""
    b = build(found.b, dtype=torch.float64, seed=5)
    b.load_state_dict(apply(found, a.state_dict(), b.state_dict()))
    return b


def logits(model: nn.Module, n: int = 9) -> Tensor:
    tokens = torch.arange(2 * n).view(2, n) * 7 % 62
    return model(tokens, Ctx(layout=TokenLayout.whole(2, n)))


@pytest.mark.parametrize("name", PAIRS)
def test_every_status(name: str) -> None:
    a, b, wanted = PAIRS[name]
    met = set()
    for row in diff(a, b).tensors:
        edge = f"{row.a} -> {row.b}"
        scoring = next(scoring for scoring in wanted if fnmatchcase(edge, scoring[0]) or fnmatchcase(str(row.b), scoring[0]))
        met.add(scoring)
        assert row.status == scoring[1], (edge, row)
        if row.status == "impossible":
            assert scoring[2] in row.how.split("; ")
        else:
            assert row.how.removeprefix("reinterpreted: ") == scoring[2].removeprefix("reinterpreted: "), edge
    assert met == set(wanted), "every rule is met at least once"


@pytest.mark.parametrize("name", PAIRS)
def test_no_tensor_is_missing(name: str) -> None:
    a, b, _ = PAIRS[name]
    found = diff(a, b)
    learned = [{d.path for d in declared(spec) if d.weight.learned} for spec in (a, b)]
    assert {row.a for row in found.tensors if row.a} == learned[0]
    assert {row.b for row in found.tensors if row.b} == learned[1]
    assert sum(found.summary.values()) == len(found.tensors)


@pytest.mark.parametrize("name", PAIRS)
def test_applied_it_runs(name: str) -> None:
    a, b, _ = PAIRS[name]
    found, model = diff(a, b), perturbed(a)
    made = carried(model, found)
    assert torch.isfinite(logits(made)).all()
    before, after, fresh = stored(model), stored(made), stored(build(b, dtype=torch.float64, seed=5))
    for row in found.tensors:
        if row.status in ("kept", "reinterpreted"):
            assert torch.equal(after[row.b], before[row.a])
        elif row.status in ("new", "impossible"):
            assert torch.equal(after[row.b], fresh[row.b])
        elif row.status == "transformed":
            assert not torch.equal(after[row.b], fresh[row.b])


def test_a_spec_and_itself() -> None:
    found = diff(small(), small())
    assert found.summary == {**dict.fromkeys(found.summary, 0), "kept": len(found.tensors)}
    assert found.change == ()


# -- what a transformation keeps ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["packed", "tables of the layers", "repeated", "untied", "counted from 0", "both packed, repeated", "unpacked"]
)
def test_changes_that_keep_the_logits(name: str) -> None:
    pairs = {
        "packed": PAIRS["packed"][:2],
        "tables of the layers": (small(of=RELATIVE), small("layers.*.mixer.position.shared=false", of=RELATIVE)),
        "repeated": (small(), small("layers.*.mixer.kv_heads=6")),
        "untied": (small(), small("head.tied=false")),
        "counted from 0": (small(), small("norm.plus_one=true", "layers.*.norm.plus_one=true")),
        "both packed, repeated": (
            small("layers.*.mixer.packed=true", "layers.*.mixer.bias=true"),
            small("layers.*.mixer.packed=true", "layers.*.mixer.bias=true", "layers.*.mixer.kv_heads=6"),
        ),
        "unpacked": (small("layers.*.mixer.packed=true"), small()),
    }
    found = diff(*pairs[name])
    assert found.summary["transformed"] > 0
    a = perturbed(found.a)
    torch.testing.assert_close(logits(carried(a, found)), logits(a), rtol=0, atol=1e-12)


def test_pooled_heads_are_a_literal_mean() -> None:
    """One token sees itself alone: attention gives v W_o, and v is the mean of the old heads' values."""
    layer = "layers: [{mixer: {heads: 2, kv_heads: 2, head: 2, position: none}, ffn: null}]"
    a = from_yaml(f"width: 2\nvocab: 3\nnorm: null\n{layer}\nhead: {{kind: lm, tied: false}}")
    found = diff(a, changed(a, ["layers.0.mixer.kv_heads=1"]))
    model = build(a, dtype=torch.float64)
    values = torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 0.0], [0.0, 6.0]])  # two heads of two rows
    with torch.no_grad():
        model.layers[0].mixer.v.weight.copy_(values)
        model.layers[0].mixer.o.weight.copy_(torch.tensor([[1.0, 0.0, 10.0, 0.0], [0.0, 1.0, 0.0, 10.0]]))
    made = carried(model, found)
    assert stored(made)["layers.0.mixer.v.weight"].tolist() == [[2.0, 0.0], [0.0, 4.0]]
    x = torch.tensor([[[1.0, 1.0]]], dtype=torch.float64)
    out = made.layers[0].mixer(x, Ctx(layout=TokenLayout.whole(1, 1)))
    assert out.tolist() == [[[22.0, 44.0]]]


def test_old_rows_are_bit_equal() -> None:
    found = diff(small(of=OLD), small("vocab=70", "position.length=23", of=OLD))
    model = perturbed(found.a)
    before, after, fresh = stored(model), stored(carried(model, found)), stored(build(found.b, dtype=torch.float64, seed=5))
    for name, rows in (("embed.table", 62), ("position.table", 17)):
        assert torch.equal(after[name][:rows], before[name])
        assert torch.equal(after[name][rows:], fresh[name][rows:])
    assert torch.equal(logits(carried(model, found))[..., :62], logits(model))


def test_a_larger_image_is_another_place() -> None:
    """The 40th square of a larger image stands elsewhere: its learned position is no row to keep."""
    a = load_spec("vit-tiny")
    statuses = {row.b: row.status for row in diff(a, changed(a, ["embed.image=32", "position.length=65"])).tensors}
    assert statuses["position.table"] == "impossible"
    assert statuses["embed.project.weight"] == "reinterpreted"
    assert statuses["layers.0.mixer.q.weight"] == "kept"


# -- which tensors a change reinterprets ----------------------------------------------------------------------------

QK, VO, ALL, NONE = "qk", "vo", "qkvo", ""


@pytest.mark.parametrize(
    ("sets", "weights"),
    [
        (["layers.*.mixer.dropout=0.3", "layers.*.wire.dropout=0.2", "init=fan_in"], NONE),
        (["layers.*.mixer.bias=true", "layers.*.mixer.out_bias=true"], NONE),
        (["layers.*.mixer.position=alibi"], QK),
        (["layers.*.mixer.position=none"], QK),
        (["layers.*.mixer.position.base=500.0"], QK),
        (["layers.*.mixer.position.fraction=0.5"], QK),
        (["layers.*.mixer.position.scaling=llama3"], QK),
        (["layers.*.mixer.mask=[causal, {kind: window, size: 3}]"], QK),
        (["layers.*.mixer.softcap=3.0"], QK),
        (["layers.*.mixer.scale=0.3"], QK),
        (["layers.*.mixer.sink=true"], QK),
        (["layers.*.mixer.qk_norm=rmsnorm"], QK),
        (["layers.*.mixer.gate=true"], VO),
        (["layers.*.wire.layer_scale=0.1"], ALL),
        (["layers.*.wire.multiplier=0.5"], ALL),
        (["layers.*.ffn=mlp"], NONE),
        (["layers.*.norm=layernorm"], NONE),
        (["head.softcap=30.0", "vocab=64"], NONE),
    ],
)
def test_which_weights_of_attention_are_reinterpreted(sets: list[str], weights: str) -> None:
    rows = {row.b: row.status for row in diff(small(), small(*sets)).tensors}
    for layer in (0, 1):
        assert {name: rows[f"layers.{layer}.mixer.{name}.weight"] for name in "qkvo"} == {
            name: "reinterpreted" if name in weights else "kept" for name in "qkvo"
        }


MLA = "width: 28\nvocab: 62\nlayers: [{mixer: {kind: mla, heads: 4, kv_rank: 10, q_rank: 14, nope: 6, rope: 4, value: 6}}]"
NSA = "width: 28\nvocab: 62\nlayers: [{mixer: {kind: nsa, heads: 6, kv_heads: 2, head: 12, block: 4, top: 2, window: 6}}]"
LINEAR = "width: 28\nvocab: 62\nlayers: [{mixer: {kind: linear_attention, heads: 2}}]"
ADDITIVE = "width: 28\nvocab: 62\nlayers: [{mixer: {kind: additive_attention, heads: 2, hidden: 10}}]"
WINDOW = "layers.0.mixer.mask=[causal, {kind: window, size: 3}]"
MOE = "width: 28\nvocab: 62\nlayers: [{mixer: {heads: 2}, ffn: {kind: moe, experts: 4, hidden: 12}}]"


@pytest.mark.parametrize(
    ("spec", "change", "reinterpreted"),
    [
        (MLA, "layers.0.mixer.position=none", {"mixer.q.weight", "mixer.turned.weight"}),
        (MLA, WINDOW, {"mixer.q.weight", "mixer.turned.weight", "mixer.k_up.weight"}),
        (NSA, "layers.0.mixer.position=none", {f"mixer.{n}" for n in ("q.weight", "k.weight", "k_place", "k_in", "k_out")}),
        (LINEAR, "layers.0.mixer.feature=relu_features", {"mixer.q.weight", "mixer.k.weight"}),
        (ADDITIVE, WINDOW, {"mixer.q.weight", "mixer.k.weight", "mixer.u"}),
        (MOE, "layers.0.ffn.router.z_loss=0.1", set()),
        (MOE, "layers.0.ffn.router.noise=0.1", set()),
        (MOE, "layers.0.ffn.router.capacity=1.5", set()),
    ],
)
def test_other_parts_declare_what_their_fields_act_on(spec: str, change: str, reinterpreted: set[str]) -> None:
    rows = diff(from_yaml(spec), small(change, of=spec)).tensors
    assert {row.b.removeprefix("layers.0.") for row in rows if row.status == "reinterpreted" and row.b} == reinterpreted
    assert {row.status for row in rows} <= {"kept", "reinterpreted", "new"}


def test_a_packed_weight_is_reinterpreted_with_its_queries() -> None:
    packed = "layers.*.mixer.packed=true"
    rows = {row.b: row.status for row in diff(small(packed), small(packed, swap=["position=alibi"])).tensors}
    assert rows["layers.0.mixer.qkv.weight"] == "reinterpreted"
    assert rows["layers.0.mixer.o.weight"] == "kept"


def test_a_position_reinterprets_its_own_table() -> None:
    rows = {
        row.b: row.status
        for row in diff(small(of=RELATIVE), small("layers.*.mixer.position.max_distance=32", of=RELATIVE)).tensors
    }
    assert rows["layers.0.mixer.position.table"] == "reinterpreted"
    assert rows["layers.0.mixer.q.weight"] == "reinterpreted"
    assert rows["layers.0.mixer.v.weight"] == "kept"


def test_a_default_written_out_is_no_change_of_a_reader() -> None:
    a = from_yaml("width: 48\nvocab: 62\nlayers: [{mixer: {heads: 4}, ffn: {kind: mlp}}]")
    found = diff(a, changed(a, ["layers.0.mixer.head=12", "layers.0.mixer.kv_heads=4", "layers.0.ffn.hidden=192"]))
    assert found.summary["kept"] == len(found.tensors)
    assert [c.path for c in found.change] == ["layers.0.mixer.kv_heads", "layers.0.mixer.head", "layers.0.ffn.hidden"]


def test_sizes_exchanged_within_one_shape_are_caught() -> None:
    """17 rows are 17 rows, but with an offset of 2 each token reads another one."""
    found = diff(small(of=OLD), small("position.length=15", "position.offset=2", of=OLD))
    row = next(row for row in found.tensors if row.b == "position.table")
    assert (row.status, row.shapes["a"]) == ("reinterpreted", row.shapes["b"])
    heads = diff(small(of=OLD), small("layers.*.mixer.heads=5", of=OLD))
    assert {r.status for r in heads.tensors if ".mixer.q." in str(r.b)} == {"impossible"}


def test_a_tied_head_reads_the_embedding() -> None:
    tied = {r.b: r.status for r in diff(small(), small("head.softcap=5.0")).tensors}
    assert tied["embed.table"] == "reinterpreted"
    own = {r.b: r.status for r in diff(small("head.tied=false"), small("head.tied=false", "head.softcap=5.0")).tensors}
    assert (own["embed.table"], own["head.out.weight"]) == ("kept", "reinterpreted")


def test_change_is_the_list_of_fields() -> None:
    data = diff(small(), small("layers.1.mixer.kv_heads=1", swap=["norm=layernorm"])).to_dict()
    assert data["change"] == [
        {"path": "layers.0.norm", "a": "rmsnorm", "b": "layernorm"},
        {"path": "layers.1.norm", "a": "rmsnorm", "b": "layernorm"},
        {"path": "layers.1.mixer.kv_heads", "a": 2, "b": 1},
        {"path": "norm", "a": "rmsnorm", "b": "layernorm"},
    ]
    assert set(data) == {"tensors", "summary", "change"}
    assert all(set(row) == {"a", "b", "status", "how", "shapes"} for row in data["tensors"])


# -- refusals -------------------------------------------------------------------------------------------------------


def test_a_broken_spec_is_refused() -> None:
    with pytest.raises(SpecError, match=r"layers\.0\.mixer\.kv_heads"):
        diff(small(), small("layers.*.mixer.kv_heads=4"))


@pytest.mark.parametrize("wrong", ["missing", "shape"])
def test_tensors_that_are_not_those_of_a_are_refused(wrong: str) -> None:
    found = diff(small(), small(swap=["position=alibi"]))
    model = build(found.a)
    tensors: dict[str, Any] = dict(model.state_dict())
    if wrong == "missing":
        del tensors["layers.1.ffn.up.weight"]
    else:
        tensors["layers.1.ffn.up.weight"] = torch.zeros(3, 4)
    with pytest.raises(FileError, match=r"layers\.1\.ffn\.up\.weight"):
        apply(found, tensors, build(found.b).state_dict())


def test_big_specs_are_compared_at_once() -> None:
    found = diff(load_spec("llama-3-8b"), load_spec("mistral-7b"))
    assert found.summary == {
        "kept": 225,
        "reinterpreted": 64,
        "transformed": 2,
        "new": 0,
        "dropped": 0,
        "impossible": 0,
    }
