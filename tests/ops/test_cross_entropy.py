"""Cross-entropy whose gradient overwrites its log-probs: torch's values and gradients, also twice, differentiated, compiled."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.loss import IGNORED
from dovetail.ops.vocab import chunked_cross_entropy, cross_entropy_sum

LABELS = torch.tensor([3, IGNORED, 0, 10, 3])
LOGITS = torch.randn(5, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 3


def torchs(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="sum")


def gradient(loss: Tensor, x: Tensor, **options: bool) -> Tensor:
    return torch.autograd.grad(loss, x, **options)[0]  # type: ignore[arg-type, call-arg]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_value_and_gradient_are_torchs(dtype: torch.dtype) -> None:
    x = LOGITS.to(dtype).requires_grad_()
    got, want = cross_entropy_sum(x, LABELS), torchs(x, LABELS)
    assert torch.equal(got, want)
    one, other = gradient(got * 0.7, x), gradient(want * 0.7, x)
    torch.testing.assert_close(one, other, rtol=4 * torch.finfo(dtype).eps, atol=torch.finfo(dtype).eps)
    assert not one[1].any(), "an ignored label has no gradient"


def test_a_graph_that_is_kept_gives_the_same_gradient_twice() -> None:
    x = LOGITS.clone().requires_grad_()
    loss = cross_entropy_sum(x, LABELS)
    first = gradient(loss, x, retain_graph=True).clone()
    torch.testing.assert_close(gradient(loss, x), first, rtol=1e-14, atol=1e-14)


def test_the_gradient_has_a_gradient() -> None:
    x = LOGITS.clone().requires_grad_()
    assert torch.autograd.gradgradcheck(lambda logits: cross_entropy_sum(logits, LABELS), x)


def test_logits_that_another_operation_has_saved_are_not_overwritten() -> None:
    x = LOGITS.clone().requires_grad_()
    capped = x.tanh()  # its gradient reads its output
    kept = capped.detach().clone()
    got = gradient(cross_entropy_sum(capped, LABELS), x)
    assert torch.equal(capped, kept)
    torch.testing.assert_close(got, gradient(torchs(x.tanh(), LABELS), x), rtol=1e-13, atol=1e-14)


def test_function_transforms_differentiate_it() -> None:
    got = torch.func.grad(lambda x: cross_entropy_sum(x, LABELS))(LOGITS)
    x = LOGITS.clone().requires_grad_()
    torch.testing.assert_close(got, gradient(torchs(x, LABELS), x), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("chunk", [2, 5])
def test_chunks_that_are_recomputed_give_the_same(chunk: int) -> None:
    x = torch.randn(5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).requires_grad_()
    table = torch.randn(11, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).requires_grad_()
    got = chunked_cross_entropy(lambda part: part @ table.t(), x, LABELS, chunk=chunk)
    assert int(got.num_labels) == 4
    want = torch.autograd.grad(torchs(x @ table.t(), LABELS), (x, table))
    for one, other in zip(torch.autograd.grad(got.sum, (x, table)), want, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-13)


def test_the_first_backward_pass_allocates_nothing_of_the_size_of_the_logits() -> None:
    class Largest(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[attr-defined]
        made = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            before = {one.untyped_storage().data_ptr() for one in args if isinstance(one, Tensor)}
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.untyped_storage().data_ptr() not in before:
                self.made = max(self.made, out.numel())
            return out

    x = LOGITS.clone().requires_grad_()
    loss = cross_entropy_sum(x, LABELS)
    with Largest() as largest:
        gradient(loss, x)
    assert largest.made <= len(LABELS), "vectors alone"


def test_chunks_leave_no_logits_behind() -> None:
    """What a chunk holds is freed after its forward pass: nothing of the size of its logits is alive before backward."""

    class Alive(torch.utils._python_dispatch.TorchDispatchMode):  # type: ignore[attr-defined]
        def __init__(self) -> None:
            super().__init__()
            self.storages = weakref.WeakSet[torch.UntypedStorage]()

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor) and out.numel() >= 8 * 101:
                self.storages.add(out.untyped_storage())
            return out

    x, table = torch.randn(40, 7).requires_grad_(), torch.randn(101, 7).requires_grad_()
    with Alive() as alive:
        loss = chunked_cross_entropy(lambda part: part @ table.t(), x, torch.arange(40), chunk=8).sum
        gc.collect()
        assert len(alive.storages) == 0
    loss.backward()
    assert x.grad is not None
