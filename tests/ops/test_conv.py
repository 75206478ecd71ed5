"""The short causal convolution in narrow dtypes."""

from __future__ import annotations

import pytest
import torch

from dovetail.nn.layout import TokenLayout
from dovetail.nn.rows import sequence_rows
from dovetail.ops.scan.conv import causal_conv


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_sum_is_rounded_once(dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*shape, generator=draw).to(dtype) for shape in ((2, 30, 7), (7, 8), (7,)))
    seq = sequence_rows(TokenLayout.whole(2, 30))
    got, _ = causal_conv(x, weight, bias, seq, None)
    want, _ = causal_conv(x.double(), weight.double(), bias.double(), seq, None)
    assert torch.equal(got, want.to(dtype))
