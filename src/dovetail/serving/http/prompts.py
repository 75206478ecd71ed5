"""Prompts to token ids, off the event loop: strings by the tokenizer, conversations by the chat template first.

One thread encodes: a tokenizer is not safe for several. A string that cannot fit the model is refused by its length, before
it is encoded. Chat templates are rendered in processes of their own (text/chat.py), a few at once; more than a few waiting are
refused as a full queue is.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from dovetail.base.errors import FileError
from dovetail.base.limits import RENDERS_AT_ONCE, RENDERS_WAITING
from dovetail.decoding.generation import Vocabulary
from dovetail.serving.client import Busy
from dovetail.serving.http.chat_schema import ChatFields
from dovetail.serving.http.errors import ApiError
from dovetail.text.chat import ChatTemplate
from dovetail.text.literal import ConversationEncoder, Marked
from dovetail.text.tokenizer import Tokenizer

T = TypeVar("T")
RENDER_SECONDS = 0.2  # of one template, as an estimate for those who wait


class PromptEncoder:
    """Encodes the prompts of requests to a model that takes `longest` tokens of `vocab` ids."""

    def __init__(self, vocabulary: Vocabulary, longest: int, vocab: int) -> None:
        self.vocabulary, self.longest, self.vocab = vocabulary, longest, vocab
        pieces = () if vocabulary.tokenizer is None else vocabulary.tokenizer.engine.get_vocab()
        self.most = longest * max((len(piece) for piece in pieces), default=1)  # characters that `longest` tokens can have
        self._encoding = ThreadPoolExecutor(1, "encode")
        self._rendering = ThreadPoolExecutor(RENDERS_AT_ONCE, "render")
        self._renders = 0
        self._conversations: ConversationEncoder | None = None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; ApiError where the model has none."""
        if self.vocabulary.tokenizer is None:
            raise ApiError(400, "prompt: is a string, but the model has no tokenizer; give token ids", param="prompt")
        return self.vocabulary.tokenizer

    async def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the token ids of a string; special tokens in it are recognized."""
        tokenizer = self.tokenizer
        return await self._encode(text, lambda: tokenizer.prompt(text, add_special=add_special))

    async def _encode(self, text: str, work: Callable[[], list[int]]) -> list[int]:
        if len(text) > self.most:
            raise too_long(f"the prompt has {len(text):,} characters, which {self.longest:,} tokens cannot have")
        try:
            ids = await self.run(work)
        except FileError:
            raise ApiError(400, "the prompt cannot be encoded", param="prompt") from None
        return self.checked(ids)

    def checked(self, ids: list[int]) -> list[int]:
        """Return token ids that the model can take; ApiError for others."""
        if not ids:
            raise ApiError(400, "prompt: has no token; give at least one", param="prompt")
        if len(ids) >= self.longest:
            raise too_long(
                f"the prompt has {len(ids):,} tokens; the limit is {self.longest - 1:,}, one less than max_model_len"
            )
        if max(ids) >= self.vocab:
            raise ApiError(400, f"prompt: token id {max(ids)} is not below {self.vocab:,}", param="prompt")
        return ids

    async def chat(self, body: ChatFields, *, add_special: bool) -> list[int]:
        """Return the token ids of a conversation: special tokens inside messages and tools are text."""
        template, tokenizer = self.vocabulary.chat_template, self.tokenizer
        if template is None:
            raise ApiError(400, "messages: the model has no chat template; use /v1/completions", param="messages")
        if self._conversations is None:
            self._conversations = ConversationEncoder(tokenizer, template, self.vocabulary.stop)
        encoder, messages = self._conversations, [one.plain() for one in body.messages]
        if sum(len(one["content"]) for one in messages) > self.most:
            raise too_long(f"the messages have more than the {self.most:,} characters that {self.longest:,} tokens can have")
        tools = self.checked_tools(body)
        marked = await self.run(lambda: encoder.mark(messages, **body.chat_template_kwargs, tools=tools or None))
        text = await self._render(template, body, marked)
        return await self._encode(text, lambda: encoder.ids(text, marked.mark, add_special=add_special))

    def checked_tools(self, body: ChatFields) -> list[dict[str, Any]]:
        """Return the tools that the chat template renders; ApiError where it renders none, whatever the tool_choice."""
        template = self.vocabulary.chat_template
        if body.offered and template is not None and "tools" not in template.text:
            raise ApiError(400, "tools: the model's chat template does not render tools; leave them out", param="tools")
        return [one.plain() for one in body.offered]

    async def _render(self, template: ChatTemplate, body: ChatFields, marked: Marked) -> str:
        """Return a conversation as text."""
        messages, mark = list(marked.messages), secrets.token_hex(16)
        if body.continue_final_message:  # what the template writes behind the mark is cut off
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + mark}
        request = (messages, body.add_generation_prompt and not body.continue_final_message)
        if self._renders >= RENDERS_WAITING:
            raise Busy(self._renders * RENDER_SECONDS / RENDERS_AT_ONCE)
        self._renders += 1
        try:
            loop = asyncio.get_running_loop()
            work = loop.run_in_executor(
                self._rendering,
                lambda: template.render_many([request], **marked.given)[0],
            )
            text = await work
        except FileError as error:
            problem = str(error).removeprefix(f"{template.origin}: ")
            raise ApiError(400, f"messages: {problem}", param="messages") from None
        finally:
            self._renders -= 1
        if not body.continue_final_message:
            return text
        before, *behind = text.split(mark)
        if len(behind) != 1:
            problem = "the chat template does not write the last message as it is"
            raise ApiError(400, f"continue_final_message: {problem}", param="continue_final_message")
        return before

    async def run(self, work: Callable[[], T]) -> T:
        """Run a function in the thread of the tokenizer."""
        return await asyncio.get_running_loop().run_in_executor(self._encoding, work)

    def close(self) -> None:
        """End the threads."""
        for pool in (self._encoding, self._rendering):
            pool.shutdown(wait=False, cancel_futures=True)


def too_long(problem: str) -> ApiError:
    """Return the error of a prompt that does not fit."""
    return ApiError(400, problem, param="prompt", code="context_length_exceeded")
