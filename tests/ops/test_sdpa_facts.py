"""Properties of torch's scaled_dot_product_attention that our kernels rely on; a torch that breaks one fails here."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["bool", "float"])
def test_a_query_without_a_visible_key_gets_zero_and_finite_gradients(dtype: torch.dtype, form: str) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, 5, 8, generator=generator).to(dtype).requires_grad_() for _ in range(3))
    mask = torch.ones(5, 5, dtype=torch.bool).tril()
    mask[2] = False
    given = mask if form == "bool" else torch.zeros(5, 5, dtype=dtype).masked_fill(~mask, -torch.inf)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=given)
    assert out.isfinite().all()
    assert (out[:, :, 2] == 0).all()
    assert (out[:, :, 1] != 0).any()
    out.backward(torch.ones_like(out))
    for tensor in (q, k, v):
        assert tensor.grad is not None
        assert tensor.grad.isfinite().all()
    assert q.grad is not None
    assert (q.grad[:, :, 2] == 0).all()


def test_is_causal_is_aligned_to_the_top_left() -> None:
    """With one query and nine keys it sees the first key alone: wrong for decoding, so we never say it there."""
    generator = torch.Generator().manual_seed(1)
    q, k, v = torch.randn(1, 1, 1, 4, generator=generator), *torch.randn(2, 1, 1, 9, 4, generator=generator)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(out, v[:, :, :1])


def test_grouped_heads_are_repeated_side_by_side() -> None:
    """Query heads 0, 1, 2 share key head 0, and 3, 4, 5 key head 1."""
    generator = torch.Generator().manual_seed(2)
    q, k, v = (torch.randn(1, h, 5, 4, generator=generator) for h in (6, 2, 2))
    shared = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    repeated = F.scaled_dot_product_attention(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1))
    torch.testing.assert_close(shared, repeated)
