"""Tagging: the most probable class per word, by a head with one answer per token (token_classifier).

The answer of a word is that at its first token, as it is trained (training/tagging.py).

Words as tokens: the tokens of words joined by spaces, and the first token of each word.

    words    Ada         met     Babbage
    tokens   [CLS]  A  ##da  met  Bab  ##bage  [SEP]
    first           1        3    4                      the index of the first token of each word, or −1

A token belongs to the word of its first character that is no space between words. A word has no token of its own where the
tokenizer drops its characters, joins them with the word before, or where the row is cut.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from dovetail.base.errors import InputError, SpecError
from dovetail.model.model import Model, ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import evaluating
from dovetail.spec.fold import over_vocab, position_limit
from dovetail.spec.scope import Scope
from dovetail.text.tokenizer import Tokenizer


def class_count(spec: Model) -> int | None:
    """The number of classes of the head; None where it has none."""
    return None if spec.head is None else spec.head.axes(Scope()).sizes.get("classes")


@torch.inference_mode()
def classes_of_words(model: ModelModule, tokenizer: Tokenizer, words: Sequence[str]) -> list[int | None]:
    """Return the most probable class of each word; None where a word has no token of its own."""
    spec = model.part
    if spec.head is None or spec.head.pools() or class_count(spec) is None or "embed" not in over_vocab(spec) or spec.encoder:
        raise SpecError("head", "the model has no class per token of a text", "use a model with a token_classifier")
    if isinstance(words, str) or not words or not all(isinstance(word, str) and word.strip() for word in words):
        raise InputError('words: give a list of words that are not empty: ["Ada", "slept"]')
    (encoded,) = encode_words(tokenizer, [words])
    longest, count = position_limit(spec), len(encoded.ids)
    if longest is not None and count > longest:
        raise InputError(f"words: are {count:,} tokens; the model takes at most {longest:,}; give fewer words at once")
    ids = torch.from_numpy(encoded.ids)[None].to(model.device)
    with evaluating(model):
        answers = model(ids, Ctx(layout=TokenLayout.whole(1, count, model.device), ranks=model.ranks))[0].argmax(-1).tolist()
    return [answers[first] if first >= 0 else None for first in encoded.first.tolist()]


ROWS_AT_ONCE = 256  # rows encoded together: the offsets of all tokens are in memory


class EncodedWords(NamedTuple):
    """The tokens of one row of words."""

    ids: NDArray[np.int64]  # (n,)
    first: NDArray[np.int64]  # (words,) the index of the first token of each word, −1 where it has none


def encode_words(tokenizer: Tokenizer, rows: Sequence[Sequence[str]], length: int | None = None) -> list[EncodedWords]:
    """Return the tokens of rows of words, with the special tokens that the tokenizer adds to a prompt. A row of more than
    `length` tokens is cut; the special tokens at its end stay."""
    encoded, waiting = list[EncodedWords](), iter(rows)
    while some := list(islice(waiting, ROWS_AT_ONCE)):
        pairs = zip(some, tokenizer.spans([" ".join(words) for words in some]), strict=True)
        encoded += [_aligned(words, ids, spans, length) for words, (ids, spans) in pairs]
    return encoded


def _aligned(words: Sequence[str], ids: list[int], spans: list[tuple[int, int]], length: int | None) -> EncodedWords:
    owners = [owner for i, word in enumerate(words) for owner in (*[i] * len(word), -1)]  # the word of each character
    tail = next((i for i, (start, stop) in enumerate(reversed(spans)) if stop > start), 0)  # special tokens at the end
    cut = len(ids) if length is None or len(ids) <= length else max(length - tail, 0)
    first = np.full(len(words), -1, np.int64)
    for token, (start, stop) in enumerate(spans[:cut]):
        owner = next((owner for owner in owners[start:stop] if owner >= 0), -1)
        if owner >= 0 and first[owner] < 0:
            first[owner] = token
    return EncodedWords(np.array([*ids[:cut], *ids[len(ids) - tail :]][:length] if cut < len(ids) else ids, np.int64), first)
