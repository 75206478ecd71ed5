"""The page of `show`: a model as a foldable block diagram, each part with its fields, shapes and costs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from dovetail.account import BYTES, Account, TreeNode, runs
from dovetail.base.units import count, flops, size
from dovetail.spec.check import advice
from dovetail.spec.fold import active_parameters
from dovetail.views.page import Fact, body
from dovetail.views.summary import Limit, amounts, description, layer_label

OPEN_DEPTH = 2  # levels of the tree that are unfolded at first: the model's children and the parts of a layer
SMALLEST = 0.001  # fraction of all parameters that has a meter


def diagram(name: str, account: Account, limit: Limit | None, lost: Sequence[str] = ()) -> str:
    """Return the content of the page."""
    state = "" if not account.states else f", decode state per sequence of {account.length:,} tokens in {account.dtype}"
    at = f"at length {account.length:,}"
    notes = [f"not carried over: {line}" for line in lost]
    notes += [f"advice: {path}: {problem.problem}" for path, problem in advice(account.spec, account.length)]
    return body(
        "show.html",
        name=name,
        account=account,
        figures=_facts(account, limit),
        notes=notes,
        legend=f"On each part: parameters, FLOPs per token {at} (over the pairs that masks leave){state}.",
        amounts=amounts(account, limit),
        open_depth=OPEN_DEPTH,
        boxes=_boxes,
        numbers=partial(_numbers, account),
        share=partial(_share, account),
        description=description,
    )


def _facts(account: Account, limit: Limit | None) -> Iterator[Fact]:
    spec, total, active = account.spec, account.tree.parameters, active_parameters(account.spec)
    weights = f"{size(total * BYTES[account.dtype])} in {account.dtype}"
    note = weights if active == total else f"{weights}, {count(active)} active per token"
    yield Fact("parameters", f"{total:,}", note)
    yield Fact("layers", f"{len(spec.layers)}", f"width {spec.width:,}, vocabulary {spec.vocab:,}")
    work = account.flops_per_token
    yield Fact("matmul", flops(work["matmul"]), "per token")
    yield Fact("attention", flops(work["attention_causal"]), f"per token at length {account.length:,}")
    if "mtp" in work:
        yield Fact("multi-token prediction", flops(work["mtp"]), "per token in training")
    if account.states:
        fixed, after = account.state_bytes(0), account.state_bytes(account.length)
        grows = account.state_bytes(1) > fixed
        note = f"per sequence of {account.length:,} tokens" if grows else "per sequence of any length"
        yield Fact("KV cache" if grows and not fixed else "decode state" if grows else "recurrent state", size(after), note)
    if limit is not None:
        yield Fact("longest sequence", f"{limit.tokens:,} tokens", limit.reason)


def _boxes(node: TreeNode) -> Iterator[tuple[TreeNode, str, int]]:
    """Yield each part below a part with its label and how often it is repeated: repeated layers are one box."""
    for period, repeats in runs(node.children):
        for child in period:
            yield child, layer_label(child, len(period), repeats), repeats


def _share(account: Account, node: TreeNode, times: int) -> str | None:
    """Return the width of a part's meter; None if it would not be seen."""
    fraction = node.parameters * times / max(account.tree.parameters, 1)
    return f"{fraction:.1%}" if fraction >= SMALLEST else None


def _numbers(account: Account, node: TreeNode, times: int) -> Iterator[tuple[str, str]]:
    """Yield (value, unit) of what a part has."""
    cost = account.costs[node.path]
    if node.parameters:
        yield count(node.parameters * times), "parameters"
    if cost.matmul + cost.attention:
        yield flops((cost.matmul + cost.attention) * times), "per token"
    if cost.state_bytes:
        yield size(cost.state_bytes * times), "KV cache" if cost.state_bytes_per_token else "recurrent state"
