"""Any value of any field is read or refused by a typed error that names the field; harmless fields refuse no checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from quick import DEEPER, FAMILIES
from transformers import AutoConfig

from dovetail.base.errors import DovetailError, SpecError
from dovetail.base.limits import MAX_TENSORS
from dovetail.hf.dialect import DIALECTS
from dovetail.hf.hf import from_hf, to_hf
from dovetail.proof.laws.ported import in_family

VALUES: tuple[Any, ...] = (0, None, float("nan"), float("inf"), 1e308, 10**9, "x", [], {"factor": float("nan")})


def spoilt(name: str) -> Iterator[tuple[str, Any, dict[str, Any]]]:
    """(field, value, config) for every field that a dialect reads, those inside mappings too."""
    dialect = DIALECTS[name]
    form = dialect.forms[-1]
    depth = DEEPER.get(name, 2)
    base = AutoConfig.for_model(name, **{field: depth for field in (dialect.layers, dialect.encoder) if field}).to_dict()
    base |= {"model_type": name, "architectures": [form.architecture]}
    for field in sorted({name for one in (*dialect.fields, *form.fields) for name in one.names} | dialect.fixed.keys()):
        inside = base.get(field) if isinstance(base.get(field), dict) and field != "id2label" else {}
        for value in VALUES:
            yield field, value, {**base, field: copy.deepcopy(value)}
            for inner in inside or {}:
                yield f"{field}.{inner}", value, {**base, field: {**base[field], inner: copy.deepcopy(value)}}


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_value_is_read_or_refused_by_name(name: str) -> None:
    refused = 0
    for field, value, config in spoilt(name):
        try:
            spec = from_hf(config)
        except DovetailError:
            refused += 1
            continue
        except Exception as error:
            raise AssertionError(f"{field} = {value!r}: {error!r}") from error
        try:
            to_hf(spec, name)
        except DovetailError:
            continue
        except Exception as error:
            raise AssertionError(f"{field} = {value!r} when written: {error!r}") from error
    assert refused > 20


@pytest.mark.parametrize(
    ("family", "change", "says"),
    [
        ("smollm3", {"no_rope_layer_interval": 0, "no_rope_layers": None}, "config.no_rope_layer_interval: 0 is not"),
        ("gemma3_text", {"sliding_window_pattern": "x", "layer_types": None}, "config.sliding_window_pattern: 'x' is not"),
        ("llama", {"partial_rotary_factor": float("nan")}, "config.partial_rotary_factor: nan is not finite"),
        (
            "stablelm",
            {"partial_rotary_factor": 1e308},
            "config.partial_rotary_factor: 1e+308 is not a number",
        ),
        ("granite", {"logits_scaling": float("inf")}, "config.logits_scaling: inf is not finite"),
        ("gemma2", {"query_pre_attn_scalar": float("inf")}, "config.query_pre_attn_scalar: inf is not finite"),
        ("vit", {"num_labels": 10**9, "id2label": None}, "config.num_labels: 1000000000 is more than 100,000"),
        ("llama", {"pruned_heads": {"0": [1]}}, "config.pruned_heads: {'0': [1]} is unsupported (supported: {})"),
        ("llama", {"rope_interleaved": True}, "config.rope_interleaved: True is unsupported (supported: False)"),
    ],
)
def test_the_refusal_names_the_field(family: str, change: dict[str, Any], says: str) -> None:
    config = {**AutoConfig.for_model(family).to_dict(), "architectures": [DIALECTS[family].forms[-1].architecture], **change}
    if "partial_rotary_factor" in change:
        del config["rope_parameters"]
    with pytest.raises(SpecError) as refused:
        from_hf(config)
    assert says in str(refused.value)


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "deepseek_v3", "qwen3_next"])
def test_experts_are_bounded_before_there_is_a_name_for_each(family: str) -> None:
    spec = in_family(family)
    for i, block in enumerate(spec.layers):
        spec = spec.set(f"layers.{i}.ffn.experts", 10**9) if block.ffn is not None and block.ffn.kind == "moe" else spec
    with pytest.raises(SpecError, match=rf"layers\.\d\.ffn.*: 1,000,000,000 tensors in {family} .* may have {MAX_TENSORS:,}"):
        to_hf(spec, family)


HARMLESS = {
    "_attn_implementation_autoset": True,
    "add_cross_attention": False,
    "do_sample": True,
    "is_decoder": False,
    "num_labels": 3,
    "pruned_heads": {},
    "temperature": 0.6,
    "tie_encoder_decoder": False,
    "tokenizer_class": "PreTrainedTokenizerFast",
    "top_p": 0.9,
    "torchscript": False,
    "transformers.js_config": {"dtype": "q4"},
    "unsloth_version": "2024.9",
}


@pytest.mark.parametrize("name", DIALECTS)
def test_harmless_fields_change_nothing(name: str) -> None:
    config = {**AutoConfig.for_model(name).to_dict(), "architectures": [DIALECTS[name].forms[0].architecture]}
    assert from_hf({**HARMLESS, **config}) == from_hf(config)


def test_smollm2_is_a_llama() -> None:
    config = AutoConfig.for_model("llama").to_dict()
    assert from_hf({**config, "is_llama_config": True, "rope_interleaved": False}) == from_hf(config)
