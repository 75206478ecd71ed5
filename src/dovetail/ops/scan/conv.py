"""A short causal convolution, each channel alone: a token and the few before it in its own document.

    y_t = bias + Σ_{d=0}^{taps−1} weight[:, taps−1−d] ∘ x_{t−d}             x_{t−d} = 0 where that token is of another document

Shapes: x, y (rows, n, channels)   weight (channels, taps)   tail (rows, channels, taps−1): the last inputs, to go on from.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.core.rows import SequenceRows


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, seq: SequenceRows, tail: Tensor | None
) -> tuple[Tensor, Tensor]:
    """y, and the tail that the next tokens of each row need; a chunk may be shorter than the convolution."""
    n, back = x.shape[1], weight.shape[1] - 1
    before = x.new_zeros(x.shape[0], back, x.shape[2]) if tail is None else tail.to(x.dtype).transpose(1, 2)
    longer = torch.cat([before, x], 1)
    # 0 is the document that goes on from the tail
    document = None if seq.document is None else F.pad(seq.document, (back, 0))
    y = None
    for d in range(weight.shape[1]):
        term = longer[:, back - d : back - d + n] * weight[:, back - d]
        if document is not None and d:
            term = term * (document[:, back - d : back - d + n] == document[:, back:])[..., None]
        y = term if y is None else y + term
    assert y is not None
    return (y if bias is None else y + bias), _tail(longer, document, back, seq.ends).transpose(1, 2)


def _tail(longer: Tensor, document: Tensor | None, back: int, ends: Tensor | None) -> Tensor:
    """The last `back` inputs of each row before its padding, nothing of earlier documents among them."""
    if ends is None:
        return longer[:, longer.shape[1] - back :]
    assert document is not None
    place = ends[:, None] + torch.arange(back, device=longer.device)  # among `longer`, where token t stands at back + t
    held = longer.gather(1, place[..., None].expand(-1, -1, longer.shape[2]))
    last = document.gather(1, (ends + back - 1).clamp(min=0)[:, None])  # where a row has no token: that of the tail
    return held * (document.gather(1, place) == last)[..., None]
