"""Draw the attention maps of a layer: the attention probs of each head, from each token (row) to each other (column).

dovetail map llama-tiny-trained "To be, or not to be, that is the question" -o map.png --layer 3
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

from dovetail.api.models import load
from dovetail.api.options import InDir, OutFile
from dovetail.api.result import Result
from dovetail.core.errors import FileError, InputError
from dovetail.core.keywords import checks_keywords
from dovetail.core.option import Option
from dovetail.disk.atomic import check_free
from dovetail.views.blocks import View

if TYPE_CHECKING:
    from torch import Tensor

    from dovetail.hf.load import Watch

GENERATED = 48  # tokens of a decoder that is given no target


@checks_keywords
@dc.dataclass(frozen=True, repr=False, eq=False)
class AttentionMap(Result):
    """The attention probs of one layer: `probs[head, i, j]` from token i to token j; of an encoder–decoder from token i of the
    decoder to token j of the source."""

    name: str
    layer: int
    layers: int  # of the model
    labels: tuple[str, ...]  # the tokens
    probs: Tensor  # (heads, n, n), or (heads, n, m)
    out: Path | None = None  # the picture
    source: tuple[str, ...] | None = None  # the m tokens of the source, of an encoder–decoder

    def to_dict(self) -> dict[str, Any]:
        data: dict[str, Any] = {"model": self.name, "layer": self.layer, "layers": self.layers, "heads": len(self.probs)}
        probs = cast("list[Any]", self.probs.tolist())  # pyright: ignore[reportUnknownMemberType]
        data["tokens"] = list(self.labels)
        if self.source is not None:
            data["source"] = list(self.source)
        return {**data, "picture": None if self.out is None else str(self.out), "probs": probs}

    def view(self, width: int) -> View:
        size = f"layer {self.layer} of {self.layers}, {len(self.probs)} heads, {len(self.labels)} tokens"
        if self.source is not None:
            size += f" over {len(self.source)} of the source"
        return size if self.out is None else f"{size}: {self.out}"

    def draw(
        self, path: str | Path, heads: Sequence[int] = (), force: Annotated[bool, Option("Replace an existing file.")] = False
    ) -> None:
        """Draw one panel per head (default: all) to a .png, .svg or .pdf file; an existing one is replaced if `force`."""
        from dovetail.views.map import draw_map

        check_free(path, force)
        columns = "to each other" if self.source is None else "of the decoder to those of the source"
        title = f"{self.name}, layer {self.layer}: attention from each token (row) {columns} (column)"
        draw_map(self.probs, self.labels, heads or range(len(self.probs)), path, title, self.source)


def map(
    model: Annotated[
        str | Path, InDir("A model directory with a tokenizer.json: ours, or in Hugging Face layout.", argument=True)
    ],
    text: Annotated[
        str,
        Option(
            "The input of the model: a sentence or two; the source of an encoder–decoder, whose cross attention is drawn.",
            argument=True,
        ),
    ],
    *,
    target: Annotated[str | None, Option("What the decoder of an encoder–decoder reads (default: what it generates).")] = None,
    out: Annotated[
        str | Path | None, OutFile("The picture to write: .png, .svg or .pdf (the command: map.png).", short="-o")
    ] = None,
    layer: Annotated[int | None, Option("The layer, counted from 0; −1 is the last (default: the middle one).")] = None,
    heads: Annotated[Sequence[int], Option("The heads to draw, counted from 0 (default: all).")] = (),
    force: Annotated[bool, Option("Replace an existing file.")] = False,
    watch: Watch | None = None,
) -> AttentionMap:
    """Return the attention probs of one layer for a text, and draw them to `out` if given.

    `model` is a model directory with a tokenizer. An encoder–decoder reads `text` as its source, and the map is that of its
    cross attention: the rows are the tokens of `target`, by default those that the model generates. `layer` counts from 0, or
    from −1 backwards; the middle one by default. `heads` selects the heads that are drawn. An existing file is replaced if
    `force`.
    """
    import torch

    from dovetail.core.finite import check_weights
    from dovetail.views.map import attention_of

    if out is not None:
        check_free(out, force)  # before the model is read
    module = load(model, watch=watch)
    spec, vocabulary = module.spec, module.vocabulary
    check_weights(module, spec)
    if vocabulary is None or vocabulary.tokenizer is None:
        raise FileError(
            f"{model}: has no tokenizer.json, so no text can be read; call model.trace(ids, 'layers.*.mixer.pattern')"
        )
    tokenizer = vocabulary.tokenizer
    tokens, source = torch.tensor(tokenizer.prompt(text), dtype=torch.long), None  # with [CLS], <s> … as the model was trained
    if spec.encoder is not None:
        source = tokens
        after = module.generate(source, GENERATED) if target is None else tokenizer.prompt(target)
        tokens = torch.tensor([*vocabulary.start, *after], dtype=torch.long)
    elif target is not None:
        raise InputError("target: is read by the decoder of an encoder–decoder; leave it out")
    depth = len(spec.layers)
    layer = depth // 2 if layer is None else layer
    probs = attention_of(module, tokens, layer, source)
    labels, keys = (None if ids is None else tuple(tokenizer.label(int(token)) for token in ids) for ids in (tokens, source))
    path = None if out is None else Path(out)
    result = AttentionMap(Path(model).name, layer % depth, depth, labels or (), probs, path, keys)
    if path is not None:
        result.draw(path, heads, force)
    return result
