"""Bugs seeded in transformers' own modules, one at a time, for `verify.py`: the change, the families, and the names of the
cause that count as right. A bug is a changed attribute, module, weight or argument, independent of how verify searches for
causes.

A plant is a function (model, layer, draw) that changes the model in place; `layer` is the number of the decoder layer to
change.
"""

from __future__ import annotations

import dataclasses as dc
import random
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

Draw = random.Random
Plant = Callable[[Any, int, Draw], None]

COMMON: dict[str, Any] = {
    "vocab_size": 62,
    "hidden_size": 48,
    "intermediate_size": 44,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    **{f"{name}_token_id": None for name in ("pad", "bos", "eos")},
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
}
WINDOWED = ["sliding_attention", "full_attention"] * 2
# tiny models: name -> (their model_type, config)
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {**COMMON, "tie_word_embeddings": False}),
    "llama, all heads": ("llama", {**COMMON, "num_key_value_heads": 6, "attention_bias": True, "tie_word_embeddings": True}),
    "llama 3": ("llama", {**COMMON, "rope_parameters": LLAMA3, "tie_word_embeddings": False}),
    "mistral": ("mistral", {**COMMON, "sliding_window": 7, "tie_word_embeddings": False}),
    "qwen2": ("qwen2", {**COMMON, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {**COMMON, "head_dim": 12, "tie_word_embeddings": False}),
    "gemma": ("gemma", {**COMMON, "head_dim": 12, "hidden_act": "gelu_pytorch_tanh"}),
    "gemma2": (
        "gemma2",
        {
            **COMMON,
            "head_dim": 12,
            "sliding_window": 7,
            "layer_types": WINDOWED,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 4.0,
            "final_logit_softcapping": 3.0,
        },
    ),
    "granite": (
        "granite",
        {
            **COMMON,
            "embedding_multiplier": 3.0,
            "attention_multiplier": 0.3,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
            "tie_word_embeddings": False,
        },
    ),
    "mixtral": ("mixtral", {**COMMON, "num_local_experts": 6, "num_experts_per_tok": 2, "tie_word_embeddings": False}),
    "qwen3 moe": (
        "qwen3_moe",
        {
            **COMMON,
            "head_dim": 12,
            "num_experts": 6,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 20,
            "norm_topk_prob": True,
        },
    ),
    "olmo2": ("olmo2", {**COMMON, "tie_word_embeddings": False}),
    "gpt2": (
        "gpt2",
        {
            "vocab_size": 62,
            "n_embd": 48,
            "n_inner": 44,
            "n_layer": 4,
            "n_head": 6,
            "n_positions": 64,
            "bos_token_id": None,
            "eos_token_id": None,
        },
    ),
}
LLAMAS = ("llama", "llama, all heads", "llama 3", "mistral", "qwen2", "granite")
GATED = (*LLAMAS, "qwen3", "gemma", "gemma2", "olmo2")
RMS = (*LLAMAS, "qwen3", "gemma", "gemma2")


def layers(model: Any) -> Any:
    """The decoder layers of a model."""
    return model.transformer.h if isinstance(model.base_model.config.to_dict().get("n_layer"), int) else model.model.layers


@dc.dataclass(frozen=True)
class Bug:
    """A kind of bug: where it shows, and the names of its cause that count as right."""

    kind: str
    plant: Plant
    families: tuple[str, ...]
    causes: tuple[str, ...]
    shows: str = "layer"  # or `embed`, `head`


# -- attention ------------------------------------------------------------------------------------------------------


def pair_order(model: Any, layer: int, draw: Draw) -> None:
    """Rows of q and k in the order of adjacent pairs, as without the conversion."""
    mixer = layers(model)[layer].self_attn
    size = mixer.head_dim
    order = torch.cat([torch.arange(0, size, 2), torch.arange(1, size, 2)])
    for linear in (mixer.q_proj, mixer.k_proj):
        for tensor in (linear.weight, linear.bias):
            if tensor is not None:
                tensor.copy_(tensor.unflatten(0, (-1, size))[:, order].flatten(0, 1))


def unscaled(model: Any, layer: int, draw: Draw) -> None:
    mixer = layers(model)[layer].self_attn
    mixer.scaling = draw.choice([1.0, 48**-0.5, 0.2])  # 0.2 is in no list


