"""Oracles of attention kernels, without parts: every backend, small tiles, and the shapes and needs that costs depend on.

With q = 0 all scores are equal, so that z is the mean of the visible values. With v = 1, 2, 4, 8 … no two sets of keys have the
same sum, so that z determines which keys were visible. The law `fast` tests gradients and larger shapes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import Any

import torch
from torch import Tensor

from dovetail.nn.layout import TokenLayout
from dovetail.nn.view import Scoring
from dovetail.ops.attend import BACKENDS, attend, chosen, is_plain, offering, using
from dovetail.ops.attend_tiled import MaskCache, Work
from dovetail.ops.implementation import Backend, ProblemSize
from dovetail.proof.laws.kernel import small_tiles
from dovetail.proof.laws.oracle import Comparison, numbers, oracle, part, row

EVERY = frozenset({"bias", "bias_grad", "softcap", "sink", "dropout", "edit", "compile"})


def _scoring(mask: Any, heads: int = 1, needs: str = "", **more: Any) -> Scoring:
    return Scoring(mask, 1.0, torch.arange(heads), needs=frozenset(needs.split()), **more)


def _means(
    mask: Any, layout: TokenLayout, keys: TokenLayout | None = None, heads: int = 1, needs: str = "", **more: Any
) -> Tensor:
    """(…, n, heads) the mean of the visible values, of v = 1, 2, 4, 8 …, since all scores are equal."""
    keys = layout if keys is None else keys
    q, k = (torch.zeros(*where.order.shape, heads, 1, dtype=torch.float64) for where in (layout, keys))
    v = (2.0 ** torch.arange(keys.n, dtype=torch.float64))[:, None, None].expand(k.shape)
    return attend(q, k, v, _scoring(mask, heads, needs, **more), layout, keys)[..., 0]


def _by_all(name: str, compute: Callable[[], Tensor], expected: Any, needs: str = "") -> Iterator[Comparison]:
    """The same computation by every backend that offers the needs, in one tile and in tiles of 2 with pieces of 3 keys."""
    for backend in offering(frozenset(needs.split())):
        with using(backend.name):
            yield Comparison(f"{name}, by {backend.name}", compute(), expected)
            with small_tiles(2, 3):
                yield Comparison(f"{name}, by {backend.name} in small tiles", compute(), expected)


CAUSAL = [1.0, 1.5, 7 / 3, 3.75, 6.2, 10.5, 127 / 7]
NEAR = [1.0, 1.5, 7 / 3, 14 / 3, 28 / 3, 56 / 3, 112 / 3]  # the last three


@oracle("attention")
def visible_keys() -> Iterator[Comparison]:
    """Seven tokens: the keys that each query sees, wherever tiles and pieces begin."""
    causal, near = part("causal"), part("causal") & part("window", size=3)
    kept = part("causal") & part("window", size=2, keep=1)
    cases: list[tuple[str, Any, list[float]]] = [
        ("causal", causal, CAUSAL),
        ("a window of 3", near, NEAR),
        ("a window of 2, the first kept", kept, [1.0, 1.5, 7 / 3, 13 / 3, 25 / 3, 49 / 3, 97 / 3]),
        ("full", part("full"), [127 / 7] * 7),
        # 0, 2, 4, 6 are 1, 4, 16, 64; 1, 3, 5 are 2, 8, 32
        ("every second", part("strided", step=2), [21.25, 14.0, 21.25, 14.0, 21.25, 14.0, 21.25]),
        ("every second, causal", causal & part("strided", step=2), [1.0, 2.0, 2.5, 5.0, 7.0, 14.0, 21.25]),
        ("every third", part("strided", step=3), [73 / 3, 9.0, 18.0, 73 / 3, 9.0, 18.0, 73 / 3]),
        ("two behind, two apart", causal & part("dilated", size=2, step=2), [1.0, 2.0, 2.5, 5.0, 10.0, 20.0, 40.0]),
        ("blocks of 3", part("block_local", size=3), [7 / 3] * 3 + [56 / 3] * 3 + [64.0]),
    ]
    for name, mask, means in cases:
        yield from _by_all(name, lambda mask=mask: _means(mask, row(7))[0, :, 0], means)
        # three rows with equal positions: the mask is computed for one of them
        yield from _by_all(f"{name}, rows", lambda mask=mask: _means(mask, TokenLayout.whole(3, 7))[2, :, 0], means)
        # a flat batch of a single sequence whose `start` is known
        flat = TokenLayout(None, torch.arange(7), None, start=0)
        yield from _by_all(f"{name}, flat", lambda mask=mask, flat=flat: _means(mask, flat)[:, 0], means)
    # queries are the last three tokens, two of them, one of them
    yield from _by_all("3 at the end", lambda: _means(near, row(3, start=4), row(7))[0, :, 0], NEAR[4:])
    yield from _by_all("2 at the end", lambda: _means(causal, row(2, start=5), row(7))[0, :, 0], CAUSAL[5:])
    yield from _by_all("the last", lambda: _means(causal, row(1, start=6), row(7))[0, :, 0], CAUSAL[6:])
    yield from _by_all("the last but one", lambda: _means(causal, row(1, start=5), row(7))[0, :, 0], CAUSAL[5:6])
    yield from _by_all("the first two", lambda: _means(causal, row(2), row(7))[0, :, 0], CAUSAL[:2])


@oracle("attention")
def documents() -> Iterator[Comparison]:
    """Documents are separate, padding sees no key and gets 0, rows of a flat batch are separate."""
    causal, even = part("causal"), part("strided", step=2)
    packed, padded = TokenLayout.packed([[3, 2], [1, 4]], 6), TokenLayout.padded([2, 4], 4, left=True)
    means = [[1.0, 1.5, 7 / 3, 8.0, 12.0, 0.0], [1.0, 2.0, 3.0, 14 / 3, 7.5, 0.0]]
    yield from _by_all("packed", lambda: _means(causal, packed)[..., 0], means)
    # each row has its own order of residues: 0, 2 | 1 | 3 | 4 of the first, 0 | 1, 3 | 2, 4 of the second
    means = [[2.5, 2.0, 2.5, 8.0, 16.0, 0.0], [1.0, 5.0, 10.0, 5.0, 10.0, 0.0]]
    yield from _by_all("packed, every second", lambda: _means(even, packed)[..., 0], means)
    yield from _by_all("padded", lambda: _means(causal, padded)[..., 0], [[0.0, 0.0, 4.0, 6.0], [1.0, 1.5, 7 / 3, 3.75]])
    flat = TokenLayout.flat([3, 1, 2], [0, 7, 4])
    yield from _by_all("flat", lambda: _means(causal, flat)[:, 0], [1.0, 1.5, 7 / 3, 8.0, 16.0, 24.0])
    yield from _by_all("flat, every second", lambda: _means(even, flat)[:, 0], [2.5, 2.0, 2.5, 8.0, 16.0, 32.0])
    # a sink of ln 3 counts as three more keys of value 0; a query that sees no key still gets 0
    means = [[1 / 4, 3 / 5, 7 / 6, 2.0, 4.8, 0.0], [1 / 4, 1 / 2, 6 / 5, 14 / 6, 30 / 7, 0.0]]
    sink = numbers([1.0986122886681098])
    yield from _by_all("a sink", lambda: _means(causal, packed, needs="sink", sink=sink)[..., 0], means, "sink")


@oracle("attention")
def by_heads() -> Iterator[Comparison]:
    """Heads 0 and 2 have the first mask, head 1 the second; each head has its own sink."""
    masks = part("by_head", masks=(part("causal"), part("window", size=1)))
    means = [[1.0, 1.0, 1.0], [1.5, 2.0, 1.5], [7 / 3, 4.0, 7 / 3], [3.75, 8.0, 3.75], [6.2, 16.0, 6.2]]
    yield from _by_all("three heads", lambda: _means(masks, row(5), heads=3)[0], means)
    # one more key of value 0; for head 1 three, for head 2 none
    sink = numbers([0.0, 1.0986122886681098, -inf])
    means = [[0.5, 0.25, 1.0], [1.0, 0.5, 1.5], [1.75, 1.0, 7 / 3], [3.0, 2.0, 3.75], [31 / 6, 4.0, 6.2]]
    yield from _by_all("sinks", lambda: _means(masks, row(5), heads=3, needs="sink", sink=sink)[0], means, "sink")


def _weighted(q: TokenLayout, k: TokenLayout, *tables: Tensor) -> Tensor:
    """A bias (…, 1, n, m) of log(1 + c) for a key at coordinate c, plus table i for the key of order i."""
    weight = (k.coords[..., 0] + 1.0).to(torch.float64).log()
    if tables:
        weight = weight + sum(table * (k.order == i) for i, table in enumerate(tables))
    return weight[..., None, None, :].expand(*weight.shape[:-1], 1, q.n, k.n)


@oracle("attention")
def biases() -> Iterator[Comparison]:
    """Biases depend on coordinates, which differ from the order; tables that require a gradient get one, and no others."""
    order, seg = torch.tensor([[0, 1, 2, 3], [0, 0, 1, 2]]), torch.tensor([[0, 0, 0, 0], [0, 1, 1, 1]])
    layout = TokenLayout(torch.tensor([[[0], [3], [2], [0]], [[1], [1], [4], [2]]]), order, seg)
    # weights of row 0: 1, 4, 3, 1, of row 1: 2, 2, 5, 3; every second token of a document: 0, 2 | 1, 3 and 0 | 1, 3 | 2
    means = [[13 / 4, 16 / 5, 13 / 4, 16 / 5], [1.0, 28 / 5, 4.0, 28 / 5]]
    even, causal = part("strided", step=2), part("causal")
    yield from _by_all("by coordinates", lambda: _means(even, layout, needs="bias", bias=_weighted)[..., 0], means, "bias")
    # two equal keys with values 10 and 30 have probs ½: dz/d table = ±½·½·(30 − 10)
    for learned in (0, 1):
        for backend in offering(frozenset({"bias", "bias_grad"})):
            tables = tuple(torch.zeros((), dtype=torch.float64, requires_grad=i == learned) for i in range(2))
            place = TokenLayout(torch.zeros(1, 2, 1, dtype=torch.long), row(2).order, None)
            with using(backend.name):
                q, v = torch.zeros(1, 2, 1, 1, dtype=torch.float64), numbers([[[[10.0]], [[30.0]]]])
                scoring = _scoring(causal, needs="bias bias_grad", bias=_weighted, tables=tables)
                z = attend(q, q, v, scoring, place, place)
                z[0, 1].sum().backward()
            yield Comparison(f"gradient of table {learned}, by {backend.name}", tables[learned].grad, (-5.0, 5.0)[learned])
            yield Comparison(f"none for the other table, by {backend.name}", tables[1 - learned].grad is None, True)


@oracle("attention")
def tiny_probs() -> Iterator[Comparison]:
    """The tiled kernel sets exponentials below 2²⁴ times the smallest normal number to 0, and only those: in float32 e^−70.5
    counts and e^−70.9 does not; in float64 the limit is at −691.7. A masked key counts exactly 0."""
    for dtype, counts, lost, value in ((torch.float32, -70.5, -70.9, 1e31), (torch.float64, -691.5, -692.0, 1e300)):
        layout = row(3)
        k = torch.tensor([0.0, counts, lost], dtype=dtype).view(1, 3, 1, 1)
        q, v = torch.ones_like(k), torch.tensor([0.0, value, value], dtype=dtype).view(1, 3, 1, 1)
        with using("tiled"):
            z = attend(q, k, v, _scoring(part("causal")), layout, layout)[0, :, 0, 0]
            far = attend(q, k[:, ::2], v[:, ::2], _scoring(part("full")), layout, row(2))
        yield Comparison(f"a masked key, {dtype}", z[0], 0.0, near=0)
        # e^−70.5 = 2.4112322e−31; e^−691.5 = 4.8458031e−301
        counted = 2.4112322 if dtype is torch.float32 else 0.48458031
        yield Comparison(f"above the limit, {dtype}", z[1:], [counted, counted], near=1e-4)
        yield Comparison(f"below the limit, {dtype}", far.flatten(), [0.0, 0.0, 0.0], near=0)


@oracle("attention")
def plain() -> Iterator[Comparison]:
    """Where a kernel's own flag is the whole mask: queries and keys begin together, or there is one query at the end."""
    causal = part("causal")
    yield Comparison("as long as the keys", is_plain("causal", row(5), row(5)), True)
    yield Comparison("fewer", is_plain("causal", row(3), row(5)), False)
    yield Comparison("the last", is_plain("causal", row(1, start=4), row(5)), True)
    yield Comparison("the last but one", is_plain("causal", row(1, start=3), row(5)), False)
    yield Comparison("one beyond", is_plain("causal", row(1, start=6), row(5)), False)
    yield Comparison("two, at and beyond the end", is_plain("causal", row(2, start=4), row(5)), False)
    yield Comparison("keys that begin later", is_plain("causal", row(5, start=1), row(5, start=1)), False)
    yield Comparison("documents", is_plain("all", TokenLayout.packed([[2, 3]], 5), row(5)), False)
    yield Comparison("full, from any start", is_plain("all", row(2, start=3), row(5)), True)
    yield Comparison("a window", is_plain((causal & part("window", size=9)).flag(), row(5), row(5)), False)


