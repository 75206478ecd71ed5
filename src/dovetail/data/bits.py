"""Bits per byte: a loss that does not depend on the tokenizer.

    bits per byte = (nats / labels) · (tokens / bytes) / ln 2

A loss per token falls when tokens get shorter, without a better model; per byte of text, vocabularies compare.
"""

from __future__ import annotations

import math

from dovetail.base.errors import InputError


def bits_per_byte(nats: float, labels: int, tokens: int, bytes: int) -> float:
    """Return the bits per byte of text.

    `nats` is the loss summed over `labels` predictions; `tokens` and `bytes` are those of the whole held-out split. Tokens that
    were not predicted, such as the first of a document, count as the mean of the others.
    """
    if labels < 1 or tokens < 1 or bytes < 1:
        raise InputError(f"bits per byte need labels, tokens and bytes; there are {labels}, {tokens} and {bytes}")
    return nats / labels * tokens / bytes / math.log(2)
