"""Maps of a text: the attention of each head of a layer, one panel per head (rows are queries, columns are keys), or the lens.

A mixer without a softmax has effective attention, per head or per channel. An encoder–decoder has the alignment of its cross
attention: rows are the tokens of the decoder, columns those of the source. The drawing is in heat.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from dovetail.base.errors import SpecError
from dovetail.look.mixing import patterns
from dovetail.model.model import Model
from dovetail.model.transformer import Transformer
from dovetail.nn.finite import check_result
from dovetail.spec.fold import taps, walk
from dovetail.views.heat import Heat, check_size, draw_heat


def attention_of(
    model: Transformer, tokens: Tensor, layer: int, source: Tensor | None = None, path: str | Path | None = None
) -> Tensor:
    """Return the attention (heads, n, n) of one layer for tokens (n,), as probs or effective; the probs of cross attention
    (heads, n, m) for a source (m,) of an encoder–decoder. `path` is the file that it will be drawn to."""
    check_size(path, len(tokens), len(tokens if source is None else source))
    depth = len(model.part.layers)
    if not -depth <= layer < depth:
        raise SpecError(f"layers.{layer}", "there is no such layer", f"layers are 0 to {depth - 1}")
    address = f"layers.{layer % depth}.cross.pattern"
    if source is None:
        found = patterns(model, tokens[None], [layer])
        if not found:
            raise SpecError(f"layers.{layer % depth}", "has no mixer of tokens, so it has no map", "choose another layer")
        address = next(iter(found))
        pattern = found[address][0]
    else:
        _check_mapped(model.part, address)
        pattern = model.trace(tokens[None], address, source=source[None])[address][0]
    check_result(pattern, address)
    return pattern


def _check_mapped(spec: Model, address: str) -> None:
    """Raise SpecError if the branch of a layer has no attention probs, with the layers that have some."""
    path, name = address.rpartition(".")[0], address.split(".", 2)[2]
    mapped = [tap.split(".")[1] for tap in taps(spec) if tap.startswith("layers.") and tap.split(".", 2)[2] == name]
    if address.split(".")[1] in mapped:
        return
    part = {node: part.kind for node, part, _ in walk(spec)}.get(path)
    problem = "the layer has no such branch" if part is None else f"{part} computes no attention probs, so it has no map"
    raise SpecError(path, problem, f"layers with a map: {', '.join(mapped)}" if mapped else "no layer of this model has a map")


def draw_map(
    pattern: Tensor,
    labels: Sequence[str],
    heads: Sequence[int],
    path: str | Path,
    title: str,
    columns: Sequence[str] | None = None,
) -> None:
    """Draw one panel per head of `heads` from attention (all heads, n, m), with the tokens as labels: those of the rows, and
    those of the columns if they differ."""
    for head in heads:
        if not 0 <= head < len(pattern):
            raise SpecError(f"heads.{head}", "there is no such head", f"heads are 0 to {len(pattern) - 1}")
    names, values = [f"head {head}" for head in heads], pattern[list(heads)]
    what = "attention prob" if bool(((pattern >= 0) & (pattern <= 1)).all()) else "effective attention"
    draw_heat(Heat(title, what, names, values, labels, labels if columns is None else columns), path)