Asked = list[tuple[ProblemSize, frozenset[str]]]


@contextmanager
def _listening(offers: frozenset[str] = EVERY) -> Iterator[Asked]:
    """Add a backend that records the arguments of its cost, which is infinite, so that it never runs."""
    asked: Asked = []

    def cost(shape: ProblemSize, needs: frozenset[str]) -> float:
        asked.append((shape, needs))
        return inf

    BACKENDS.append(Backend("listening", offers, cost, attend, dense=False))
    try:
        yield asked
    finally:
        BACKENDS.pop()


@contextmanager
def _compiling() -> Iterator[None]:
    """Make torch.compiler.is_compiling() true."""
    known = torch.compiler.is_compiling
    torch.compiler.is_compiling = lambda: True
    try:
        yield
    finally:
        torch.compiler.is_compiling = known


@oracle("attention")
def cost_shapes() -> Iterator[Comparison]:
    """The shape that costs depend on: rows, queries, keys, heads, head, whether the mask is plain, and the scores in the tiles
    of 64 × 64 that it touches, which are planned from four tiles on. A window of 64 touches a query's tile and the previous.
    Where the mask is plain, the kernel with a flag runs, and no cost is computed."""

    def shape(mask: Any, n: int, needs: str = "", bias: Any = None, keys: int | None = None) -> tuple[list[int], str]:
        scoring, layout = _scoring(mask, 8, bias=bias), TokenLayout.whole(2, n)
        with _listening() as asked:
            chosen(torch.empty(2, n, 8, 3), scoring, layout, TokenLayout.whole(2, keys or n), frozenset(needs.split()))
        return [int(number) for number in asked[0][0]], " ".join(sorted(asked[0][1]))

    causal, near = part("causal"), part("causal") & part("window", size=64)
    yield Comparison("short", shape(near, 255)[0], [2, 255, 255, 8, 3, 0, 65025], near=0)
    yield Comparison("long: 1 + 2 + 2 + 2 tiles", shape(near, 256)[0], [2, 256, 256, 8, 3, 0, 28672], near=0)
    yield Comparison("more keys", shape(near, 100, keys=120)[0], [2, 100, 120, 8, 3, 0, 12000], near=0)
    biased = shape(causal, 256, "bias", _weighted)
    yield Comparison("with a bias: 1 + 2 + 3 + 4 tiles", biased[0], [2, 256, 256, 8, 3, 0, 40960], near=0)
    with _listening() as asked:
        layout = TokenLayout.whole(2, 256)
        backend, flag = chosen(torch.empty(2, 256, 8, 3), _scoring(causal, 8), layout, layout, frozenset())
    yield Comparison("plain", [backend.name, flag, len(asked)], ["torch", "causal", 0], near=0)
    halves = part("by_head", masks=(causal, near))
    yield Comparison("two masks by head", shape(halves, 256)[0], [2, 256, 256, 8, 3, 0, 34816], near=0)
    yield Comparison("needs", biased[1], "bias")


