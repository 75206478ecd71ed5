"""map: the attention maps of one layer."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
from rich.console import RenderableType
from torch import Tensor

from dovetail.api.result import Result
from dovetail.core.finite import check_weights
from dovetail.core.keywords import checks_keywords
from dovetail.io.atomic import check_free
from dovetail.look.console import unwrapped
from dovetail.look.map import attention_of, draw_map
from dovetail.port.load import Watch, load
from dovetail.text.tokenizer import Tokenizer


@checks_keywords
@dc.dataclass(frozen=True, repr=False, eq=False)
class AttentionMap(Result):
    """The attention probs of one layer: `probs[head, i, j]` from token i to token j."""

    name: str
    layer: int
    layers: int  # of the model
    labels: tuple[str, ...]  # the tokens
    probs: Tensor  # (heads, n, n)
    out: Path | None = None  # the picture

    def to_dict(self) -> dict[str, Any]:
        data = {"model": self.name, "layer": self.layer, "layers": self.layers, "heads": len(self.probs)}
        probs = cast("list[Any]", self.probs.tolist())  # pyright: ignore[reportUnknownMemberType]
        return {**data, "tokens": list(self.labels), "picture": None if self.out is None else str(self.out), "probs": probs}

    def view(self, width: int) -> RenderableType:
        size = f"layer {self.layer} of {self.layers}, {len(self.probs)} heads, {len(self.labels)} tokens"
        return unwrapped(size if self.out is None else f"{size}: {self.out}")

    def draw(self, path: str | Path, heads: Sequence[int] = (), force: bool = False) -> None:
        """Draw one panel per head (default: all) to a .png, .svg or .pdf file; an existing one is replaced if `force`."""
        check_free(path, force)
        title = f"{self.name}, layer {self.layer}: attention from each token (row) to each other (column)"
        draw_map(self.probs, self.labels, heads or range(len(self.probs)), path, title)


def map(
    model: str | Path,
    text: str,
    *,
    out: str | Path | None = None,
    layer: int | None = None,
    heads: Sequence[int] = (),
    force: bool = False,
    watch: Watch | None = None,
) -> AttentionMap:
    """Return the attention probs of one layer for a text, and draw them to `out` if given.

    `model` is a model directory with a tokenizer. `layer` counts from 0, or from −1 backwards; the middle one by default.
    `heads` selects the heads that are drawn. An existing file is replaced if `force`.
    """
    if out is not None:
        check_free(out, force)  # before the model is read
    module = load(model, watch=watch)
    spec = module.part
    check_weights(module, spec)
    tokenizer = Tokenizer.load(Path(model))
    tokens = torch.tensor(tokenizer.prompt(text), dtype=torch.long)  # with [CLS], <s> … as the model was trained
    depth = len(spec.layers)
    layer = depth // 2 if layer is None else layer
    probs = attention_of(module, tokens, layer)
    labels = tuple(tokenizer.label(int(token)) for token in tokens)
    path = None if out is None else Path(out)
    result = AttentionMap(Path(model).name, layer % depth, depth, labels, probs, path)
    if path is not None:
        result.draw(path, heads, force)
    return result
