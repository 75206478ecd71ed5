"""dt.show: every form of a spec, what a checkpoint's files say, and rows that would repeat."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import dovetail as dt
from dovetail.base.errors import UsageError
from dovetail.files.model_dir import save
from dovetail.files.spec import from_yaml, load_spec
from dovetail.hf.write import export_directory

TEXT = "{width: 256, vocab: 62, layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]}"
SPEC = from_yaml(TEXT)


def test_every_form_of_a_spec_gives_the_same_summary(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(TEXT)
    forms = [TEXT, SPEC, tmp_path / "spec.yaml", str(tmp_path / "spec.yaml"), dt.build(SPEC)]
    figures = [{**dt.show(form).to_dict(), "spec": ""} for form in forms]
    assert all(one == figures[0] for one in figures)
    assert dt.show("llama-tiny").parameters == 4_361_472


def test_changes_are_strings_or_a_mapping() -> None:
    by_text = dt.show("llama-tiny", set=["layers.*.mixer.kv_heads=1"], swap=["position=alibi"])
    by_mapping = dt.show("llama-tiny", set={"layers.*.mixer.kv_heads": 1}, swap={"position": "alibi"})
    assert by_text.to_dict() == by_mapping.to_dict()
    assert by_text.name == "llama-tiny --swap position=alibi --set layers.*.mixer.kv_heads=1"
    lost = dt.show("llama-3-8b", swap={"mixer": "mla"}).not_carried_over
    assert lost == ("layers.*.mixer.kv_heads was 8; mla has no such field",)


def test_the_summary_prints_as_the_table_of_the_command_line() -> None:
    result = dt.show(SPEC)
    text = str(result)
    assert repr(result) == text
    assert "width 256" in text, "the width is shown though it is the default"
    assert "per token" in text
    assert "per sequence of 4,096 tokens" in text
    assert "\x1b" not in text
    json.dumps(result.to_dict())


@pytest.mark.parametrize(("dtype", "name"), [(torch.float32, "fp32"), (torch.float16, "fp16"), (torch.bfloat16, "bf16")])
def test_the_dtype_is_that_of_the_files(tmp_path: Path, dtype: torch.dtype, name: str) -> None:
    save(dt.build(SPEC, dtype=dtype), SPEC, tmp_path / "model")
    result = dt.show(tmp_path / "model")
    assert result.account.dtype == name
    assert f" {name}" in str(result)
    assert dt.show(tmp_path / "model", dtype="fp8").account.dtype == "fp8"


def test_the_longest_sequence_is_that_of_the_config(tmp_path: Path) -> None:
    save(dt.build(SPEC), SPEC, tmp_path / "model")
    assert dt.show(tmp_path / "model").to_dict()["max_length"] is None
    export_directory(tmp_path / "model", tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    (tmp_path / "hf" / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 1000}))
    result = dt.show(tmp_path / "hf")
    assert result.to_dict()["max_length"] == result.account.length == 1000
    assert "1,000  tokens (max_position_embeddings of the config)" in str(result)
    assert "1,024" not in str(result)
    assert "positions of the model" in str(dt.show("gpt2"))


def test_equal_rows_of_a_recurrent_model_are_one() -> None:
    text = str(dt.show("rwkv6-tiny"))
    assert text.count("49.88 KiB") == 1
    assert "per sequence of any length" in text
    hybrid = str(dt.show("gated-deltanet-hybrid-tiny"))
    assert "per sequence of any length (recurrent state)" in hybrid
    assert "per sequence of 4,096 tokens" in hybrid


def test_costs_of_parts_add_up() -> None:
    for name in ("llama-tiny", "t5-tiny", "mixtral-tiny", "gated-deltanet-hybrid-tiny"):
        account = dt.show(load_spec(name)).account
        total = account.costs[""]
        assert total.state_bytes == account.state_bytes(account.length)
        assert total.matmul == pytest.approx(account.flops_per_token["matmul"])
        assert total.attention == pytest.approx(account.flops_per_token["attention_causal"])


def test_a_length_out_of_range_is_refused() -> None:
    with pytest.raises(UsageError, match="length: 0 is not from 1 to"):
        dt.show("llama-tiny", length=0)
