"""Grammars: constrained output, and which tokens may come next under one.

    grammar = json_grammar({"type": "object"})          also: regex_grammar, choice_grammar, lark_grammar
    matcher = Grammars(tokenizer, vocab, stop).matcher(grammar)
    matcher.mask()       (vocab,) bool: the tokens that some continuation of the text can have next
    matcher.push(token)
    matcher.finished     whether the text is complete, and nothing can follow

llguidance (extra `grammar`) computes the masks: an Earley parser over the bytes of the tokens, with bounds on its work per
token. End tokens of the model are allowed where the text may end.
"""

from __future__ import annotations

import dataclasses as dc
import importlib.util
import json
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from dovetail.base.errors import InputError, UsageError, install_command
from dovetail.base.limits import GRAMMAR_CHARACTERS, GRAMMAR_CHOICES, GRAMMAR_LIMITS, GRAMMARS_KEPT
from dovetail.text.tokenizer import Tokenizer

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

NO_END = "<|dovetail: no end|>"  # the end token of a model without one; it is never allowed


class GrammarError(InputError):
    """A grammar that is refused, or that took more work at a token than its bound."""


@dc.dataclass(frozen=True)
class Grammar:
    """The text of a grammar and its format: json (a schema), regex, choice (JSON strings), grammar (Lark or GBNF)."""

    format: str
    text: str

    def __post_init__(self) -> None:
        if not self.text.strip():
            raise GrammarError(f"{self.format}: is empty; give one, or leave it out")
        if len(self.text) > GRAMMAR_CHARACTERS:
            raise GrammarError(f"{self.format}: has {len(self.text):,} characters; the limit is {GRAMMAR_CHARACTERS:,}")


