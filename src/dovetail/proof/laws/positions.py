"""Law 24, positions: coordinates that the caller gives survive the cache, and the text after them continues them.

In each row some tokens have random coordinates, as those of an image, and the others have those of text: one more than the
largest before them, whatever their order. The law computes all coordinates itself. One pass with them must equal chunks and
steps in which the pool is given those of the images alone; roll-backs and forks; and padded, packed and flat batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dovetail.model.construction import generator
from dovetail.model.model import Model
from dovetail.nn.groups import Position
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.case import ARRANGEMENTS, BATCH, LENGTHS, Case, N, NotApplicable, law, rows_of
from dovetail.proof.laws.sequence import LAYOUTS, CaseDecoder, behind, decodes
from dovetail.spec.part import walk_spec
from dovetail.state.pool import Layout

IMAGES = (((0, 8),), ((0, 5), (9, 12)), ((0, 11),))  # per row: the tokens that have coordinates of their own
CHUNKS = ((5, 3, 8), (6, 3, 4), (1, 1, 1), (1, 1, 1), (2, 1, 1), (1, 3, 1), (5, 9, 5))
SIDE = 6  # coordinates of images are below this


def coordinates(spec: Model) -> int:
    """The number of coordinates per token: that of the positions, or 1 where they differ."""
    counts = {part.coordinates() for path, part in walk_spec(spec) if isinstance(part, Position) and "encoder" not in path}
    counts -= {1}
    return counts.pop() if len(counts) == 1 else 1


def given(case: Case) -> Tensor:
    """(batch, n, c) the coordinates of all tokens."""
    coords = torch.zeros(BATCH, N, coordinates(case.spec), dtype=torch.long)
    image = torch.randint(0, SIDE, coords.shape, generator=generator(case.seed, "coordinates"))
    for row, images in enumerate(IMAGES):
        following = 0
        for t in range(N):
            inside = any(begin <= t < end for begin, end in images)
            coords[row, t] = image[row, t] if inside else following
            following = max(following, int(coords[row, t].max()) + 1)
    return coords


@law(
    24,
    "positions",
    "coordinates that the caller gives once survive the cache: decoding equals one pass with all of them",
    excepted_with=("chunked",),
)
@torch.no_grad()
def positions(case: Case) -> None:
    """Decode with coordinates on every layout, and compare with one pass; then padded, packed and flat batches with each row
    alone."""
    decodes(case)
    parts = [part for _, part in walk_spec(case.spec) if isinstance(part, Position)]
    if all(part.site == "any" for part in parts):
        raise NotApplicable("no part encodes a position")
    coords = given(case)
    layout = TokenLayout.whole(BATCH, N).at(coords)
    want = case.stream(case.inputs, case.ctx(layout=layout, source_layout=TokenLayout.padded(LENGTHS, N)))
    ways: list[tuple[Layout, bool]] = [(cache, flat) for cache in LAYOUTS for flat in (False, True)]
    for cache, flat in case.alternating(ways, 3):
        _decode(case, coords, want, cache, flat)
    if case.spec.encoder is None:
        _joined(case, coords)


class PositionDecoder(CaseDecoder):
    """A decoder that is given the coordinates of images alone."""

    def __init__(self, case: Case, layout: Layout, coords: Tensor, flat: bool) -> None:
        super().__init__(case, layout, coords=coords.shape[-1])
        self.coords, self.flat = coords, flat

    def advance(self, rows: Sequence[int], of: Sequence[int], new: Sequence[int]) -> list[Tensor]:
        """Feed the next new[i] tokens of sequence of[i] to row rows[i]."""
        begins = [self.pool.lengths[row] for row in rows]
        pieces = [slice(begin, begin + n) for begin, n in zip(begins, new, strict=True)]
        images = [any(a < piece.stop and piece.start < b for a, b in IMAGES[r]) for r, piece in zip(of, pieces, strict=True)]
        at = [self.coords[r, piece] if image else None for r, piece, image in zip(of, pieces, images, strict=True)]
        tokens = [self.case.inputs[r, piece] for r, piece in zip(of, pieces, strict=True)]
        return self.feed(rows, tokens, self.flat, at if any(images) else None)


def _decode(case: Case, coords: Tensor, want: Tensor, layout: Layout, flat: bool) -> None:
    """Decode in chunks; in the middle of the text roll a row back, and fork another."""
    decoder, how = PositionDecoder(case, layout, coords, flat), f"{layout}{', flat' if flat else ''}"
    rows = [3, 1, 4]
    decoder.admit(rows)
    place = [0] * BATCH
    for number, new in enumerate(behind(CHUNKS, case.spec.ahead() or 0)):
        for r, out in enumerate(decoder.advance(rows, range(BATCH), new)):
            case.same(out, want[r, place[r] : place[r] + len(out)], f"{how}: row {r}, chunk {number}, cached and whole")
            place[r] += len(out)
        if number == 3:
            decoder.pool.mark(3)
            wrong = torch.full((2, coords.shape[-1]), 40)
            decoder.feed([3], [case.inputs[0, :2]], flat, [wrong])
            reached = decoder.pool.rollback(3, place[0])
            if reached < place[0]:
                (out,) = decoder.advance([3], [0], [place[0] - reached])
                case.same(out, want[0, reached : place[0]], f"{how}: replayed from {reached}")
            decoder.pool.fork(1, 0)
    begin = decoder.pool.lengths[0]
    new = (1, 3, N - begin - 4)  # text, which continues the first image; the second one; text again
    out = torch.cat([decoder.advance([0], [1], [n])[0] for n in new])
    case.same(out, want[1, begin:], f"{how}: the new row after a fork")


def _joined(case: Case, coords: Tensor) -> None:
    """Compare padded, packed and flat batches with each row alone."""
    tokens, own = rows_of(case.inputs, LENGTHS), rows_of(coords, LENGTHS)
    alone = [
        case.stream(ids[None], case.ctx(layout=TokenLayout.whole(1, len(ids)).at(at[None])))[0]
        for ids, at in zip(tokens, own, strict=True)
    ]
    for batch in ARRANGEMENTS:
        out = case.stream(batch.join(tokens), case.ctx(layout=batch.make().at(batch.join(own, padding=0))))
        for r, real in enumerate(batch.split(out)):
            case.same(real, alone[r], f"{batch.what.format(r)} and alone")
