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
from typing import TypeVar

from dovetail.core.errors import FileError
from dovetail.core.limits import RENDERS_AT_ONCE, RENDERS_WAITING
from dovetail.generation import Vocabulary
from dovetail.serving.client import Busy
from dovetail.serving.http.chat_schema import ChatFields
from dovetail.serving.http.errors import ApiError
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

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer; ApiError where the model has none."""
        if self.vocabulary.tokenizer is None:
            raise ApiError(400, "prompt: is a string, but the model has no tokenizer; give token ids", param="prompt")
        return self.vocabulary.tokenizer

    async def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        """Return the token ids of a string."""
        tokenizer = self.tokenizer
        if len(text) > self.most:
            raise too_long(f"the prompt has {len(text):,} characters, which {self.longest:,} tokens cannot have")
        try:
            ids = await self.run(lambda: tokenizer.prompt(text, add_special=add_special))
        except FileError:
            raise ApiError(400, "the prompt cannot be encoded", param="prompt") from None
        return self.checked(ids)

    def checked(self, ids: list[int]) -> list[int]:
        """Return token ids that the model can take; ApiError for others."""
        if not ids:
            raise ApiError(400, "prompt: has no token; give at least one", param="prompt")
        if len(ids) >= self.longest:
            raise too_long(f"the prompt has {len(ids):,} tokens")
        if max(ids) >= self.vocab:
            raise ApiError(400, f"prompt: token id {max(ids)} is not below {self.vocab:,}", param="prompt")
        return ids

    async def chat(self, body: ChatFields) -> list[int]:
        """Return the token ids of a conversation."""
        return await self.encode(await self.render(body), add_special=body.add_special_tokens)

    async def render(self, body: ChatFields) -> str:
        """Return a conversation as text."""
        template = self.vocabulary.chat_template
        if template is None:
            raise ApiError(400, "messages: the model has no chat template; ask /v1/completions", param="messages")
        messages, mark = [one.plain() for one in body.messages], secrets.token_hex(16)
        if sum(len(one["content"]) for one in messages) > self.most:
            raise too_long("the messages have more characters than fit")
        tools = [one.plain() for one in body.offered]
        if tools and "tools" not in template.text:
            raise ApiError(400, "tools: the model's chat template does not render tools; leave them out", param="tools")
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
                lambda: template.render_many([request], **body.chat_template_kwargs, tools=tools or None)[0],
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
