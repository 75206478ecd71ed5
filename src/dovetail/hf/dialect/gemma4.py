"""Gemma 4 (text): Gemma 3 with normed values, full layers whose values are their keys, and proportional RoPE there (2026).

    v = rms(x W_v), in full layers rms(x W_k)          without a scale, before the norm and the rotation of keys
    x ← c·x                                            behind each layer, c a number per layer that is not trained

Full layers have heads of their own size: `global_head_dim`, `num_global_key_value_heads`, or newer a `per_layer_config`. Some
models have layers without keys and values, which use those of the last layer of their type before them; per-layer embeddings,
all in one tensor; or experts beside each feed-forward.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.convert import CONCAT, Concat
from dovetail.hf.dialect.gemma3 import GEMMA3
from dovetail.hf.expert import glu_rows
from dovetail.hf.field import ABSENT, ACTIVATIONS, Choice, Config, Copy, Field, Settings, depth_of, integer, is_kind, value_at
from dovetail.hf.layer import FULL, LAYER_TYPES, SLIDING, LayerTypes, RotaryByType, all_but_every
from dovetail.hf.rotary import LENGTH, ROTARY_FRACTION, Rotary
from dovetail.hf.table import Row, Skip
from dovetail.model.model import Model

LAYERS, VOCAB, SHARING = "num_hidden_layers", 262_144, "num_kv_shared_layers"
HEAD, KV_HEADS, SAME, BY_LAYER = "head_dim", "num_key_value_heads", "attention_k_eq_v", "per_layer_config"
FULL_HEAD, FULL_KV_HEADS = "global_head_dim", "num_global_key_value_heads"
BOTH, MOE = "ffn:dense_and_experts", "layers.*.ffn:dense_and_experts.experts:moe"
DENSE = ("ffn:glu", f"{BOTH}.dense")
UNUSED_KEYS = "of a layer that uses the keys and values of an earlier one"
NORM = {"kind": "rmsnorm", "eps": 1e-6, "plus_one": False}
ROPES = {
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
    FULL: {"rope_type": "proportional", ROTARY_FRACTION: 0.25, "rope_theta": 1e6},
}


class LastFull(LayerTypes):
    """The type of each layer; the last is full, whatever the list says."""

    def types(self, config: Config) -> list[str]:
        return [*super().types(config)[:-1], FULL] if config.get(self.layers) else []


TYPES = LastFull(LAYERS, all_but_every(6))


def owners(config: Config) -> int:
    """The number of layers with keys and values of their own; those after them use theirs."""
    depth, sharing = depth_of(config, LAYERS), integer(config, SHARING, 0)
    if sharing >= max(depth, 1):
        raise SpecError(f"config.{SHARING}", f"{sharing} of {depth} layers leave none whose keys and values they could use")
    return depth - sharing


def switched_on(config: Config, name: str) -> bool:
    """Whether a field is true; it may be left out."""
    value = config.get(name) or False
    if not isinstance(value, bool):
        raise SpecError(f"config.{name}", f"{value!r} is not true or false")
    return value


class HeadSizes(Field):
    """The size and the number of KV heads in sliding and in full layers, and whether values are keys in full ones."""

    names = (HEAD, KV_HEADS, FULL_HEAD, FULL_KV_HEADS, SAME, BY_LAYER)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        types = TYPES.to_hf(spec)[LAYER_TYPES]
        sliding, full = (next((i for i, one in enumerate(types) if one == word), 0) for word in (SLIDING, FULL))
        sizes = {
            HEAD: value_at(spec, f"layers.{sliding}.mixer.head"),
            KV_HEADS: value_at(spec, f"layers.{sliding}.mixer.kv_heads"),
            FULL_HEAD: value_at(spec, f"layers.{full}.mixer.head"),
            SAME: value_at(spec, f"layers.{full}.mixer.k_is_v"),
        }
        if ABSENT in sizes.values():
            return {}
        return {**sizes, FULL_KV_HEADS: value_at(spec, f"layers.{full}.mixer.kv_heads") if sizes[SAME] else None}

    def from_hf(self, config: Config) -> Settings:
        types, same = TYPES.types(config), switched_on(config, SAME)
        plain = {HEAD: config.get(HEAD), KV_HEADS: config.get(KV_HEADS)}
        sizes = [{**plain, **own} for own in self._overrides(config, types, same)]
        result: Settings = {}
        for i, (word, own) in enumerate(zip(types, sizes, strict=True)):
            if own != sizes[types.index(word)]:
                raise SpecError(f"config.{BY_LAYER}.{i}", f"differs from layer {types.index(word)}, which is of the same type")
            result |= {f"layers.{i}.mixer.head": own[HEAD], f"layers.{i}.mixer.kv_heads": own[KV_HEADS]}
            result |= {f"layers.{i}.mixer.k_is_v": True} if same and word == FULL and i < owners(config) else {}
        return result

    def _overrides(self, config: Config, types: list[str], same: bool) -> list[Mapping[str, Any]]:
        """Per layer the sizes that differ from those of the whole config."""
        if BY_LAYER not in config:
            number = config.get(FULL_KV_HEADS) if same else None
            full = {HEAD: integer(config, FULL_HEAD, 512, 1), **({} if number is None else {KV_HEADS: number})}
            return [full if word == FULL else {} for word in types]
        listed = config[BY_LAYER]
        if not isinstance(listed, Mapping):
            raise SpecError(f"config.{BY_LAYER}", f"{listed!r} is not a mapping")
        for i, own in listed.items():
            if not str(i).isdecimal() or int(i) >= len(types):
                raise SpecError(f"config.{BY_LAYER}.{i}", f"is not one of the {len(types)} layers")
            if not isinstance(own, Mapping) or not own.keys() <= {HEAD, KV_HEADS}:
                raise SpecError(f"config.{BY_LAYER}.{i}", f"{own!r} is unsupported", f"supported: {HEAD}, {KV_HEADS}")
        by_layer = {int(i): own for i, own in listed.items()}  # transformers writes 05
        return [by_layer.get(i, {}) for i in range(len(types))]


class RotaryOfTypes(RotaryByType):
    """RoPE parameters per layer type; both are there, or none is."""

    names = ("rope_parameters", LENGTH)

    def __init__(self) -> None:
        self.types = TYPES

    def from_hf(self, config: Config) -> Settings:
        ropes = config.get("rope_parameters")
        ropes = ROPES if ropes is None else ropes
        if not isinstance(ropes, Mapping) or not ropes.keys() <= ROPES.keys():
            raise SpecError("config.rope_parameters", f"{ropes!r} is not a mapping of {SLIDING} and {FULL}")
        result: Settings = {}
        for i, word in enumerate(self.types.types(config)):
            one = ropes.get(word)
            if not isinstance(one, Mapping):
                raise SpecError(f"config.rope_parameters.{word}", f"{one!r} is not a mapping", f"layer {i} is of this type")
            if one.get("rope_type") != "proportional" and one.get(ROTARY_FRACTION) not in (None, 1, 1.0):
                what = f"{one[ROTARY_FRACTION]!r} is unsupported"
                raise SpecError(f"config.rope_parameters.{word}.{ROTARY_FRACTION}", what, "supported: with proportional RoPE")
            position = Rotary(f"layers.{i}.mixer.position")
            result |= position.from_hf({"rope_parameters": one, LENGTH: config.get(LENGTH)})
        return result


class CausalText(Field):
    """Whether tokens see later ones: `vision` is for tokens of images, and a model of text is causal."""

    names = ("use_bidirectional_attention",)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        return {self.names[0]: None}

    def from_hf(self, config: Config) -> Settings:
        value = config.get(self.names[0])
        if value not in (None, "vision"):
            raise SpecError(f"config.{self.names[0]}", f"{value!r} is unsupported", "supported: null, vision")
        return {}


class PerLayer(Field):
    """Per-layer embeddings: their channels, 0 for none. Their table has the rows of the vocabulary."""

    names = ("hidden_size_per_layer_input", "vocab_size_per_layer_input")

    def to_hf(self, spec: Model) -> dict[str, Any]:
        piece = value_at(spec, "layers.*.ple:ple.piece")
        return {self.names[0]: 0 if piece is ABSENT else piece, self.names[1]: spec.vocab}

    def from_hf(self, config: Config) -> Settings:
        piece, vocab = integer(config, self.names[0], 256), config.get("vocab_size")
        if not piece:
            return {}
        if integer(config, self.names[1], VOCAB) != vocab:
            what = f"{integer(config, self.names[1], VOCAB)} rows differ from those of the vocabulary"
            raise SpecError(f"config.{self.names[1]}", what, f"supported: {vocab}")
        own = {"kind": "ple", "piece": piece, "norm": NORM}
        ples = (own if i == 0 else {**own, "shares_norm": 0} for i in range(depth_of(config, LAYERS)))
        return {f"layers.{i}": {"kind": "ple_block", "ple": one} for i, one in enumerate(ples)}


class Experts(Field):
    """Experts beside the dense feed-forward of every layer."""

    names = ("enable_moe_block", "num_experts", "top_k_experts", "moe_intermediate_size")

    def to_hf(self, spec: Model) -> dict[str, Any]:
        sizes = [value_at(spec, f"{MOE}.{path}") for path in ("experts", "router:softmax_router.top_k", "hidden")]
        if ABSENT in sizes:
            return {self.names[0]: False}
        return dict(zip(self.names, (True, *sizes), strict=True))

    def from_hf(self, config: Config) -> Settings:
        width = config.get("hidden_size")
        if not switched_on(config, self.names[0]) or not isinstance(width, int):
            return {}
        experts, chosen, hidden = (config.get(name) for name in self.names[1:])
        router = {"kind": "softmax_router", "top_k": chosen, "norm": NORM, "input_scale": width**-0.5, "expert_scale": True}
        moe = {"kind": "moe", "experts": experts, "hidden": hidden, "act": "gelu_tanh", "norm": NORM, "router": router}
        for name in self.names[1:]:
            if config.get(name) is None:
                raise SpecError(f"config.{name}", "is missing", f"{self.names[0]} is true")
        dense = {"kind": "glu", "act": "gelu_tanh"}
        ffn = {"kind": "dense_and_experts", "dense": dense, "experts": moe, "norm": NORM}
        return {f"layers.{i}.ffn": ffn for i in range(depth_of(config, LAYERS))}


class SharedKeys(Field):
    """The last layers use the keys and values of the last layer of their type before them; their feed-forward may be twice as
    wide."""

    names = (SHARING, "use_double_wide_mlp", "intermediate_size")

    def to_hf(self, spec: Model) -> dict[str, Any]:
        sharing = [i for i, block in enumerate(spec.layers) if is_kind(value_at(block, "mixer.earlier"), "shared_kv")]
        first, last = (
            next((size for path in DENSE if (size := value_at(spec, f"layers.{i}.{path}.hidden")) is not ABSENT), ABSENT)
            for i in (0, len(spec.layers) - 1)
        )
        wide = bool(sharing) and isinstance(first, int) and last == 2 * first
        size = {} if first is ABSENT else {self.names[2]: first}
        return {SHARING: len(sharing), self.names[1]: wide, **size}

    def from_hf(self, config: Config) -> Settings:
        types, first, hidden = TYPES.types(config), owners(config), integer(config, self.names[2], 1, 1)
        wide = switched_on(config, self.names[1])
        found: Settings = {}
        for i, word in enumerate(types):
            size = 2 * hidden if wide and i >= first else hidden
            found |= {f"layers.{i}.{path}.hidden": size for path in DENSE}
            if i < first:
                continue
            before = [j for j in range(first) if types[j] == word]
            if not before:
                what = f"layer {i} is of type {word}, and no layer with keys and values of its own is"
                raise SpecError(f"config.{SHARING}", what)
            found |= {f"layers.{i}.mixer.earlier": {"kind": "shared_kv", "layer": before[-1]}, f"layers.{i}.mixer.v_norm": None}
        return found


EPS = (
    *("norm.eps", "layers.*.norm.eps", "layers.*.mixer.qk_norm.eps", "layers.*.mixer.v_norm.eps"),
    *("layers.*.ple:ple.norm.eps", f"layers.*.{BOTH}.norm.eps", f"{MOE}.norm.eps", f"{MOE}.router:softmax_router.norm.eps"),
)
ACTS = ("layers.*.ffn:glu.act", f"layers.*.{BOTH}.dense.act", f"{MOE}.act", "layers.*.ple:ple.act")
FFN, NORMS = "layers.{}.ffn", "feedforward_layernorm"

GEMMA4 = GEMMA3.variant(
    "gemma4_text",
    architecture="Gemma4ForCausalLM",
    spec={"norm": NORM},
    layer={
        "norm": NORM,
        "wire": {"kind": "sandwich_norm", "stream_scale": True},
        "mixer": {"scale": 1.0, "qk_norm": NORM, "v_norm": {**NORM, "scale": False}},
    },
    without=("query_pre_attn_scalar", "attn_logit_softcapping"),
    fields=(
        PerLayer(),
        Experts(),
        TYPES,
        HeadSizes(),
        SharedKeys(),
        RotaryOfTypes(),
        CausalText(),
        Copy("rms_norm_eps", *EPS),
        Choice("hidden_activation", ACTS[0], ACTIVATIONS, also=ACTS[1:]),
    ),
    tensors=(
        Row("layers.{}.layer_scalar", "layers.{}.wire.stream"),
        Row("embed_tokens_per_layer.weight", "layers.{all}.ple.table", convert=Concat(dim=1)),
        Row("per_layer_model_projection.weight", "layers.{all}.ple.project.weight", convert=CONCAT),
        Row("per_layer_projection_norm.weight", "layers.0.ple.found_norm.scale"),
        Row("layers.{}.per_layer_input_gate.weight", "layers.{}.ple.gate.weight"),
        Row("layers.{}.per_layer_projection.weight", "layers.{}.ple.o.weight"),
        Row("layers.{}.post_per_layer_input_norm.weight", "layers.{}.ple.out_norm.scale"),
        *glu_rows("layers.{}.mlp", FFN),
        *glu_rows("layers.{}.mlp", f"{FFN}.dense"),
        Row(f"layers.{{}}.pre_{NORMS}.weight", "layers.{}.ffn_norm.scale"),
        Row(f"layers.{{}}.pre_{NORMS}.weight", f"{FFN}.dense_norm.scale"),
        Row(f"layers.{{}}.pre_{NORMS}_2.weight", f"{FFN}.experts.norm.scale"),
        Row(f"layers.{{}}.post_{NORMS}.weight", "layers.{}.ffn_post_norm.scale"),
        Row(f"layers.{{}}.post_{NORMS}.weight", f"{FFN}.post_norm.scale"),
        Row(f"layers.{{}}.post_{NORMS}_1.weight", f"{FFN}.dense_post_norm.scale"),
        Row(f"layers.{{}}.post_{NORMS}_2.weight", f"{FFN}.experts_post_norm.scale"),
        Row("layers.{}.router.proj.weight", f"{FFN}.experts.router.out.weight"),
        Row("layers.{}.router.scale", f"{FFN}.experts.router.norm.scale"),
        Row("layers.{}.router.per_expert_scale", f"{FFN}.experts.router.expert_scale"),
        Row(
            "layers.{}.experts.gate_up_proj",
            *(f"{FFN}.experts.bank.{name}.weight" for name in ("gate", "up")),
            convert=Concat(dim=1),
        ),
        Row("layers.{}.experts.down_proj", f"{FFN}.experts.bank.down.weight"),
    ),
    defaults={KV_HEADS: 4, HEAD: 256, "sliding_window": 512},
    skips=(*GEMMA3.skips, *(Skip(f"*.self_attn.{name}*", UNUSED_KEYS) for name in ("k_proj", "v_proj", "k_norm"))),
)
