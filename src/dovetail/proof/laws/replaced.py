"""Law 23, replaced: every path of a model uses its linear leaves, however they store their matrix.

    W + u vᵀ in a storage of two terms   =   W + u vᵀ stored as the weight

The storage of all linear leaves of a spec is replaced by one that never holds the sum, and compared with a model that does:
the reference kernels and the fast ones, the loss, a KV cache fed token by token (MLA decodes in its absorbed form). A path that
reads the stored weight misses u vᵀ. In a second run the storage declares that it has no exact matrix, and a path that takes it
all the same gets W alone. Tensor parallel, training and saving refuse such a leaf by its name (`nn/declared_tensors.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dovetail.model.construction import generator
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx, Losses
from dovetail.nn.linear import EXACT, Dense, Linear, Offer, Rows
from dovetail.ops.attend import using
from dovetail.proof.laws.case import BATCH, Case, N, law, perturbed
from dovetail.proof.laws.sequence import CaseDecoder

SPREAD = 0.5  # of u and v: enough that no output stays the same
STEPS = 3
FORMS: dict[str, frozenset[Offer]] = {"with a matrix": EXACT, "without a matrix": EXACT - {"matrix"}}


class LowRank(Dense):
    """W + u vᵀ: u (…, out, 1), v (…, 1, inp)."""

    def __init__(self, u: Tensor, v: Tensor, exact: frozenset[Offer]) -> None:
        self.u, self.v, self.exact = u, v, exact

    def multiply(self, leaf: Linear, x: Tensor, ctx: Ctx | None) -> Tensor:
        """(…, inp) -> (…, out)."""
        return super().multiply(leaf, x, ctx) + F.linear(F.linear(x, self.v.to(x.dtype)), self.u.to(x.dtype))

    def grouped(self, leaf: Linear, x: Tensor, rows: Rows, ctx: Ctx | None) -> Tensor:
        """x (rows, inp) -> (rows, out)."""
        return super().grouped(leaf, x, rows, ctx) + rows.multiply(rows.multiply(x, self.v), self.u)

    def dense(self, leaf: Linear) -> Tensor:
        """The sum, where it is declared; W alone where it is not, so that who takes it all the same is caught."""
        return leaf.weight + self.u @ self.v if "matrix" in self.exact else leaf.weight


def leaves(model: ModelModule) -> Iterator[tuple[str, Linear]]:
    """Every linear leaf and its path."""
    return ((path, module) for path, module in list(model.named_modules()) if isinstance(module, Linear))


def added(path: str, leaf: Linear, seed: int) -> tuple[Tensor, Tensor]:
    """u and v for a leaf, functions of (seed, path)."""
    *batch, out, inp = leaf.matrix().shape
    draws = generator(seed, f"replaced {path}")
    u, v = (torch.randn(*batch, *size, generator=draws, dtype=torch.float64) for size in ((out, 1), (1, inp)))
    return SPREAD * u, SPREAD * v * inp**-0.5


def with_leaves(case: Case, exact: frozenset[Offer] = EXACT) -> ModelModule:
    """The model with the storage of every linear leaf replaced."""
    model = perturbed(case.spec, case.seed)
    for path, leaf in leaves(model):
        leaf.storage = LowRank(*added(path, leaf, case.seed), exact)
    return model


def with_sums(case: Case) -> ModelModule:
    """The model with the sums stored as its weights; a tied head gets a matrix of its own."""
    model = perturbed(case.spec, case.seed)
    for path, leaf in leaves(model):
        u, v = added(path, leaf, case.seed)
        leaf.weight = nn.Parameter(leaf.matrix().detach() + u @ v)
    return model


@law(
    23,
    "replaced",
    "every path uses the linear leaves of a model, also in another storage",
    "values",
    budget=1.0,
)
@torch.no_grad()
def replaced(case: Case) -> None:
    """Compare leaves that never store the sum with stored sums, with exact matrices and without; in the suite, one of both."""
    want = paths(case.of(with_sums(case)))
    for how, exact in case.alternating(list(FORMS.items()), len(FORMS)):
        got = paths(case.of(with_leaves(case, exact)))
        for name, output in got.items():
            case.same(output, want[name], f"{name}: leaves {how} and stored sums")


def paths(case: Case) -> dict[str, Tensor]:
    """The outputs of every path of a model, by name."""
    outputs = on_paths(case, case.run)
    head = case.spec.head
    if head is not None:
        labels = head.labels(case.scope, tuple(outputs["fast"].shape[:-1]), generator(case.seed, "labels"))
        outputs["loss"] = case.model.loss(case.inputs, labels, case.ctx(losses=Losses()))
    return outputs


def on_paths(case: Case, run: Callable[[], Tensor]) -> dict[str, Tensor]:
    """The result of a run with the reference kernels and the fast ones, and the outputs of a KV cache."""
    with using("reference"):
        outputs = {"reference": run()}
    outputs["fast"] = run()
    if case.spec.order() != "both":
        outputs["cached"] = cached(case)
    return outputs


def cached(case: Case) -> Tensor:
    """The outputs of a prefill and of a few steps."""
    decoder, rows = CaseDecoder(case, "contiguous"), range(BATCH)
    decoder.admit(rows)
    pieces = [decoder.feed(rows, list(piece)) for piece in case.inputs.split([N - STEPS, *[1] * STEPS], 1)]
    return torch.stack([torch.cat(row) for row in zip(*pieces, strict=True)])
