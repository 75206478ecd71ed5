"""Law 11, compiled = eager: a block in a whole pass, and a whole model in decoding, as one graph without a break.

In decoding every step has another length. A graph that holds a length, or the state of a cache, as a constant would be compiled
again at every token; so the graphs of a generation are counted, and the tensors of a step are measured: their size follows the
tokens held, not the capacity of the pool.
"""

from __future__ import annotations

import contextlib
import dataclasses as dc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dovetail.nn.block import BlockModule
from dovetail.nn.ctx import Ctx, Listener
from dovetail.nn.draws import Draws
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.case import BATCH, Case, N, law
from dovetail.proof.laws.sequence import CaseDecoder
from dovetail.state.pool import Layout

# prefill, then steps of one token: of rows that are alike, and of rows whose lengths differ
GENERATIONS: tuple[tuple[Layout, Sequence[int]], ...] = (
    ("contiguous", (6, 6, 6)),
    ("ring", (6, 6, 6)),
    ("paged", (9, 3, 5)),
    ("contiguous", (9, 3, 5)),
    ("ring", (4, 11, 7)),
)
STEPS = 8
GRAPHS = 2  # the first step is compiled for its lengths, the second for all
FULL = 2  # more where a ring becomes full, since its frames then have another form
BLOCKS = 2  # more where blocks are stored, which grow at a pace of their own


@law(
    11,
    "compiled",
    "compiled equals eager, with no graph break; at most two graphs per generation, whose cost follows the cached tokens",
    covers="kinds",
    budget=6.0,
)
def compiled(case: Case) -> None:
    """Compile the first block of a whole pass, and every step of a generation; the graphs run unchanged."""
    _block(case)
    if case.spec.order() != "causal":
        return
    _follows_tokens(case)
    for layout, prefill in case.alternating(GENERATIONS, len(GENERATIONS)):
        _generation(case, layout, prefill)


class CapturedGraphs:
    """A backend that runs each captured graph unchanged, and keeps its code."""

    def __init__(self) -> None:
        torch.compiler.reset()
        self.graphs: list[str] = []

    def __call__(self, graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        self.graphs.append(graph.code)
        return graph.forward


def _block(case: Case) -> None:
    """The first block; its graph without taps is the same."""
    block = case.model.layers[0]
    assert isinstance(block, BlockModule)
    ctx, x = _block_input(case)
    sources = {"inputs": case.inputs, "embedded": x}
    given = [] if block.io is None else [sources[read.name] for _, read in block.io.reads]
    want = tree_leaves(block(x, ctx, {}, *given))  # the residual stream, and values that later blocks read
    graphs: list[list[str]] = []
    for cut in (False, True):
        kept = CapturedGraphs()
        with _without_taps() if cut else contextlib.nullcontext():
            got = tree_leaves(torch.compile(block, backend=kept, fullgraph=True)(x, _fresh(ctx), {}, *given))
        for own, other in zip(got, want, strict=True):
            case.same(own, other, "a compiled block and an eager one")
        graphs.append(kept.graphs)
    training = dc.replace(_fresh(ctx), draws=Draws(5))
    got = tree_leaves(torch.compile(block, backend="eager", fullgraph=True)(x, training, {}, *given))
    for own, other in zip(got, tree_leaves(block(x, dc.replace(_fresh(ctx), draws=Draws(5)), {}, *given)), strict=True):
        case.same(own, other, "a compiled block and an eager one, in training")
    torch.compiler.reset()
    case.true(graphs[0] == graphs[1], "the graph without listeners is not the graph without taps")


@torch.no_grad()
def _generation(case: Case, layout: Layout, prefill: Sequence[int]) -> None:
    """The steps of a generation, compiled and eager."""
    kept = CapturedGraphs()
    run = torch.compile(case.stream, backend=kept, fullgraph=True)
    both = [CaseDecoder(case, layout, rows=BATCH) for _ in range(2)]
    rows, held = list(range(BATCH)), list(prefill)
    for decoder in both:
        decoder.admit(rows)
        decoder.feed(rows, [case.inputs[row, :n] for row, n in enumerate(held)])
    for number in range(STEPS):
        tokens = case.inputs.gather(1, torch.tensor(held)[:, None])
        steps = [decoder.pool.step(rows, [1] * BATCH) for decoder in both]
        contexts = [Ctx(step.layout, step.views, patches=case.patches) for step in steps]
        got, want = (f(tokens, ctx) for f, ctx in zip((run, case.stream), contexts, strict=True))
        case.same(got, want, f"{layout}, step {number} after {tuple(prefill)} tokens, compiled and eager")
        held = [n + 1 for n in held]
    torch.compiler.reset()
    count, groups = len(kept.graphs), both[0].pool.groups.values()
    most = GRAPHS + FULL * (layout == "ring") + BLOCKS * any(group.per == "block" for group in groups)
    case.true(count <= most, f"{layout}, after {tuple(prefill)} tokens: {STEPS} steps made {count} graphs, above {most}")


@torch.no_grad()
def _follows_tokens(case: Case) -> None:
    """The sizes of the tensors that a step makes are the same in a pool of eight times the capacity."""
    sizes: list[int] = []
    for times in (1, 8):
        decoder = CaseDecoder(case, "contiguous", rows=BATCH, capacity=times * (N + 8))
        decoder.admit(range(BATCH))
        for n in (6, 1):
            with Made() as made:
                decoder.feed(range(BATCH), [case.inputs[row, :n] for row in range(BATCH)])
        sizes.append(made.values)
    case.true(sizes[0] == sizes[1], f"a step makes {sizes[0]} values, in a pool of eight times the capacity {sizes[1]}")


class Made(TorchDispatchMode):
    """Counts the values of the tensors that operations make; views, and what is written in place, aside."""

    def __init__(self) -> None:
        super().__init__()
        self.values = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view and not func._schema.is_mutable:
            self.values += sum(x.numel() for x in tree_leaves(out) if isinstance(x, Tensor))
        return out


def _fresh(ctx: Ctx) -> Ctx:
    """The same ctx with empty caches in its layouts."""
    encoder_layout = None if ctx.encoder_layout is None else _without_cache(ctx.encoder_layout)
    return dc.replace(ctx, layout=_without_cache(ctx.layout), encoder_layout=encoder_layout)


def _without_cache(layout: TokenLayout) -> TokenLayout:
    return TokenLayout(layout.coords, layout.order, layout.seg, layout.row, layout.start)


def _block_input(case: Case) -> tuple[Ctx, Tensor]:
    """The ctx and the input of the first block."""
    inputs: list[Tensor] = []

    def keep(_: str, x: Tensor) -> None:
        inputs.append(x.detach())

    with torch.no_grad():
        ctx = case.ctx()
        _, layout = case.model.embed(case.inputs, ctx)
        case.run(taps=Listener({"layers.0.in": keep}))
    return dc.replace(ctx, layout=layout), inputs[0]


@contextlib.contextmanager
def _without_taps() -> Iterator[None]:
    tap = Ctx.tap
    Ctx.tap = lambda self, module, name, x: x  # type: ignore[method-assign]
    try:
        yield
    finally:
        Ctx.tap = tap  # type: ignore[method-assign]
