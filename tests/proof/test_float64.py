"""Float32 that is asked for inside is float64; bytes that are read stay what they are, and nothing stays changed outside."""

from __future__ import annotations

import torch

from dovetail.proof.compare.float64 import float32_islands_widened


def test_every_request_for_float32_is_one_for_float64() -> None:
    x = torch.ones(3, dtype=torch.float64)
    with float32_islands_widened():
        made = (x.float(), x.to(torch.float32), x.softmax(-1, dtype=torch.float32), torch.zeros(2), torch.arange(3.0))
    assert {one.dtype for one in made} == {torch.float64}
    assert x.float().dtype == torch.zeros(2).dtype == torch.float32


def test_what_bytes_are_is_not_changed() -> None:
    with float32_islands_widened():
        read = torch.frombuffer(bytearray(8), dtype=torch.float32)
        assert torch.zeros(2, dtype=torch.bfloat16).dtype == torch.bfloat16
    assert (read.dtype, read.numel()) == (torch.float32, 2)


def test_in_other_dtypes_nothing_happens() -> None:
    with float32_islands_widened(torch.bfloat16):
        assert torch.ones(2, dtype=torch.bfloat16).float().dtype == torch.float32


def test_a_default_dtype_of_float32_that_is_set_inside_is_float64() -> None:
    """transformers sets the dtype of a config while it builds a model: Gemma's embedding scale was rounded to float32."""
    with float32_islands_widened():
        torch.set_default_dtype(torch.float32)
        assert torch.tensor(48**0.5).item() == 48**0.5
        torch.set_default_dtype(torch.bfloat16)  # no request for float32
        assert torch.tensor(48**0.5).dtype == torch.bfloat16
    assert torch.get_default_dtype() == torch.float32
