"""Multi-token prediction of published files: every tensor is kept, and the computation is that of the published description.

transformers ignores these tensors when it loads a model, so the files are made here: a tiny random model of transformers, and
random tensors under the names that the checkpoints have (`model.layers.61.*` of DeepSeek-V3, `mtp.*` of Qwen3-Next).
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3Config, DeepseekV3ForCausalLM, Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextDecoderLayer, Qwen3NextRotaryEmbedding

import dovetail
from dovetail.base.errors import FileError, SpecError
from dovetail.files.model_dir import WEIGHTS_FILE
from dovetail.hf.hf import from_hf, to_hf
from dovetail.hf.origin import find_spec
from dovetail.hf.write import export_directory, import_directory
from dovetail.model.transformer import Transformer
from dovetail.nn.ctx import Ctx, Listener
from dovetail.nn.layout import TokenLayout
from dovetail.spec.fold import parameters

COUNT = "num_nextn_predict_layers"
TOKENS = torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(1))
DEEPSEEK: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 4,
    "topk_group": 2,
    "q_lora_rank": 12,
    "kv_lora_rank": 20,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 6,
    "v_head_dim": 10,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 2,
}
QWEN: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 8,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def random_like(shape: Any, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.2


def deepseek(place: Path, copies: bool = True, depths: int = 2) -> Path:
    """A checkpoint of DeepSeek-V3 with its layers for multi-token prediction, two layers deep."""
    torch.manual_seed(0)
    DeepseekV3ForCausalLM(DeepseekV3Config(**{**DEEPSEEK, COUNT: depths})).save_pretrained(place)
    stored = load_file(place / WEIGHTS_FILE)
    width = DEEPSEEK["hidden_size"]
    last = [name for name in stored if name.startswith("model.layers.1.")]
    for depth in range(depths):
        layer = f"model.layers.{2 + depth}"
        new = {name.replace("model.layers.1", layer): random_like(stored[name].shape, i) for i, name in enumerate(last, depth)}
        new |= {f"{layer}.{name}.weight": 1 + random_like(width, depth) for name in ("enorm", "hnorm", "shared_head.norm")}
        new[f"{layer}.eh_proj.weight"] = random_like((width, 2 * width), 77 + depth)
        if copies:
            new[f"{layer}.embed_tokens.weight"] = stored["model.embed_tokens.weight"].clone()
            new[f"{layer}.shared_head.head.weight"] = stored["lm_head.weight"].clone()
        stored |= new
    save_file(stored, place / WEIGHTS_FILE, metadata={"format": "pt"})
    return place


def qwen(place: Path) -> Path:
    """A checkpoint of Qwen3-Next with its layer for multi-token prediction; its config does not say so."""
    torch.manual_seed(0)
    Qwen3NextForCausalLM(Qwen3NextConfig(**QWEN)).save_pretrained(place)
    stored = load_file(place / WEIGHTS_FILE)
    width = QWEN["hidden_size"]
    last = [name for name in stored if name.startswith("model.layers.3.")]
    stored |= {
        name.replace("model.layers.3", "mtp.layers.0"): random_like(stored[name].shape, i) for i, name in enumerate(last)
    }
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    stored |= {f"mtp.{name}.weight": random_like(width, i) for i, name in enumerate(norms)}
    stored["mtp.fc.weight"] = random_like((width, 2 * width), 7)
    save_file(stored, place / WEIGHTS_FILE, metadata={"format": "pt"})
    return place


MAKERS = {"deepseek_v3": (deepseek, 2), "qwen3_next": (qwen, 1)}


@pytest.mark.parametrize("family", MAKERS)
def test_every_tensor_is_read_and_written_again_bit_for_bit(family: str, tmp_path: Path) -> None:
    make, depths = MAKERS[family]
    place = make(tmp_path / "theirs")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = dovetail.load(place)
    assert len(model.part.mtp) == depths
    assert find_spec(place) == model.part
    imported = import_directory(place, tmp_path / "ours")
    assert imported.dropped == []
    assert imported.spec == model.part
    export_directory(tmp_path / "ours", tmp_path / "back")
    before, after = load_file(place / WEIGHTS_FILE), load_file(tmp_path / "back" / WEIGHTS_FILE)
    assert before.keys() == after.keys()
    assert all(before[name].dtype == after[name].dtype and torch.equal(before[name], after[name]) for name in before)
    config = json.loads((tmp_path / "back" / "config.json").read_text())
    assert config[COUNT] == depths
    again = dovetail.load(tmp_path / "back")  # with the spec beside the config, which must agree
    assert again.part == model.part
    assert torch.equal(again(TOKENS), model(TOKENS))


@pytest.mark.parametrize(("family", "auto"), [("deepseek_v3", DeepseekV3ForCausalLM), ("qwen3_next", Qwen3NextForCausalLM)])
def test_the_logits_are_those_of_transformers(family: str, auto: Any, tmp_path: Path) -> None:
    place = MAKERS[family][0](tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(dovetail.load(place)(TOKENS), auto.from_pretrained(place).eval()(TOKENS).logits)


def hidden_ahead(model: Transformer) -> tuple[Tensor, list[Tensor]]:
    """The hidden states of the model, and those of every depth."""
    found: dict[str, Tensor] = {}

    def listen(address: str, x: Tensor) -> None:
        found[address] = x

    with torch.no_grad():
        ctx = Ctx(layout=TokenLayout.whole(2, TOKENS.shape[1]), taps=Listener({"mtp.*.hidden": listen}))
        hidden, _ = model.hidden(TOKENS, ctx)
    return hidden, [found[f"mtp.{i}.hidden"] for i in range(len(model.part.mtp))]


@torch.no_grad()
def test_deepseek_is_held_to_the_mtp_modules_of_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = deepseek(tmp_path)
    # the published pattern, for a model of 61 layers, here for one of 2
    monkeypatch.setattr(DeepseekV3ForCausalLM, "_keys_to_ignore_on_load_unexpected", [r"model\.layers\.(2|3)\..*"])
    main = DeepseekV3ForCausalLM.from_pretrained(place, attn_implementation="eager").eval()
    theirs = MtpModel.from_pretrained(main).eval()
    cache = MtpCache(config=main.config.get_mtp_config())
    hidden, ahead = hidden_ahead(dovetail.load(place))
    torch.testing.assert_close(hidden, main.model(TOKENS).last_hidden_state)
    state, n = hidden, TOKENS.shape[1]
    for k, got in enumerate(ahead, 1):
        positions = torch.arange(k, n)[None].expand(2, -1)
        state = theirs.forward_layer(k - 1, state[:, : n - k], positions, cache, input_ids=TOKENS[:, k:])
        torch.testing.assert_close(got, state, rtol=1e-4, atol=1e-4)


def rms(x: Tensor, weight: Tensor, eps: float = 1e-6) -> Tensor:
    return x * (x.square().mean(-1, keepdim=True) + eps).rsqrt() * weight


@torch.no_grad()
def test_qwen_is_held_to_its_published_description(tmp_path: Path) -> None:
    """fc([norm E(t); norm h]), one layer of gated attention and experts, a norm; every norm multiplies by 1 + its weight."""
    place = qwen(tmp_path)
    stored = load_file(place / WEIGHTS_FILE)
    mtp = {name.removeprefix("mtp."): value for name, value in stored.items() if name.startswith("mtp.")}
    eager = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "attn_implementation": "eager"}
    config = Qwen3NextConfig(**{**QWEN, **eager})
    layer = Qwen3NextDecoderLayer(config, 0).eval()
    own = {name.removeprefix("layers.0."): value for name, value in mtp.items() if "experts." not in name or "shared" in name}
    own = {name: value for name, value in own.items() if name in layer.state_dict()}
    experts = [
        {one: mtp[f"layers.0.mlp.experts.{e}.{one}_proj.weight"] for one in ("gate", "up", "down")}
        for e in range(QWEN["num_experts"])
    ]
    own["mlp.experts.gate_up_proj"] = torch.stack([torch.cat([one["gate"], one["up"]]) for one in experts])
    own["mlp.experts.down_proj"] = torch.stack([one["down"] for one in experts])
    layer.load_state_dict(own)  # strict: every tensor of the layer is there
    hidden, (got,) = hidden_ahead(dovetail.load(place))
    n = TOKENS.shape[1] - 1
    embedded = stored["model.embed_tokens.weight"][TOKENS[:, 1:]]
    halves = rms(embedded, 1 + mtp["pre_fc_norm_embedding.weight"]), rms(hidden[:, :n], 1 + mtp["pre_fc_norm_hidden.weight"])
    x = torch.cat(halves, -1) @ mtp["fc.weight"].T
    positions = torch.arange(1, n + 1)[None].expand(2, -1)
    rope = Qwen3NextRotaryEmbedding(config)(x, positions)
    causal = torch.full((n, n), float("-inf")).triu(1)[None, None]
    out = layer(x, position_embeddings=rope, attention_mask=causal, position_ids=positions)
    out = out[0] if isinstance(out, tuple) else out
    torch.testing.assert_close(got, rms(out, 1 + mtp["norm.weight"]), rtol=1e-4, atol=1e-4)


# -- what files may leave out, and what is refused


def test_a_config_that_counts_layers_which_the_files_do_not_have(tmp_path: Path) -> None:
    """transformers writes the number of layers for multi-token prediction, and none of their tensors."""
    DeepseekV3ForCausalLM(DeepseekV3Config(**DEEPSEEK)).save_pretrained(tmp_path / "theirs")
    assert json.loads((tmp_path / "theirs" / "config.json").read_text())[COUNT] == 2
    assert dovetail.load(tmp_path / "theirs").part.mtp == ()
    import_directory(tmp_path / "theirs", tmp_path / "ours")
    export_directory(tmp_path / "ours", tmp_path / "back")
    assert json.loads((tmp_path / "back" / "config.json").read_text())[COUNT] == 0


def test_second_copies_may_be_missing_but_not_different(tmp_path: Path) -> None:
    assert len(dovetail.load(deepseek(tmp_path / "without", copies=False)).part.mtp) == 2
    place = deepseek(tmp_path / "other")
    stored = load_file(place / WEIGHTS_FILE)
    stored["model.layers.3.embed_tokens.weight"][5, 3] += 1
    save_file(stored, place / WEIGHTS_FILE, metadata={"format": "pt"})
    with pytest.raises(FileError, match=r"layers\.3\.embed_tokens\.weight: is tied to embed\.table, yet holds other numbers"):
        dovetail.load(place)


@pytest.mark.parametrize("name", ["enorm.weight", "shared_head.norm.weight", "mlp.experts.3.up_proj.weight"])
def test_a_missing_tensor_of_a_depth_is_an_error(name: str, tmp_path: Path) -> None:
    place = deepseek(tmp_path)
    stored = load_file(place / WEIGHTS_FILE)
    del stored[f"model.layers.3.{name}"]
    save_file(stored, place / WEIGHTS_FILE, metadata={"format": "pt"})
    with pytest.raises(FileError, match=rf"model\.layers\.3\.{name}: is missing"):
        dovetail.load(place)


def test_a_second_depth_has_no_names_in_qwen(tmp_path: Path) -> None:
    config = {**Qwen3NextConfig(**QWEN).to_dict(), COUNT: 2}
    with pytest.raises(SpecError, match="2 is not a whole number from 0 to 1"):
        from_hf(config)
    place = qwen(tmp_path)
    stored = load_file(place / WEIGHTS_FILE)
    stored["mtp.layers.1.input_layernorm.weight"] = torch.ones(32)
    save_file(stored, place / WEIGHTS_FILE, metadata={"format": "pt"})
    with pytest.raises(FileError, match=r"mtp\.layers\.1\.input_layernorm\.weight: has no place in this spec"):
        dovetail.load(place)


def test_the_weight_of_its_loss_is_no_part_of_a_config(tmp_path: Path) -> None:
    spec = find_spec(deepseek(tmp_path)).set("mtp.*.weight", 0.1)
    assert to_hf(spec, "deepseek_v3").config[COUNT] == 2
    with pytest.raises(SpecError, match=r"heads: 2 cannot be written|mixer") as error:
        to_hf(spec.set("mtp.1.block.mixer.heads", 2), "deepseek_v3")
    assert error.value.path.startswith("mtp.1.block.mixer")


def test_a_family_without_it_refuses_by_name() -> None:
    layer = "mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}"
    spec = dovetail.from_yaml(
        f"{{width: 28, vocab: 62, layers: [{{{layer}}}], head: {{kind: lm, tied: false}}, mtp: [{{block: {{{layer}}}}}]}}"
    )
    with pytest.raises(SpecError, match=r"^mtp: mtp cannot be written as llama \(there it is nothing\)"):
        to_hf(spec, "llama")


def test_published_sizes_count_it() -> None:
    """The files of DeepSeek-V3 hold 680,571,043,840 numbers in float8 and 3,918,786,560 in bfloat16, beside scales and router
    biases: those of the model, of its module for multi-token prediction, and the second copies of embedding and head."""
    spec = from_hf(DeepseekV3Config().to_dict())
    assert len(spec.mtp) == 1
    assert parameters(spec) + 2 * 129_280 * 7_168 == 680_571_043_840 + 3_918_786_560
