"""A model as a foldable block diagram in HTML: each part with its fields, shapes, parameters, FLOPs and decode state."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dovetail.account import BYTES, Account, Cost, Node, runs
from dovetail.core.check import advice
from dovetail.core.fold import active_parameters
from dovetail.core.units import count, flops, size
from dovetail.views.page import Fact, facts, text
from dovetail.views.summary import Limit, amounts, description, layer_label

OPEN_DEPTH = 2  # levels of the tree that are unfolded at first: the model's children and the parts of a layer
SMALLEST = 0.001  # fraction of all parameters that has a meter
RULES = """
.dovetail .part{border:1px solid var(--line);border-radius:8px;background:var(--card);margin:0;padding:.35rem .6rem}
.dovetail .part .part{background:var(--inner)}
.dovetail .part .part .part{background:var(--card)}
.dovetail .repeated{box-shadow:4px 4px 0 -1px var(--card),4px 4px 0 0 var(--line)}
.dovetail .head{display:flex;flex-wrap:wrap;align-items:baseline;gap:.1rem .6rem}
.dovetail summary>.head{display:inline-flex;width:calc(100% - 1.2em);vertical-align:top}
.dovetail .label{font-weight:600}
.dovetail .kind{color:var(--accent)}
.dovetail .numbers{margin-left:auto;display:flex;flex-wrap:wrap;gap:0 .9rem;font-variant-numeric:tabular-nums;font-size:.9rem}
.dovetail .numbers i{font-style:normal;color:var(--soft)}
.dovetail .meter{display:block;height:4px;border-radius:2px;background:var(--line);margin:.25rem 0 .1rem;overflow:hidden}
.dovetail .meter span{display:block;height:100%;background:var(--accent)}
.dovetail .inside{padding:.3rem 0 .2rem}
.dovetail .inside>.part,.dovetail .inside>.arrow{margin-top:.35rem}
.dovetail .fields{list-style:none;display:flex;flex-wrap:wrap;gap:.3rem;padding:0;margin:.35rem 0}
.dovetail .fields li{border:1px solid var(--line);border-radius:4px;padding:0 .4rem;font-size:.88rem;margin:0}
.dovetail .arrow{text-align:center;color:var(--soft);line-height:1.1;margin:.15rem 0}
.dovetail .costs td{overflow-wrap:normal}
@media(max-width:600px){.dovetail .numbers{margin-left:1.1em;width:100%}.dovetail .inside{padding-left:0}}
"""


def diagram(name: str, account: Account, limit: Limit | None, lost: Sequence[str] = ()) -> str:
    """Return the content of the page of `show`."""
    state = "" if not account.states else f", decode state per sequence of {account.length:,} tokens in {account.dtype}"
    legend = f"On each part: parameters, FLOPs per token at length {account.length:,} (over the pairs that masks leave){state}."
    notes = [f"not carried over: {line}" for line in lost]
    notes += [f"advice: {path}: {problem.problem}" for path, problem in advice(account.spec, account.length)]
    below = "".join(f"<p>{text(note)}</p>" for note in notes)
    return (
        f"<h1>{text(name)}</h1>{facts(_facts(account, limit))}{below}"
        f'<p class="soft">{text(legend)}</p><div class="diagram">{_children(account.tree, account, 1, 0)}</div>'
        f"{_costs(account, limit)}"
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


def _children(node: Node, account: Account, times: int, depth: int) -> str:
    """Return the parts below a part; repeated layers are one box, and the flow of the model is drawn by arrows."""
    boxes = [
        _box(child, layer_label(child, len(period), repeats), account, times * repeats, depth, repeats > 1)
        for period, repeats in runs(node.children)
        for child in period
    ]
    between = '<div class="arrow" aria-hidden="true">↓</div>' if depth == 0 else ""
    return between.join(boxes)


def _box(node: Node, label: str, account: Account, times: int, depth: int, repeated: bool) -> str:
    fraction = node.parameters * times / max(account.tree.parameters, 1)
    inside = _inside(node, account, times, depth)
    words = "" if inside else f'<span class="soft">{text(node.summary)}</span>'
    head = (
        f'<span class="label">{text(label)}</span><span class="kind">{text(node.kind)}</span>{words}'
        f'<span class="numbers">{_numbers(node, account.costs[node.path], times)}</span>'
    )
    meter = f'<span class="meter"><span style="width:{fraction:.1%}"></span></span>' if fraction >= SMALLEST else ""
    style = "part repeated" if repeated else "part"
    if not inside:
        return f'<div class="{style}"><div class="head">{head}</div>{meter}</div>'
    unfolded = " open" if depth < OPEN_DEPTH and node.children else ""
    return (
        f'<details class="{style}"{unfolded}><summary><span class="head">{head}</span>{meter}</summary>'
        f'<div class="inside">{inside}</div></details>'
    )


def _numbers(node: Node, cost: Cost, times: int) -> str:
    items: list[tuple[str, str]] = []
    if node.parameters:
        items.append((count(node.parameters * times), "parameters"))
    if cost.matmul + cost.attention:
        items.append((flops((cost.matmul + cost.attention) * times), "per token"))
    if cost.state_bytes:
        items.append((size(cost.state_bytes * times), "KV cache" if cost.state_bytes_per_token else "recurrent state"))
    return "".join(f"<span>{text(value)} <i>{text(unit)}</i></span>" for value, unit in items)


def _inside(node: Node, account: Account, times: int, depth: int) -> str:
    """Return what a part shows when it is unfolded: what it computes, fields, shapes, and the parts below it."""
    fields = "".join(f"<li>{text(words)}</li>" for words in description(node))
    rows = "".join(
        f'<tr><td><code>{text(name)}</code></td><td class="n">{text(" × ".join(map(str, shape)) or "scalar")}</td></tr>'
        for name, shape in node.shapes.items()
    )
    blocks = [f'<p class="soft">{text(node.summary)}</p>' if depth and (fields or rows) else ""]
    blocks.append(f'<ul class="fields">{fields}</ul>' if fields else "")
    blocks.append(f'<table><tr><th>weight</th><th class="n">shape</th></tr>{rows}</table>' if rows else "")
    if times > 1 and node.parameters:
        blocks.append(f'<p class="soft">{times} times {node.parameters:,} parameters</p>')
    return "".join(blocks) + _children(node, account, times, depth + 1)


def _costs(account: Account, limit: Limit | None) -> str:
    """Return all costs as a table, with the decode state at several lengths."""
    rows = "".join(
        f'<tr><td>{text(name)}</td><td class="n">{text(amount)}</td><td class="soft">{text(note)}</td></tr>'
        for name, amount, note, _ in amounts(account, limit)
    )
    return f'<h2>Costs</h2><table class="costs">{rows}</table>'
