"""Packed documents by the arguments that a class documents: which they are, and a model that ignores them."""

from __future__ import annotations

from typing import TypedDict, Unpack

import pytest
import torch
from torch import Tensor, nn

from dovetail.proof.foreign.laws import described, documented, laws_on
from dovetail.proof.foreign.model import Foreign


class Packing(TypedDict, total=False):
    cu_seq_lens_q: Tensor
    seq_idx: Tensor
    unrelated: int


class Documented(nn.Module):
    """Attention that positions separate, and a mean over the tokens before, which `seq_idx` separates alone."""

    right = True

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(62, 12), nn.Linear(12, 62)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        **kwargs: Unpack[Packing],
    ) -> Tensor:
        n = input_ids.shape[1]
        visible = torch.ones(n, n, dtype=torch.bool).tril()[None]
        if attention_mask is not None:
            visible = visible & attention_mask[:, None].bool()
        elif position_ids is not None:
            document = (position_ids == 0).cumsum(1)
            visible = visible & (document[:, :, None] == document[:, None])
        seq_idx = kwargs.get("seq_idx")
        if seq_idx is not None and not self.right:
            visible = torch.ones(n, n, dtype=torch.bool).tril()[None]
        x = self.table(input_ids)
        weights = visible.to(x.dtype)
        return self.head((weights @ x / weights.sum(-1, keepdim=True).clamp(min=1)).tanh())


class Ignored(Documented):
    right = False


def test_the_arguments_that_a_forward_documents() -> None:
    assert documented(Documented()) == {"cu_seq_lens_q", "seq_idx"}
    assert documented(nn.Linear(2, 2)) == frozenset()


def test_documents_are_described() -> None:
    found = described((3, 2))
    assert found["cu_seq_lens_q"].tolist() == [0, 3, 5]
    assert found["seq_idx"].tolist() == [[0, 0, 0, 1, 1]]
    assert found["max_length_k"] == 3


@pytest.mark.parametrize(("make", "state"), [(Documented, "passed"), (Ignored, "failed")])
def test_packing_by_documented_arguments_is_tested(make: type[Documented], state: str) -> None:
    (found,) = laws_on(Foreign(make, "packed"), ["padded"])
    assert found.state == state, found.detail
    assert state == "passed" or "packed with seq_idx" in found.detail
