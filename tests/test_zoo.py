"""The presets: literal counts, the same counts in Hugging Face's own classes, and the two recipes in one line each."""

from __future__ import annotations

import time
from collections import Counter
from importlib import resources
from math import prod

import pytest
import torch
import transformers as hf
from torch import nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek_parts
from transformers.models.mixtral import modeling_mixtral as mixtral_parts
from transformers.models.qwen3_moe import modeling_qwen3_moe as qwen3_moe_parts

from dovetail.files.spec import from_yaml, load_spec, to_yaml, zoo
from dovetail.model.construction import build
from dovetail.model.model import Model
from dovetail.nn.block import Block
from dovetail.spec.check import check
from dovetail.spec.fold import active_parameters, declared, parameters

COUNTS = {
    "bert-base": 109_482_240,
    "bigbird-base": 127_468_800,
    "deepseek-v3": 671_026_404_352,
    "gemma-2-2b": 2_614_341_888,
    "gpt2": 124_439_808,
    "llama-3-405b": 405_853_388_800,
    "llama-3-70b": 70_553_706_496,
    "llama-3-8b": 8_030_261_248,
    "llama-7b": 6_738_415_616,
    "mamba-130m": 129_135_360,
    "mamba2-130m": 128_989_632,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-8b": 8_190_735_360,
    "t5-small": 60_506_624,
    "vit-base": 86_389_248,
}
LINEAR = (
    nn.Linear,
    nn.Conv2d,
    hf.pytorch_utils.Conv1D,
    deepseek_parts.DeepseekV3TopkRouter,
    deepseek_parts.DeepseekV3Experts,
    mixtral_parts.MixtralTopKRouter,
    mixtral_parts.MixtralExperts,
    qwen3_moe_parts.Qwen3MoeTopKRouter,
    qwen3_moe_parts.Qwen3MoeExperts,
)
TINY = {name for name in zoo() if name.endswith("-tiny")}


def gpt2(width: int, vocab: int, length: int, depth: int, heads: int) -> nn.Module:
    return hf.GPT2LMHeadModel(hf.GPT2Config(n_embd=width, vocab_size=vocab, n_positions=length, n_layer=depth, n_head=heads))


def bert(width: int, vocab: int, length: int, depth: int, heads: int) -> nn.Module:
    sizes = {"hidden_size": width, "vocab_size": vocab, "max_position_embeddings": length, "intermediate_size": 4 * width}
    return hf.BertModel(hf.BertConfig(**sizes, num_hidden_layers=depth, num_attention_heads=heads))


def t5(width: int, vocab: int, encoder: int, decoder: int, heads: int, head: int) -> nn.Module:
    sizes = {"d_model": width, "vocab_size": vocab, "d_ff": 4 * width, "d_kv": head, "num_heads": heads}
    return hf.T5ForConditionalGeneration(hf.T5Config(**sizes, num_layers=encoder, num_decoder_layers=decoder))


def vit(width: int, image: int, patch: int, channels: int, depth: int, heads: int) -> nn.Module:
    sizes = {"hidden_size": width, "image_size": image, "patch_size": patch, "num_channels": channels}
    wide = {"intermediate_size": 4 * width, "pooler_output_size": width}
    return hf.ViTModel(hf.ViTConfig(**sizes, **wide, num_hidden_layers=depth, num_attention_heads=heads))


def bigbird(width: int, vocab: int, length: int, depth: int, heads: int) -> nn.Module:
    sizes = {"hidden_size": width, "vocab_size": vocab, "max_position_embeddings": length, "intermediate_size": 4 * width}
    return hf.BigBirdModel(hf.BigBirdConfig(**sizes, num_hidden_layers=depth, num_attention_heads=heads))


