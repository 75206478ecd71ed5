"""Write a small checkpoint of a model in Hugging Face layout, from only a config, for tests of any library that loads one.

All sizes are small and different; every kind of layer is kept. Weights are random, and moved until the top-1 token of every
position is clear, so that a comparison of greedy tokens in float32 and bfloat16 does not depend on rounding.

    dovetail tiny qwen3 -o qwen3-small                  a model type, as `dovetail port` lists them
    dovetail tiny Qwen3-8B/config.json -o qwen3-small   a config; no weights are read
    dovetail tiny llama-tiny -o small                   a preset or a .yaml file
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from dovetail.api.arguments import SpecLike, read_spec
from dovetail.api.result import Result
from dovetail.spec.fold import declared
from dovetail.views.blocks import View

if TYPE_CHECKING:
    from dovetail.hf.peaked import Opinion
    from dovetail.model.model import Model
from dovetail.api.options import OUT, Seed
from dovetail.base.option import Option


@dc.dataclass(frozen=True, repr=False)
class TinyCheckpoint(Result):
    """A small checkpoint: its directory, its family, and how clear its top-1 tokens are (None without a vocabulary)."""

    directory: Path
    model_type: str
    architecture: str
    spec: Model
    opinion: Opinion | None

    @property
    def parameters(self) -> int:
        """The number of parameters."""
        return sum(d.size for d in declared(self.spec) if d.weight.stored)

    def to_dict(self) -> dict[str, Any]:
        return {
            "directory": str(self.directory),
            "model_type": self.model_type,
            "architecture": self.architecture,
            "layers": len(self.spec.layers),
            "parameters": self.parameters,
            "margin": None if self.opinion is None else self.opinion.margin,
            "rounding": None if self.opinion is None else self.opinion.rounding,
        }

    def view(self, width: int) -> View:
        lines = [f"{self.directory}: {self.architecture}, {len(self.spec.layers)} layers, {self.parameters:,} parameters"]
        if self.opinion is None:
            lines.append("random weights; it has no logits over a vocabulary")
        else:
            margin, rounding = self.opinion.margin, self.opinion.rounding
            lines.append(f"least margin of the top-1 token {margin:.2g}; bfloat16 moves a logit by at most {rounding:.2g}")
        return "\n".join(lines)


def tiny(
    model: Annotated[
        SpecLike | Mapping[str, Any],
        Option("A model type, a config.json, a model directory, a preset's name or a .yaml file.", form="MODEL", argument=True),
    ],
    out: Annotated[str | Path, OUT],
    *,
    family: Annotated[
        str | None,
        Option(
            "The model_type to write, as `dovetail port` lists them (default: that of the config, else the first that fits)."
        ),
    ] = None,
    seed: Annotated[int, Seed("Samples other weights.")] = 0,
    force: Annotated[bool, Option("Replace the directory if it is a model already.")] = False,
) -> TinyCheckpoint:
    """Write a small checkpoint of a model in Hugging Face layout, which transformers loads.

    `model` is a model type (`"llama"`), a config.json or its content, a model directory, a preset or a spec; no weights are
    read. Sizes are small and different, and every kind of layer is kept. Weights are random, a function of `seed`, and moved
    until the top-1 token of every position is clear: bfloat16 and float32 agree on it. `force` replaces an existing model.
    """
    from dovetail.files.model_dir import must_be_free
    from dovetail.hf.peaked import with_peaked_logits
    from dovetail.hf.shrink import shrink
    from dovetail.hf.survey import family_source
    from dovetail.hf.write import write_fresh

    must_be_free(Path(out), force)
    spec, named = family_source(model) or (read_spec(model).spec, None)
    small = shrink(spec, family or named)
    built, opinion = with_peaked_logits(small, seed)
    ported = write_fresh(built, out, family or named)
    return TinyCheckpoint(Path(out), ported.dialect, ported.form.architecture, small, opinion)
