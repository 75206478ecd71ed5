"""Tagging: the most probable class per word, by a head with one answer per token (token_classifier).

The answer of a word is that at its first token, as it is trained (training/tagging.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from dovetail.core.ctx import Ctx
from dovetail.core.errors import InputError, SpecError
from dovetail.core.fold import over_vocab, position_limit
from dovetail.core.layout import TokenLayout
from dovetail.core.mode import evaluating
from dovetail.core.scope import Scope
from dovetail.model import Model, ModelModule
from dovetail.text.tokenizer import Tokenizer
from dovetail.text.words import encode_words


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
