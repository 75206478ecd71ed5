"""Qwen2-VL's text model: Qwen 2 whose rotary pairs take the time, height and width of a patch (Wang et al. 2024).

The class has no head: it returns hidden states. Its positions come from outside (`positions`): those of text are equal on all
three coordinates, those of an image are its grid, and text behind an image continues at the largest plus one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from dovetail.base.errors import SpecError
from dovetail.hf.dialect.qwen2 import QWEN2
from dovetail.hf.field import Config, Settings, value_at
from dovetail.hf.rotary import Rotary
from dovetail.hf.table import Form
from dovetail.model.model import Model

SECTIONS = "mrope_section"
DEFAULT = [16, 24, 24]  # of a head of 128


class MultimodalRotary(Rotary):
    """RoPE with `mrope_section`, the pairs per coordinate; the type `mrope` of older files is the default one."""

    def to_hf(self, spec: Model) -> dict[str, Any]:
        written, sections = super().to_hf(spec), value_at(spec, f"{self.path}.sections")
        if written and isinstance(sections, tuple) and sections:
            written["rope_parameters"] |= {SECTIONS: list(sections)}
        return written

    def from_hf(self, config: Config) -> Settings:
        plain, sections = dict(config), DEFAULT
        for name in ("rope_scaling", "rope_parameters"):
            if isinstance(params := config.get(name), Mapping):
                sections = params.get(SECTIONS, sections)
                kept = {field: value for field, value in params.items() if field != SECTIONS}
                plain[name] = {field: "default" if value == "mrope" else value for field, value in kept.items()}
        if not isinstance(sections, (list, tuple)) or len(sections) != 3 or not all(type(pairs) is int for pairs in sections):
            raise SpecError(f"config.rope_parameters.{SECTIONS}", f"{sections!r} is not a list of 3 integers")
        return {**super().from_hf(plain), f"{self.path}.sections": list(sections)}


QWEN2_VL_TEXT = QWEN2.variant(
    "qwen2_vl_text",
    forms=(Form(architecture="Qwen2VLTextModel", auto="AutoModel", answer="last_hidden_state", head={"head": None}),),
    layer={"mixer": {"position": {"kind": "rope", "coords": 3, "sections": [4, 6, 6]}}},  # of a head of 32, our default
    fields=(MultimodalRotary("layers.*.mixer.position"),),
    ignored=("tie_word_embeddings",),
    defaults={"num_key_value_heads": 8, "max_window_layers": 80, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
)
