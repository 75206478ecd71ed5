"""When a part and a cause that `verify` names count as right for a mutated statement; the rules of `blind.py`, in tables.

They were written before the first score was taken, and name no mutation.
"""

from __future__ import annotations

import re

# the part in which a class or function stands, by the end of its name; functions that are not named here are attention's
PARTS = {
    "norm": ("Norm",),
    "ffn": ("MLP", "Experts", "Router", "MoeBlock"),
    "block": ("DecoderLayer", "Block"),
}
# what a statement of a layer's own class calls
CALLED = {"mixer": ("attn",), "ffn": ("mlp", "moe"), "norm": ("norm", "layernorm", "ln")}

# classes of statements, by the words of their names (`self.attn_logit_softcapping` -> self, attn, logit, softcapping)
WORDS = {
    "rotary": "cos sin rotary rotate rope freq freqs emb position positions",
    "norm": "norm layernorm ln variance eps epsilon",
    "scale": "scale scaling",
    "soft-cap": "softcap softcapping",
    "mask": "mask causal window",
    "activation": "act activation",
    "heads": "head heads groups rep kv repeat transpose view reshape expand split",
    "weights": "proj fc linear weight bias gate up down query key value q k v",
    "residual": "residual mlp attn moe",
    "router": "router gate expert experts top routing",
}
# the same for causes, by name; `*` is any text. A cause that is called by a path is classed by the words of the path.
CAUSES = {
    "rotary": ("rotary *", "rope *", "mrope sections", "position offset", "position missing"),
    "norm": ("kind of norm", "norm missing", "norm's *", "swapped norms", "qk-norm *", "norm of values missing"),
    "scale": ("score scale",),
    "soft-cap": ("soft-cap",),
    "mask": ("mask", "window size", "window missing", "sink missing", "prefix missing"),
    "activation": ("activation",),
    "heads": ("KV head order", "heads and channels swapped"),
    "weights": ("* and * swapped", "transposed weight", "weight missing", "bias missing", "another layer's weights"),
    "residual": ("residual scale", "wiring", "branch missing", "layer skipped", "layer's scale"),
    "router": ("router's weights", "experts per token"),
}


def parts_of_site(within: str, statement: str) -> set[str]:
    """The part whose code is changed: mixer, ffn, norm or block, and for a statement of a layer the part that it calls."""
    owner = within.partition(".")[0]
    part = next((part for part, ends in PARTS.items() if owner.endswith(ends)), "mixer")
    called = {name for name, words in CALLED.items() if part == "block" and words_of(statement) & set(words)}
    return {part} | called


def parts_of_tap(address: str) -> set[str]:
    """The parts that compute the activation at an address within a layer.

    mixer.q, mixer.o.in …         mixer          mixer_norm, ffn_post_norm …   norm
    ffn.up, ffn.down.in …         ffn            mixer.q_norm                  norm, mixer
    mixer_norm.in                 block          mixer_post_norm.in            mixer, block
    ffn_norm.in                   block, mixer (its last operation has no tap of its own)
    the output of the layer       block, ffn   (likewise)
    """
    if not address:
        return {"block", "ffn"}
    first, is_input = address.partition(".")[0], address.endswith(".in")
    branch = {"mixer"} if first.startswith("mixer") else {"ffn"}
    if first in ("mixer", "ffn"):
        return branch | ({"norm"} if address.endswith("_norm") else set())
    if not is_input:
        return {"norm"}
    before = {"mixer_norm.in": set[str](), "ffn_norm.in": {"mixer"}}.get(address, branch)
    return {"block"} | before


def classes_of_site(within: str, statement: str) -> set[str]:
    """The classes of a mutated statement. Code of rotary tables, norms and routers has one class, whatever its words."""
    owner = words_of(within)
    for name, words in (("rotary", {"rotary", "rotate"}), ("norm", {"norm"}), ("router", {"router"})):
        if owner & words:
            return {name}
    return _classes(words_of(statement))


def classes_of_cause(cause: str) -> set[str]:
    """The classes of a cause."""
    for name, patterns in CAUSES.items():
        if any(re.fullmatch(re.escape(one).replace(r"\*", ".+"), cause) for one in patterns):
            return {name}
    return _classes(words_of(cause))


def _classes(words: set[str]) -> set[str]:
    return {name for name, known in WORDS.items() if words & set(known.split())}


def words_of(text: str) -> set[str]:
    """The words of all names in a text: `Gemma2RMSNorm.forward` -> gemma, norm, forward."""
    return {word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", text)}
