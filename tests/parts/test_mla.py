"""MLA: both forms agree, the cache has 576 values per token, and outputs equal those of transformers."""

from __future__ import annotations

from math import log
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

from dovetail.base.errors import SpecError
from dovetail.files.spec import from_yaml
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import make
from dovetail.ops.attend import using
from dovetail.parts.mixer.mla import MLA, MLAModule
from dovetail.parts.position.rope import Rope
from dovetail.parts.position.scaling import Yarn
from dovetail.proof.laws.case import perturbed
from dovetail.spec.check import advice, check
from dovetail.spec.part import walk
from dovetail.spec.scope import Scope
from dovetail.state.pool import Pool

SIZES = {"heads": 6, "kv_rank": 10, "q_rank": 14, "nope": 9, "rope": 8, "value": 7}
WIDTH = 28


def model(**mixer: Any) -> Any:
    text = "{width: 28, vocab: 62, layers: [{repeat: 2, mixer: {kind: mla}, ffn: {hidden: 44}}]}"
    return from_yaml(text).set("layers.*.mixer", {"kind": "mla", **SIZES, **mixer})


def alone(part: MLA) -> MLAModule:
    """The mixer by itself with random weights and its own constants."""
    scope = Scope(sizes={"embed": WIDTH, "coords": 1}, stack="layers")
    module = make(part, scope).to_empty(device="cpu").double()
    assert isinstance(module, MLAModule)
    torch.manual_seed(0)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    for path, below, inside in walk(part, scope):
        for weight in below.weights(inside):
            if weight.role == "const":
                module.get_submodule(path).register_buffer(weight.name, below.constant(weight.name, inside), persistent=False)
    return module


# -- the reference --------------------------------------------------------------------------------------------------


