"""Law 21, invariant: a row's bits do not depend on its neighbors in the batch.

    a whole pass   of 3 rows, of 3 with other tokens in the neighbors, of the row alone
    decoding       of 32 rows in one pool, with other tokens in the neighbors, with no tokens in them

Bit-equal in float32 for one backend at least, with leaves that multiply tile by tile (core/invariant.py). With plain leaves the
number of rows chooses the order of sums, and a row may change by a few ulp. Law 5 compares up to rounding; here rounding is the
point: a sampled token may turn on the last bit, and then what one user gets depends on who else asks.

32 tokens, because torch's elementwise kernels compute whole vectors, and what is left at the end of a tensor by other
instructions: the length of every tensor is then a multiple of the vector's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dovetail.core.fold import needs_of
from dovetail.core.invariant import make_invariant
from dovetail.model import ModelModule
from dovetail.ops import attend
from dovetail.proof.laws.case import Case, law, perturbed
from dovetail.proof.laws.sequence import CaseDecoder

ULPS = 64  # of the largest output: what neighbors may change where kernels choose by the number of rows
ROW, TOKENS, DTYPE = 1, 32, torch.float32
PREFILL, STEPS = 7, 3


@law(21, "invariant", "a row's bits do not depend on its neighbors in the batch", "values", budget=1.5)
@torch.no_grad()
def invariant(case: Case) -> None:
    """Compare a row beside its neighbors, beside others, and alone; in the suite, in a whole pass or in decoding."""
    needs = needs_of(case.spec)
    backends = [backend.name for backend in attend.offering(needs)]
    plain, tiled = perturbed(case.spec, case.seed, DTYPE), perturbed(case.spec, case.seed, DTYPE)
    make_invariant(tiled)
    for what, run in case.taking_turns(list(programs(case).items()), 2):
        for name in backends if case.turn(f"ulp {what}") else ():
            gap = _ulps(run, plain, name)
            case.true(gap <= ULPS, f"{what}, {name}: a row moves with its neighbors by {gap:.0f} ulp")
        exact = any(_ulps(run, tiled, name) == 0 for name in backends)
        case.true(exact, f"{what}: a row's bits change with its neighbors, whichever of {', '.join(backends)} runs")


def _ulps(run: Program, model: ModelModule, backend: str) -> float:
    """How far the row moves with its neighbors, in ulp of the largest output."""
    with attend.using(backend):
        own, *others = (run(model, neighbors) for neighbors in NEIGHBORS)
    ulp = torch.finfo(DTYPE).eps * max(float(own.abs().max()), 1.0)
    return max(float((other - own).abs().max()) for other in others) / ulp


NEIGHBORS = ("its own", "others", "none")
Program = Callable[[ModelModule, str], Tensor]  # (model, neighbors) -> the outputs of the row


def programs(case: Case) -> dict[str, Program]:
    """What is run with each kind of neighbors."""
    runs: dict[str, Program] = {"a whole pass": lambda model, neighbors: _whole(case, model, neighbors)}
    if case.spec.order() != "both":
        runs["decoding"] = lambda model, neighbors: _decoded(case, model, neighbors)
    return runs


def _whole(case: Case, model: ModelModule, neighbors: str) -> Tensor:
    own = Case(
        case.spec, case.seed, model, rows=3 if case.tokens else TOKENS, n=TOKENS
    )  # the tokens of an image fill no vector, but those of 32 do
    alone = neighbors == "none" and case.tokens
    own.inputs = own.inputs[ROW : ROW + 1] if alone else _beside(own.inputs, neighbors)
    if own.source is not None:
        own.source = own.source[ROW : ROW + 1] if alone else _beside(own.source, neighbors)
    return own.stream(own.inputs, own.ctx())[0 if alone else ROW]


def _decoded(case: Case, model: ModelModule, neighbors: str) -> Tensor:
    own, rows = Case(case.spec, case.seed, model, rows=TOKENS, n=TOKENS), range(TOKENS)
    own.inputs = _beside(own.inputs, neighbors)
    decoder = CaseDecoder(own, "contiguous", rows=TOKENS, capacity=TOKENS, source=TOKENS, dtype=DTYPE)
    decoder.admit(rows, [TOKENS] * TOKENS)
    out, held = list[Tensor](), 0
    for new in (PREFILL, *[1] * STEPS):
        ends = [held + new if neighbors != "none" or row == ROW else held for row in rows]
        out.append(decoder.feed(rows, [own.inputs[row, held:end] for row, end in enumerate(ends)])[ROW])
        held += new
    return torch.cat(out)


def _beside(x: Tensor, neighbors: str) -> Tensor:
    """The rows, with other neighbors of one of them."""
    return torch.stack([row.flip(0) if i != ROW and neighbors == "others" else row for i, row in enumerate(x)])
