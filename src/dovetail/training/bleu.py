"""BLEU of a corpus: how many n-grams of the translations are in their references (Papineni et al. 2002).

    BLEU = min(1, e^{1 − r/c}) · (p₁ p₂ p₃ p₄)^{1/4}        p_n = Σ clipped matches / Σ n-grams,   c and r words of both

Words are separated by white space, and case counts. Orders that no translation is long enough for are left out. The counts of
several batches add up, so each p_n is a sum with its count.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

ORDER = 4
LENGTHS = "lengths"  # words of the translations per word of the references


def counts(translations: Sequence[str], references: Sequence[str]) -> dict[str, tuple[int, int]]:
    """(matches, n-grams) by order `1` … `4`, and `lengths`: (words of the translations, words of the references)."""
    both = [(one.split(), other.split()) for one, other in zip(translations, references, strict=True)]
    found = {LENGTHS: (sum(len(one) for one, _ in both), sum(len(other) for _, other in both))}
    for n in range(1, ORDER + 1):
        pairs = [(_ngrams(one, n), _ngrams(other, n)) for one, other in both]
        found[str(n)] = (sum((one & other).total() for one, other in pairs), sum(one.total() for one, _ in pairs))
    return found


def bleu(sums: Mapping[str, tuple[float, float]]) -> float:
    """BLEU, from 0 to 1, of counts that were summed over a corpus."""
    words, expected = sums[LENGTHS]
    orders = [sums[str(n)] for n in range(1, ORDER + 1) if sums[str(n)][1]]
    if not words or any(not matches for matches, _ in orders):
        return 0.0
    precision = math.exp(sum(math.log(matches / total) for matches, total in orders) / len(orders))
    return min(1.0, math.exp(1 - expected / words)) * precision


def _ngrams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))
