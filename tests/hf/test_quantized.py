"""Weights of few bits: numbers worked out by hand, the reference's own conversion, and whole directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from dovetail.base.errors import FileError, SpecError
from dovetail.hf.hf import export_tensors, from_hf
from dovetail.hf.load import load
from dovetail.hf.quantized import Fp8, Mxfp4, split_quantization
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout

E4M3 = torch.float8_e4m3fn


def test_fp8_by_hand() -> None:
    """Blocks of 2 × 3 over 3 × 5: the last ones are smaller."""
    numbers = torch.tensor([[1.0, -2.0, 0.5, 448.0, 0.0625], [3.5, 0.0, -0.25, 1.0, -1.0], [2.0, 4.0, 8.0, -16.0, 0.5]])
    scales = torch.tensor([[0.5, 2.0], [4.0, 0.25]])
    wanted = [[0.5, -1.0, 0.25, 896.0, 0.125], [1.75, 0.0, -0.125, 2.0, -2.0], [8.0, 16.0, 32.0, -4.0, 0.125]]
    (got,) = Fp8(2, 3).from_hf([numbers.to(E4M3), scales])
    assert got.dtype == torch.bfloat16
    assert got.tolist() == wanted


def test_mxfp4_by_hand() -> None:
    """0x21 is ½ and 1 (low half first), 0xF7 is 6 and −6, 0x9B is −1½ and −½; exponents 128, 126, 127 double, halve, keep."""
    blocks = torch.zeros(1, 1, 3, 16, dtype=torch.uint8)
    blocks[0, 0, 0, 0], blocks[0, 0, 1, 2], blocks[0, 0, 2, 15] = 0x21, 0xF7, 0x9B
    (got,) = Mxfp4().from_hf([blocks, torch.tensor([[[128, 126, 127]]], dtype=torch.uint8)])
    assert got.shape == (1, 96, 1)
    assert got.dtype == torch.bfloat16
    flat = got.flatten()
    assert {i: x for i, x in enumerate(flat.tolist()) if x} == {0: 1.0, 1: 2.0, 36: 3.0, 37: -3.0, 94: -1.5, 95: -0.5}


def drawn(*shape: int, high: int = 256, low: int = 0) -> Tensor:
    return torch.randint(low, high, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(sum(shape)))


def test_both_are_the_reference_s() -> None:
    blocks, scales = drawn(3, 10, 2, 16), drawn(3, 10, 2, low=110, high=140)
    (got,) = Mxfp4().from_hf([blocks, scales])
    assert got.equal(convert_moe_packed_tensors(blocks, scales))
    numbers, scale = torch.randn(256, 384).to(E4M3), torch.rand(2, 3)
    (made,) = Fp8().from_hf([numbers, scale])
    assert made.equal(Fp8Dequantize(None)._dequantize_one(numbers, scale).to(torch.bfloat16))


def test_mxfp4_is_written_as_it_was() -> None:
    """The same numbers; of two ways to say a block, the one whose largest number is 4 or 6."""
    blocks, scales = drawn(3, 10, 2, 16), drawn(3, 10, 2, low=110, high=140)
    whole = Mxfp4()
    (once,) = whole.from_hf([blocks, scales])
    (again,) = whole.from_hf(whole.to_hf([once]))
    assert again.equal(once)
    full = blocks.clone()
    full[..., 0] |= 7  # a 6 in every block leaves one way only
    (once,) = whole.from_hf([full, scales])
    written = whole.to_hf([once])
    assert written[1].equal(scales)
    assert whole.from_hf(written)[0].equal(once)
    with pytest.raises(FileError, match="no numbers of mxfp4"):
        whole.to_hf([torch.full((64, 3), 0.3)])


@pytest.mark.parametrize(
    ("convert", "tensors", "said"),
    [
        (Fp8(), (torch.ones(3, 5), torch.ones(1, 1)), "not a matrix of e4m3"),
        (Fp8(), (torch.ones(3, 5).to(E4M3), torch.ones(2, 1)), "not a matrix of e4m3"),
        (Fp8(), (torch.ones(5).to(E4M3), torch.ones(1)), "not a matrix of e4m3"),
        (Mxfp4(), (torch.ones(2, 3, 16), torch.ones(2, 3)), "not mxfp4"),
        (Mxfp4(), (drawn(2, 3, 16), drawn(3, 2)), "not mxfp4"),
        (Mxfp4(), (drawn(2, 3, 16), torch.full((2, 3), 255, dtype=torch.uint8)), "an exponent of 255"),
    ],
)
def test_what_is_not_of_the_form_is_refused(convert: Any, tensors: tuple[Tensor, Tensor], said: str) -> None:
    with pytest.raises(FileError, match=said):
        convert.from_hf(tensors)


@pytest.mark.parametrize(
    "said", [{"quant_method": "gptq"}, {}, 3, {"quant_method": "fp8", "weight_block_size": [0, 1]}, {"quant_method": ["fp8"]}]
)
def test_other_forms_are_refused(said: Any) -> None:
    with pytest.raises(SpecError, match="quantization_config"):
        split_quantization({"quantization_config": said})


SIZES = {"vocab_size": 62, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8, "hidden_size": 32}
GPT_OSS = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 64, **SIZES}
DEEPSEEK = {
    **{name: value for name, value in SIZES.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "intermediate_size": 44,
    "moe_intermediate_size": 20,
    "n_routed_experts": 8,
    "kv_lora_rank": 10,
    "q_lora_rank": 14,
    "qk_nope_head_dim": 9,
    "qk_rope_head_dim": 12,
    "v_head_dim": 7,
    "n_group": 4,
    "topk_group": 2,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
}


def written(place: Path, family: str, fields: dict[str, Any], told: dict[str, Any]) -> dict[str, Tensor]:
    """A directory as such models are released, and its weights as plain bfloat16."""
    config = {**AutoConfig.for_model(family, **fields).to_dict(), "quantization_config": told}
    spec = from_hf({name: value for name, value in config.items() if name != "quantization_config"})
    model = build(spec)
    torch.manual_seed(0)
    held = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    known = {name: t.detach() for name, t in model.state_dict().items()}
    for tensor in known.values():
        tensor.copy_(torch.randn_like(tensor) * 0.3 + (1.0 if tensor.dim() == 1 else 0.0))
    assert known.keys() <= held.keys()
    plain = {name: t.bfloat16() for name, t in export_tensors(spec, known, family).items()}
    files: dict[str, Tensor] = {}
    for name, tensor in plain.items():
        if told["quant_method"] == "mxfp4" and name.endswith(("gate_up_proj", "down_proj")):
            experts, inp, out = tensor.shape
            files[f"{name}_blocks"] = drawn(experts, out, inp // 32, 16)
            files[f"{name}_scales"] = drawn(experts, out, inp // 32, low=122, high=127)
            plain[name] = convert_moe_packed_tensors(files[f"{name}_blocks"], files[f"{name}_scales"])
        elif told["quant_method"] == "fp8" and name.endswith("_proj.weight"):
            rows, columns = tensor.shape
            files[name] = tensor.float().to(E4M3)
            files[f"{name}_scale_inv"] = torch.rand(-(-rows // 16), -(-columns // 16)) + 0.5
            scale = files[f"{name}_scale_inv"].repeat_interleave(16, 0)[:rows].repeat_interleave(16, 1)[:, :columns]
            plain[name] = (files[name].float() * scale).bfloat16()
        else:
            files[name] = tensor
    save_file(files, place / "model.safetensors", metadata={"format": "pt"})
    (place / "config.json").write_text(json.dumps(config, default=str))
    return plain


@pytest.mark.parametrize(
    ("family", "fields", "told"),
    [
        ("gpt_oss", GPT_OSS, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}),
        ("deepseek_v3", DEEPSEEK, {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 16]}),
    ],
)
def test_a_directory_is_read_as_bfloat16(tmp_path: Path, family: str, fields: dict[str, Any], told: dict[str, Any]) -> None:
    plain = written(tmp_path, family, fields, told)
    model = load(tmp_path)
    again = export_tensors(model.part, {name: t.detach() for name, t in model.state_dict().items()}, family)
    assert again.keys() == plain.keys()
    for name, tensor in again.items():
        assert tensor.equal(plain[name]), name
    elsewhere = tmp_path / "plain"
    elsewhere.mkdir()
    save_file({name: t.contiguous() for name, t in plain.items()}, elsewhere / "model.safetensors", metadata={"format": "pt"})
    AutoConfig.for_model(family, **fields).save_pretrained(elsewhere)
    theirs: Any = AutoModelForCausalLM.from_pretrained(elsewhere, dtype=torch.float32, experts_implementation="eager").eval()
    tokens = torch.randint(62, (2, 9), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want, got = theirs(input_ids=tokens).logits, model.float()(tokens, Ctx(layout=TokenLayout.whole(2, 9)))
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()