def window(model: Any, layer: int, draw: Draw) -> None:
    """One key more or one less than the window."""
    more = draw.random() < 0.5

    def edit(mask: Tensor) -> Tensor:
        n = mask.shape[-1]
        distance = torch.arange(n)[:, None] - torch.arange(n)
        mask = mask.clone()
        mask[..., distance == (7 if more else 6)] = 0.0 if more else torch.finfo(mask.dtype).min
        return mask

    with_argument(layers(model)[layer], "attention_mask", edit)


def looks_ahead(model: Any, layer: int, draw: Draw) -> None:
    with_argument(layers(model)[layer], "attention_mask", torch.zeros_like)


def rope_base(model: Any, layer: int, draw: Draw) -> None:
    """Angles of another base: usual ones, and two that are in no list."""
    base = draw.choice([5e5, 1e6, 1e5, 2e4, 7e3])
    with_argument(layers(model)[layer], "position_embeddings", lambda now: angles(now, base, 1.0))


def rope_scaling(model: Any, layer: int, draw: Draw) -> None:
    """Positions divided by a factor, or a scaling that is not applied."""
    factor = 1.0 if model.config.rope_parameters["rope_type"] == "llama3" else draw.choice([2.0, 4.0, 8.0, 3.0])
    with_argument(layers(model)[layer], "position_embeddings", lambda now: angles(now, 10000.0, factor))


def angles(now: tuple[Tensor, Tensor], base: float, factor: float) -> tuple[Tensor, Tensor]:
    """cos and sin (1, n, head) with another base and factor."""
    cos = now[0]
    pairs = cos.shape[-1] // 2
    frequency = base ** -(torch.arange(pairs, dtype=torch.float64) / pairs) / factor
    angle = torch.arange(cos.shape[-2], dtype=torch.float64)[:, None] * frequency
    whole = torch.cat([angle, angle], -1).expand(cos.shape)
    return whole.cos().to(cos.dtype), whole.sin().to(cos.dtype)


def kv_order(model: Any, layer: int, draw: Draw) -> None:
    """KV heads tiled instead of each repeated."""
    mixer = layers(model)[layer].self_attn
    shared, size = mixer.num_key_value_groups, mixer.head_dim
    for linear in (mixer.q_proj, mixer.o_proj.weight.T):
        for tensor in (linear,) if isinstance(linear, Tensor) else (linear.weight, linear.bias):
            if tensor is not None:
                heads = tensor.unflatten(0, (shared, -1, size))
                tensor.copy_(heads.transpose(0, 1).flatten(0, 2).clone())


def no_qk_norm(model: Any, layer: int, draw: Draw) -> None:
    mixer = layers(model)[layer].self_attn
    mixer.q_norm = mixer.k_norm = nn.Identity()


def no_softcap(model: Any, layer: int, draw: Draw) -> None:
    layers(model)[layer].self_attn.attn_logit_softcapping = None


def queries_for_keys(model: Any, layer: int, draw: Draw) -> None:
    mixer = layers(model)[layer].self_attn
    mixer.q_proj, mixer.k_proj = mixer.k_proj, mixer.q_proj


def transposed(model: Any, layer: int, draw: Draw) -> None:
    mixer = layers(model)[layer].self_attn
    weight = draw.choice([mixer.q_proj, mixer.o_proj]).weight
    weight.copy_(weight.T.clone())


# -- norms, ffn, biases ---------------------------------------------------------------------------------------------


def norms_of(block: nn.Module) -> list[tuple[str, Any]]:
    """The norms that are direct children of a layer."""
    return [(name, one) for name, one in block.named_children() if "norm" in name or name.startswith("ln_")]


def norms_exchanged(model: Any, layer: int, draw: Draw) -> None:
    block = layers(model)[layer]
    (one, first), (other, second) = norms_of(block)[:2]
    setattr(block, one, second)
    setattr(block, other, first)


def eps(model: Any, layer: int, draw: Draw) -> None:
    _, norm = draw.choice(norms_of(layers(model)[layer]))
    wrong = draw.choice([1e-5, 1e-3, 1e-12, 3e-4])
    for name in ("variance_epsilon", "eps"):
        if name in vars(norm):
            setattr(norm, name, wrong if vars(norm)[name] != wrong else 1e-8)


def plus_one(model: Any, layer: int, draw: Draw) -> None:
    _, norm = draw.choice(norms_of(layers(model)[layer]))
    norm.weight.add_(draw.choice([1.0, -1.0]))


