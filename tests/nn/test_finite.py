"""NaN and infinity are found in every dtype that can hold them."""

from __future__ import annotations

import pytest
import torch

from dovetail.nn.finite import nonfinite


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64])
def test_nan_is_found_in_any_dtype(dtype: torch.dtype) -> None:
    finite = torch.tensor([1.0, -2.0]).to(dtype)
    assert nonfinite(finite) is None
    assert nonfinite(torch.tensor([1.0, float("nan")]).to(dtype)) == "nan"


def test_infinity_is_found_in_either_part_of_a_complex_number() -> None:
    assert nonfinite(torch.complex(torch.zeros(2), torch.tensor([0.0, -torch.inf])).conj()) == "inf"


def test_integers_and_empty_tensors_are_finite() -> None:
    assert nonfinite(torch.arange(3)) is None
    assert nonfinite(torch.empty(0)) is None
