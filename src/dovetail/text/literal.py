"""Conversations to token ids: special tokens that the chat template writes are tokens, those inside messages are text.

    encoder = ConversationEncoder(tokenizer, template, stop)
    messages, given, mark = encoder.mark(messages, tools=tools)     a mark stands inside each special token that they hold
    text = template.render(messages, **given)                       the template writes its own special tokens without a mark
    ids = encoder.ids(text, mark)                                   what has the mark is encoded as text, without the mark

A message `<|im_end|>⏎<|im_start|>system⏎…` would end its own turn otherwise, and begin another. In the text of assistants,
added tokens that are not special (`<think>`, `<tool_call>`) stay tokens, as the model wrote them; elsewhere they are text if
the template writes them. Raw prompts (`Tokenizer.prompt`) are not messages: special tokens in them are recognized.

Tokenizers recognize special tokens everywhere in a text, or nowhere. So marked text is encoded by a copy of the tokenizer that
recognizes none, with a stand-in for each of those that the template wrote. It is made when a message first holds one.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from tokenizers import AddedToken, Tokenizer as Engine

from dovetail.base.errors import InputError
from dovetail.text.chat import ChatTemplate, Message
from dovetail.text.tokenizer import Tokenizer

MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]  # noncharacters of Unicode: never part of a text
STAND_IN = "\ue000{}\ue001"  # private use; the number of a token is between them
ASSISTANT = "assistant"


class Marked(NamedTuple):
    """Messages and further variables of a template, with a mark inside each special token; "" where there is none."""

    messages: list[Message]
    given: dict[str, Any]
    mark: str


class ConversationEncoder:
    """Encodes conversations by one tokenizer and one chat template."""

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate, stop: Collection[int] = ()) -> None:
        """`stop`: the ids at which generation ends, which are special whether tokenizer.json says so or not."""
        self.tokenizer, self.template, self.stop = tokenizer, template, frozenset(stop)
        self._lock = threading.Lock()
        self._copy: tuple[Engine, dict[int, int]] | None = None  # and the id of each stand-in's token

    @cached_property
    def special(self) -> dict[str, int]:
        """The special tokens."""
        added = self.tokenizer.engine.get_added_tokens_decoder()
        return {one.content: number for number, one in added.items() if one.content and (one.special or number in self.stop)}

    @cached_property
    def control(self) -> dict[str, int]:
        """The special tokens, and the added tokens that the template writes."""
        added = self.tokenizer.engine.get_added_tokens_decoder()
        words = {number: one.content for number, one in added.items() if len(one.content.strip()) > 1}
        return {**{word: number for number, word in words.items() if word in self.template.text}, **self.special}

    @cached_property
    def _normalized(self) -> bool:
        """Whether a token is recognized after the text was normalized: other spellings of it are recognized, too."""
        added = self.tokenizer.engine.get_added_tokens_decoder()
        normalizes = self.tokenizer.engine.normalizer is not None
        return normalizes and any(added[number].normalized for number in self.control.values())

    def mark(self, messages: Sequence[Message], **given: Any) -> Marked:
        """Return messages, and further variables of the template, with marks."""
        texts = _strings([list(messages), given])
        if not self._normalized and not any(token in text for text in texts for token in self.control):
            return Marked(list(messages), given, "")
        mark = next((mark for mark in MARKS if not any(mark in text for text in texts)), None)
        if mark is None:
            raise InputError("messages: hold all 32 noncharacters U+FDD0 to U+FDEF; leave them out")
        everywhere, of_models = _pattern(self.control), _pattern(self.special)
        marked = [_marked(message, of_models if message.get("role") == ASSISTANT else everywhere, mark) for message in messages]
        return Marked(marked, _marked(given, everywhere, mark), mark)

    def ids(self, text: str, mark: str, *, add_special: bool = False) -> list[int]:
        """Return the ids of a rendered conversation; `mark` is that of its messages."""
        if not mark:
            return self.tokenizer.prompt(text, add_special=add_special)
        with self._lock:
            if self._copy is None:
                self._copy = self._make_copy()
            engine, tokens = self._copy
            numbers = {content: i for i, content in enumerate(self.control)}
            stood_in = _pattern(self.control).sub(lambda match: STAND_IN.format(numbers[match[0]]), text)
            text = stood_in.replace(mark, "")
            ids = Tokenizer(engine).prompt(text, add_special=add_special, recognized=False)
        return [tokens.get(token, token) for token in ids]

    def _make_copy(self) -> tuple[Engine, dict[int, int]]:
        """The tokenizer, whose control tokens are all special, so that none is recognized, with a stand-in for each."""
        data = json.loads(self.tokenizer.engine.to_str())
        for one in data["added_tokens"]:
            one["special"] = one["special"] or one["content"] in self.control
        engine = Engine.from_str(json.dumps(data))
        added, tokens = self.tokenizer.engine.get_added_tokens_decoder(), dict[int, int]()
        for i, number in enumerate(self.control.values()):
            kind = added[number]
            sides = {"lstrip": kind.lstrip, "rstrip": kind.rstrip, "single_word": kind.single_word}
            engine.add_tokens([AddedToken(STAND_IN.format(i), normalized=False, special=False, **sides)])
            stand_in = engine.token_to_id(STAND_IN.format(i))
            assert stand_in is not None
            tokens[stand_in] = number
        return engine, tokens


def _pattern(tokens: Mapping[str, int]) -> re.Pattern[str]:
    """Finds the tokens, the longest first."""
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or r"(?!)")


def _strings(value: Any) -> list[str]:
    """All strings of plain data."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, Mapping):
        return [text for pair in value.items() for one in pair for text in _strings(one)]
    return [text for one in value for text in _strings(one)] if isinstance(value, list | tuple) else []


def _marked(value: Any, pattern: re.Pattern[str], mark: str) -> Any:
    """Plain data with a mark behind the first character of each token in its strings."""
    if isinstance(value, str):
        return pattern.sub(lambda match: match[0][0] + mark + match[0][1:], value)
    if isinstance(value, Mapping):
        return {_marked(key, pattern, mark): _marked(one, pattern, mark) for key, one in value.items()}
    return [_marked(one, pattern, mark) for one in value] if isinstance(value, list | tuple) else value
