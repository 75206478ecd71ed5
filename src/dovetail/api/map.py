"""Draw the attention of a layer, from each token (row) to each other (column) of each head; or the logit lens of a text.

dovetail map llama-tiny-trained "To be, or not to be, that is the question" -o map.png --layer 3
dovetail map llama-tiny-trained "To be, or not to be, that is the question" -o lens.html --of lens
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

from dovetail.api.models import load
from dovetail.api.options import InDir, OutFile
from dovetail.api.result import Result
from dovetail.base.errors import FileError, InputError, UsageError
from dovetail.base.keywords import checks_keywords
from dovetail.base.option import Option
from dovetail.disk.atomic import check_free
from dovetail.views.blocks import View

if TYPE_CHECKING:
    from torch import Tensor

    from dovetail.hf.load import Watch
    from dovetail.look.lenses import Lens
    from dovetail.look.sweeps import Sweep
    from dovetail.model.transformer import Transformer
    from dovetail.text.tokenizer import Tokenizer

GENERATED = 48  # tokens of a decoder that is given no target


@checks_keywords
@dc.dataclass(frozen=True, repr=False, eq=False)
class AttentionMap(Result):
    """The attention of one layer: `probs[head, i, j]` from token i to token j; of an encoder–decoder from token i of the
    decoder to token j of the source. Of a mixer without a softmax it is effective attention, which may be negative."""

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
        """Draw one panel per head (default: all) to a .png, .svg, .pdf or .html file; `force` replaces an existing one."""
        from dovetail.views.map import draw_map

        check_free(path, force)
        columns = "to each other" if self.source is None else "of the decoder to those of the source"
        title = f"{self.name}, layer {self.layer}: attention from each token (row) {columns} (column)"
        draw_map(self.probs, self.labels, heads or range(len(self.probs)), path, title, self.source)


@checks_keywords
@dc.dataclass(frozen=True, repr=False, eq=False)
class LensMap(Result):
    """What the residual stream before each layer predicts at each token of a text."""

    name: str
    labels: tuple[str, ...]  # the tokens
    lens: Lens  # of one row
    words: tuple[str, ...]  # the most probable tokens, layer by layer
    out: Path | None = None

    def to_dict(self) -> dict[str, Any]:
        tables = {name: getattr(self.lens, name)[:, 0] for name in ("prob", "rank", "kl")}
        data: dict[str, Any] = {
            "model": self.name,
            "tokens": list(self.labels),
            "picture": None if self.out is None else str(self.out),
        }
        data |= {name: cast("list[Any]", x.tolist()) for name, x in tables.items()}  # pyright: ignore[reportUnknownMemberType]
        return {**data, "points": list(self.lens.addresses), "predicted": list(self.words)}

    def view(self, width: int) -> View:
        size = f"{len(self.lens.addresses)} points of the residual stream, {len(self.labels)} tokens"
        return size if self.out is None else f"{size}: {self.out}"


def draw(result: Sweep, out: str | Path, *, labels: Sequence[str] = (), title: str = "", force: bool = False) -> None:
    """Draw the effects of a `dt.look.sweep` to a .png, .svg, .pdf or .html file: a row per address, a column per index.

    `labels` are the names of the indices, such as the tokens. An existing file is replaced if `force`."""
    from dovetail.views.heat import draw_heat, sweep_heat

    check_free(out, force)
    draw_heat(sweep_heat(result, labels, title), out)


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
        str | Path | None, OutFile("The picture to write: .png, .svg, .pdf or .html (the command: map.png).", short="-o")
    ] = None,
    layer: Annotated[int | None, Option("The layer, counted from 0; −1 is the last (default: the middle one).")] = None,
    heads: Annotated[Sequence[int], Option("The heads to draw, counted from 0 (default: all).")] = (),
    of: Annotated[
        Literal["attention", "lens"], Option("attention: of one layer; lens: what the model would predict after each layer.")
    ] = "attention",
    force: Annotated[bool, Option("Replace an existing file.")] = False,
    watch: Watch | None = None,
) -> AttentionMap | LensMap:
    """Return the attention of one layer for a text, or its logit lens, and draw it to `out` if given.

    `model` is a model directory with a tokenizer. A mixer without a softmax has effective attention (`dt.look.patterns`). An
    encoder–decoder reads `text` as its source, and the map is that of its cross attention: the rows are the tokens of `target`,
    by default those that the model generates. `layer` counts from 0, or from −1 backwards; the middle one by default. `heads`
    selects the heads that are drawn. An .html page shows one head large and all small, with the tokens and the value under the
    pointer. An existing file is replaced if `force`.
    """
    import torch

    from dovetail.nn.finite import check_weights
    from dovetail.views.map import attention_of

    if out is not None:
        check_free(out, force)  # before the model is read
    if of == "lens" and (layer is not None or heads or target is not None):
        raise UsageError("of: a lens shows every layer of one text; leave out layer, heads and target")
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
    if of == "lens":
        return _lens(module, tokenizer, tokens, Path(model).name, out, source)
    depth = len(spec.layers)
    layer = depth // 2 if layer is None else layer
    probs = attention_of(module, tokens, layer, source, out)
    labels, keys = (None if ids is None else tuple(tokenizer.label(int(token)) for token in ids) for ids in (tokens, source))
    path = None if out is None else Path(out)
    result = AttentionMap(Path(model).name, layer % depth, depth, labels or (), probs, path, keys)
    if path is not None:
        result.draw(path, heads, force)
    return result


def _lens(
    model: Transformer, tokenizer: Tokenizer, tokens: Tensor, name: str, out: str | Path | None, source: Tensor | None
) -> LensMap:
    from dovetail.look.lenses import lens
    from dovetail.views.heat import check_size, draw_heat, lens_heat

    if source is not None:
        raise InputError("of: the lens of an encoder–decoder needs its target as ids; call dt.look.lens(model, ids, ctx=…)")
    check_size(out, len(model.part.layers) + 1, len(tokens))
    result = lens(model, tokens[None].to(model.device), top=1)
    labels = tuple(tokenizer.label(int(token)) for token in tokens)
    words = tuple(tokenizer.label(int(token)) for token in result.tokens[:, 0, :, 0].flatten())
    path = None if out is None else Path(out)
    if path is not None:
        draw_heat(lens_heat(result, labels, words, f"{name}: the most probable next token after each layer"), path)
    return LensMap(name, labels, result, words, path)
