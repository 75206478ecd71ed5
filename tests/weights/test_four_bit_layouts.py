"""GPTQ and AWQ as we write them: bit-equal to a second writer of the documented layouts, read back with the same codes, scales
and logits, described by a config that transformers takes, and refused where a layout cannot hold a matrix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import dovetail as dt
from dovetail.base.errors import SpecError, UsageError
from dovetail.cli import main
from dovetail.hf.packed import packed_form
from dovetail.ops.attend import using
from dovetail.ops.formats.format import SCALE, Format
from dovetail.ops.formats.kinds import FP8, NF4, Int4, Int8
from dovetail.weights.quantization.recipe import leaf_at, quantize, select

SPEC = """
width: 32
vocab: 64
layers: [{repeat: 2, mixer: {heads: 4, kv_heads: 2, head: 8}, ffn: {hidden: 48}}]
head: {kind: lm, tied: false}
"""
FORMATS = {"symmetric": Int4(group=16), "zero": Int4(group=16, zero_point=True)}
PLAIN, AWQ = tuple(range(8)), (0, 2, 4, 6, 1, 3, 5, 7)
LEAF, THEIRS = "layers.1.ffn.down", "model.layers.1.mlp.down_proj"


def exported(
    home: Path, format: Format, layout: str, dtype: torch.dtype = torch.float32, spec: str = SPEC, **recipe: Format | None
) -> tuple[Path, dt.Transformer]:
    model = dt.build(spec, dtype=dtype)
    chosen = {**select(model.spec, format), **recipe}
    quantize(model, model.spec, {path: one for path, one in chosen.items() if one is not None})
    dt.save(model, home / f"{layout}-own")
    dt.export(home / f"{layout}-own", home / layout, family="llama", layout=layout, force=True)
    return home / layout, model


def logits(model: dt.Transformer) -> torch.Tensor:
    """The logits by the reference implementation: a kernel sums products with codes in another order than those with W."""
    with torch.no_grad(), using("reference"):
        return model(torch.arange(1, 25)[None])


def by_hand(codes: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """(rows, n) codes of four bits -> (rows, n / 8): nibble i of a word holds the code order[i] of its eight."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for i, place in enumerate(order):
        words |= codes[:, place::8].long() << (4 * i)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_tensors_are_the_documented_ones_and_load_with_the_same_logits(
    layout: str, name: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    directory, model = exported(tmp_path, FORMATS[name], layout, dtype)
    leaf = leaf_at(model, LEAF)
    stored = leaf.storage.stored(leaf)
    codes, zero = leaf.storage.format.codes(stored, 48), leaf.storage.format.grid(stored).zero
    zero = torch.full((32, 3), 8) if zero is None else zero.long()
    assert name != "zero" or len(zero.unique()) > 2
    found = {key.removeprefix(f"{THEIRS}."): one for key, one in load_file(directory / "model.safetensors").items()}
    assert "weight" not in found
    assert torch.equal(found["scales"], stored[SCALE].to(dtype).T)
    if layout == "gptq":
        assert torch.equal(found["qweight"], by_hand(codes, PLAIN).T)
        assert torch.equal(found["qzeros"], by_hand((zero - int(name == "symmetric")).T.contiguous(), PLAIN))
        assert found["g_idx"].tolist() == [i // 16 for i in range(48)]
    else:
        assert torch.equal(found["qweight"], by_hand(codes.T.contiguous(), AWQ))
        assert torch.equal(found["qzeros"], by_hand(zero.T.contiguous(), AWQ))
    if dtype == torch.float32:
        assert torch.equal(logits(dt.load(directory)), logits(model))
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    form = packed_form(config, "config")
    assert form is not None
    dense = form.decode(found)
    groups = torch.arange(3).repeat_interleave(16)
    assert torch.equal(dense, (codes.to(dtype) - zero[:, groups].to(dtype)) * stored[SCALE].to(dtype)[:, groups])


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_transformers_takes_the_config(layout: str, tmp_path: Path) -> None:
    quantizers = pytest.importorskip("transformers.quantizers.auto")
    directory, _ = exported(tmp_path, FORMATS["zero"], layout)
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    made = quantizers.AutoQuantizationConfig.from_dict(dict(config))
    assert (made.bits, made.group_size) == (4, 16)


def test_a_zero_point_of_zero_survives(tmp_path: Path) -> None:
    """In version 1 of GPTQ it would be read as 16."""
    model = dt.build(SPEC)
    with torch.no_grad():
        leaf_at(model, LEAF).weight.abs_()  # no value below 0: the zero point of every group is 0
    quantize(model, model.spec, select(model.spec, FORMATS["zero"]))
    leaf = leaf_at(model, LEAF)
    assert int(leaf.storage.stored(leaf)["weight_zero_point"].max()) == 0
    dt.save(model, tmp_path / "own")
    dt.export(tmp_path / "own", tmp_path / "out", family="llama", layout="gptq")
    assert torch.equal(logits(dt.load(tmp_path / "out")), logits(model))


def test_the_command_writes_a_layout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    exported(tmp_path, FORMATS["symmetric"], "awq")
    with pytest.raises(SystemExit) as stop:
        main(["export", str(tmp_path / "awq-own"), "-o", str(tmp_path / "out"), "--layout", "gptq"])
    assert not stop.value.code
    assert json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]["checkpoint_format"] == "gptq"
    capsys.readouterr()


@pytest.mark.parametrize("layout", ["gptq", "awq"])
def test_what_a_layout_cannot_hold_is_refused_with_its_path(layout: str, tmp_path: Path) -> None:
    for format in (Int8(), NF4(group=16), FP8()):
        with pytest.raises(SpecError, match=rf"layers\.0\.mixer\.q: {format.kind} has no layout in {layout}"):
            exported(tmp_path, format, layout)
    with pytest.raises(SpecError, match=r"layers\.1\.ffn\.down: has another format"):
        exported(tmp_path, FORMATS["zero"], layout, **{LEAF: Int8()})
    odd = SPEC.replace("kv_heads: 2, head: 8", "kv_heads: 1, head: 12").replace("heads: 4", "heads: 4")
    with pytest.raises(SpecError, match=rf"layers\.0\.mixer\.k: its 12 outputs are not a multiple of 8, of which {layout}"):
        exported(tmp_path, FORMATS["zero"], layout, spec=odd)
    dt.save(dt.build(SPEC), tmp_path / "dense")
    with pytest.raises(UsageError, match=f"layout {layout}: .*dense holds no weights of fewer bits"):
        dt.export(tmp_path / "dense", tmp_path / "out", layout=layout)


def test_a_matrix_that_is_left_out_is_named_in_awq_and_refused_in_gptq(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"layers\.1\.ffn\.down: is not quantized, which the layout gptq cannot express"):
        exported(tmp_path, FORMATS["zero"], "gptq", **{LEAF: None})
    directory, model = exported(tmp_path, FORMATS["zero"], "awq", **{LEAF: None})
    config = json.loads((directory / "config.json").read_text())["quantization_config"]
    assert THEIRS in config["modules_to_not_convert"]
    assert torch.equal(logits(dt.load(directory)), logits(model))
    with pytest.raises(UsageError, match="layout: 'gptk' is none of its values; did you mean gptq"):
        dt.export(tmp_path / "awq-own", tmp_path / "out", layout="gptk")
