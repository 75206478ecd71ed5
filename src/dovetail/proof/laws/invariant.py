"""Law 21, invariant: a row's bits do not depend on its neighbors in the batch.

    a whole pass   of 3 rows, of 3 with other tokens in the neighbors, of the row alone
    decoding       of 32 rows in one pool, with other tokens in the neighbors, with no tokens in them

Bit-equal in float32 for one backend at least, with leaves that multiply tile by tile (nn/fused.py). With plain leaves the
number of rows chooses the order of sums, and a row may change by a few ulp; on a deep spec that amplifies rounding, by a few
times its error against float64. Law 5 compares up to rounding; here rounding is the point: a sampled token may turn on the last
bit, and then what one user gets depends on who else asks.

32 tokens, because torch's elementwise kernels compute whole vectors, and what is left at the end of a tensor by other
instructions: the length of every tensor is then a multiple of the vector's.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from dovetail.model.model import ModelModule
from dovetail.nn.fused import make_invariant
from dovetail.ops import attend
from dovetail.proof.laws.case import Case, law, perturbed
from dovetail.proof.laws.sequence import CaseDecoder
from dovetail.spec.fold import needs_of

ULPS = 64  # of the largest output: what neighbors may change where kernels choose by the number of rows
ERRORS = 3  # or this many times the error against float64: each of two results has one, and a sample is not the largest
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
    for what, run in case.alternating(list(programs(case).items()), 2):
        for name in backends if case.turn(f"ulp {what}") else ():
            gap = _ulps(run, plain, name)
            few = gap <= ULPS or gap <= ERRORS * _error(run, plain, perturbed(case.spec, case.seed, torch.float64), name)
            case.true(few, f"{what}, {name}: a row moves with its neighbors by {gap:.0f} ulp")
        exact = any(_ulps(run, tiled, name) == 0 for name in backends)
        case.true(exact, f"{what}: a row's bits change with its neighbors, whichever of {', '.join(backends)} runs")


def _ulps(run: Program, model: ModelModule, backend: str) -> float:
    """How far the row moves with its neighbors, in ulp of the largest output."""
    with attend.using(backend):
        own, *others = (run(model, neighbors) for neighbors in NEIGHBORS)
    return max(_distance(other, own) for other in others)


def _error(run: Program, model: ModelModule, exact: ModelModule, backend: str) -> float:
    """The distance of the row from the same row in float64, in ulp of the largest output."""
    with attend.using(backend):
        return _distance(run(exact, NEIGHBORS[0]), run(model, NEIGHBORS[0]).double())


def _distance(other: Tensor, own: Tensor) -> float:
    return float((other - own).abs().max()) / (torch.finfo(DTYPE).eps * max(float(own.abs().max()), 1.0))


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
    decoder = CaseDecoder(own, "contiguous", rows=TOKENS, capacity=TOKENS, source=TOKENS, dtype=next(model.parameters()).dtype)
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
