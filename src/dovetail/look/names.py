"""Names that users of TransformerLens and of transformers know, as addresses here.

    blocks.3.hook_resid_pre            layers.3.in                     TransformerLens
    model.layers.3.self_attn           layers.3.mixer.out              transformers, the output of a module

A name that has no counterpart in the model at hand is left as it is, so that the error names the nearest address.
"""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

from dovetail.base.errors import SpecError
from dovetail.nn.groups import Position
from dovetail.spec.fold import taps
from dovetail.spec.part import Part, walk

LAYER = r"(?P<i>\d+|\*)"
LENS = {
    "hook_embed": ("embed.out",),
    "ln_final.hook_out": ("normed",),
    "ln_final.hook_scale": ("norm.scale",),
    "unembed.hook_out": ("head.logits",),
    "blocks.{i}.hook_resid_pre": ("layers.{i}.in",),
    "blocks.{i}.hook_resid_mid": ("layers.{i}.after_mixer",),
    "blocks.{i}.hook_resid_post": ("layers.{i}.after_ffn", "layers.{i}.after_mixer"),
    "blocks.{i}.hook_attn_out": ("layers.{i}.mixer_add",),
    "blocks.{i}.hook_mlp_out": ("layers.{i}.ffn_add",),
    "blocks.{i}.hook_in": ("layers.{i}.in",),
    "blocks.{i}.hook_out": ("layers.{i}.after_ffn", "layers.{i}.after_mixer"),
    "blocks.{i}.attn.hook_q": ("layers.{i}.mixer.q",),
    "blocks.{i}.attn.hook_rot_q": ("layers.{i}.mixer.q",),
    "blocks.{i}.attn.hook_k": ("layers.{i}.mixer.k",),
    "blocks.{i}.attn.hook_rot_k": ("layers.{i}.mixer.k",),
    "blocks.{i}.attn.hook_v": ("layers.{i}.mixer.v",),
    "blocks.{i}.attn.hook_z": ("layers.{i}.mixer.z",),
    "blocks.{i}.attn.hook_pattern": ("layers.{i}.mixer.pattern",),
    "blocks.{i}.attn.hook_out": ("layers.{i}.mixer.out",),
    "blocks.{i}.mlp.hook_post": ("layers.{i}.ffn.hidden",),
    "blocks.{i}.mlp.hook_out": ("layers.{i}.ffn.out",),
    "blocks.{i}.mlp.hook_expert_weights": ("layers.{i}.ffn.router.weights",),
    "blocks.{i}.mlp.hook_expert_indices": ("layers.{i}.ffn.router.chosen",),
    "blocks.{i}.ln1.hook_out": ("layers.{i}.mixer_norm.out", "layers.{i}.norm.out"),
    "blocks.{i}.ln1.hook_scale": ("layers.{i}.mixer_norm.scale", "layers.{i}.norm.scale"),
    "blocks.{i}.ln2.hook_out": ("layers.{i}.ffn_norm.out",),
    "blocks.{i}.ln2.hook_scale": ("layers.{i}.ffn_norm.scale",),
}
STACK = r"(?:(?:model|transformer|gpt_neox|bert|roberta|decoder|encoder|language_model)\.)*"
MODULES = {  # of transformers; the output of each
    r"(?:embed_tokens|wte|embed_in|embeddings\.word_embeddings|embeddings)": ("embed.out",),
    r"(?:norm|ln_f|final_layer_norm)": ("normed",),
    r"(?:lm_head|embed_out)": ("head.logits",),
    rf"(?:layers|h|layer)\.{LAYER}": ("layers.{i}.after_ffn", "layers.{i}.after_mixer"),
    rf"(?:layers|h|layer)\.{LAYER}\.(?:self_attn|attn|attention|linear_attn|mixer|mamba)": ("layers.{i}.mixer.out",),
    rf"(?:layers|h|layer)\.{LAYER}\.(?:mlp|block_sparse_moe|feed_forward)": ("layers.{i}.ffn.out",),
    rf"(?:layers|h|layer)\.{LAYER}\.(?:mlp|block_sparse_moe)\.(?:gate|router)": ("layers.{i}.ffn.router.logits",),
    rf"(?:layers|h|layer)\.{LAYER}\.(?:input_layernorm|ln_1)": ("layers.{i}.mixer_norm.out", "layers.{i}.norm.out"),
    rf"(?:layers|h|layer)\.{LAYER}\.(?:post_attention_layernorm|ln_2)": ("layers.{i}.ffn_norm.out",),
}
WITHOUT = {  # what is read elsewhere here, by the end of the name
    r"hook_pos_embed": "embedded is the sum of tokens and positions",
    r"hook_normalized": "it is before the norm's weight; after it: hook_out",
}
ROTATED = r"attn\.hook_(?P<what>[qk])"
PATTERNS = {
    **{re.escape(name).replace(r"\{i\}", LAYER): ours for name, ours in LENS.items()},
    **{STACK + name: ours for name, ours in MODULES.items()},
}


def translated(pattern: str, spec: Part) -> str:
    """The address of a name of another library; the pattern itself where it is one of ours, or of nobody."""
    declared = taps(spec)
    if any(fnmatchcase(address, pattern) for address in declared):
        return pattern
    for theirs, ours in PATTERNS.items():
        if match := re.fullmatch(theirs, pattern):
            names = [name.format(**match.groupdict()) for name in ours]
            for name in names:
                if any(fnmatchcase(address, name) for address in declared):
                    return _unrotated(pattern, name, spec)
            raise SpecError(
                pattern, "this model has no such activation", f"it would be {names[0]}; list dt.look.addresses(spec)"
            )
    if re.search(r"(^|\.)hook_", pattern):
        why = next((why for end, why in WITHOUT.items() if re.search(end + "$", pattern)), "list dt.look.addresses(spec)")
        raise SpecError(pattern, "is a name of TransformerLens without a counterpart", why)
    return pattern


def _unrotated(pattern: str, name: str, spec: Part) -> str:
    """The address, unless the name means a query or key before its rotation."""
    if match := re.search(ROTATED + "$", pattern):
        place = f"{name.rpartition('.')[0]}.*"
        if any(isinstance(part, Position) and part.rotates and fnmatchcase(path, place) for path, part, _ in walk(spec)):
            why = f"{name} is after it: hook_rot_{match['what']}"
            raise SpecError(pattern, "is before the rotation by position, which has no address here", why)
    return name
