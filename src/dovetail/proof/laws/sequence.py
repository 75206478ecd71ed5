"""Laws of sequences: causal (3), full = chunked = step by step (4), padded = packed = alone (5), roll-back and fork (7)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.nn.ctx import Ctx, Listener
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.case import ARRANGEMENTS, BATCH, DTYPE, LENGTHS, Broken, Case, N, NotApplicable, law, rows_of
from dovetail.state.pool import Layout, Pool

LAYOUTS: tuple[Layout, ...] = ("contiguous", "paged", "ring")


@law(3, "causal", "no gradient from a later token to an earlier output, except among the first tokens of a prefix mask")
def causal(case: Case) -> None:
    """Compute the gradient of one output with respect to the embedded inputs, and check which tokens it reaches."""
    ahead = case.spec.ahead()
    if ahead is None:
        raise NotApplicable("outputs may depend on later tokens")
    stream: list[Tensor] = []

    def listen(_: str, x: Tensor) -> Tensor:
        stream.append(x.detach().requires_grad_())
        return stream[0]

    ctx = case.ctx(taps=Listener({"embedded": listen}))
    out = case.stream(case.inputs, ctx)
    for t in (0, 7, N - 2):
        (grad,) = torch.autograd.grad(out[:, t].sin().sum(), stream, retain_graph=True)
        seen = max(t + 1, ahead if t < ahead else 0)  # the first `ahead` tokens see each other
        case.true(not grad[:, seen:].any(), f"the output at {t} depends on tokens from {seen} on")
        case.true(bool(grad[:, t].any()), f"the output at {t} does not depend on its own token")


def decodes(case: Case) -> None:
    """Raise where a spec is not for decoding: then `generate` refuses it, too."""
    if case.spec.order() == "both":
        case.true(case.spec.ahead() is None, "the model is bidirectional, and yet declares that only its first tokens are")
        raise NotApplicable("not a decoder: tokens see later ones, so that generation is refused")


def behind(chunks: Sequence[Sequence[int]], ahead: int) -> list[tuple[int, ...]]:
    """Chunks (tokens per row) of which the first holds the first `ahead` tokens of each row, as a prefix mask requires."""
    ends = [[max(sum(row[: i + 1]), ahead) for i in range(len(chunks))] for row in zip(*chunks, strict=True)]
    steps = [tuple(end[i] - (end[i - 1] if i else 0) for end in ends) for i in range(len(chunks))]
    return [step for step in steps if any(step)]


class CaseDecoder:
    """A case with a pool: feeds tokens to rows and returns their outputs."""

    def __init__(
        self,
        case: Case,
        layout: Layout,
        rows: int = 5,
        capacity: int = N + 8,
        source: int = N,
        dtype: torch.dtype = DTYPE,
        coords: int = 0,
    ) -> None:
        self.case, self.source = case, source
        self.listen: Listener | None = None
        self.pool = Pool(case.spec, rows, capacity, layout=layout, dtype=dtype, source=source, page=4, slack=3, coords=coords)

    def admit(self, rows: Sequence[int], lengths: Sequence[int] = LENGTHS) -> None:
        """Encode the sources of the batch and admit the rows with them, in order."""
        if self.case.spec.encoder is None:
            return
        source = self.case.source
        assert source is not None
        lengths = lengths[: len(rows)]
        layout = TokenLayout.padded(lengths, self.source)
        ctx = self.case.ctx(source_layout=layout, source=source[: len(rows)])
        assert ctx.encoder_output is not None
        ctx.encoder_layout = layout
        views = self.pool.admit(rows, lengths)
        keep = max(lengths)
        ctx.encoder_output, ctx.encoder_layout = ctx.encoder_output[:, :keep], TokenLayout.padded(lengths, keep)
        self.case.model.fill(ctx, views)

    def feed(
        self,
        rows: Sequence[int],
        pieces: Sequence[Tensor],
        flat: bool = False,
        positions: Sequence[Tensor | None] | None = None,
    ) -> list[Tensor]:
        """Feed new tokens to each row, and return the outputs of each."""
        new = [len(piece) for piece in pieces]
        step = self.pool.step(rows, new, flat, positions)
        if flat:
            tokens = torch.cat(list(pieces))
        else:
            tokens = torch.zeros(len(rows), max(new), dtype=torch.long)
            for i, piece in enumerate(pieces):
                tokens[i, : len(piece)] = piece
        out = self.case.stream(tokens, Ctx(layout=step.layout, views=step.views, patches=self.case.patches, taps=self.listen))
        return list(out.split(new)) if flat else rows_of(out, new)


def whole(case: Case) -> Tensor:
    """All outputs from one pass over whole sequences (with sources of different lengths, where there is an encoder)."""
    return case.stream(case.inputs, case.ctx(source_layout=TokenLayout.padded(LENGTHS, N)))


@law(4, "chunked", "one pass, prefill in any chunks, and token by token on a ragged batch agree, batched and flat", budget=1.5)
@torch.no_grad()
def chunked(case: Case) -> None:
    """Decode the same tokens in several chunkings on every layout of the decode state."""
    decodes(case)
    want, tokens = whole(case), case.inputs
    chunkings = {
        "in even chunks": [(5,) * 3, (1,) * 3, (8,) * 3, (2,) * 3, (5,) * 3],
        "ragged": [(7, 3, 12), (1, 9, 1), (1, 1, 1), (4, 1, 1), (8, 7, 6)],
        "step by step": [(1,) * 3] * 9 + [(1, 2, 3)] * 4,
    }
    ways: list[tuple[str, Layout, bool]] = [
        (name, layout, flat) for name in chunkings for flat in (False, True) for layout in LAYOUTS
    ]
    for name, layout, flat in case.alternating(ways, 4):  # 4 and 3 layouts have no common factor: each spec meets them all
        rows = [0, 1, 2] if name != "ragged" else [3, 1, 4]
        decoder = CaseDecoder(case, layout, rows=3 if name == "in even chunks" else 5)
        decoder.admit(rows)
        place, got = [0] * BATCH, [[] for _ in range(BATCH)]
        for lengths in behind(chunkings[name], case.spec.ahead() or 0):
            pieces = [tokens[r, place[r] : place[r] + m] for r, m in enumerate(lengths)]
            for r, out in enumerate(decoder.feed(rows, pieces, flat)):
                got[r].append(out)
                place[r] += len(out)
        for r in range(BATCH):
            how = f"{layout}, {name}{', flat' if flat else ''}: row {r} cached and whole"
            case.same(torch.cat(got[r]), want[r, : place[r]], how)


@law(5, "padded", "neither padding, nor neighbors in a batch, nor packed documents change a token")
@torch.no_grad()
def padded(case: Case) -> None:
    """Compare each sequence alone with the same one in a padded, packed and flat batch."""
    if not case.tokens:
        raise NotApplicable("images are not padded")
    rows = rows_of(case.inputs, LENGTHS)
    sources = None if case.source is None else rows_of(case.source, LENGTHS)
    pools = case.spec.head is not None and case.spec.head.pools()
    alone: list[Tensor] = []
    outputs: list[Tensor] = []
    for r, length in enumerate(LENGTHS):
        how: dict[str, Any] = {"layout": TokenLayout.whole(1, length), "source": None if sources is None else sources[r][None]}
        alone.append(case.stream(rows[r][None], case.ctx(**how))[0])
        outputs.append(case.run(rows[r][None], **how)[0])
    for batch in ARRANGEMENTS:
        how = {"layout": batch.make(), "source_layout": batch.make()}
        how |= {"source": None if sources is None else batch.join(sources)}
        out = case.stream(batch.join(rows), case.ctx(**how))
        for r, real in enumerate(batch.split(out)):
            case.same(real, alone[r], f"{batch.what.format(r)} and alone")
        case.true(bool(out.isfinite().all()), f"{batch.what.format(0)} has outputs that are not finite")
        if pools:
            pooled = case.run(batch.join(rows), **how)
            case.true(len(pooled) == BATCH, f"{batch.what.format(0)}: {BATCH} sequences give {len(pooled)} pooled outputs")
            for r, output in enumerate(outputs):
                case.same(pooled[r], output, f"the pooled output of {batch.what.format(r)} and alone")


@law(7, "rollback", "rolling back and replaying equals never having seen the tokens; both rows of a fork continue correctly")
@torch.no_grad()
def rollback(case: Case) -> None:
    """Feed wrong tokens, roll them back and feed the right ones; then fork a row and feed different tokens to both."""
    decodes(case)
    want, tokens = whole(case), case.inputs
    wrong = case.inputs.flip(1)
    for layout in case.alternating(LAYOUTS, 2):
        for least, extra in ((10, 2), (10, 9), (4, 13)):  # within the slack of a ring, beyond it, across its edge
            length = max(least, case.spec.ahead() or 0)
            decoder = CaseDecoder(case, layout)
            decoder.admit([0, 1, 2])
            decoder.feed([0], [tokens[0, :length]])
            decoder.pool.mark(0)
            decoder.feed([0], [wrong[0, :extra]])
            reached = decoder.pool.rollback(0, length)
            case.true(0 <= reached <= length, f"{layout}: a roll-back to {length} reached {reached}")
            (got,) = decoder.feed([0], [tokens[0, reached:]])
            case.same(got, want[0, reached:], f"{layout}: rolled back from {length + extra} to {length} (reached {reached})")
        decoder = CaseDecoder(case, layout)
        decoder.admit([0, 1, 2])
        decoder.feed([0], [tokens[0, :10]])
        decoder.pool.fork(0, 3)
        (other,) = decoder.feed([3], [wrong[0, :7]])
        (got,) = decoder.feed([0], [tokens[0, 10:]])
        case.same(got, want[0, 10:], f"{layout}: the forked row after a fork")
        fresh = CaseDecoder(case, layout)
        fresh.admit([0, 1, 2])
        (once,) = fresh.feed([0], [torch.cat([tokens[0, :10], wrong[0, :11]])])
        case.same(other, once[10:17], f"{layout}: the new row after a fork")
        (later,) = decoder.feed([3], [wrong[0, 7:11]])  # after more tokens of the forked row
        case.same(later, once[17:], f"{layout}: the new row after the forked row continued")
        if not torch.equal(wrong[0, :7], tokens[0, 10:17]) and torch.equal(other, got[:7]):
            raise Broken(f"{layout}: both rows of a fork have equal outputs for different tokens")