def no_norm(model: Any, layer: int, draw: Draw) -> None:
    block = layers(model)[layer]
    name, _ = draw.choice(norms_of(block))
    setattr(block, name, nn.Identity())


def activation(model: Any, layer: int, draw: Draw) -> None:
    mlp = layers(model)[layer].mlp
    others = [nn.GELU(), nn.GELU(approximate="tanh"), nn.ReLU(), nn.SiLU(), nn.Mish(), nn.ELU()]  # the last two are in no spec
    probe = torch.linspace(-3, 3, 31, dtype=torch.float64)
    name = "act" if "act" in dict(mlp.named_children()) else "act_fn"
    now = getattr(mlp, name)
    setattr(mlp, name, draw.choice([one for one in others if not one(probe).allclose(now(probe))]))


def gate_for_up(model: Any, layer: int, draw: Draw) -> None:
    mlp = layers(model)[layer].mlp
    mlp.gate_proj, mlp.up_proj = mlp.up_proj, mlp.gate_proj


def no_bias(model: Any, layer: int, draw: Draw) -> None:
    biases = [one for name, one in layers(model)[layer].named_parameters() if name.endswith("bias") and "ln_" not in name]
    draw.choice(biases).zero_()


# -- layers, front and back -----------------------------------------------------------------------------------------


def skipped(model: Any, layer: int, draw: Draw) -> None:
    layers(model)[layer].forward = lambda hidden_states, *_, **__: hidden_states


def repeated(model: Any, layer: int, draw: Draw) -> None:
    """A layer with the weights of its neighbor."""
    stack = layers(model)
    stack[layer].load_state_dict(stack[layer - 1 if layer else 1].state_dict())


def residual(model: Any, layer: int, draw: Draw) -> None:
    layers(model)[layer].residual_multiplier = 1.0


def noisy(model: Any, layer: int, draw: Draw) -> None:
    """One row of one matrix changed."""
    matrices = [one for one in layers(model)[layer].parameters() if one.dim() == 2]
    weight = draw.choice(matrices)
    weight[draw.randrange(weight.shape[0])].mul_(1.5)


def embedding_scale(model: Any, layer: int, draw: Draw) -> None:
    factor = {"gemma": 48**-0.5, "gemma2": 48**-0.5, "granite": 1 / 3.0}.get(model.config.model_type, 48**0.5)
    model.get_input_embeddings().register_forward_hook(lambda module, given, out: out * factor)


def position_offset(model: Any, layer: int, draw: Draw) -> None:
    table = model.transformer.wpe.weight
    table.copy_(table.roll(draw.choice([1, -1, 2]), 0))


def untied(model: Any, layer: int, draw: Draw) -> None:
    table = model.get_input_embeddings().weight
    made = torch.randn(table.shape, generator=torch.Generator().manual_seed(draw.randrange(10**6)), dtype=torch.float64)
    model.lm_head.weight = nn.Parameter((0.25 * made).to(table.dtype))


def tied(model: Any, layer: int, draw: Draw) -> None:
    model.lm_head.weight = model.get_input_embeddings().weight


def no_last_norm(model: Any, layer: int, draw: Draw) -> None:
    model.model.norm = nn.Identity()


def no_last_softcap(model: Any, layer: int, draw: Draw) -> None:
    model.config.final_logit_softcapping = None


def logits_unscaled(model: Any, layer: int, draw: Draw) -> None:
    model.config.logits_scaling = 1.0


