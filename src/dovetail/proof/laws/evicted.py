"""Law 29, evicted: with eviction, each token attends to the entries that the policy leaves it, at the positions of the policy.

    programs    random steps, forks, marks, roll-backs, restored rows and frees, on the pool of each policy (law 19)
    expected    one token after the other, over plain lists of all keys and values:
                oldest      the last B                                   positions of the sequence
                sinks       the first FIRST and the last B − FIRST       positions in the cache
                attended    drop the entry with the least sum of probs among those that are not of the newest half, if there
                            are more than B                              positions in the cache

The list is written here from the definitions; it knows neither masks, nor rings, nor streaming positions. For mixers whose
entries no list can hold (latents), and for other masks than causal, the expected outputs are those of one pass with the mask of
the policy. The memory of a pool does not depend on the number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dovetail.base.errors import SpecError
from dovetail.decoding.eviction import FIRST, Eviction, Policy, evicting
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.view import Edit, Scoring
from dovetail.ops.attend import StoredEntries
from dovetail.proof.laws.case import DTYPE, LENGTHS, Case, N, NotApplicable, law
from dovetail.proof.laws.programs import Program, compare
from dovetail.proof.laws.sequence import decodes
from dovetail.state.attended import AttendedView
from dovetail.state.pool import Pool

BUDGET = 9  # entries: fewer than a row has tokens, more than the first ones
POLICIES: tuple[Policy, ...] = ("oldest", "sinks", "attended")
ALL = 1000  # a budget that evicts nothing


class Listed:
    """The cache of one layer as plain lists: per row its entries (order, k, v, sum of probs), of which a policy drops some."""

    def __init__(self, policy: Policy, budget: int = BUDGET) -> None:
        self.policy, self.budget = policy, budget

    def append(self, layout: TokenLayout, k: Tensor, v: Tensor) -> Listed:
        """Take the keys and values (rows, n, kv_heads, head) of whole sequences."""
        self.k, self.v = k, v
        return self

    def attend(self, layout: TokenLayout, q: Tensor, scoring: Scoring, edit: Edit | None = None) -> Tensor:
        """Attention of whole sequences, token by token."""
        return torch.stack([self._row(q[i], self.k[i], self.v[i], scoring) for i in range(len(q))])

    def _row(self, q: Tensor, k: Tensor, v: Tensor, scoring: Scoring) -> Tensor:
        left, sums, out = list[int](), dict[int, float](), list[Tensor]()
        for t in range(len(q)):
            left.append(t)
            sums[t] = 0.0
            if len(left) > self.budget:
                left.remove(self._dropped(left, sums))
            # a query is rotated by its position in the sequence, so positions in the cache are counted back from it
            places = left if self.policy == "oldest" else [t + 1 - len(left) + i for i in range(len(left))]
            probs = list[Tensor]()
            stored = StoredEntries(TokenLayout.of(*_order(places)), (k[left][None], v[left][None]))
            out.append(stored.attend(TokenLayout.of(*_order([t])), q[None, t : t + 1], scoring, Edit(_keep(probs)))[0, 0])
            for i, total in zip(left, probs[0].sum((0, 1, 2)).tolist(), strict=True):
                sums[i] += total
        return torch.stack(out)

    def _dropped(self, left: list[int], sums: dict[int, float]) -> int:
        if self.policy == "attended":
            return min(left[: -(self.budget // 2)], key=lambda i: (sums[i], i))
        return left[FIRST if self.policy == "sinks" else 0]


def _order(places: Sequence[int]) -> tuple[Tensor, Tensor]:
    order = torch.tensor([places])
    return order, torch.zeros_like(order)


def _keep(probs: list[Tensor]) -> Callable[..., Tensor]:
    def run(x: Tensor, *_: TokenLayout) -> Tensor:
        probs.append(x)
        return x

    return run


@law(
    29,
    "evicted",
    "with eviction, each token attends to the entries that the policy leaves, at the policy's positions, whatever the steps",
    covers="kinds",
    budget=3.0,
)
@torch.no_grad()
def evicted(case: Case) -> str | None:
    """Run programs with each policy that the spec can have, and compare every step with lists."""
    decodes(case)
    refused = list[str]()
    for policy in POLICIES:
        eviction = Eviction(policy, BUDGET)
        try:
            model = evicting(case.model, eviction)
        except SpecError as error:
            refused.append(f"{policy} is refused ({error.problem})")
            continue
        _flat(case, model.part, eviction)
        held, encoded = case.of_spec(model), dict[int, tuple[Tensor, TokenLayout]]()
        outputs = Program(held, "ring", encoded, eviction.attended).run()
        compare(held, outputs, partial(_expected, case, held, policy), f"with eviction ({policy}) and by definition")
    if len(refused) == len(POLICIES):
        raise NotApplicable(refused[0])
    return "; ".join(refused)


def _flat(case: Case, spec: Any, eviction: Eviction) -> None:
    """Require that the pool of a policy is as large for long sequences as for short ones."""
    sizes = [
        Pool(spec, 1, capacity, layout="ring", dtype=DTYPE, source=N, attended=eviction.attended).bytes()
        for capacity in (N, 100 * N)
    ]
    case.true(sizes[0] == sizes[1], f"{eviction.policy}: a pool for {N} tokens has {sizes[0]} bytes, for {100 * N} {sizes[1]}")


def _expected(case: Case, held: Case, policy: Policy, batch: Tensor, sources: list[int]) -> Tensor:
    """The outputs of whole sequences over lists, or with the mask of the policy where no list can hold the entries."""
    how: dict[str, Any] = {"layout": TokenLayout.whole(len(batch), N)}
    if case.source is not None:
        how |= {"source": case.source[sources], "source_layout": TokenLayout.padded([LENGTHS[s] for s in sources], N)}
    try:
        listed = case.of_spec(evicting(case.model, Eviction("attended", BUDGET)))
    except SpecError:
        return held.stream(batch, held.ctx(**how))
    ctx = listed.ctx(**how)
    pool = Pool(listed.spec, len(batch), N, dtype=DTYPE, source=N, attended=ALL)
    if ctx.encoder_output is not None:
        lengths = [LENGTHS[s] for s in sources]
        keep = max(lengths)
        own = Ctx(
            layout=ctx.layout, encoder_output=ctx.encoder_output[:, :keep], encoder_layout=TokenLayout.padded(lengths, keep)
        )
        listed.model.fill(own, pool.admit(list(range(len(batch))), lengths))
    step = pool.step(list(range(len(batch))), [N] * len(batch))
    views = [
        {name: Listed(policy) if isinstance(view, AttendedView) else view for name, view in layer.items()}
        for layer in step.views
    ]
    return listed.stream(batch, Ctx(layout=step.layout, views=views, patches=case.patches))
