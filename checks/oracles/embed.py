"""Oracles of embeddings: rows of a table, and patches of an image, row by row."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from checks.oracles.first_rank import Halved
from dovetail.base.errors import InputError
from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.ranks import Ranks
from dovetail.proof.laws.oracle import Comparison, alone, ctx, eye, numbers, oracle, part, row
from dovetail.spec.scope import Scope

TABLE = [[1.0, 2.0, 3.0, 4.0], [10.0, 20.0, 30.0, 40.0], [5.0, 6.0, 7.0, 8.0]]


@oracle("tokens")
def tokens() -> Iterator[Comparison]:
    """Token 2 is row 2; √4 = 2 where the width scales it; types are added unscaled."""
    ids = torch.tensor([[2, 0]])
    plain = alone(part("tokens"), {"table": TABLE}, vocab=3, embed=4)
    yield Comparison("rows 2 and 0", plain(ids, ctx(2))[0], [[[5.0, 6.0, 7.0, 8.0], [1.0, 2.0, 3.0, 4.0]]], near=0)
    scaled = alone(part("tokens", scale=0.5, scale_by_width=True), {"table": TABLE}, vocab=3, embed=4)
    yield Comparison("½ · √4", scaled(ids, ctx(2))[0], [[[5.0, 6.0, 7.0, 8.0], [1.0, 2.0, 3.0, 4.0]]])
    wide = alone(part("tokens", scale_by_width=True), {"table": TABLE}, vocab=3, embed=4)
    yield Comparison("√4", wide(ids, ctx(2))[0], [[[10.0, 12.0, 14.0, 16.0], [2.0, 4.0, 6.0, 8.0]]])
    types = {"table": TABLE, "type_table": [[0.1, 0.2, 0.3, 0.4], [100.0, 200.0, 300.0, 400.0]]}
    typed = alone(part("tokens", types=2, scale_by_width=True), types, vocab=3, embed=4)
    second = typed(ids, Ctx(layout=row(2), types=torch.tensor([[0, 1]])))[0]
    yield Comparison("types 0 and 1", second, [[[10.1, 12.2, 14.3, 16.4], [102.0, 204.0, 306.0, 408.0]]])
    default = typed(ids, ctx(2))[0]
    yield Comparison("type 0 where none is given", default, [[[10.1, 12.2, 14.3, 16.4], [2.1, 4.2, 6.3, 8.4]]])
    weights = {"table": [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], "project.weight": [[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]}
    narrow = alone(part("tokens", width=2), {**weights, "project.bias": [0.0, 0.0, 0.5]}, vocab=3, table=2, embed=3)
    yield Comparison("two channels", narrow(ids, ctx(2))[0], [[[5.0, 6.0], [1.0, 2.0]]], near=0)
    yield Comparison("projected to three", narrow.widen(numbers([[[5.0, 6.0]]])), [[[5.0, 6.0, 11.5]]], near=0)
    first = alone(part("tokens"), {"table": [*TABLE, [9.0, 9.0, 9.0, 9.0]]}, vocab=4, embed=4)
    first.table = Parameter(numbers(TABLE[:2]))  # the first of two ranks has rows 0 and 1; row 2 comes from the other
    both = first(ids, Ctx(layout=row(2), ranks=Ranks(Halved([[[5.0, 6.0, 7.0, 8.0], [0.0, 0.0, 0.0, 0.0]]]))))[0]
    yield Comparison("rows of two ranks", both.detach(), [[[5.0, 6.0, 7.0, 8.0], [1.0, 2.0, 3.0, 4.0]]], near=0)
    yield from _shared()


def _shared() -> Iterator[Comparison]:
    """An encoder that shares its decoder's table: one table, or two."""
    layer = part("block", mixer=part("attention", heads=2), ffn=None)
    deep = part("block", mixer=part("attention", heads=2), cross=part("cross_attention", heads=2), ffn=None)
    for shared, tables in ((True, 1), (False, 2)):
        encoder = part("model", width=4, vocab=3, embed=part("tokens", shared=shared), layers=(layer,), head=None)
        model = build(part("model", width=4, vocab=3, encoder=encoder, layers=(deep,)))
        names = [name for name, _ in model.named_parameters() if name.endswith("embed.table")]
        yield Comparison(f"tables, shared {shared}", len(names), tables, near=0)


