"""Layouts of other libraries: compressed-tensors against transformers and the library itself; GPTQ and AWQ against a second
writer of the documented layout, since no package that runs them is installed."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import dovetail as dt
from dovetail.base.errors import FileError, SpecError
from dovetail.hf.packed import pack_words, packed_form, unpack_words
from dovetail.ops.attend import using
from dovetail.ops.formats.format import Format
from dovetail.ops.formats.kinds import FP8, NF4, Int4, Int8
from dovetail.weights.quantization.recipe import quantize, select

ROOT = Path(__file__).parents[2]
PEERS = ROOT / ".peers" / "tuning"
SPEC = """
width: 32
vocab: 64
layers: [{repeat: 2, mixer: {heads: 4, kv_heads: 2, head: 8}, ffn: {hidden: 48}}]
head: {kind: lm, tied: false}
"""
FORMATS = {
    "int4": Int4(group=16),
    "int4_zero": Int4(group=16, zero_point=True),
    "int8": Int8(),
    "int8_group": Int8(group=16),
    "fp8": FP8(),
    "fp8_tensor": FP8(per="tensor"),
}


def exported(home: Path, name: str, format: Format, dtype: torch.dtype = torch.float32) -> tuple[Path, dt.Transformer]:
    model = dt.build(SPEC, dtype=dtype)
    quantize(model, model.spec, select(model.spec, format))
    dt.save(model, home / f"{name}-own")
    dt.export(home / f"{name}-own", home / name, family="llama")
    return home / name, model


def logits(model: dt.Transformer) -> torch.Tensor:
    """The logits by the reference implementation: a kernel sums products with codes in another order than those with W."""
    with torch.no_grad(), using("reference"):
        return model(torch.arange(1, 25)[None])


@pytest.mark.parametrize("name", FORMATS)
def test_an_export_loads_here_with_the_same_logits(name: str, tmp_path: Path) -> None:
    directory, model = exported(tmp_path, name, FORMATS[name])
    names = load_file(directory / "model.safetensors")
    assert not any(
        key.endswith("q_proj.weight") and value.is_floating_point() and value.itemsize > 1 for key, value in names.items()
    )
    assert torch.equal(logits(dt.load(directory)), logits(model))


def test_rounded_activations_are_written_down(tmp_path: Path) -> None:
    directory, _ = exported(tmp_path, "dynamic", Int8(dynamic=True))
    (group,) = json.loads((directory / "config.json").read_text())["quantization_config"]["config_groups"].values()
    assert group["format"] == "int-quantized"
    assert group["input_activations"] == {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "strategy": "token",
        "dynamic": True,
    }


@pytest.mark.slow
@pytest.mark.skipif(not (PEERS / "ready").exists(), reason="benchmarks/peers/make tuning")
def test_transformers_loads_an_export_with_our_logits(tmp_path: Path) -> None:
    made = {name: exported(tmp_path, name, format) for name, format in FORMATS.items()}
    made["bf16"] = exported(tmp_path, "bf16", Int4(group=16), torch.bfloat16)
    made["dynamic"] = exported(tmp_path, "dynamic", Int8(dynamic=True))  # their steps are max |x| / 127.5
    script = ROOT / "tests" / "quantization" / "peers_compressed.py"
    command = [PEERS / "bin" / "python", script, tmp_path / "out.safetensors", *(directory for directory, _ in made.values())]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    subprocess.run([str(one) for one in command], check=True, env=environment, timeout=1200)
    found = load_file(tmp_path / "out.safetensors")
    for name, (_, model) in made.items():
        ours = logits(model)
        gap = float((found[name].float() - ours.float()).abs().max() / ours.float().abs().max())
        assert gap < (0.02 if name in ("bf16", "dynamic") else 1e-5), (name, gap)
    assert torch.equal(unpack_words(found["packed4"], 4) - 8, found["codes4"].int())
    assert torch.equal(unpack_words(found["packed8"], 8) - 128, found["codes8"].int())
    assert torch.equal(pack_words(found["codes4"].int() + 8, 4), found["packed4"])
    assert torch.equal(pack_words(found["codes8"].int() + 128, 8), found["packed8"])
    assert torch.equal(unpack_words(found["zeros4"].T.contiguous(), 4).T - 8, found["codes4"][:, :5].int())


def by_hand(codes: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
    """(rows, n) codes of four bits -> (rows, n / 8): nibble i of a word holds the code order[i] of its eight."""
    words = torch.zeros(codes.shape[0], codes.shape[1] // 8, dtype=torch.int64)
    for i, place in enumerate(order):
        words |= codes[:, place::8].long() << (4 * i)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def drawn() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(0, 16, (24, 32), generator=generator)  # (out, inp)
    zeros = torch.randint(1, 16, (24, 4), generator=generator)  # (out, groups)
    return codes, zeros, torch.rand(24, 4, generator=generator).half() + 0.5


def test_gptq_reads_the_documented_layout() -> None:
    codes, zeros, scales = drawn()
    plain = tuple(range(8))
    group = torch.arange(4).repeat_interleave(8).flip(0)
    tensors = {
        "a.qweight": by_hand(codes, plain).T.contiguous(),
        "a.qzeros": by_hand((zeros - 1).T.contiguous(), plain),
        "a.scales": scales.T.contiguous(),
        "a.g_idx": group.int(),
    }
    form = packed_form({"quant_method": "gptq", "bits": 4}, "config")
    assert form is not None
    names, read = form.tensors(tensors, tensors.__getitem__)
    want = (codes - zeros[:, group]).half() * scales[:, group]
    assert names == ["a.weight"]
    assert torch.equal(read("a.weight"), want)
    second = packed_form({"quant_method": "gptq", "bits": 4, "checkpoint_format": "gptq_v2"}, "config")
    assert second is not None
    tensors["a.qzeros"] = by_hand(zeros.T.contiguous(), plain)
    assert torch.equal(second.tensors(tensors, tensors.__getitem__)[1]("a.weight"), want)


def test_awq_reads_the_documented_layout() -> None:
    codes, zeros, scales = drawn()
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    tensors = {
        "a.qweight": by_hand(codes.T.contiguous(), order),
        "a.qzeros": by_hand(zeros.T.contiguous(), order),
        "a.scales": scales.T.contiguous(),
    }
    form = packed_form({"quant_method": "awq", "bits": 4}, "config")
    assert form is not None
    group = torch.arange(4).repeat_interleave(8)
    got = form.tensors(tensors, tensors.__getitem__)[1]("a.weight")
    assert torch.equal(got, (codes - zeros[:, group]).half() * scales[:, group])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "supported: fp8, mxfp4, compressed-tensors, gptq, awq"),
        ({"quant_method": "gptq", "bits": 3}, "3 is unsupported"),
        ({"quant_method": "compressed-tensors", "config_groups": {}}, "one group of layers"),
        (
            {"quant_method": "compressed-tensors", "format": "marlin-24", "config_groups": {"a": {"weights": {"num_bits": 4}}}},
            "'marlin-24' of 4 bits",
        ),
    ],
)
def test_layouts_that_are_not_read_are_refused(settings: dict[str, object], message: str, tmp_path: Path) -> None:
    directory, _ = exported(tmp_path, "int4", FORMATS["int4"])
    (directory / "dovetail.yaml").unlink()
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))
    with pytest.raises(SpecError, match=message):
        dt.load(directory)


def test_damaged_tensors_are_refused(tmp_path: Path) -> None:
    directory, _ = exported(tmp_path, "int4", FORMATS["int4"])
    name = "model.layers.0.self_attn.q_proj.weight_packed"
    tensors = load_file(directory / "model.safetensors")
    save_file({**tensors, name: tensors[name][:, :2].contiguous()}, directory / "model.safetensors")
    with pytest.raises(FileError, match=r"q_proj.weight: weight_packed of \(32, 2\) does not hold 32 × 32 integers of 4 bits"):
        dt.load(directory)


def test_what_cannot_be_written_is_refused_with_its_path(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match=r"layers.0.mixer.q: nf4 has no layout in compressed-tensors"):
        exported(tmp_path, "nf4", NF4(group=16))
    model = dt.build(SPEC)
    quantize(model, model.spec, {**select(model.spec, Int8()), "layers.1.mixer.o": Int4(group=16)})
    dt.save(model, tmp_path / "mixed")
    with pytest.raises(SpecError, match=r"layers.1.mixer.o: has another format"):
        dt.export(tmp_path / "mixed", tmp_path / "out", family="llama")
