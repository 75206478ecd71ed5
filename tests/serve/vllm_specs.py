"""Specs that no Hugging Face family can express, for the plugin in vLLM: one per feature, then products drawn from a seed.

Each has a plain twin, with RoPE and full causal attention of the same sizes, in the place of recurrent mixers too: its greedy
tokens must differ, or equal tokens would show nothing.
"""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from dovetail.files.spec import from_mapping
from dovetail.model.model import Model

PRODUCTS, SEED = 12, 7
GEOMETRIES = ((4, 2, 32), (3, 1, 96), (2, 2, 64), (6, 3, 32), (4, 1, 80))  # heads, kv_heads, head
POSITIONS: tuple[Any, ...] = (
    "rope",
    "alibi",
    "none",
    {"kind": "rope", "pairs": "adjacent", "base": 100.0},
    {"kind": "rope", "fraction": 0.5},
)
MOE = {"kind": "moe", "experts": 5, "hidden": 56, "router": {"kind": "sigmoid_router", "top_k": 2}}
FFNS: tuple[Any, ...] = ({"kind": "glu", "hidden": 144}, {"kind": "mlp", "hidden": 200, "act": "relu2"}, MOE)
PLAIN = {"kind": "attention", "heads": 4, "kv_heads": 2, "head": 32}  # the twin of a mixer that is not attention
MAMBA2 = {"kind": "mamba2", "head": 32, "state_size": 32}  # 28 KB of state: blocks of 64 tokens of KV cache


class Case(NamedTuple):
    """A spec and its plain twin."""

    spec: Model
    plain: Model


def attention(heads: int = 4, kv_heads: int = 2, head: int = 32, *, window: int | None = None, **fields: Any) -> dict[str, Any]:
    mask = {} if window is None else {"mask": ["causal", {"kind": "window", "size": window}]}
    return {"kind": "attention", "heads": heads, "kv_heads": kv_heads, "head": head, **mask, **fields}


def case(mixers: list[dict[str, Any]], blocks: list[dict[str, Any]] | None = None, vocab: int = 101, **fields: Any) -> Case:
    """A model with these mixers, one per layer; `blocks` are the other fields of the layers."""
    blocks = blocks or [{}] * len(mixers)
    sizes = [{name: mixer[name] for name in PLAIN} if mixer["kind"] == PLAIN["kind"] else PLAIN for mixer in mixers]
    layers, plain = (
        [{"ffn": FFNS[0], **block, "mixer": one} for one, block in zip(every, blocks, strict=True)] for every in (mixers, sizes)
    )
    base = {"width": 96, "vocab": vocab}
    return Case(from_mapping({**base, **fields, "layers": layers}), from_mapping({**base, "layers": plain}))


def features() -> dict[str, Case]:
    """One spec per feature."""
    sandwich = {"wire": "sandwich_norm", "norm": "layernorm"}
    return {
        "alibi on llama": case([attention(position="alibi")] * 3),
        "windows 16, 40 and none": case([attention(window=16), attention(window=40), attention()]),
        "nope and rope": case([attention(position="none"), attention()] * 2, [{"norm": "layernorm"}] * 4),
        "sandwich norms": case([attention(qk_norm="rmsnorm")] * 2, [sandwich, {"wire": "post_norm"}]),
        "soft-cap": case([attention(softcap=3.0), attention(softcap=1.5)]),
        "sinks": case([attention(sink=True), attention()]),
        "head sizes and kv heads": case([attention(*sizes, position="alibi") for sizes in GEOMETRIES]),
        "numbers of heads": case([attention(4, position="alibi"), attention(6, softcap=2.0), attention(2, sink=True)]),
        "scale, gate and experts": case([attention(scale=0.4, gate=True), attention(scale=0.1)], [{"ffn": MOE}] * 2),
    }


def products() -> dict[str, Case]:
    """Products of all features, drawn from a seed."""
    draw = random.Random(SEED)
    found: dict[str, Case] = {}
    for number in range(PRODUCTS):
        mixers, blocks = list[dict[str, Any]](), list[dict[str, Any]]()
        for sizes in draw.sample(GEOMETRIES, draw.choice((2, 3))):
            mixers.append(
                attention(
                    *sizes,
                    window=draw.choice((None, 16, 40)),
                    position=draw.choice(POSITIONS),
                    softcap=draw.choice((None, 2.0)),
                    sink=draw.choice((False, True)),
                    qk_norm=draw.choice((None, "rmsnorm")),
                    bias=draw.choice((False, True)),
                    scale=draw.choice((None, 0.3)),
                )
            )
            wire = draw.choice(("pre_norm", "sandwich_norm", "res_post_norm", "parallel"))
            blocks.append({"wire": wire, "norm": draw.choice(("rmsnorm", "layernorm")), "ffn": draw.choice(FFNS)})
        head = {"kind": "lm", "tied": draw.choice((False, True)), "softcap": draw.choice((None, 8.0))}
        found[f"product {number}"] = case(mixers, blocks, head=head)
    return found


def recurrent() -> dict[str, Case]:
    """Specs with recurrent states."""
    delta = {"kind": "gated_deltanet", "heads": 4, "key_heads": 2, "key_size": 12, "value_size": 16}
    alone = [{"kind": "rwkv6", "heads": 4}, {"kind": "mamba", "inner": 120, "state_size": 8}, {"kind": "gla", "heads": 2}]
    beside = {"kind": "hybrid_block", "ssm": {"kind": "mamba2", "head": 16, "state_size": 12, "groups": 2}, "ssm_in": 1.5}
    return {
        "mamba-2 hybrid": case([MAMBA2, attention(position="none"), MAMBA2, attention(position="alibi", window=16)]),
        "gated deltanet and sinks": case([delta, attention(sink=True, position="alibi"), delta]),
        "mamba-2 beside attention": case([attention(position="alibi"), attention(window=40)], [beside] * 2),
        "recurrent states alone": case(alone),
        "n-grams, lstm and experts": case([{"kind": "ngram"}, attention(), {"kind": "lstm"}], [{"ffn": MOE}] * 3),
    }


def sharded() -> dict[str, Case]:
    """Specs for two ranks: slopes and sinks per head, a KV head that both ranks hold, an odd vocabulary that both hold whole, a
    tied one in shards, a recurrent state in shards."""
    heads = [attention(position="alibi", sink=True, window=16), attention(4, 1, position="none", softcap=3.0)]
    hybrid = case([MAMBA2, attention(position="alibi")], vocab=102, head={"kind": "lm", "tied": True})
    normed = [{"wire": "sandwich_norm"}] * 3
    return {"alibi, sinks and one kv head": case([*heads, attention(qk_norm="rmsnorm")], normed), "tied hybrid": hybrid}


CASES = {**features(), **products(), **recurrent()}
