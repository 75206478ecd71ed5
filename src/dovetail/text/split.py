"""Where a long text can be cut so that the ids of the pieces, joined, are the ids of the whole text.

    …the quick| brown fox…      before one space between two letters: the piece behind the cut starts with the space

Such a cut is exact where (1) no normalizer changes characters across it, (2) the pre-tokenizer starts a new pre-token at the
space whatever comes before it, so that the model never sees both sides together, and (3) no added token matches across it.
`cuts_are_exact` proves this from the components of the tokenizer, and says False for every component it does not know: then the
text is encoded as a whole.

A pre-tokenizer that scans from left to right without looking back (the regular expressions below) goes on behind a boundary as
if the text began there. A prefix space (ByteLevel, Metaspace) is not added to a piece that already starts with one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import Any

from tokenizers import Tokenizer as Engine

# normalizers that map single characters, or sequences that no space is part of
LOCAL_NORMALIZERS = frozenset(
    ("NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Precompiled", "Nmt")
)
SPACE_RUNS = {"Regex": " {2,}"}  # replaced by XLM-R and T5; a single space is not touched
# pre-tokenizers that classify single characters and start no pre-token at a space
CHARACTER_SPLITTERS = frozenset(("Digits", "Punctuation"))
WHITESPACE_SPLITTERS = frozenset(("Whitespace", "WhitespaceSplit", "BertPreTokenizer"))
ANY_CHARACTER = r"[\s\S]"
WORD_PUNCTUATION_OR_SPACE = r"\w+|\s+|[^\w\s]"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_OTHERS = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# no alternative goes on over a space behind a letter, and a match starts at that space
SPLIT_PATTERNS = frozenset(
    (
        ANY_CHARACTER,
        WORD_PUNCTUATION_OR_SPACE,
        rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}{{1,3}}|{_OTHERS}",  # GPT-4, Llama 3
        rf"{_CONTRACTIONS}|{_WORDS}|\p{{N}}|{_OTHERS}",  # Qwen 2 and 3
    )
)
# U+0D4E is the first letter that forms one grapheme with the character behind it (Unicode GB9b), and Precompiled maps graphemes
JOINING_LETTERS = "\u0d4e"
HANGUL = ("가", "힣")


def pieces(text: str, length: int) -> Iterator[str]:
    """Yield pieces of at most `length` characters where the text has a cut, longer ones where it has none."""
    start = 0
    while start < len(text):
        stop = _cut(text, start, start + length) if start + length < len(text) else len(text)
        yield text[start:stop]
        start = stop


def bounded(parts: Iterable[str], length: int) -> Iterator[str]:
    """Yield the parts, those of more than `length` characters in slices: text without spaces, a word of megabytes."""
    for part in parts:
        for start in range(0, len(part), length):
            yield part[start : start + length]


def _cut(text: str, start: int, stop: int) -> int:
    """Return the last cut in (start, stop], else the first behind it, else the end of the text."""
    at = text.rfind(" ", start + 1, stop + 1)
    while at > start:
        if _is_cut(text, at):
            return at
        at = text.rfind(" ", start + 1, at)
    at = text.find(" ", stop + 1)
    while at >= 0:
        if _is_cut(text, at):
            return at
        at = text.find(" ", at + 1)
    return len(text)


def _is_cut(text: str, space: int) -> bool:
    return 0 < space < len(text) - 1 and _is_letter(text[space - 1]) and _is_letter(text[space + 1])


def _is_letter(character: str) -> bool:
    return character.isalpha() and (character < JOINING_LETTERS or HANGUL[0] <= character <= HANGUL[1])


def cuts_are_exact(engine: Engine) -> bool:
    """Return whether a cut before one space between two letters leaves the ids of every text as they are."""
    return _normalizes_locally(engine) and _splits_at_spaces(engine) and not _added_tokens_interfere(engine)


def _normalizes_locally(engine: Engine) -> bool:
    """A normalizer that adds, strips or replaces at a cut shows it on the two sides of one."""
    if engine.normalizer is None:
        return True
    known = all(
        part["type"] in LOCAL_NORMALIZERS or (part["type"] == "Replace" and part["pattern"] == SPACE_RUNS)
        for part in components(engine.normalizer, "normalizers")
    )
    return known and all(engine.normalizer.normalize_str(text) == text for text in (" b", "a", "a b"))


def _splits_at_spaces(engine: Engine) -> bool:
    """The first component that is more than a splitter of digits or punctuation decides: all later ones work on its pieces."""
    if engine.pre_tokenizer is None:
        return False
    parts = components(engine.pre_tokenizer, "pretokenizers")
    first = next((part for part in parts if part["type"] not in CHARACTER_SPLITTERS), None)
    return first is not None and _starts_pre_tokens_at_spaces(first)


def _starts_pre_tokens_at_spaces(part: dict[str, Any]) -> bool:
    if part["type"] == "ByteLevel":
        return part["use_regex"]  # GPT-2's expression: 's|…| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+
    if part["type"] == "Metaspace":
        return part["split"]
    if part["type"] == "Split":
        isolated = (part["behavior"], part["invert"]) in (("Isolated", False), ("Removed", True))
        return isolated and part["pattern"].get("Regex") in SPLIT_PATTERNS
    return part["type"] in WHITESPACE_SPLITTERS


def _added_tokens_interfere(engine: Engine) -> bool:
    """Return whether an added token that is matched in plain text may touch a cut: special tokens are not matched there."""
    matched = [token for token in engine.get_added_tokens_decoder().values() if not token.special]
    return any(
        token.lstrip
        or token.rstrip
        or any(c.isspace() or c == "▁" for c in token.content)
        or token.content[:1].isalpha()
        or token.content[-1:].isalpha()
        for token in matched
    )


def components(component: Any, inner: str) -> list[dict[str, Any]]:
    """Return the component, or the flat list of those in a Sequence, as plain data."""

    def flat(data: dict[str, Any]) -> list[dict[str, Any]]:
        return [one for part in data[inner] for one in flat(part)] if data["type"] == "Sequence" else [data]

    return flat(json.loads(component.__getstate__()))
