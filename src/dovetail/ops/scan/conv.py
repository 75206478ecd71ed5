"""Short causal depthwise convolution over the tokens of a document.

    y_t = bias + Σ_{d=0}^{taps−1} weight[:, taps−1−d] ∘ x_{t−d}             x_{t−d} = 0 where that token is of another document

Shapes: x, y (rows, n, channels)   weight (channels, taps)   conv state (rows, channels, taps−1): the last inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.nn.module import at_least_fp32
from dovetail.nn.rows import SequenceRows


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq: SequenceRows, conv_state: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y, and the conv state for the next tokens of each row; a chunk may be shorter than the kernel."""
    n, back = x.shape[1], weight.shape[1] - 1
    longer, document = extended(x, back, seq, conv_state)
    y, dtype = None, at_least_fp32(x.dtype)
    wide, kernel = longer.to(dtype), weight.to(dtype)  # the sum is rounded once, at the end
    for d in range(weight.shape[1]):
        term = wide[:, back - d : back - d + n] * kernel[:, back - d]
        if document is not None and d:
            term = term * (document[:, back - d : back - d + n] == document[:, back:])[..., None]
        y = term if y is None else y + term
    assert y is not None
    y = y if bias is None else y + bias.to(dtype)
    return y.to(x.dtype), last_inputs(longer, document, back, seq.ends).transpose(1, 2)


def extended(x: Tensor, back: int, seq: SequenceRows, conv_state: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """x behind the `back` inputs before it, (rows, back + n, channels), and the document of each; token t is at back + t."""
    before = x.new_zeros(x.shape[0], back, x.shape[2]) if conv_state is None else conv_state.to(x.dtype).transpose(1, 2)
    # document 0 continues from the conv state
    return torch.cat([before, x], 1), None if seq.document is None else F.pad(seq.document, (back, 0))


def last_inputs(longer: Tensor, document: Tensor | None, back: int, ends: Tensor | None) -> Tensor:
    """The last `back` inputs of each row before its padding, with zeros for earlier documents."""
    if ends is None:
        return longer[:, longer.shape[1] - back :]
    assert document is not None
    place = ends[:, None] + torch.arange(back, device=longer.device)  # in `longer`, where token t is at back + t
    inputs = longer.gather(1, place[..., None].expand(-1, -1, longer.shape[2]))
    last = document.gather(1, (ends + back - 1).clamp(min=0)[:, None])  # in a row without a token: that of the conv state
    return inputs * (document.gather(1, place) == last)[..., None]
