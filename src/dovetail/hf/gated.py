"""Plain or gated FFNs: by a prefix of the activation (T5's `gated-gelu`), or by a switch and a ratio to the width (DINOv2)."""

from __future__ import annotations

from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.field import ACTIVATIONS, Choice, Config, Field, Settings, is_kind, value_at
from dovetail.model.model import Model

RATIO, GATED = "mlp_ratio", "use_swiglu_ffn"


class GatedActivation(Field):
    """`relu` is a plain FFN, `gated-silu` a gated one; `gated-gelu` is the tanh approximation."""

    names = ("feed_forward_proj", "dense_act_fn", "is_gated_act")

    def __init__(self, *paths: str) -> None:
        self.paths = paths

    def to_hf(self, spec: Model) -> dict[str, Any]:
        ffn, act = value_at(spec, self.paths[0]), value_at(spec, f"{self.paths[0]}.act")
        words = [word for word, kind in ACTIVATIONS.items() if is_kind(act, kind) and word != "gelu_pytorch_tanh"]
        if not words:
            return {}
        gated = is_kind(ffn, "glu")
        word = "gelu" if gated and words[0] == "gelu_new" else words[0]
        return {} if gated and words[0] == "gelu" else {"feed_forward_proj": f"gated-{word}" if gated else word}

    def from_hf(self, config: Config) -> Settings:
        value = config.get("feed_forward_proj", "relu")
        gate, _, word = value.rpartition("-") if isinstance(value, str) else ("", "", "")
        if word not in ACTIVATIONS or gate not in ("", "gated"):
            known = f"supported: {', '.join(ACTIVATIONS)}, each also after gated-"
            raise SpecError("config.feed_forward_proj", f"{value!r} is unsupported", known)
        act = "gelu_tanh" if value == "gated-gelu" else ACTIVATIONS[word]
        ffn = {"kind": "glu" if gate else "mlp", "act": act, "bias": False}
        return dict.fromkeys(self.paths, ffn)


def gated_hidden(hidden: int) -> int:
    """Two thirds of a plain FFN's hidden size, rounded up to a multiple of 8."""
    return (int(hidden * 2 / 3) + 7) // 8 * 8


class MlpRatio(Field):
    """The hidden size as a multiple of the width; a gated FFN has about two thirds of it."""

    names = (RATIO, GATED)

    def to_hf(self, spec: Model) -> dict[str, Any]:
        ffn, hidden = value_at(spec, "layers.*.ffn"), value_at(spec, "layers.*.ffn.hidden")
        if not isinstance(hidden, int):
            return {}
        width, gated = spec.width, is_kind(ffn, "glu")
        least, most = (3 * (hidden - 8) // (2 * width), 3 * hidden // (2 * width) + 2) if gated else (hidden // width,) * 2
        sizes = {n: gated_hidden(width * n) if gated else width * n for n in range(max(1, least), most + 1)}
        ratios = [n for n, size in sizes.items() if size == hidden]
        return {RATIO: ratios[0], GATED: gated} if ratios else {GATED: gated}

    def from_hf(self, config: Config) -> Settings:
        ratio, width, gated = config.get(RATIO), config.get("hidden_size"), config.get(GATED, False)
        if type(ratio) is not int or type(width) is not int or ratio < 1 or not isinstance(gated, bool):
            raise SpecError(f"config.{RATIO}", f"{ratio!r} is not a whole number above 0")
        if gated:
            return {"layers.*.ffn": {"kind": "glu", "bias": True, "hidden": gated_hidden(width * ratio)}}
        return {"layers.*.ffn": {"kind": "mlp", "act": "gelu", "hidden": width * ratio}}


class Activation(Choice):
    """The activation of a plain FFN; a gated one always has silu."""

    def from_hf(self, config: Config) -> Settings:
        return {} if config.get(GATED) else super().from_hf(config)
