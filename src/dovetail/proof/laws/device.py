"""Law 22, device: full forward passes, backward, prefill and decode on one device, without waiting for it.

Everything runs on the meta device, where tensors have shapes and no values, under a mode that sees every operation:

    mixed    an operation over tensors of two devices (a 0-dimensional CPU tensor is a number, and may be one of them)
    stray    a tensor that is made on another device: a mask, an index, an `arange` without its device
    sync     a value read from a tensor (`.item()`, `.tolist()`, a shape that depends on values): meta tensors have none

No GPU is needed to find these: on a GPU the first raises, the second copies, and the third waits for the device at every step.
What must be read is read by `nn/host.py`, which answers zeros here: how many tokens each expert has, where no kernel takes
all experts at once. In bfloat16, in which people run.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dovetail.model.construction import build
from dovetail.nn.ctx import Ctx, Losses
from dovetail.nn.draws import Draws
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.case import BATCH, LENGTHS, Broken, Case, N, law
from dovetail.proof.laws.sequence import LAYOUTS
from dovetail.state.pool import Layout, Pool

META, DTYPE = torch.device("meta"), torch.bfloat16
PACKED, ROWS = [[9, 7], [5], [3, 8, 4]], 4
TURNS = 8  # specs that take turns with the programs, where there are hundreds of specs
# prefill of all rows, a step of all, a chunk of one, a ragged step
STEPS: tuple[tuple[Sequence[int], Sequence[int]], ...] = (
    ((0, 1, 2), (5, 5, 5)),
    ((0, 1, 2), (1, 1, 1)),
    ((2,), (4,)),
    ((0, 2), (3, 1)),
)


class DeviceWatch(TorchDispatchMode):
    """Records each operation over two devices, and each tensor that is made elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [x for x in tree_leaves((args, kwargs or {})) if isinstance(x, Tensor)]
        out = func(*args, **(kwargs or {}))
        if len({x.device for x in given if x.dim()}) > 1:
            self.found.append(f"{func} over tensors of two devices in {_here(traceback.extract_stack())}")
        if not given and any(isinstance(x, Tensor) and x.dim() and x.device != META for x in tree_leaves(out)):
            self.found.append(f"{func} makes a tensor on another device in {_here(traceback.extract_stack())}")
        return out


def _here(frames: Iterable[traceback.FrameSummary]) -> str:
    """The innermost line of ours, but for this file."""
    ours = [f for f in frames if "dovetail/" in f.filename and f.filename != __file__]
    return f"{ours[-1].filename.rpartition('dovetail/')[2]}:{ours[-1].lineno}: {ours[-1].line}" if ours else "outside"


@law(
    22,
    "device",
    "full forward passes, backward, prefill and decode stay on one device and never wait for it",
    "values",
    budget=1.0,
)
def device(case: Case) -> None:
    """Run everything on the meta device; in the suite, one in eight programs of each spec."""
    for name, run in case.alternating(list(OnMeta(case).programs()), TURNS):
        with DeviceWatch() as watch:
            try:
                run()
            except (NotImplementedError, RuntimeError) as error:
                where = _here(traceback.extract_tb(error.__traceback__))
                raise Broken(f"{name}: fails in {where} ({str(error).splitlines()[0][:80]})") from error
        case.true(not watch.found, f"{name}: {watch.found[:1]}")


class OnMeta(Case):
    """A case on the meta device, with labels."""

    def __init__(self, case: Case) -> None:
        super().__init__(case.spec, case.seed, build(case.spec, dtype=DTYPE, device=META))
        # sampled now, on the CPU, which no program may use
        self.sampled = (self.inputs, self.source, self.patches, self.source_patches)
        head = self.spec.head
        if head is not None:
            shape = tuple(case.run().shape[:-1])
            self.labels = self.moved(head.labels(self.model.head.scope, shape, torch.Generator().manual_seed(0)))

    def programs(self) -> Iterator[tuple[str, Callable[[], Any]]]:
        """(name, what runs) for whole passes on every layout, for the loss with its gradients, and for decoding."""
        spec = self.spec
        if spec.head is not None:
            yield "the loss and its gradients", self.loss
        yield "a whole pass", self.run
        if not spec.embed.causal():
            return
        layouts = {"padded": TokenLayout.padded(LENGTHS, N, left=True, device=META)}
        if spec.encoder is None:
            layouts |= {"packed": TokenLayout.packed(PACKED, N, META), "flat": TokenLayout.flat(LENGTHS, device=META)}
        for name, layout in layouts.items():
            yield f"a {name} batch", lambda layout=layout: self.run(_tokens(layout), layout=layout)
        if spec.order() == "causal":
            for kind, flat in product(LAYOUTS, (False, True)):
                yield f"decoding, {kind}{', flat' * flat}", lambda kind=kind, flat=flat: self.decode(kind, flat)

    def loss(self) -> None:
        """The loss in training, and the gradient of every parameter."""
        loss = self.model.loss(self.inputs, self.labels, self.ctx(draws=Draws(1), losses=Losses()))
        torch.autograd.grad(loss, list(self.model.parameters()), allow_unused=True)

    @torch.no_grad()
    def decode(self, kind: Layout, flat: bool) -> None:
        """Prefill, steps, a chunk, a fork and a roll-back."""
        pool = Pool(self.spec, ROWS, N, layout=kind, dtype=DTYPE, device=META, source=N, page=4, slack=3)
        if self.source is not None:
            self.model.fill(self.ctx(), pool.admit(range(BATCH), [N] * BATCH))
        for rows, new in STEPS:
            step = pool.step(rows, new, flat)
            self.model.hidden(_tokens(step.layout), Ctx(layout=step.layout, views=step.views, patches=self.patches))
        pool.mark(1)
        pool.fork(0, 3)
        pool.rollback(2, 1)


def _tokens(layout: TokenLayout) -> Tensor:
    return torch.zeros(layout.order.shape, dtype=torch.long, device=META)
