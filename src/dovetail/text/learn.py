"""Training of tokenizers on a text, of five kinds; each is saved as tokenizer.json.

    byte_pair    bytes, merged in pairs by frequency; no unknown token                    Sennrich et al. 2016; Radford 2019
    unigram      pieces of bytes, the most probable segmentation; no unknown token        Kudo 2018
    wordpiece    words and punctuation, as a first piece and ##continuations; drops spaces  Schuster & Nakajima 2012
    characters   one token per character
    words        one token per word, punctuation mark or run of spaces

Ids 0 and 1 are special tokens: end of text, and the mask of masked language modeling. The last three have an unknown
token, id 2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator

from tokenizers import Regex, Tokenizer as Engine, decoders, models, pre_tokenizers, trainers

from dovetail.base.errors import SpecError
from dovetail.text.split import ANY_CHARACTER, WORD_PUNCTUATION_OR_SPACE
from dovetail.text.tokenizer import END, MASK, Tokenizer

UNKNOWN = "<|unknown|>"
SPECIAL = (END, MASK)
LEAST = 256 + len(SPECIAL)  # 256 bytes and the special tokens
SAMPLE = 1 << 16  # characters that a trainer reads as one


def learn(text: str, vocab: int, kind: str = "byte_pair") -> Tokenizer:
    """Train a tokenizer of at most `vocab` tokens on a text; of fewer where the text is too short for more."""
    if kind not in KINDS:
        raise SpecError("tokenizer", f"unknown kind {kind!r}", f"kinds: {', '.join(KINDS)}")
    if vocab < len(SPECIAL) + 2:
        raise SpecError("vocab", f"{vocab} is too small for any tokenizer", f"--set vocab={LEAST}")
    return Tokenizer(KINDS[kind](text, vocab))


def _samples(text: str) -> Iterator[str]:
    """Yield the text in parts of about SAMPLE characters, cut behind a line end where there is one."""
    start = 0
    while start < len(text):
        stop = min(start + SAMPLE, len(text))
        line = text.rfind("\n", start, stop) + 1
        stop = line if stop < len(text) and line > start else stop
        yield text[start:stop]
        start = stop


def _on_bytes(model: models.Model, trainer: Callable[..., trainers.Trainer], text: str, vocab: int) -> Engine:
    """Train a model on bytes."""
    if vocab < LEAST:
        raise SpecError("vocab", f"{vocab} is too small: bytes and special tokens already take {LEAST}", f"--set vocab={LEAST}")
    engine = Engine(model)
    engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    engine.decoder = decoders.ByteLevel()
    given = {"special_tokens": list(SPECIAL), "initial_alphabet": sorted(pre_tokenizers.ByteLevel.alphabet())}
    engine.train_from_iterator(_samples(text), trainer(vocab_size=vocab, show_progress=False, **given))
    return engine


def _byte_pair(text: str, vocab: int) -> Engine:
    return _on_bytes(models.BPE(), trainers.BpeTrainer, text, vocab)


def _unigram(text: str, vocab: int) -> Engine:
    # scores of nine decimals: further digits depend on the order of threads, and JSON does not preserve them
    data = json.loads(_on_bytes(models.Unigram(), trainers.UnigramTrainer, text, vocab).to_str())
    data["model"]["vocab"] = [[piece, round(score, 9)] for piece, score in data["model"]["vocab"]]
    return Engine.from_str(json.dumps(data))


def _wordpiece(text: str, vocab: int) -> Engine:
    engine = Engine(models.WordPiece(unk_token=UNKNOWN))
    engine.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    engine.decoder = decoders.WordPiece(cleanup=False)
    # the trainer numbers continuations in the order of a hash table, which differs from process to process, and equal counts
    # are merged by number; so they are numbered here, as special tokens, which they do not stay
    words = {word for sample in _samples(text) for word, _ in engine.pre_tokenizer.pre_tokenize_str(sample)}
    special, continuing = [*SPECIAL, UNKNOWN], sorted({f"##{c}" for word in words for c in word[1:]})
    first = sorted({c for word in words for c in word})
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab, special_tokens=[*special, *continuing], initial_alphabet=first, show_progress=False
    )
    engine.train_from_iterator(_samples(text), trainer)
    data = json.loads(engine.to_str())
    data["added_tokens"] = [token for token in data["added_tokens"] if token["content"] in special]
    return Engine.from_str(json.dumps(data))


def _cut_by(pattern: str) -> Callable[[str, int], Engine]:
    """Return the trainer of one token per match of a pattern that leaves no character out: joined tokens are the text."""

    def train(text: str, vocab: int) -> Engine:
        engine = Engine(models.WordLevel({}, unk_token=UNKNOWN))
        engine.pre_tokenizer = pre_tokenizers.Split(Regex(pattern), "isolated")
        engine.decoder = decoders.Fuse()
        trainer = trainers.WordLevelTrainer(vocab_size=vocab, special_tokens=[*SPECIAL, UNKNOWN], show_progress=False)
        engine.train_from_iterator(_samples(text), trainer)
        return engine

    return train


KINDS: dict[str, Callable[[str, int], Engine]] = {
    "byte_pair": _byte_pair,
    "wordpiece": _wordpiece,
    "unigram": _unigram,
    "characters": _cut_by(ANY_CHARACTER),
    "words": _cut_by(WORD_PUNCTUATION_OR_SPACE),
}
