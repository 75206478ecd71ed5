"""The bounds of tiles of a layout whose rows begin at a known place are read from no tensor."""

from __future__ import annotations

from torch._subclasses.fake_tensor import FakeTensorMode

from dovetail.nn.layout import TokenLayout
from dovetail.ops.mask import spans


def test_bounds_of_fake_tokens_are_those_of_real_ones() -> None:
    for start, n, size, step in ((0, 9, 4, 1), (5, 12, 5, 3), (2, 1, 64, 1)):
        real = TokenLayout.whole(2, n, start=start)
        plain = TokenLayout.of(real.order, real.seg)
        with FakeTensorMode():
            fake = TokenLayout.whole(2, n, start=start)
        assert plain.start is None
        assert spans(fake, size, step) == spans(real, size, step) == spans(plain, size, step)
