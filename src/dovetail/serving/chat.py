"""A conversation with a model. Each turn renders all messages with the model's chat template; the KV cache of what was said
before is kept, so that a turn costs its own tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from dovetail.base.errors import InputError
from dovetail.base.keywords import checks_keywords
from dovetail.decoding.continuation import Generation
from dovetail.decoding.generation import Vocabulary, chat_ids, generate_tokens
from dovetail.decoding.sampling import Sampling
from dovetail.look.intervention import Replacement
from dovetail.look.record import Trace
from dovetail.look.tracer import Tracer
from dovetail.model.transformer import Transformer
from dovetail.serving.engine import Engine
from dovetail.serving.request import Request
from dovetail.text.literal import ConversationEncoder
from dovetail.text.stream import TextStream

TURN = 2  # messages: the user's and the answer


@checks_keywords
class Chat:
    """A conversation. `messages` are its messages so far, the system's first."""

    def __init__(self, model: Transformer, system: str | None, max_tokens: int, sampling: Sampling, longest: int) -> None:
        vocabulary = model.vocabulary or Vocabulary()
        if vocabulary.tokenizer is None or vocabulary.chat_template is None:
            missing = "tokenizer" if vocabulary.tokenizer is None else "chat template"
            raise InputError(f"chat: the model has no {missing}; use generate, or a directory that has one")
        self.tokenizer, self.stop = vocabulary.tokenizer, vocabulary.stop
        self.encoder = ConversationEncoder(self.tokenizer, vocabulary.chat_template, self.stop)
        self.model, self.engine = model, Engine(model.eval(), rows=1, longest=longest, start=vocabulary.start)
        self.max_tokens, self.sampling = max_tokens, sampling
        self.first = [] if system is None else [{"role": "system", "content": system}]
        self.messages: list[dict[str, Any]] = list(self.first)
        self.left_out = 0  # turns, in the last answer

    def ask(
        self,
        text: str,
        on_text: Callable[[str], None] | None = None,
        *,
        trace: Trace | None = None,
        patch: Mapping[str, Replacement] | None = None,
    ) -> Generation:
        """Send a message and return the answer, which becomes part of the conversation. `on_text` is called with each piece of
        it. Where it is interrupted (KeyboardInterrupt), the answer ends there; both messages stay. `trace` records activations
        and `patch` replaces some, as in `generate`: of the whole conversation, which is then computed without the cache."""
        tracer = None if trace is None and not patch else Tracer(self.model.spec, trace, patch)
        self.messages.append({"role": "user", "content": text})
        try:
            ids = self._ids()
        except BaseException:
            self.messages.pop()
            raise
        stream, pieces, tokens = TextStream(self.tokenizer), list[str](), list[int]()

        def tell(piece: str) -> None:
            pieces.append(piece)
            if piece and on_text is not None:
                on_text(piece)

        begin = time.monotonic()
        try:
            for token in self._tokens(ids, tracer):
                tokens.append(token)
                if token not in self.stop:
                    tell(stream.push(token))
            tell(stream.end())
        finally:
            self.engine.abort("turn")
            answer = "".join(pieces)
            self.messages.append({"role": "assistant", "content": answer})
        seconds = max(time.monotonic() - begin, 1e-9)
        finish = "end" if tokens and tokens[-1] in self.stop else "length"
        return Generation(text, answer, tokens, len(ids), finish, len(tokens) / seconds)

    def _tokens(self, ids: list[int], tracer: Tracer | None = None) -> Iterator[int]:
        room = min(self.max_tokens, self.engine.longest - len(ids))
        if tracer is not None:  # the engine holds keys and values that were computed without the patch
            yield from generate_tokens(self.model, ids, room, self.sampling, stop=self.stop, listen=tracer)
            tracer.end()
            return
        self.engine.add(Request(id="turn", prompt=tuple(ids), max_tokens=room, sampling=self.sampling, stop=self.stop))
        while self.engine.busy:
            for output in self.engine.step():
                if output.message:
                    raise InputError(f"chat: {output.message}")
                yield from output.tokens

    def _ids(self) -> list[int]:
        """The ids of the conversation; the oldest turns are left out where an answer would not fit."""
        turns, room = self.messages[len(self.first) :], max(1, self.engine.longest - self.max_tokens)
        ids: list[int] = []
        for left_out in range(self.left_out, len(turns) // TURN + 1):  # turns that did not fit before do not fit now
            ids = chat_ids(self.encoder, [*self.first, *turns[TURN * left_out :]])
            if len(ids) <= room:
                self.left_out = left_out
                return ids
        raise InputError(f"chat: the message has {len(ids):,} tokens, and there is room for {room:,}; shorten it")

    def undo(self) -> bool:
        """Forget the last turn; False where there is none."""
        if len(self.messages) <= len(self.first):
            return False
        del self.messages[-TURN:]
        self.left_out = 0
        return True

    def forget(self) -> None:
        """Forget all turns."""
        self.messages, self.left_out = list(self.first), 0