def with_argument(module: nn.Module, name: str, edit: Callable[[Any], Any]) -> None:
    """Call a module with another value of one of its named arguments."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        return args, {**kwargs, name: edit(kwargs[name])}

    module.register_forward_pre_hook(hook, with_kwargs=True)


def decode_position(model: Any, layer: int, draw: Draw) -> None:
    """Rotary tables of another position, in steps with a cache alone."""
    with_argument(layers(model)[layer], "position_embeddings", lambda now: wrong_table(now) if now[0].shape[-2] == 1 else now)


def decode_scale(model: Any, layer: int, draw: Draw) -> None:
    """Another scale of scores, in steps with a cache alone."""
    mixer = layers(model)[layer].self_attn
    scale = mixer.scaling

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        module.scaling = scale * (1.5 if kwargs["hidden_states"].shape[1] == 1 else 1.0)

    mixer.register_forward_pre_hook(hook, with_kwargs=True)


def wrong_table(now: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return now[0].roll(1, -1), now[1].roll(1, -1)


def beyond_length(model: Any, layer: int, draw: Draw) -> None:
    """Positions that repeat the last one beyond a length, as a table that is too short."""
    rows = draw.choice([64, 100, 128, 200])

    def edit(now: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        last = [torch.cat([x[:, :rows], x[:, rows - 1 : rows].expand(-1, max(0, x.shape[1] - rows), -1)], 1) for x in now]
        return last[0], last[1]

    with_argument(layers(model)[layer], "position_embeddings", edit)


def one_head_row(model: Any, layer: int, draw: Draw) -> None:
    """One row of the head changed."""
    weight = model.lm_head.weight.clone()
    weight[draw.randrange(62)] *= 1.5
    model.lm_head.weight = nn.Parameter(weight)


BUGS = (
    Bug("rope wrong in cached decoding", decode_position, LLAMAS, ("cached decoding",)),
    Bug("scale wrong in cached decoding", decode_scale, (*LLAMAS, "qwen3", "gemma"), ("cached decoding",)),
    Bug("rope wrong beyond a length", beyond_length, LLAMAS, ("long prompt",)),
    Bug("one row of the head", one_head_row, ("llama", "mistral", "qwen2"), ("other numbers in the weights",), "head"),
    Bug("rotary pair order", pair_order, LLAMAS, ("rotary pair order",)),
    Bug("score scale missing or wrong", unscaled, (*LLAMAS, "qwen3", "gemma", "olmo2"), ("score scale",)),
    Bug("window off by one", window, ("mistral", "gemma2"), ("window size",)),
    Bug("mask looks ahead", looks_ahead, (*LLAMAS, "qwen3"), ("mask", "window missing")),
    Bug("rope base", rope_base, ("llama", "llama, all heads", "mistral", "qwen2", "qwen3", "gemma", "granite"), ("rope base",)),
    Bug("rope scaling", rope_scaling, ("llama", "llama 3", "mistral", "qwen2", "qwen3"), ("rope scaling",)),
    Bug("KV heads in another order", kv_order, ("llama", "llama 3", "mistral", "qwen2", "granite"), ("KV head order",)),
    Bug("qk-norm missing", no_qk_norm, ("qwen3",), ("qk-norm missing",)),
    Bug("soft-cap missing", no_softcap, ("gemma2",), ("soft-cap",)),
    Bug("query and key swapped", queries_for_keys, ("llama, all heads",), ("k and q swapped",)),
    Bug("square weight transposed", transposed, LLAMAS, ("transposed weight",)),
    Bug("norms swapped", norms_exchanged, (*RMS, "olmo2", "gpt2"), ("swapped norms",)),
    Bug("norm's eps", eps, (*RMS, "olmo2", "gpt2"), ("norm's eps",)),
    Bug("norm's + 1", plus_one, RMS, ("norm's + 1",)),
    Bug("norm missing", no_norm, (*RMS, "olmo2", "gpt2"), ("norm missing",)),
    Bug("activation", activation, (*GATED, "gpt2"), ("activation",)),
    Bug("gate and up swapped", gate_for_up, GATED, ("gate and up swapped",)),
    Bug("bias missing", no_bias, ("llama, all heads", "qwen2", "gpt2"), ("bias missing",)),
    Bug("layer skipped", skipped, (*GATED, "gpt2"), ("layer skipped",)),
    Bug("another layer's weights", repeated, (*GATED, "gpt2"), ("another layer's weights",)),
    Bug("residual scale", residual, ("granite",), ("residual scale",)),
    Bug("other numbers in a weight", noisy, (*GATED, "gpt2"), ("other numbers in the weights",)),
    Bug("embedding scale", embedding_scale, ("llama", "gemma", "gemma2", "granite", "qwen3"), ("embedding scale",), "embed"),
    Bug("positions shifted", position_offset, ("gpt2",), ("position offset",), "embed"),
    Bug("head untied", untied, ("llama, all heads", "qwen2", "gemma"), ("untied head",), "head"),
    Bug("head tied", tied, ("llama", "mistral", "qwen3", "olmo2"), ("tied head",), "head"),
    Bug("last norm missing", no_last_norm, GATED, ("norm missing",), "head"),
    Bug("last soft-cap missing", no_last_softcap, ("gemma2",), ("soft-cap",), "head"),
    Bug("logits not scaled", logits_unscaled, ("granite",), ("logit scale",), "head"),
)