@oracle("attention")
def in_a_compiled_graph() -> Iterator[Comparison]:
    """No cost is computed, because it would compare symbolic sizes: the first backend that offers all of the needs runs."""
    scoring, layout = _scoring(part("causal") & part("window", size=64), 8), TokenLayout.whole(2, 256)
    with _compiling(), _listening() as asked:
        runs = [
            chosen(torch.empty(2, 256, 8, 3), scoring, layout, layout, frozenset(needs.split()))[0].name
            for needs in ("", "softcap", "bias bias_grad", "sink edit")
        ]
    yield Comparison("backends that run", runs, ["torch", "reference", "torch", "reference"])
    yield Comparison("costs computed", len(asked), 0, near=0)


@oracle("attention")
def offers() -> Iterator[Comparison]:
    """The backends that may run: those that offer all needs; with `using`, only the named one."""
    yield Comparison("no needs", [b.name for b in offering(frozenset())], ["torch", "tiled", "reference"])
    yield Comparison("a soft-cap", [b.name for b in offering(frozenset({"softcap"}))], ["tiled", "reference"])
    yield Comparison(
        "a soft-cap in a compiled graph", [b.name for b in offering(frozenset({"softcap", "compile"}))], ["reference"]
    )
    with using("tiled"), using("reference"):
        yield Comparison("the innermost `using`", [b.name for b in offering(frozenset())], ["reference"])
    with _listening(frozenset()) as asked:
        yield Comparison("a further backend", len(offering(frozenset())) - len(offering(frozenset({"bias"}))), 1, near=0)
    yield Comparison("costs computed for it", len(asked), 0, near=0)


@oracle("attention")
def cached_masks() -> Iterator[Comparison]:
    """Tile masks are cached while there is room, to the last value; a mask that does not fit is computed again."""
    computed: list[str] = []

    def look_up(masks: MaskCache, kind: str, count: int) -> None:
        masks.once(kind, lambda: (computed.append(kind), torch.zeros(count))[1])

    cache = MaskCache(6)
    for kind, count in (("four", 4), ("three", 3), ("two", 2), ("four", 4), ("three", 3), ("two", 2), ("one", 1), ("one", 1)):
        look_up(cache, kind, count)
    yield Comparison("computed", computed, ["four", "three", "two", "three", "one", "one"])
    work = Work.of(_scoring(part("causal")), row(3), row(5))
    yield Comparison("four tiles of 64 for each of 3 tokens", work.masks.room, 768, near=0)
    yield Comparison("causal is relative", work.relative, True)
    kept = Work.of(_scoring(part("window", size=2, keep=1)), row(3), row(5))
    yield Comparison("a window with `keep` is not", kept.relative, False)
    yield Comparison(
        "nor are packed documents", Work.of(_scoring(part("causal")), TokenLayout.packed([[3]], 3), row(5)).relative, False
    )
