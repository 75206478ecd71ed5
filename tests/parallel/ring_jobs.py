"""What tests of ring attention let ranks do: functions that a rank can import, of plain data."""

from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from dovetail.nn.layout import TokenLayout
from dovetail.nn.view import Edit, Scoring
from dovetail.ops.attend import WHOLE, using
from dovetail.parallel import ring
from dovetail.parallel.context import GatherView
from dovetail.parallel.ring import RingView
from dovetail.proof.laws import sharded
from dovetail.spec.part import KINDS


def view_of(how: str) -> GatherView | RingView:
    assert dist.group.WORLD is not None
    gathers = GatherView(dist.group.WORLD)
    return RingView(gathers) if how == "ring" else gathers


def scoring(mask: Any = None, heads: int = 1, **more: Any) -> Scoring:
    causal: Any = KINDS["causal"]
    return Scoring(causal() if mask is None else mask, 1.0, torch.arange(heads), **more)


def own(x: Tensor, dim: int = 1) -> Tensor:
    """This rank's chunk as a leaf."""
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone().requires_grad_()


def weighted_by_integers() -> dict[str, list[float]]:
    """Four tokens with q = 1, k = ln 1 … ln 4 and v = 10 … 40, so that key j weighs j; gradients of the last output."""
    count = torch.arange(1.0, 5.0, dtype=torch.float64).view(1, 4, 1, 1)
    q, k, v = own(torch.ones_like(count)), own(count.log()), own(10 * count)
    layout = TokenLayout.whole(1, 4).cut(dist.get_world_size(), dist.get_rank())
    out = view_of("ring").append(layout, k, v).attend(layout, q, scoring())
    last = dist.get_rank() == dist.get_world_size() - 1
    (out[:, -1].sum() if last else 0.0 * out.sum()).backward()
    named = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    return {name: x.flatten().tolist() for name, x in named.items() if x is not None}