def json_grammar(schema: Mapping[str, Any] | bool | str) -> Grammar:
    """The JSON values of a schema, which is plain data or JSON text. White space between tokens is bounded."""
    if isinstance(schema, str):
        return Grammar("json", schema)
    try:
        return Grammar("json", json.dumps(schema, ensure_ascii=False, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise GrammarError(f"json: is not JSON ({str(error)[:100]})") from None


def regex_grammar(pattern: str) -> Grammar:
    """The texts that match a regular expression of Rust's syntax as a whole."""
    return Grammar("regex", pattern)


def choice_grammar(choices: Sequence[str]) -> Grammar:
    """One of several strings."""
    if not choices or not all(choices):
        raise GrammarError("choice: has no string, or an empty one; give strings of one character or more")
    if len(choices) > GRAMMAR_CHOICES:
        raise GrammarError(f"choice: has {len(choices):,} strings; the limit is {GRAMMAR_CHOICES:,}")
    return Grammar("choice", json.dumps(list(choices), ensure_ascii=False))


def lark_grammar(text: str) -> Grammar:
    """A context-free grammar: in llguidance's Lark syntax (`start: …`), or GBNF (`root ::= …`)."""
    return Grammar("grammar", text)


def given_grammars(
    json: Mapping[str, Any] | bool | str | None = None,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
    grammar: str | None = None,
) -> list[Grammar]:
    """Return the grammar of each constraint that is given."""
    return [
        *([] if json is None else [json_grammar(json)]),
        *([] if regex is None else [regex_grammar(regex)]),
        *([] if choice is None else [choice_grammar(choice)]),
        *([] if grammar is None else [lark_grammar(grammar)]),
    ]


def check_extra() -> None:
    """Raise UsageError where llguidance is not installed."""
    if importlib.util.find_spec("llguidance") is None:
        raise UsageError(f"constrained output needs the package llguidance: {install_command('grammar')}")


@dc.dataclass(frozen=True)
class GrammarVocabulary:
    """What llguidance reads of a vocabulary: the tokenizer.json, the end tokens, and those that are never allowed."""

    tokenizer: str
    stop: tuple[int, ...]
    barred: tuple[int, ...] = ()

    @staticmethod
    def of(tokenizer: Tokenizer, stop: Collection[int]) -> GrammarVocabulary:
        """Return that of a tokenizer; without an end token, one that is never allowed takes its place."""
        ends = tuple(sorted(token for token in stop if token < tokenizer.size))
        if ends:
            return GrammarVocabulary(tokenizer.to_json(), ends)
        added = tokenizer.with_special([NO_END])
        return GrammarVocabulary(added.to_json(), (added.id_of(NO_END),), (added.id_of(NO_END),))


class Grammars:
    """Compiles grammars for one vocabulary, and keeps those that were used last."""

    def __init__(self, tokenizer: Tokenizer, vocab: int, stop: Collection[int]) -> None:
        """`vocab`: the number of logits; `stop`: the end tokens."""
        self.vocab, self._tokenizer, self._stop = vocab, tokenizer, frozenset(stop)
        self._opened: tuple[LLTokenizer, tuple[int, ...]] | None = None
        self._kept: dict[str, LLMatcher] = {}
        self._lock, self._opening = threading.Lock(), threading.Lock()

    def source(self, grammar: Grammar) -> str:
        """Return llguidance's form of a grammar, which `matcher` takes."""
        check_extra()
        from dovetail.text.grammar_check import source_of

        try:
            return source_of(grammar.format, grammar.text)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"{grammar.format}: {str(error)[:300]}") from None

    def matcher(self, grammar: Grammar | str) -> Matcher:
        """Return a matcher at the start of the text, of a grammar or of its `source`. Raises GrammarError where it is refused.
        Compilation releases the GIL: a thread may call it to prepare a matcher that another takes."""
        source = self.source(grammar) if isinstance(grammar, Grammar) else grammar
        with self._lock:
            kept = self._kept.pop(source, None)
        kept = self._compile(source) if kept is None else kept
        with self._lock:
            self._kept[source] = kept  # the last: those that were used least recently are dropped
            while len(self._kept) > GRAMMARS_KEPT:
                del self._kept[next(iter(self._kept))]
        assert self._opened is not None
        return Matcher(kept.deep_copy(), self.vocab, self._opened[1])

    def _compile(self, source: str) -> LLMatcher:
        check_extra()
        from dovetail.text.grammar_check import open_matcher, open_tokenizer

        with self._opening:
            if self._opened is None:
                given = GrammarVocabulary.of(self._tokenizer, self._stop)
                self._opened = open_tokenizer(given.tokenizer, given.stop), given.barred
        try:
            return open_matcher(self._opened[0], source, GRAMMAR_LIMITS)
        except ValueError as error:
            raise GrammarError(f"the grammar is refused: {str(error)[:300]}") from None


class Matcher:
    """The state of one text under its grammar."""

    def __init__(self, engine: LLMatcher, vocab: int, barred: Sequence[int]) -> None:
        self.engine, self.vocab, self.barred = engine, vocab, [token for token in barred if token < vocab]

    @property
    def finished(self) -> bool:
        """Whether the text is complete and nothing but an end token can follow."""
        return self.engine.is_stopped() and not self.engine.is_error()

    def mask(self) -> NDArray[np.bool_]:
        """The tokens (vocab,) that may come next. Raises GrammarError where the bound on the work per token is reached."""
        bits = np.unpackbits(np.frombuffer(self.engine.compute_bitmask(), np.uint8), bitorder="little")
        if self.engine.is_error():
            problem = self.engine.get_error().removesuffix("<non-verbose/>").strip()[:300]
            raise GrammarError(f"the grammar cannot be followed: {problem}")
        mask = np.zeros(self.vocab, np.bool_)
        mask[: len(bits)] = bits[: self.vocab]
        mask[self.barred] = False
        return mask

    def push(self, token: int) -> None:
        """Add a token to the text."""
        self.engine.consume_token(token)

    def copy(self) -> Matcher:
        """Return a matcher of the same state."""
        return Matcher(self.engine.deep_copy(), self.vocab, self.barred)