def reference(q_rank: int | None, adjacent: bool, yarn: bool) -> tuple[DeepseekV3Attention, DeepseekV3RotaryEmbedding]:
    stretched = {"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32, "beta_slow": 1}
    turning: dict[str, Any] = {"rope_theta": 10000.0, "rope_type": "default"}
    if yarn:
        turning |= {**stretched, "original_max_position_embeddings": 40}
    config = DeepseekV3Config(
        hidden_size=WIDTH,
        num_attention_heads=6,
        num_key_value_heads=6,
        q_lora_rank=q_rank,
        kv_lora_rank=10,
        qk_nope_head_dim=9,
        qk_rope_head_dim=8,
        v_head_dim=7,
        max_position_embeddings=1600 if yarn else 40,
        rope_parameters=turning,
        rope_interleave=adjacent,
    )
    config._attn_implementation = "eager"
    return DeepseekV3Attention(config, 0).double(), DeepseekV3RotaryEmbedding(config)


def take_weights(ours: MLAModule, theirs: DeepseekV3Attention) -> None:
    """Their packed matrices, unpacked."""
    with torch.no_grad():
        if ours.part.q_rank is None:
            ours.q.weight.copy_(theirs.q_proj.weight)
        else:
            ours.q_down.weight.copy_(theirs.q_a_proj.weight)
            ours.q_norm.scale.copy_(theirs.q_a_layernorm.weight)  # type: ignore[operator]
            ours.q.weight.copy_(theirs.q_b_proj.weight)
        down, turned = theirs.kv_a_proj_with_mqa.weight.split([10, 8])
        up = theirs.kv_b_proj.weight.unflatten(0, (6, 16))
        for mine, other in (
            (ours.kv_down.weight, down),
            (ours.turned.weight, turned),
            (ours.kv_norm.scale, theirs.kv_a_layernorm.weight),
            (ours.k_up.weight, up[:, :9].flatten(0, 1)),
            (ours.v_up.weight, up[:, 9:].flatten(0, 1)),
            (ours.o.weight, theirs.o_proj.weight),
        ):
            mine.copy_(other)  # type: ignore[operator]


@pytest.mark.parametrize("q_rank", [14, None])
@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("yarn", [False, True])
def test_it_is_the_reference(q_rank: int | None, adjacent: bool, yarn: bool) -> None:
    theirs, rotary = reference(q_rank, adjacent, yarn)
    for weight in theirs.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    # the sharper softmax of a stretched model is a factor on the scale: (0.1·ln 40 + 1)²
    scale = 17**-0.5 * (0.1 * log(40) + 1) ** 2 if yarn else None
    scaling = Yarn(factor=40.0, original=40, attention=1.0) if yarn else None
    position = Rope(pairs="adjacent" if adjacent else "half", scaling=scaling)
    norm = {"kind": "rmsnorm", "eps": 1e-6}
    part = model(q_rank=q_rank, norm=norm).layers[0].mixer
    part = part.replace("position", position).replace("scale", scale)
    ours = alone(part)
    take_weights(ours, theirs)
    x, n = torch.randn(2, 11, WIDTH, dtype=torch.float64), 11
    shut = torch.full((n, n), -torch.inf, dtype=torch.float64).triu(1)
    want, _ = theirs(x, rotary(x, torch.arange(n).expand(2, n)), shut.expand(2, 1, n, n))
    got = ours(x, Ctx(layout=TokenLayout.whole(2, n)))
    assert (got - want).abs().max() < 2e-6  # it computes norms, angles and softmax in float32
    assert ours.scale == pytest.approx(theirs.scaling)


# -- two forms ------------------------------------------------------------------------------------------------------


def both(module: MLAModule, n: int, m: int) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    q, latent = torch.randn(3, n, 6, 17, dtype=torch.float64), torch.randn(3, m, 10, dtype=torch.float64)
    turned, key_layout = torch.randn(3, m, 1, 8, dtype=torch.float64), TokenLayout.whole(3, m)
    ctx = Ctx(layout=TokenLayout.whole(3, n, start=m - n))
    return tuple(form(q, latent, turned, ctx.layout, key_layout, ctx) for form in (module.expanded, module.absorbed))  # type: ignore[return-value]


@pytest.mark.parametrize(("n", "m"), [(1, 1), (1, 13), (5, 13), (13, 13)])
@pytest.mark.parametrize("position", ["rope", "alibi", "none"])
def test_absorbed_is_expanded(n: int, m: int, position: str) -> None:
    expanded, absorbed = both(alone(model(position=position).layers[0].mixer), n, m)
    assert (expanded - absorbed).abs().max() < 1e-12


def test_the_cheaper_form_runs() -> None:
    deepseek = MLAModule(MLA(heads=128, q_rank=1536), Scope(sizes={"embed": 7168, "coords": 1}, stack="layers"))
    ctx = Ctx(layout=TokenLayout.whole(1, 1))
    assert deepseek.absorbing(1, 4096, ctx)
    assert deepseek.absorbing(64, 4096, ctx)
    assert not deepseek.absorbing(4096, 4096, ctx)
    assert not deepseek.absorbing(1, 1, ctx)
    # per cached token: 256·512 products to expand keys and values, against 1024 − 256 more per query in the absorbed form
    assert deepseek.absorbing(170, 10**6, ctx)
    assert not deepseek.absorbing(171, 10**6, ctx)
    with using("reference"):
        assert not deepseek.absorbing(1, 4096, ctx)


def test_decoding_never_expands_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = model()
    lm, tokens = perturbed(spec), torch.randint(62, (2, 9))
    want, pool = lm(tokens, Ctx(layout=TokenLayout.whole(2, 9))), Pool(spec, 2, 9, dtype=torch.float64)
    first = pool.step([0, 1], [8, 8])
    lm(tokens[:, :8], Ctx(layout=first.layout, views=first.views))
    monkeypatch.setattr(MLAModule, "expanded", None, raising=False)
    last = pool.step([0, 1], [1, 1])
    got = lm(tokens[:, 8:], Ctx(layout=last.layout, views=last.views))
    assert (got - want[:, 8:]).abs().max() < 1e-9


def test_the_cache_has_a_latent_and_one_rotated_key_per_token() -> None:
    spec = model()
    assert Pool(spec, 1, 20, dtype=torch.float32).bytes() == 2 * 20 * (10 + 8) * 4


# -- what it says ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mixer", "path"),
    [
        ({"kv_rank": 0}, "layers.0.mixer.kv_rank"),
        ({"q_rank": 0}, "layers.0.mixer.q_rank"),
        ({"rope": 7}, "layers.0.mixer.position.fraction"),
        ({"position": "sinusoidal"}, "layers.0.mixer.position"),
        ({"dropout": 1.0}, "layers.0.mixer.dropout"),
        ({"mask": {"kind": "window", "size": 0}}, "layers.0.mixer.mask.size"),
    ],
)
def test_illegal_specs_raise_with_their_path(mixer: dict[str, Any], path: str) -> None:
    with pytest.raises(SpecError, match=f"^{path}"):
        check(model(**mixer))


def test_a_latent_that_saves_nothing_is_advised_against() -> None:
    assert not [path for path, _ in advice(model()) if path.endswith("kv_rank")]
    assert [path for path, _ in advice(model(kv_rank=200)) if path.endswith("kv_rank")]
