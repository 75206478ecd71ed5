"""Latent attention in their words: its sizes, its tensors, and a YaRN that has two words more.

With m(x) = 0.1·x·ln(factor) + 1, cos and sin are multiplied by m(mscale)/m(mscale_all_dim) and all scores by
m(mscale_all_dim)²: our `attention` of the scaling, and `scale` of the mixer. Of their two matrices one holds the latent and the
key that turns, the other keys and values head by head.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import log, sqrt
from typing import Any

from dovetail.core.errors import SpecError
from dovetail.model import Model
from dovetail.port.convert import STACK
from dovetail.port.expert import whole
from dovetail.port.rotary import Rotary
from dovetail.port.table import ABSENT, Config, Field, Follows, Nullable, Row, Same, Settings, Switch, look

MIXER = "layers.*.mixer"


class Turning(Rotary):
    """Rope of the channels that turn, and what YaRN of theirs does to scores."""

    def give(self, spec: Model) -> dict[str, Any]:
        said = super().give(spec)
        scale, factor = look(spec, f"{MIXER}.scale"), look(spec, f"{self.ours}.scaling.factor")
        if scale not in (None, ABSENT) and isinstance(factor, float) and factor > 1 and "rope_parameters" in said:
            asked = look(spec, f"{MIXER}.nope") + look(spec, f"{MIXER}.rope")
            found = (sqrt(scale * sqrt(asked)) - 1) / (0.1 * log(factor))
            exact = [x for digits in (3, 6, 9, 12, 15, 17) if sharper(x := round(found, digits), factor, asked) == scale]
            said["rope_parameters"] |= {"mscale_all_dim": exact[0]} if exact else {}
        return said

    def take(self, config: Config) -> Settings:
        name = next((name for name in ("rope_parameters", "rope_scaling") if config.get(name)), None)
        own = {} if name is None else config[name]
        if not isinstance(own, Mapping) or own.get("rope_type", own.get("type")) != "yarn":
            return {**super().take(config), f"{MIXER}.scale": None}
        own = dict(own)
        one, whole_head, factor = own.pop("mscale", None), own.pop("mscale_all_dim", None), own.get("factor", 1.0)
        for value in (one, whole_head, factor):
            if value is not None and (isinstance(value, bool) or not isinstance(value, (int, float))):
                raise SpecError(f"config.{name}", f"{value!r} is not a number")
        if one and whole_head:
            own.setdefault("attention_factor", grown(one, factor) / grown(whole_head, factor))
        asked = whole(config, "qk_nope_head_dim", 128) + whole(config, "qk_rope_head_dim", 64)
        scale = sharper(whole_head, factor, asked) if whole_head else None
        return {**super().take({**config, str(name): own}), f"{MIXER}.scale": scale}


def grown(x: float, factor: float) -> float:
    """How much larger numbers get with a text so much longer."""
    return 0.1 * x * log(factor) + 1.0 if factor > 1 else 1.0


def sharper(x: float, factor: float, asked: int) -> float:
    """The scale of scores of heads of so many channels."""
    return asked**-0.5 * grown(x, factor) ** 2


def fields() -> tuple[Field, ...]:
    """The config's fields about latent attention."""
    return (
        Same("num_attention_heads", f"{MIXER}.heads"),
        Follows("num_key_value_heads", f"{MIXER}.heads", said=lambda config: config.get("num_attention_heads")),
        Follows("head_dim", f"{MIXER}.rope", said=lambda config: config.get("qk_rope_head_dim")),
        Same("kv_lora_rank", f"{MIXER}.kv_rank"),
        Nullable("q_lora_rank", f"{MIXER}.q_rank"),
        Same("qk_nope_head_dim", f"{MIXER}.nope"),
        Same("qk_rope_head_dim", f"{MIXER}.rope"),
        Same("v_head_dim", f"{MIXER}.value"),
        Switch("rope_interleave", f"{MIXER}.position.pairs", on="adjacent", off="half"),
        Turning(f"{MIXER}.position", head="rope"),
    )


def tensors(theirs: str, ours: str) -> tuple[Row, ...]:
    """Rows of one latent attention; its last matrix has a row of its own."""
    rank = f"{ours}.q_rank"
    return (
        Row(f"{theirs}.q_proj.weight", f"{ours}.q.weight", unless=rank),
        Row(f"{theirs}.q_b_proj.weight", f"{ours}.q.weight", where=rank),
        Row(f"{theirs}.q_a_proj.weight", f"{ours}.q_down.weight"),
        Row(f"{theirs}.q_a_layernorm.weight", f"{ours}.q_norm.scale"),
        Row(f"{theirs}.kv_a_proj_with_mqa.weight", f"{ours}.kv_down.weight", f"{ours}.turned.weight", convert=STACK),
        Row(f"{theirs}.kv_a_layernorm.weight", f"{ours}.kv_norm.scale"),
        Row(f"{theirs}.kv_b_proj.weight", f"{ours}.k_up.weight", f"{ours}.v_up.weight", woven=f"{ours}.heads"),
    )
