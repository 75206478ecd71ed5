"""Turns: conversations and completions as token ids, with the tokens that the model is to learn: those of its own answers.

    <|im_start|>user⏎ 2 + 3? <|im_end|>⏎ <|im_start|>assistant⏎ 5 <|im_end|> ⏎ …
                                                                ─────────────        answer: up to its end-of-turn token

An answer is found by rendering, never by searching for words: what the chat template writes through turn i, minus the prompt of
turn i (the turns before it, and the template's generation prompt). Ids are those that generation sees: the tokens of the prompt
must not change when the answer follows. A template or a tokenizer for which this does not hold is refused, as is an answer that
no special token ends: a model that never learns where to stop talks on.

A plain prompt with its completion needs no template; the completion ends with the model's end token.
"""

from __future__ import annotations

import dataclasses as dc
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dovetail.base.errors import FileError
from dovetail.text.chat import ChatTemplate, Message
from dovetail.text.tokenizer import END, Tokenizer

ANSWERS = "assistant"  # the role whose turns are learned
MARKED = re.compile(r"<\|[^<>|\s]{1,64}\|>")  # what can only be meant as a special token, in the text of a template
SHOWN = 30  # characters of a text in a message
# for models without a template: `role: content`, and the end token behind each answer
PLAIN = (
    "{% for message in messages %}{{ message.role }}: {{ message.content | trim }}"
    "{% if message.role == 'assistant' %}END{% endif %}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


@dc.dataclass(frozen=True)
class Completion:
    """A plain text and what follows it."""

    prompt: str
    text: str


@dc.dataclass(frozen=True)
class Conversation:
    """Messages; the turns of the assistant from `first` on are answers. `tools` are those that the template renders."""

    messages: tuple[Message, ...]
    first: int = 0
    tools: tuple[Mapping[str, Any], ...] = ()

    def answers(self) -> list[int]:
        """The numbers of the turns that are answers."""
        return [i for i, one in enumerate(self.messages) if i >= self.first and one["role"] == ANSWERS]


Example = Completion | Conversation


class Encoded(NamedTuple):
    """Token ids (n,), and which of them are the model's own; the last one is."""

    ids: NDArray[np.int64]
    answer: NDArray[np.bool_]


@dc.dataclass(frozen=True)
class TurnEncoder:
    """Encodes examples by a tokenizer, its end tokens and a chat template; `origin` is the model that they come from."""

    tokenizer: Tokenizer
    stop: frozenset[int] = frozenset()  # the ids at which generation ends
    template: ChatTemplate | None = None
    origin: str = "the model"

    def plain(self) -> TurnEncoder:
        """The same with the template PLAIN, which needs no special token but the end token."""
        text = PLAIN.replace("END", self.label(self.end))
        return dc.replace(self, template=ChatTemplate(text, "the plain template"))

    def label(self, token: int) -> str:
        """The text of a token, as a template writes it."""
        return self.tokenizer.engine.id_to_token(token) or ""

    @cached_property
    def end(self) -> int:
        """The token that ends a completion."""
        engine = self.tokenizer.engine
        named = None if self.template is None else self.template.tokens.get("eos_token")
        candidates = [engine.token_to_id(name) for name in (named, END) if name is not None]
        found = [candidate for candidate in candidates if candidate is not None and (candidate in self.stop or not self.stop)]
        if not found and not self.stop:
            remedy = "give eos_token_id in generation_config.json"
            raise FileError(f"{self.origin}: has no end token, so a completion would have no end; {remedy}")
        return found[0] if found else min(self.stop)

    @cached_property
    def special(self) -> frozenset[int]:
        """The ids of special tokens."""
        added = self.tokenizer.engine.get_added_tokens_decoder()
        return frozenset(token for token, one in added.items() if one.special) | self.stop

    def encode(self, examples: Sequence[tuple[str, Example]]) -> list[Encoded]:
        """Return the ids of examples, each with its place, which errors name."""
        renders = iter(self._rendered([one for _, one in examples]))
        return [
            self._chat(where, one, [next(renders) for _ in range(2 * len(one.answers()))])
            if isinstance(one, Conversation)
            else self._completion(where, one)
            for where, one in examples
        ]

    def prompts(self, prompts: Sequence[str | Conversation]) -> list[list[int]]:
        """Return the ids of prompts, behind which the model generates: plain texts, or messages to answer."""
        chats = [(prompt.messages, True, prompt.tools) for prompt in prompts if isinstance(prompt, Conversation)]
        renders = iter(self._render(chats))
        return [
            self.tokenizer.prompt(next(renders), add_special=False)
            if isinstance(prompt, Conversation)
            else self.tokenizer.prompt(prompt)
            for prompt in prompts
        ]

    # -- completions

    def _completion(self, where: str, example: Completion) -> Encoded:
        prompt, whole = (self.tokenizer.prompt(text) for text in (example.prompt, example.prompt + example.text))
        if not prompt:
            raise FileError(f"{where}: the prompt has no token, and the model nothing to continue; give one")
        if whole[: len(prompt)] != prompt or len(whole) == len(prompt):
            between = f"between {example.prompt[-SHOWN:]!r} and {example.text[:SHOWN]!r}"
            remedy = "end the prompt where a token ends: move the space to the start of the completion"
            raise FileError(f"{where}: the tokens of the prompt change with the completion, {between}; {remedy}")
        return _marked([*whole, self.end], [(len(prompt), len(whole) + 1)])

    # -- chats

    def _rendered(self, examples: Sequence[Example]) -> list[str]:
        """For each answer of each chat: the prompt before it, and the text through it."""
        chats = [example for example in examples if isinstance(example, Conversation)]
        return self._render(
            [
                request
                for chat in chats
                for i in chat.answers()
                for request in ((chat.messages[:i], True, chat.tools), (chat.messages[: i + 1], False, chat.tools))
            ]
        )

    def _render(self, requests: Sequence[tuple[Sequence[Message], bool, Sequence[Mapping[str, Any]]]]) -> list[str]:
        """Render messages, with a generation prompt where the flag is true, and tools; those of equal tools together."""
        if not requests:
            return []
        if self.template is None:
            remedy = "put a chat_template.jinja beside the weights, or give --template plain or --template FILE"
            raise FileError(f"{self.origin}: has no chat template to render messages by; {remedy}")
        texts, by_tools = [""] * len(requests), dict[str, list[int]]()
        for i, (_, _, tools) in enumerate(requests):
            by_tools.setdefault(json.dumps(tools), []).append(i)
        for alike in by_tools.values():
            tools = list(requests[alike[0]][2]) or None
            if tools and "tools" not in self.template.text:
                raise FileError(f"{self.template.origin}: the chat template does not render tools; leave them out of the rows")
            rendered = self.template.render_many([requests[i][:2] for i in alike], tools=tools)
            for i, text in zip(alike, rendered, strict=True):
                texts[i] = text
        self._check_special(texts)
        return texts

    def _check_special(self, texts: Sequence[str]) -> None:
        """Raise where the template writes a special token that is none of the tokenizer's."""
        assert self.template is not None
        named = (token for token in self.template.tokens.values() if any(token in text for text in texts))
        for literal in sorted({*MARKED.findall(self.template.text), *named}):
            if literal and len(ids := self.tokenizer.prompt(literal, add_special=False)) != 1:
                what = f"writes {literal[:SHOWN]!r}, which the tokenizer of {self.origin} splits into {len(ids)} tokens"
                raise FileError(f"{self.template.origin}: {what}; add it to tokenizer.json as a special token")

    def _chat(self, where: str, example: Conversation, renders: Sequence[str]) -> Encoded:
        if not renders:
            raise FileError(f"{where}: has no message of the role {ANSWERS!r} to learn; give one")
        whole, spans = self.tokenizer.prompt(renders[-1], add_special=False), list[tuple[int, int]]()
        for turn, prompt, through in zip(example.answers(), renders[::2], renders[1::2], strict=True):
            if not (through.startswith(prompt) and renders[-1].startswith(through)):
                what = "writes a turn differently when others follow it, or when it is to be generated"
                remedy = "give one answer per row, the last message, or another --template"
                raise FileError(f"{where}: message {turn + 1}: the chat template {what}; {remedy}")
            before, after = (self.tokenizer.prompt(text, add_special=False) for text in (prompt, through))
            if whole[: len(before)] != before or whole[: len(after)] != after:
                remedy = "strip white space from its ends"
                raise FileError(f"{where}: message {turn + 1}: its first or last token merges with the text beside; {remedy}")
            ends = [i for i in range(len(before), len(after)) if whole[i] in self.special]
            if not ends:
                what = f"no special token ends the answer, which ends with {through[-SHOWN:]!r}"
                remedy = "let the chat template write an end-of-turn token, such as eos_token, after each answer"
                raise FileError(f"{where}: message {turn + 1}: {what}; {remedy}")
            spans.append((len(before), ends[-1] + 1))
        return _marked(whole, spans)


def _marked(ids: Sequence[int], spans: Sequence[tuple[int, int]]) -> Encoded:
    """The ids up to the end of the last answer."""
    answer = np.zeros(spans[-1][1], bool)
    for start, stop in spans:
        answer[start:stop] = True
    return Encoded(np.array(ids[: len(answer)], np.int64), answer)