@oracle("tokens_and_patches")
def tokens_and_patches() -> Iterator[Comparison]:
    """Ids 0 to 2 are rows of the table, 3 and 4 the two patches; the values of a patch by channel, then row by row."""
    table = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    weights = {"table": table, "project.weight": [[1.0, 0.0, 0.0, 10.0], [0.0, 1.0, -1.0, 0.0]], "project.bias": [0.5, 0.25]}
    module = alone(part("tokens_and_patches", patch=2, channels=1), weights, embed=2, vocab=3)
    patches = numbers([[[[1.0, 2.0], [3.0, 4.0]]], [[[5.0, 6.0], [8.0, 7.0]]]])
    ids = torch.tensor([[4, 3, 2, 0], [1, 3, 3, 2]])
    x, _ = module(ids, Ctx(layout=TokenLayout.whole(2, 4), patches=patches))
    # 1 + 10·4 + ½ and 2 − 3 + ¼; 5 + 10·7 + ½ and 6 − 8 + ¼
    first, second = [41.5, -0.75], [75.5, -1.75]
    yield Comparison("patches among tokens", x, [[second, first, table[2], table[0]], [table[1], first, first, table[2]]])
    text, _ = module(torch.tensor([[2, 1]]), ctx(2))
    yield Comparison("text alone needs no patches", text, [[table[2], table[1]]], near=0)
    yield Comparison("a patch that is not there", _message(module, torch.tensor([[3]])), "token id 3 is neither")
    pixels = part("tokens_and_patches", patch=1, channels=2, bias=False)
    channels = alone(pixels, {"table": table, "project.weight": eye(2)}, embed=2, vocab=3)
    x, _ = channels(torch.tensor([[3]]), Ctx(layout=row(1), patches=numbers([[[[7.0]], [[9.0]]]])))
    yield Comparison("two channels, no bias", x, [[[7.0, 9.0]]])


def _message(module: Any, ids: Tensor) -> str:
    try:
        module(ids, ctx(1))
    except InputError as error:
        return "token id 3 is neither" if "token id 3 is neither a token nor a patch" in str(error) else str(error)
    return "no refusal"


@oracle("patches")
def patches() -> Iterator[Comparison]:
    """Patches from left to right, then down; the values of one by channel, then row by row. 224²/16² = 196 patches of 768."""
    square = part("patches", image=4, patch=2, channels=1)
    image = torch.arange(16.0, dtype=torch.float64).view(1, 1, 4, 4)
    weights = {"project.weight": eye(4), "project.bias": [0.5] * 4, "class_token": [-1.0, -2.0, -3.0, -4.0]}
    x, layout = alone(square, weights, embed=4)(image, ctx(5))
    expected = [[0.5, 1.5, 4.5, 5.5], [2.5, 3.5, 6.5, 7.5], [8.5, 9.5, 12.5, 13.5], [10.5, 11.5, 14.5, 15.5]]
    yield Comparison("a class token, then four patches", x, [[[-1.0, -2.0, -3.0, -4.0], *expected]])
    yield Comparison("coordinates", layout.coords, [[[0, 0], [0, 0], [0, 1], [1, 0], [1, 1]]], near=0)
    yield Comparison("order", layout.order, [[0, 1, 2, 3, 4]], near=0)
    two = part("patches", image=2, patch=1, channels=2, class_token=False, bias=False)
    pixels = numbers([[[[1.0, 2.0], [3.0, 4.0]], [[10.0, 20.0], [30.0, 40.0]]]])
    x, layout = alone(two, {"project.weight": eye(2)}, embed=2)(pixels, ctx(4))
    yield Comparison("channels of a pixel", x, [[[1.0, 10.0], [2.0, 20.0], [3.0, 30.0], [4.0, 40.0]]])
    big = part("patches")
    yield Comparison("tokens of 224² in 16²", big.tokens(), 197, near=0)
    yield Comparison("values of a patch", big.axes(Scope(sizes={"embed": 8})).size("patch_values"), 768, near=0)
    small = alone(part("patches", bias=False), {"project.weight": [[1.0] * 768], "class_token": [5.0]}, embed=1)
    x, _ = small(torch.ones(1, 3, 224, 224), ctx(1))
    yield Comparison(
        "196 patches of 768 ones, and the class token", [x.shape[-2], x[0, 0, 0].item(), x[0, 196, 0].item()], [197, 5.0, 768.0]
    )