def deepseek(
    width: int, vocab: int, depth: int, heads: int, hidden: int, latent: tuple[int, ...], experts: tuple[int, ...]
) -> nn.Module:
    ranks = dict(
        zip(("kv_lora_rank", "q_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), latent, strict=True)
    )
    bank = dict(zip(("first_k_dense_replace", "n_routed_experts", "moe_intermediate_size"), experts, strict=True))
    return hf.DeepseekV3ForCausalLM(hf.DeepseekV3Config(**decoder(width, vocab, depth, heads, heads, hidden), **ranks, **bank))


def llama(width: int, vocab: int, depth: int, heads: int, groups: int, hidden: int, tied: bool = False) -> nn.Module:
    return hf.LlamaForCausalLM(hf.LlamaConfig(**decoder(width, vocab, depth, heads, groups, hidden, tied)))


def mistral(width: int, vocab: int, depth: int, heads: int, groups: int, hidden: int) -> nn.Module:
    return hf.MistralForCausalLM(hf.MistralConfig(**decoder(width, vocab, depth, heads, groups, hidden)))


def mixtral(width: int, vocab: int, depth: int, heads: int, groups: int, hidden: int, experts: int) -> nn.Module:
    return hf.MixtralForCausalLM(
        hf.MixtralConfig(**decoder(width, vocab, depth, heads, groups, hidden), num_local_experts=experts)
    )


def qwen3_moe(
    width: int, vocab: int, depth: int, heads: int, groups: int, hidden: int, head: int, experts: int, tied: bool
) -> nn.Module:
    sizes = {"moe_intermediate_size": hidden, "num_experts": experts, "head_dim": head, "mlp_only_layers": []}
    return hf.Qwen3MoeForCausalLM(hf.Qwen3MoeConfig(**decoder(width, vocab, depth, heads, groups, 1, tied), **sizes))


def gemma2(width: int, vocab: int, depth: int, heads: int, groups: int, hidden: int, head: int) -> nn.Module:
    return hf.Gemma2ForCausalLM(hf.Gemma2Config(**decoder(width, vocab, depth, heads, groups, hidden, True), head_dim=head))


def qwen3(width: int, vocab: int, depth: int, heads: int, groups: int, hidden: int, head: int, tied: bool) -> nn.Module:
    return hf.Qwen3ForCausalLM(hf.Qwen3Config(**decoder(width, vocab, depth, heads, groups, hidden, tied), head_dim=head))


def mamba(width: int, vocab: int, depth: int, state: int, rank: int) -> nn.Module:
    sizes = {"hidden_size": width, "vocab_size": vocab, "num_hidden_layers": depth, "state_size": state}
    return hf.MambaForCausalLM(hf.MambaConfig(**sizes, time_step_rank=rank))


def mamba2(width: int, vocab: int, depth: int, head: int, state: int, groups: int) -> nn.Module:
    sizes = {"hidden_size": width, "vocab_size": vocab, "num_hidden_layers": depth, "state_size": state, "n_groups": groups}
    heads = {"head_dim": head, "num_heads": 2 * width // head}
    return hf.Mamba2ForCausalLM(hf.Mamba2Config(**sizes, **heads, tie_word_embeddings=True))


def jamba(width: int, vocab: int, hidden: int, heads: int, groups: int, experts: int, state: int, rank: int) -> nn.Module:
    sizes = {"num_experts": experts, "mamba_d_state": state, "mamba_dt_rank": rank, "use_mamba_kernels": False}
    every = {"attn_layer_period": 4, "attn_layer_offset": 3, "expert_layer_period": 2, "expert_layer_offset": 1}
    return hf.JambaForCausalLM(hf.JambaConfig(**decoder(width, vocab, 4, heads, groups, hidden), **sizes, **every))


def decoder(width: int, vocab: int, depth: int, heads: int, groups: int, hidden: int, tied: bool = False) -> dict[str, int]:
    return {
        "hidden_size": width,
        "vocab_size": vocab,
        "num_hidden_layers": depth,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "intermediate_size": hidden,
        "tie_word_embeddings": tied,
    }


# every preset that Hugging Face has a class for; the 2017 ones are held to torch's own layers below
KNOWN = {
    "bert-base": lambda: bert(768, 30522, 512, 12, 12),
    "bert-tiny": lambda: bert(120, 512, 64, 3, 5),
    "bigbird-base": lambda: bigbird(768, 50358, 4096, 12, 12),
    "bigbird-tiny": lambda: bigbird(120, 512, 1024, 3, 5),
    "block-sparse-tiny": lambda: llama(144, 512, 4, 6, 3, 384, True),
    "deepseek-tiny": lambda: deepseek(144, 512, 4, 6, 384, (40, 64, 24, 16, 20), (1, 8, 48)),
    "deepseek-v3": lambda: deepseek(7168, 129280, 61, 128, 18432, (512, 1536, 128, 64, 128), (3, 256, 2048)),
    "gemma-2-2b": lambda: gemma2(2304, 256000, 26, 8, 4, 9216, 256),
    "gemma-2-tiny": lambda: gemma2(120, 512, 4, 6, 2, 320, 24),
    "gpt2": lambda: gpt2(768, 50257, 1024, 12, 12),
    "gpt2-tiny": lambda: gpt2(192, 512, 512, 4, 6),
    "llama-3-405b": lambda: llama(16384, 128256, 126, 128, 8, 53248),
    "llama-3-70b": lambda: llama(8192, 128256, 80, 64, 8, 28672),
    "llama-3-8b": lambda: llama(4096, 128256, 32, 32, 8, 14336),
    "llama-7b": lambda: llama(4096, 32000, 32, 32, 32, 11008),
    "llama-tiny": lambda: llama(256, 512, 6, 8, 2, 704, True),
    "jamba-tiny": lambda: jamba(120, 512, 320, 6, 2, 4, 12, 7),
    "mamba-130m": lambda: mamba(768, 50280, 24, 16, 48),
    "mamba-tiny": lambda: mamba(120, 512, 4, 12, 7),
    "mamba2-130m": lambda: mamba2(768, 50288, 24, 64, 128, 1),
    "mamba2-tiny": lambda: mamba2(112, 512, 4, 28, 24, 2),
    "local-full-tiny": lambda: llama(144, 512, 6, 6, 2, 384, True),
    "longformer-tiny": lambda: bert(120, 512, 1024, 3, 5),  # its masks; its global tokens have no projections of their own
    "mistral-7b": lambda: mistral(4096, 32000, 32, 32, 8, 14336),
    "mistral-tiny": lambda: mistral(144, 512, 4, 6, 3, 384),
    "mixtral-8x7b": lambda: mixtral(4096, 32000, 32, 32, 8, 14336, 8),
    "mixtral-tiny": lambda: mixtral(96, 512, 3, 6, 2, 136, 6),
    "qwen3-30b-a3b": lambda: qwen3_moe(2048, 151936, 48, 32, 4, 768, 128, 128, False),
    "qwen3-8b": lambda: qwen3(4096, 151936, 36, 32, 8, 12288, 128, False),
    "qwen3-moe-tiny": lambda: qwen3_moe(88, 512, 3, 6, 2, 64, 24, 10, True),
    "qwen3-tiny": lambda: qwen3(128, 512, 4, 6, 2, 352, 40, True),
    "sparse-transformer-tiny": lambda: gpt2(144, 512, 1024, 4, 6),
    "t5-small": lambda: t5(512, 32128, 6, 6, 8, 64),
    "t5-tiny": lambda: t5(72, 512, 3, 2, 4, 20),
    "vit-base": lambda: vit(768, 224, 16, 3, 12, 12),
    "vit-tiny": lambda: vit(100, 28, 4, 1, 3, 5),
}


def roles(model: nn.Module) -> Counter[str]:
    """Numbers by role in a model that knows nothing of roles: by the class of the module and the shape."""
    found: Counter[str] = Counter()
    owners: dict[int, nn.Module] = {}
    for module in model.modules():
        for p in module.parameters(recurse=False):
            owners.setdefault(id(p), module)  # a tied head's table belongs to the embedding, which comes first
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            role = "bias"
        elif isinstance(owners[id(p)], nn.Conv1d):
            role = "conv"
        elif name.endswith((".A_log", ".D")):
            role = "gate"
        elif ".experts." in name or ".router." in name or isinstance(owners[id(p)], LINEAR):
            role = "linear"
        else:
            role = "norm" if p.ndim == 1 else "embed"
        found[role] += p.numel()
    return found


@pytest.mark.parametrize("name", zoo())
def test_preset_is_whole(name: str) -> None:
    spec = load_spec(name)
    check(spec)
    assert from_yaml(to_yaml(spec)) == spec
    first = (resources.files("dovetail.zoo") / f"{name}.yaml").read_text().splitlines()[0]
    assert first.startswith("# ")
    assert first.endswith(".")


def test_every_family_has_a_tiny_one_that_builds_at_once() -> None:
    assert {f"{family}-tiny" for family in ("transformer-2017", "gpt2", "llama", "bert", "t5", "vit", "mistral")} <= TINY
    assert {"gemma-2-tiny", "qwen3-tiny", "mixtral-tiny", "qwen3-moe-tiny"} <= TINY
    for name in TINY:
        spec = load_spec(name)
        assert 2 <= len(spec.layers) <= 6
        assert parameters(spec) < 5_000_000


@pytest.mark.parametrize(("name", "count"), COUNTS.items())
def test_parameters_are_the_published_number(name: str, count: int) -> None:
    begin = time.perf_counter()
    assert parameters(load_spec(name)) == count
    assert time.perf_counter() - begin < 5, "plain data takes no time"


@pytest.mark.parametrize(("name", "count"), [("mixtral-8x7b", 12_879_925_248), ("qwen3-30b-a3b", 3_353_032_704)])
def test_active_parameters_are_those_a_token_meets(name: str, count: int) -> None:
    assert active_parameters(load_spec(name)) == count


def test_405b_builds_on_meta() -> None:
    begin = time.perf_counter()
    model = build(load_spec("llama-3-405b"), device="meta")
    assert time.perf_counter() - begin < 30
    assert sum(p.numel() for p in model.parameters()) == 405_853_388_800
    assert {p.device.type for p in model.parameters()} == {"meta"}


@pytest.mark.parametrize("name", KNOWN)
def test_counts_are_those_of_hugging_face(name: str) -> None:
    with torch.device("meta"):
        theirs = roles(KNOWN[name]())
    ours: Counter[str] = Counter()
    for d in declared(load_spec(name)):
        if d.weight.learned:
            ours[d.weight.role] += prod(d.weight.shape(d.scope))
    assert ours == theirs


def test_every_preset_is_compared_with_something() -> None:
    ours_alone = {"mamba2-hybrid-tiny", "nsa-tiny", "gated-deltanet-hybrid-tiny"}
    ours_alone |= {"linear-attention-tiny", "performer-tiny", "gla-tiny", "rwkv6-tiny"}  # counted in test_zoo_linear.py
    assert set(zoo()) - set(KNOWN) - ours_alone == {"transformer-2017-base", "transformer-2017-big", "transformer-2017-tiny"}


# -- facts that no count can see ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "path", "value"),
    [
        ("llama-7b", "norm.eps", 1e-6),
        ("llama-7b", "layers.0.mixer.position.base", 10_000.0),
        ("llama-3-8b", "norm.eps", 1e-5),
        ("llama-3-8b", "layers.31.mixer.position.base", 500_000.0),
        ("llama-3-8b", "layers.31.mixer.position.scaling", None),
        ("llama-3-70b", "layers.79.mixer.position.scaling", None),
        ("llama-3-405b", "layers.125.mixer.position.scaling.factor", 8.0),
        ("llama-3-405b", "layers.125.mixer.position.scaling.original", 8192),
        ("mistral-7b", "layers.0.mixer.mask.masks.1.size", 4096),
        ("mistral-7b", "layers.31.mixer.mask.masks.1.size", 4096),
        ("gemma-2-2b", "layers.0.mixer.mask.masks.1.size", 4096),
        ("gemma-2-2b", "layers.1.mixer.mask.kind", "causal"),
        ("gemma-2-2b", "layers.24.mixer.mask.masks.1.size", 4096),
        ("gemma-2-2b", "layers.25.mixer.mask.kind", "causal"),
        ("gemma-2-2b", "layers.25.mixer.softcap", 50.0),
        ("gemma-2-2b", "head.softcap", 30.0),
        ("gemma-2-2b", "layers.0.norm.plus_one", True),
        ("gemma-2-2b", "layers.0.ffn.act.kind", "gelu_tanh"),
        ("gemma-2-2b", "layers.0.wire.kind", "sandwich_norm"),
        ("gemma-2-2b", "embed.scale_by_width", True),
        ("qwen3-8b", "layers.0.mixer.qk_norm.eps", 1e-6),
        ("qwen3-8b", "layers.0.mixer.position.base", 1_000_000.0),
        ("mixtral-8x7b", "layers.31.mixer.mask.kind", "causal"),
        ("mixtral-8x7b", "layers.0.mixer.position.base", 1_000_000.0),
        ("mixtral-8x7b", "layers.0.ffn.router.top_k", 2),
        ("mixtral-8x7b", "layers.0.ffn.router.normalize", True),
        ("qwen3-30b-a3b", "layers.47.ffn.router.top_k", 8),
        ("qwen3-30b-a3b", "layers.0.ffn.router.normalize", True),
        ("bert-base", "layers.0.norm.eps", 1e-12),
        ("vit-base", "norm.eps", 1e-12),
        ("gpt2", "layers.0.ffn.act.kind", "gelu_tanh"),
        ("bert-base", "layers.0.ffn.act.kind", "gelu"),
        ("t5-small", "layers.0.mixer.scale", 1.0),
        ("t5-small", "head.scale", 512**-0.5),
    ],
)
def test_facts(name: str, path: str, value: object) -> None:
    at: object = load_spec(name)
    for step in path.split("."):
        at = at[int(step)] if isinstance(at, tuple) else getattr(at, step)
    assert at == value


# -- the two recipes ------------------------------------------------------------------------------------------------


def test_the_modern_recipe_is_the_defaults() -> None:
    spec = Model(layers=(Block(),) * 6)
    (block, *_), data = spec.layers, to_yaml(spec)
    assert data == "dovetail: 1\nlayers:\n- {repeat: 6}\n"
    assert (block.wire.kind, block.norm.kind, block.mixer.kind, block.ffn.kind) == ("pre_norm", "rmsnorm", "attention", "glu")
    assert (block.ffn.act.kind, block.mixer.position.kind, block.mixer.mask.kind) == ("silu", "rope", "causal")
    assert (spec.position.kind, spec.norm.kind, spec.head.tied) == ("none", "rmsnorm", True)
    names = {d.weight.role for d in declared(spec) if d.weight.learned}
    assert names == {"embed", "norm", "linear"}, "no biases"
    assert {part.dropout for part in (spec, block.wire, block.mixer, block.ffn)} == {0.0}


def test_the_2017_recipe_is_one_name() -> None:
    spec = load_spec("transformer-2017-base")
    assert (spec.width, len(spec.layers), len(spec.encoder.layers)) == (512, 6, 6)
    for stack in (spec, spec.encoder):
        assert (stack.position.kind, stack.norm, stack.dropout) == ("sinusoidal", None, 0.1)
        for block in stack.layers:
            assert (block.wire.kind, block.norm.kind, block.ffn.kind, block.ffn.act.kind) == (
                "post_norm",
                "layernorm",
                "mlp",
                "relu",
            )
            assert (block.mixer.heads, block.mixer.groups(), block.wire.dropout) == (8, 8, 0.1)
            assert (block.mixer.position.kind, block.mixer.bias, block.mixer.out_bias, block.ffn.bias) == (
                "none",
                True,
                True,
                True,
            )
    assert [block.cross.kind for block in spec.layers] == ["cross_attention"] * 6
    assert [block.mixer.mask.kind for block in spec.encoder.layers] == ["full"] * 6
    hidden = {d.scope.size("ffn") for d in declared(spec) if "ffn" in d.weight.out}
    assert hidden == {2048}
    tables = [d.path for d in declared(spec) if d.weight.out == ("vocab",) and d.weight.learned]
    assert tables == ["embed.table", "encoder.embed.table", "head.out.weight"]


@pytest.mark.parametrize(
    ("name", "width", "heads", "hidden", "depths", "vocab"),
    [
        ("transformer-2017-base", 512, 8, 2048, (6, 6), 37000),
        ("transformer-2017-big", 1024, 16, 4096, (6, 6), 37000),
        ("transformer-2017-tiny", 96, 4, 384, (3, 2), 512),
    ],
)
def test_the_2017_models_have_the_layers_of_torch(
    name: str, width: int, heads: int, hidden: int, depths: tuple[int, int], vocab: int
) -> None:
    with torch.device("meta"):
        layers = (nn.TransformerEncoderLayer(width, heads, hidden), nn.TransformerDecoderLayer(width, heads, hidden))
    stacks = sum(depth * sum(p.numel() for p in layer.parameters()) for depth, layer in zip(depths, layers, strict=True))
    assert parameters(load_spec(name)) == stacks + 3 * vocab * width
