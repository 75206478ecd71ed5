"""A dialect is checked itself: each mistake one can make in a table is an error that names the dialect and our path."""

from __future__ import annotations

import dataclasses as dc
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from dovetail.base.errors import SpecError
from dovetail.hf.check import check_dialect
from dovetail.hf.dialect import DIALECTS
from dovetail.hf.dialect.llama import LLAMA
from dovetail.hf.field import Copy
from dovetail.hf.hf import export_tensors, from_hf, import_tensors, to_hf
from dovetail.hf.table import Row
from dovetail.model.construction import build
from dovetail.proof.laws.ported import in_family

SIZES = {"vocab_size": 62, "num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 32}


@pytest.mark.parametrize("name", DIALECTS)
def test_every_dialect_is_sound(name: str) -> None:
    check_dialect(DIALECTS[name])


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"layer": {"mixer": "attentoin"}}, "x, LlamaForCausalLM: layers.0.mixer: "),
        ({"fields": (Copy("eps", "layers.*.norm.epsilon"),)}, "layers.*.norm.epsilon: the spec has no such field"),
        ({"fields": (Copy("eps", "layers.*.norm:rmsnrom.eps"),)}, "no part has the kind 'rmsnrom'"),
        ({"fields": (Copy("eps", "layers.*.ffn:moe.exprts"),)}, "moe has no field 'exprts'"),
        ({"fields": (Copy("width", "width"),)}, "width: is set by config.width and config.hidden_size"),
        ({"fields": (Copy("part", "layers.*.ffn"),)}, "layers.*.ffn.hidden: is set by config.part and config.inter"),
        ({"without": ("norm.weight",)}, "x, LlamaForCausalLM: norm.scale: lies in no tensor of x"),
        ({"tensors": (Row("another.weight", "norm.scale"),)}, "norm.scale: lies in two tensors of x (model.norm.weight and"),
        ({"without": ("mlp_bais",)}, "x: `without` names 'mlp_bais', which is not a field or tensor of llama"),
        ({"without": ("hidden_act",), "required": ("act",)}, "x, LlamaForCausalLM: config.act: is missing"),
    ],
)
def test_a_mistake_in_a_table_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(SpecError) as refused:
        check_dialect(LLAMA.variant("x", **changes))
    assert says in str(refused.value)
    assert str(refused.value).startswith("x")


def test_two_fields_never_set_one_path_differently() -> None:
    twice = dc.replace(LLAMA, fields=(*LLAMA.fields, Copy("width", "width")))
    config = {**SIZES, "model_type": "llama", "intermediate_size": 44}
    assert from_hf({**config, "width": 32}, twice).width == 32
    with pytest.raises(SpecError) as refused:
        from_hf({**config, "width": 24}, twice)
    assert str(refused.value) == ("config.width: sets width to 24, but config.hidden_size sets it to 32 (the two must agree)")


def test_an_embedding_of_another_width_is_refused() -> None:
    config = {**SIZES, "model_type": "opt", "ffn_dim": 44, "max_position_embeddings": 64}
    assert from_hf({**config, "word_embed_proj_dim": 32}).width == 32
    assert from_hf(config).width == 32
    with pytest.raises(SpecError) as refused:
        from_hf({**config, "word_embed_proj_dim": 16})
    assert str(refused.value).startswith("config.word_embed_proj_dim: 16 is unsupported: an embedding with another width")


@pytest.mark.parametrize(
    ("family", "old", "new", "value", "other"),
    [
        ("qwen3_moe", "num_local_experts", "num_experts", 6, 8),
        ("gpt_neox", "rotary_emb_base", "rope_theta", 500.0, 100.0),
        ("gpt_neox", "rotary_pct", "partial_rotary_factor", 0.5, 1.0),
    ],
)
def test_two_names_of_a_field_must_agree(family: str, old: str, new: str, value: Any, other: Any) -> None:
    config = {**SIZES, "model_type": family, "intermediate_size": 44, "num_key_value_heads": 2, "head_dim": 8}
    if family == "gpt_neox":
        del config["num_key_value_heads"], config["head_dim"]
    else:
        config["num_experts_per_tok"] = 2
    assert from_hf({**config, old: value}) == from_hf({**config, new: value}) == from_hf({**config, old: value, new: value})
    assert from_hf({**config, old: value}) != from_hf({**config, old: other})
    with pytest.raises(SpecError, match=rf"config\.{old}: is {other}, but config\.{new} is {value}"):
        from_hf({**config, new: value, old: other})


FALLBACKS = [(name, *row) for name, one in DIALECTS.items() if name != "mt5" for row in one.fallbacks.items()]  # a T5


@pytest.mark.parametrize(("family", "field", "other"), [row for row in FALLBACKS if isinstance(row[2], str)])
def test_a_fallback_replaces_no_value_that_the_config_gives(family: str, field: str, other: str) -> None:
    config = to_hf(in_family(family), family).config
    given, left_out = {**config, field: config[other] + 1}, {**config, field: None}
    assert to_hf(from_hf(given), family).config[field] == config[other] + 1
    assert to_hf(from_hf(left_out), family).config[field] == config[other]


def test_a_tensor_without_a_row_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rather than a parameter that stays on the meta device, or one that is not written."""
    spec = in_family("mixtral")
    ours = {name: p.detach() for name, p in build(spec).named_parameters()}
    theirs = export_tensors(spec, ours, "mixtral")
    whole = DIALECTS["mixtral"]
    rows = tuple(row for row in whole.tensors if row.paths != ("layers.{}.ffn.router.out.weight",))
    monkeypatch.setitem(DIALECTS, "mixtral", dc.replace(whole, tensors=rows))
    for ask in (lambda: import_tensors(spec, theirs, "mixtral"), lambda: to_hf(spec, "mixtral")):
        with pytest.raises(SpecError, match=r"layers\.0\.ffn\.router\.out\.weight: lies in no tensor of mixtral"):
            ask()


@pytest.mark.slow
def test_a_package_offers_a_dialect_by_an_entry_point(tmp_path: Path) -> None:
    (tmp_path / "others.py").write_text(
        "from dovetail.hf.dialect.llama import LLAMA\n"
        "GOOD = LLAMA.variant('good', architecture='GoodForCausalLM')\n"
        "BAD = LLAMA.variant('bad', without=('norm.weight',))\n"
        "TWICE = LLAMA.variant('llama')\n"
    )
    info = tmp_path / "others-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1\n")
    ask = "from dovetail.hf.survey import survey; print(survey()[-1].data())"
    says = {
        "GOOD": "{'model_type': 'good', 'import': True, 'export': True, 'architectures': ('GoodForCausalLM',), 'lines': None",
        "BAD": "bad, LlamaForCausalLM: norm.scale: lies in no tensor of bad",
        "TWICE": "llama: a dialect of this name is registered already",
    }
    for name, said in says.items():
        (info / "entry_points.txt").write_text(f"[dovetail.dialects]\nother = others:{name}\n")
        env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
        done = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=False)
        assert said in done.stdout + done.stderr
