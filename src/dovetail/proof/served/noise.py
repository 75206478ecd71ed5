"""How far two answers of one server are apart, and how far rounding may move them.

The bound is ROOM times the server's own spread, measured before the laws on three relations that rounding alone should move:
the same requests again, the same requests at once, and prompts that end with what was generated. A relation may be broken, or
exact where the others are not, so that the scale is the middle one of the three, or the largest as far as CREDIBLE reaches:

    scale = max(middle, min(largest, CREDIBLE)),  bound = min(max(ROOM · scale, FLOOR), CEILING)

Where two answers take different tokens, both rows are compared there and no further: the texts have parted. A flip between
tokens within 2 · bound of each other is a near-tie, which is excused and counted. Fixed bounds do not do: bfloat16 moves
log-probs of ordinary models by up to 0.5, float32 by 1e-5.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Mapping
from math import inf, isnan

from dovetail.proof.answers import Answer, Key, TokenStep

ROOM = 4.0
CEILING = 1.0  # in log-prob: the most that rounding may explain
NARROW = {"float32": (1e-3, 2.5e-3), "float16": (0.02, 0.15), "bfloat16": (0.1, 0.15), None: (2e-3, 0.15)}  # FLOOR, CREDIBLE
LOWEST = -12.0  # log-probs below are equal: servers cut the tail at values of their own


@dc.dataclass(frozen=True)
class Distance:
    """The largest difference of log-probs over the tokens that two answers share, its place, and the flip that ends them."""

    gap: float = 0.0
    at: int = 0
    tokens: int = 0  # compared positions
    flip: float | None = None  # how far apart the two tokens of a flip are, where one happened


def distance(got: Answer, want: Answer) -> Distance:
    """Compare two answers to one prompt up to their first different token."""
    worst, at, flip, count = 0.0, 0, None, 0
    named = got.ids is not None and want.ids is not None  # ids and strings are not compared with each other
    got_tokens, want_tokens = (answer.tokens if named else [step.token for step in answer.steps] for answer in (got, want))
    pairs = zip(got.steps, want.steps, got_tokens, want_tokens, strict=False)
    for i, (a, b, got_token, want_token) in enumerate(pairs):
        gap, count = row_gap(a, b), i + 1
        if gap > worst:
            worst, at = gap, i
        if got_token != want_token:
            flip = max(_margin(a.row(), got_token, want_token), _margin(b.row(), want_token, got_token))
            break
    return Distance(worst, at, count, flip)


def row_gap(a: TokenStep, b: TokenStep) -> float:
    """The largest difference over the tokens of two rows. A token that one row lacks is at most as likely as its least one."""
    rows = a.row(), b.row()
    if not rows[0] or not rows[1]:
        return 0.0 if not rows[0] and not rows[1] else inf
    if any(isnan(value) for row in rows for value in row.values()):
        return inf
    gap = 0.0
    for row, other, step in ((rows[0], rows[1], b), (rows[1], rows[0], a)):
        least = max(min((value for key, value in other.items() if key != step.token), default=inf), LOWEST)  # (1)
        for key, value in row.items():
            if key in other:
                gap = max(gap, abs(max(value, LOWEST) - max(other[key], LOWEST)))
            elif isinstance(key, int):  # strings collide, so that a string may be absent for another reason
                gap = max(gap, value - least)
    return gap if set(rows[0]) & set(rows[1]) else inf  # (1) a sampled token is listed whether it is a likely one or not


def _margin(row: Mapping[Key, float], chosen: Key, other: Key) -> float:
    """By how much the chosen token is likelier than the other one; the least of the row where it is not listed."""
    if not row:
        return 0.0
    least = min(row.values())
    return row.get(chosen, least) - row.get(other, least)


@dc.dataclass(frozen=True)
class Noise:
    """The measured spread of a server, by relation."""

    repeat: float = 0.0
    concurrent: float = 0.0
    prefill: float = 0.0

    def bound(self, dtype: str | None) -> float:
        """The largest difference of log-probs that counts as rounding."""
        floor, credible = NARROW.get(dtype, NARROW[None])
        _, middle, largest = sorted((self.repeat, self.concurrent, self.prefill))
        return min(max(ROOM * max(middle, min(largest, credible)), floor), CEILING)
