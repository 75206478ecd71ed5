"""Gated DeltaNet against the module of transformers, and a whole hybrid against Qwen3-Next, with the same weights."""

from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from dovetail.base.errors import SpecError
from dovetail.files.spec import from_yaml, load_spec
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import tensor_at
from dovetail.spec.check import check
from dovetail.spec.fold import parameters, state_values
from dovetail.state.pool import Pool

N = 21


def config(heads: int, key_heads: int, key: int, value: int) -> hf.Qwen3NextConfig:
    """A Qwen3-Next without experts, as small as the preset."""
    return hf.Qwen3NextConfig(
        hidden_size=112,
        vocab_size=512,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=304,
        num_experts=0,
        tie_word_embeddings=True,
        linear_num_value_heads=heads,
        linear_num_key_heads=key_heads,
        linear_key_head_dim=key,
        linear_value_head_dim=value,
        attn_implementation="eager",
    )


def moved(module: torch.nn.Module) -> Any:
    """The module with perturbed weights."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * (p.shape[-1] ** -0.5 if p.dim() > 1 else 0.3))
    return module.eval()


def mixer_weights(theirs: dict[str, Tensor], heads: int, key_heads: int, key: int, value: int) -> dict[str, Tensor]:
    """What theirs is called here: they pack q, k, v, z (and b, a) key head by key head, and the convolutions into one."""
    share = heads // key_heads
    packed = theirs["in_proj_qkvz.weight"].unflatten(0, (key_heads, -1))
    q, k, v, z = (piece.flatten(0, 1) for piece in packed.split([key, key, share * value, share * value], 1))
    b, a = (piece.flatten(0, 1) for piece in theirs["in_proj_ba.weight"].unflatten(0, (key_heads, -1)).split(share, 1))
    conv = theirs["conv1d.weight"][:, 0].split([key_heads * key, key_heads * key, heads * value])
    made = {"q": q, "k": k, "v": v, "z": z, "b": b, "a": a, "o": theirs["out_proj.weight"]}
    return {
        **{f"{name}.weight": weight for name, weight in made.items()},
        **{f"conv_{name}": weight for name, weight in zip("qkv", conv, strict=True)},
        "fade_bias": theirs["dt_bias"],
        "a_log": theirs["A_log"],
        "norm.scale": theirs["norm.weight"],
    }


def load(module: torch.nn.Module, tensors: dict[str, Tensor]) -> None:
    with torch.no_grad():
        assert set(tensors) == set(dict(module.named_parameters()))
        for path, tensor in tensors.items():
            tensor_at(module, path).copy_(tensor)


@pytest.mark.parametrize(("heads", "key_heads", "key", "value"), [(4, 2, 24, 20), (6, 6, 5, 7), (4, 1, 9, 12)])
def test_the_mixer_is_that_of_transformers(heads: int, key_heads: int, key: int, value: int) -> None:
    theirs = moved(Qwen3NextGatedDeltaNet(config(heads, key_heads, key, value), 0))
    sizes = f"heads: {heads}, key_heads: {key_heads}, key_size: {key}, value_size: {value}"
    fields = f"{{kind: gated_deltanet, {sizes}, norm: {{eps: 1.0e-6}}}}"
    ours = build(from_yaml(f"{{width: 112, layers: [{{mixer: {fields}}}]}}")).layers[0].mixer
    load(ours, mixer_weights(theirs.state_dict(), heads, key_heads, key, value))
    x = torch.randn(2, N, 112, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        want, got = theirs(x), ours(x, Ctx(layout=TokenLayout.whole(2, N)))
    assert (got - want).abs().max() < 1e-5 * want.abs().max()


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Any]:
    """Their model and ours: the preset, with equal weights."""
    torch.manual_seed(0)
    theirs, spec = moved(hf.Qwen3NextForCausalLM(config(4, 2, 24, 20))), load_spec("gated-deltanet-hybrid-tiny")
    held = theirs.state_dict()
    tensors = {"embed.table": held["model.embed_tokens.weight"], "norm.scale": held["model.norm.weight"]}
    for i in range(4):
        here = {k.removeprefix(f"model.layers.{i}."): v for k, v in held.items() if k.startswith(f"model.layers.{i}.")}
        layer = {f"ffn.{name}.weight": here[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down")}
        layer |= {"mixer_norm.scale": here["input_layernorm.weight"], "ffn_norm.scale": here["post_attention_layernorm.weight"]}
        if i < 3:
            inside = {k.removeprefix("linear_attn."): v for k, v in here.items() if k.startswith("linear_attn.")}
            layer |= {f"mixer.{name}": weight for name, weight in mixer_weights(inside, 4, 2, 24, 20).items()}
        else:
            q, gate = (x.flatten(0, 1) for x in here["self_attn.q_proj.weight"].unflatten(0, (4, 64)).chunk(2, 1))
            layer |= {"mixer.q.weight": q, "mixer.gate.weight": gate}
            layer |= {f"mixer.{name}.weight": here[f"self_attn.{name}_proj.weight"] for name in "kvo"}
            layer |= {f"mixer.{name}_norm.scale": here[f"self_attn.{name}_norm.weight"] for name in "qk"}
        tensors |= {f"layers.{i}.{name}": weight for name, weight in layer.items()}
    ours = build(spec)
    load(ours, tensors)
    return theirs, ours


def test_the_preset_has_as_many_parameters_as_theirs() -> None:
    with torch.device("meta"):
        theirs = hf.Qwen3NextForCausalLM(config(4, 2, 24, 20))
    assert parameters(load_spec("gated-deltanet-hybrid-tiny")) == sum(p.numel() for p in theirs.parameters())


@torch.no_grad()
def test_the_hybrid_has_the_logits_of_qwen3_next(pair: tuple[Any, Any]) -> None:
    theirs, ours = pair
    tokens = torch.randint(512, (2, 90), generator=torch.Generator().manual_seed(0))  # longer than a chunk
    want, got = theirs(tokens).logits, ours(tokens, Ctx(layout=TokenLayout.whole(2, 90)))
    assert (got - want).abs().max() < 1e-4 * want.abs().max()
    assert torch.equal(got.argmax(-1), want.argmax(-1))


@torch.no_grad()
def test_decoding_step_by_step_has_their_logits_too(pair: tuple[Any, Any]) -> None:
    theirs, ours = pair
    tokens = torch.randint(512, (1, 12), generator=torch.Generator().manual_seed(2))
    want, pool, got = theirs(tokens).logits, Pool(ours.part, 1, 12), []
    for t in range(12):
        step = pool.step([0], [1])
        got.append(ours(tokens[:, t : t + 1], Ctx(layout=step.layout, views=step.views)))
    assert (torch.cat(got, 1) - want).abs().max() < 1e-4 * want.abs().max()


def test_state_is_independent_of_n() -> None:
    spec = from_yaml(
        "{width: 28, layers: [{mixer: {kind: gated_deltanet, heads: 4, key_heads: 2, key_size: 5, value_size: 6}}]}"
    )
    tails = 3 * (2 * 5 + 2 * 5 + 4 * 6)
    assert state_values(spec, 10) == state_values(spec, 10_000) == tails + 4 * 5 * 6


def test_errors_name_the_field() -> None:
    for bad, field in (("heads: 4, key_heads: 3", "key_heads"), ("conv_size: 1", "conv_size"), ("heads: 5", "heads")):
        with pytest.raises(SpecError, match=f"layers.0.mixer.{field}"):
            check(from_yaml(f"{{width: 28, layers: [{{mixer: {{kind: gated_deltanet, {bad}}}}}]}}"))