def recomputed() -> float:
    """The largest difference of gradients where the forward pass is recomputed in the backward pass."""
    generator, layout = torch.Generator().manual_seed(dist.get_rank()), TokenLayout.whole(2, 12)
    layout = layout.cut(dist.get_world_size(), dist.get_rank())
    inputs = [torch.randn(2, layout.n, 2, 4, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    view = view_of("ring")

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return view.append(layout, k, v).attend(layout, q, scoring(heads=2)).sin()

    want = torch.autograd.grad(run(*inputs).sum(), inputs)
    got = torch.autograd.grad(checkpoint(run, *inputs, use_reentrant=False).sum(), inputs)  # type: ignore[union-attr]
    return max((a - b).abs().max().item() for a, b in zip(got, want, strict=True))


def attended_chunks(mask: str) -> int:
    """How many chunks this rank attends to, of one token each, with this mask."""
    calls: list[int] = []

    def counted(*args: Any) -> Any:
        calls.append(1)
        return attend_tiles(*args)

    attend_tiles = ring.attend_tiles
    kind: Any = KINDS[mask]
    layout = TokenLayout.whole(2, dist.get_world_size()).cut(dist.get_world_size(), dist.get_rank())
    q = torch.ones(2, 1, 1, 4)
    with patch.object(ring, "attend_tiles", counted):
        view_of("ring").append(layout, q, q).attend(layout, q, scoring(kind()))
    return len(calls)


def one_view(how: str, seed: int) -> float:
    """The largest difference of outputs from one rank, over batches of other documents that one view serves in turn, as in a
    run: lengths of documents are drawn, and each batch comes twice in a row, as a pass and its recomputation do."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    view, generator = view_of(how), torch.Generator().manual_seed(seed)
    worst = 0.0
    for _ in range(5):
        cuts = torch.randint(1, 12, (2,), generator=generator).tolist()
        layout = TokenLayout.packed([[cut, 12 - cut] for cut in cuts], 12)
        q, k, v = (torch.randn(2, 12, 2, 4, generator=generator, dtype=torch.float64) for _ in range(3))
        want = WHOLE.append(layout, k, v).attend(layout, q, scoring(heads=2)).chunk(ranks, 1)[rank]
        piece = layout.cut(ranks, rank)
        for _ in range(2):
            kv = view.append(piece, *(x.chunk(ranks, 1)[rank] for x in (k, v)))
            worst = max(worst, (kv.attend(piece, q.chunk(ranks, 1)[rank], scoring(heads=2)) - want).abs().max().item())
    return worst


def attended(dtype: torch.dtype, flat: bool, edit: bool) -> tuple[float, float]:
    """The largest difference of outputs and gradients from one rank in float64, of the ring and of one rank in this dtype. Keys
    of 12 tokens in a batch or flat; with `edit`, a listener reads the probs over all keys and halves them."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    layout = TokenLayout.flat([7, 2, 3]) if flat else TokenLayout.packed([[7, 2], [12]], 12)
    lead, generator = layout.order.shape, torch.Generator().manual_seed(0)
    shapes = ((6, 3), (2, 3), (2, 7), (6, 7))
    q, k, v, g = (torch.randn(*lead, *axes, generator=generator).to(dtype).double() for axes in shapes)
    heard: list[int] = []

    def halved(probs: Tensor, *layouts: TokenLayout) -> Tensor:
        heard.append(probs.shape[-1])
        return probs / 2

    def run(view: Any, layout: TokenLayout, *inputs: Tensor) -> list[Tensor]:
        leaves = [x.detach().clone().requires_grad_() for x in inputs[:3]]
        out = view.append(layout, *leaves[1:]).attend(layout, leaves[0], scoring(heads=6), Edit(halved) if edit else None)
        return [out.detach(), *torch.autograd.grad(out, leaves, inputs[3])]

    with using("reference"):
        exact = run(WHOLE, layout, q, k, v, g)
    with using("reference" if edit else "tiled"):
        rounded = run(WHOLE, layout, *(x.to(dtype) for x in (q, k, v, g)))
    pieces = [x.chunk(ranks, layout.order.dim() - 1)[rank].to(dtype) for x in (q, k, v, g)]
    found = run(view_of("ring"), layout.cut(ranks, rank), *pieces)
    assert set(heard) <= {12}, "a listener gets the probs over all keys"
    want = [x.chunk(ranks, layout.order.dim() - 1)[rank] for x in exact]
    error = max((a.double() - b).abs().max().item() for a, b in zip(found, want, strict=True))
    return error, max((a.double() - b).abs().max().item() for a, b in zip(rounded, exact, strict=True))


def compare_twelve(spec_yaml: str) -> dict[str, sharded.Compared]:
    """Law 8 by ring, on rows of 12 tokens: chunks of 4 or 3 on 3 or 4 ranks, the last ones with padding only."""
    with patch.object(sharded, "N", 12):
        return sharded.compare(spec_yaml, 0, ("ring",))


class KeyValueBytes(TorchDispatchMode):
    """Counts the bytes of storages of one dtype and of certain sizes that are alive after each operation."""

    def __init__(self, dtype: torch.dtype, sizes: set[int]) -> None:
        super().__init__()
        self.dtype, self.sizes, self.most = dtype, sizes, 0
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves((args, kwargs, out)):
            if isinstance(x, Tensor) and x.dtype == self.dtype and x.untyped_storage().nbytes() in self.sizes:
                storage = StorageWeakRef(x.untyped_storage())
                self.alive[storage.cdata] = (storage, x.untyped_storage().nbytes())
        self.alive = {key: (storage, size) for key, (storage, size) in self.alive.items() if not storage.expired()}
        self.most = max(self.most, sum(size for _, size in self.alive.values()))
        return out


def chunks_alive(how: str) -> tuple[float, float]:
    """The most keys and values that this rank holds at once, in chunks: in the forward and in the backward pass."""
    ranks, n, kv_heads, heads, head, value = dist.get_world_size(), 24, 2, 6, 3, 7
    layout = TokenLayout.whole(2, ranks * n).cut(ranks, dist.get_rank())
    generator = torch.Generator().manual_seed(dist.get_rank())
    shapes = ((heads, head), (kv_heads, head), (kv_heads, value))
    q, k, v = (torch.randn(2, n, *axes, generator=generator).bfloat16().requires_grad_() for axes in shapes)
    each = [x.untyped_storage().nbytes() for x in (k, v)]
    with KeyValueBytes(torch.bfloat16, {times * size for size in each for times in (1, ranks)}) as forward:
        out = view_of(how).append(layout, k, v).attend(layout, q, scoring(heads=heads))
    with KeyValueBytes(torch.bfloat16, forward.sizes) as backward:
        out.sum().backward()
    return forward.most / sum(each), backward.most / sum(each)
