"""learn_tokenizer: a tokenizer trained on a text, for a model that is built and trained in Python.

tokenizer = dt.learn_tokenizer(text, 512)                       byte pairs
model = dt.build("llama-tiny", tokenizer=tokenizer)             saved, tuned and served with it
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from dovetail.text.tokenizer import Tokenizer


def learn_tokenizer(
    text: str,
    vocab: int,
    kind: Literal["byte_pair", "wordpiece", "unigram", "characters", "words"] = "byte_pair",
    *,
    added: Sequence[str] = (),
) -> Tokenizer:
    """Train a tokenizer of at most `vocab` tokens on a text. Id 0 is the end of text, id 1 the mask. Each string of `added` is
    one more token wherever it occurs, as `<tool_call>` in many models; it is counted in `vocab` and is not special.

    byte_pair and unigram    pieces of bytes: no text is unknown, and the vocabulary has 258 tokens or more
    wordpiece                words and their pieces, without spaces
    characters, words        a token per character; per word, punctuation mark or run of spaces
    """
    from dovetail.text.learn import learn

    tokenizer = learn(text, vocab - len(added), kind)
    tokenizer.engine.add_tokens(list(added))  # pyright: ignore[reportUnknownMemberType]
    return tokenizer
