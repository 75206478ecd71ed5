"""Files of tuning rows in JSON Lines. All of them are untrusted, and read into memory; errors name the line.

    answers       {"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}, …]}
                  {"prompt": "…", "completion": "…"}                            plain text, or messages
    preferences   {"prompt": "…", "chosen": "…", "rejected": "…"}               plain text, or messages; without a prompt,
                                                                                messages that begin alike
    judged        {"prompt": "…", "completion": "…", "label": true}
    prompts       {"prompt": "…", …}                                            other fields are for the reward

Strings are plain text, which the model continues; messages are rendered by the model's chat template (text/conversation.py),
with the `tools` of the row: a list, as in a request to a server.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from dovetail.base.errors import FileError
from dovetail.base.limits import CHAT_MESSAGES, TEXT_BYTES
from dovetail.data.rows import kind_of, objects_of, sha256_of, text_of
from dovetail.disk.untrusted import read_regular
from dovetail.text.chat import Message
from dovetail.text.conversation import ANSWERS, Completion, Conversation, Example

T = TypeVar("T")
Fields = dict[str, Any]


class TuningRow(NamedTuple):
    """A row of a file: its place (`chats.jsonl:3`), what the model is to say, and the fields of the file."""

    where: str
    examples: tuple[Example, ...]  # one; of a preference, the chosen and the rejected one
    fields: Fields


class PromptRow(NamedTuple):
    """A prompt to answer, its place and the fields of the file."""

    where: str
    prompt: str | Conversation
    fields: Fields


def read_answers(path: Path) -> tuple[list[TuningRow], str]:
    """Read conversations, and prompts with completions; return the rows and the SHA-256 of the file."""
    return _read(path, lambda where, fields: TuningRow(where, (_answer(where, fields),), fields))


def read_preferences(path: Path) -> tuple[list[TuningRow], str]:
    """Read pairs of a chosen and a rejected answer."""
    return _read(path, lambda where, fields: TuningRow(where, _pair(where, fields), fields))


def read_judged(path: Path) -> tuple[list[TuningRow], str]:
    """Read answers that are labeled as desirable or not."""

    def judged(where: str, fields: Fields) -> TuningRow:
        if not isinstance(fields.get("label"), bool):
            raise FileError(f'{where}: its "label" is {kind_of(fields.get("label"))}; give true or false')
        return TuningRow(where, (_answer(where, fields),), fields)

    return _read(path, judged)


def read_prompts(path: Path) -> tuple[list[PromptRow], str]:
    """Read prompts."""

    def prompt(where: str, fields: Fields) -> PromptRow:
        value = fields.get("prompt")
        return PromptRow(
            where,
            _chat(where, fields, _messages(where, fields, "prompt"))
            if isinstance(value, list)
            else text_of(where, fields, "prompt"),
            fields,
        )

    return _read(path, prompt)


def _read(path: Path, row: Callable[[str, Fields], T]) -> tuple[list[T], str]:
    content = read_regular(path, TEXT_BYTES, "a file of rows")
    return [row(where, fields) for where, fields in objects_of(path, content)], sha256_of(content)


def _answer(where: str, fields: Fields) -> Example:
    """The example of a row with `messages`, or with `prompt` and `completion`."""
    if "messages" in fields:
        return _chat(where, fields, _messages(where, fields, "messages"))
    if "prompt" not in fields:
        names = ", ".join(map(repr, list(fields)[:12]))[:300]
        raise FileError(f'{where}: has neither "messages" nor "prompt" and "completion"; its fields are {names}')
    return _behind(where, fields, "completion")


def _pair(where: str, fields: Fields) -> tuple[Example, ...]:
    if "prompt" in fields:
        return tuple(_behind(where, fields, name) for name in ("chosen", "rejected"))
    chosen, rejected = (_messages(where, fields, name) for name in ("chosen", "rejected"))
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False)))
    if not common:
        raise FileError(f'{where}: has no "prompt", and "chosen" and "rejected" begin differently; give the prompt')
    return tuple(_chat(where, fields, messages, common) for messages in (chosen, rejected))


def _behind(where: str, fields: Fields, name: str) -> Example:
    """A prompt, and the answer of a field behind it: both plain text or both messages."""
    if not isinstance(fields.get("prompt"), list):
        return Completion(text_of(where, fields, "prompt"), text_of(where, fields, name))
    prompt = _messages(where, fields, "prompt")
    if isinstance(fields.get(name), str):
        return _chat(where, fields, (*prompt, {"role": ANSWERS, "content": text_of(where, fields, name)}), len(prompt))
    return _chat(where, fields, (*prompt, *_messages(where, fields, name)), len(prompt))


def _chat(where: str, fields: Fields, messages: tuple[Message, ...], first: int = 0) -> Conversation:
    """Messages with the tools of the row, if it has any."""
    tools = fields.get("tools") or []
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise FileError(f'{where}: its "tools" is not a list of objects; give them as in a request to a server')
    return Conversation(messages, first, tuple(tools))


def _messages(where: str, fields: Fields, name: str) -> tuple[Message, ...]:
    """The messages of a field, each with a role and a content."""
    found: Sequence[Any] = fields[name] if isinstance(fields.get(name), list) else ()
    if not found:
        raise FileError(f'{where}: its "{name}" is {kind_of(fields.get(name))}; give a list of messages')
    if len(found) > CHAT_MESSAGES:
        raise FileError(f'{where}: its "{name}" has {len(found):,} messages; the limit is {CHAT_MESSAGES:,}')
    for number, one in enumerate(found, 1):
        for key in ("role", "content"):
            if not isinstance(one, dict) or not isinstance(one.get(key), str):
                what = kind_of(one if not isinstance(one, dict) else one.get(key))
                raise FileError(f'{where}: message {number} of "{name}": its "{key}" is {what}; give a string')
    return tuple(found)


def read_rows(path: Path) -> tuple[list[TuningRow], str]:
    """Read a file of answers, of preferences or of judged answers, whichever its first row is."""
    content = read_regular(path, TEXT_BYTES, "a file of rows")
    _, first = next(iter(objects_of(path, content)))
    if "chosen" in first:
        return read_preferences(path)
    return read_judged(path) if "label" in first else read_answers(path)
