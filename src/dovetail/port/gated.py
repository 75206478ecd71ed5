"""Plain or gated ffns in their words: by a prefix (T5's `gated-gelu`), or by a switch and a number of widths (DINOv2)."""

from __future__ import annotations

from typing import Any

from dovetail.core.errors import SpecError
from dovetail.model import Model
from dovetail.port.table import ACTIVATIONS, Config, Named, Settings, is_kind, look

RATIO, GATED = "mlp_ratio", "use_swiglu_ffn"


class GatedWord:
    """`relu` is a plain ffn, `gated-silu` a gated one; their `gated-gelu` means the tanh approximation."""

    names = ("feed_forward_proj", "dense_act_fn", "is_gated_act")

    def __init__(self, *ours: str) -> None:
        self.ours = ours

    def give(self, spec: Model) -> dict[str, Any]:
        ffn, act = look(spec, self.ours[0]), look(spec, f"{self.ours[0]}.act")
        words = [word for word, kind in ACTIVATIONS.items() if is_kind(act, kind) and word != "gelu_pytorch_tanh"]
        if not words:
            return {}
        gated = is_kind(ffn, "glu")
        word = "gelu" if gated and words[0] == "gelu_new" else words[0]
        return {} if gated and words[0] == "gelu" else {"feed_forward_proj": f"gated-{word}" if gated else word}

    def take(self, config: Config) -> Settings:
        said = config.get("feed_forward_proj", "relu")
        gate, _, word = said.rpartition("-") if isinstance(said, str) else ("", "", "")
        if word not in ACTIVATIONS or gate not in ("", "gated"):
            known = f"known: {', '.join(ACTIVATIONS)}, each also behind gated-"
            raise SpecError("config.feed_forward_proj", f"{said!r} is not known", known)
        act = "gelu_tanh" if said == "gated-gelu" else ACTIVATIONS[word]
        ffn = {"kind": "glu" if gate else "mlp", "act": act, "bias": False}
        return dict.fromkeys(self.ours, ffn)


def gated_hidden(wide: int) -> int:
    """Two thirds of a plain ffn's, rounded up to a multiple of 8."""
    return (int(wide * 2 / 3) + 7) // 8 * 8


class Widths:
    """A whole number of widths; gated ones have about two thirds of that."""

    names = (RATIO, GATED)

    def give(self, spec: Model) -> dict[str, Any]:
        ffn, hidden = look(spec, "layers.*.ffn"), look(spec, "layers.*.ffn.hidden")
        if not isinstance(hidden, int):
            return {}
        width, gated = spec.width, is_kind(ffn, "glu")
        least, most = (3 * (hidden - 8) // (2 * width), 3 * hidden // (2 * width) + 2) if gated else (hidden // width,) * 2
        sizes = {n: gated_hidden(width * n) if gated else width * n for n in range(max(1, least), most + 1)}
        ratios = [n for n, size in sizes.items() if size == hidden]
        return {RATIO: ratios[0], GATED: gated} if ratios else {GATED: gated}

    def take(self, config: Config) -> Settings:
        ratio, width, gated = config.get(RATIO), config.get("hidden_size"), config.get(GATED, False)
        if type(ratio) is not int or type(width) is not int or ratio < 1 or not isinstance(gated, bool):
            raise SpecError(f"config.{RATIO}", f"{ratio!r} is not a whole number above 0")
        if gated:
            return {"layers.*.ffn": {"kind": "glu", "bias": True, "hidden": gated_hidden(width * ratio)}}
        return {"layers.*.ffn": {"kind": "mlp", "act": "gelu", "hidden": width * ratio}}


class Activation(Named):
    """Of a plain ffn; a gated one has silu whatever is said."""

    def take(self, config: Config) -> Settings:
        return {} if config.get(GATED) else super().take(config)
