"""What a language model of bytes must beat: an interpolated n-gram, and xz.

    p_n(c | h) = (count(h c) + T(h) · p_{n−1}(c | h')) / (count(h) + T(h))        T(h): distinct bytes seen after h; h' = h[1:]

p_0 is uniform over 256 bytes.                                                                       Witten & Bell 1991
"""

from __future__ import annotations

import lzma
import math
from collections import Counter, defaultdict


class NGram:
    """An interpolated model of bytes with contexts of up to `order` − 1 bytes."""

    def __init__(self, data: bytes, order: int = 6) -> None:
        self.order = order
        self.counts: list[dict[bytes, Counter[int]]] = [defaultdict(Counter) for _ in range(order)]
        for length, counts in enumerate(self.counts):
            for (context, byte), count in Counter((data[i - length : i], data[i]) for i in range(length, len(data))).items():
                counts[context][byte] = count

    def probability(self, context: bytes, byte: int) -> float:
        """p(byte | context), of which the last `order` − 1 bytes are used."""
        p = 1 / 256
        for length, counts in enumerate(self.counts):
            seen = counts.get(context[len(context) - length :]) if length <= len(context) else None
            if seen:
                kinds = len(seen)
                p = (seen[byte] + kinds * p) / (seen.total() + kinds)
        return p

    def bits(self, data: bytes) -> float:
        """Bits per byte of some text, each byte predicted from those before it."""
        reach = self.order - 1
        return sum(-math.log2(self.probability(data[max(0, i - reach) : i], data[i])) for i in range(len(data))) / len(data)


def xz_bits(train: bytes, held_out: bytes) -> tuple[float, float]:
    """Bits per byte of held-out text under `xz -9`: alone, and behind the training text (what it adds to the file)."""
    alone, before, both = (len(lzma.compress(data, preset=9)) for data in (held_out, train, train + held_out))
    return 8 * alone / len(held_out), 8 * (both - before) / len(held_out)
