"""Answers of completions and of chat completions: whole, and in chunks. Both have the same parts under different names."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dovetail.serving.http.chat_schema import ChatBody
from dovetail.serving.http.choice import Piece
from dovetail.serving.http.logprobs import LogprobShapes, Scored
from dovetail.serving.http.run import Job, Run, now
from dovetail.serving.http.schema import CompletionBody, GenerationBody
from dovetail.serving.http.tool_stream import ToolCalls


class Shape(ABC):
    """The form of an answer to one request."""

    whole_object = chunk_object = ""

    def __init__(self, id: str, model: str, body: GenerationBody, run: Run, logprobs: LogprobShapes) -> None:
        self.id, self.model, self.run, self.logprobs, self.created = id, model, run, logprobs, now()
        self.ids, self.prompt_logprobs = body.return_token_ids, body.prompt_logprobs is not None
        self.usage_at_end = body.stream and body.stream_options.include_usage

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """Return the whole answer."""
        choices = []
        for job in self.run.jobs:
            for choice in job.choices:
                own = [piece for piece in pieces if piece.index == choice.index]
                text, tokens = "".join(piece.text for piece in own), [one for piece in own for one in piece.tokens]
                content = {
                    "index": choice.index,
                    "finish_reason": choice.finish,
                    **self.content(job, text, tokens, choice.finish),
                }
                choices.append({**content, **self._extras(tokens, job)})
        return {**self._head(self.whole_object), "choices": choices, "usage": self.run.usage(), **self._above(self.run.jobs)}

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        """Return the chunk of a piece; None where it has nothing to show."""
        if not (piece.text or piece.finish or (piece.tokens and (self.ids or self.scored))):
            return None
        content = {"index": piece.index, **self.delta(piece), "finish_reason": piece.finish, **self._extras(piece.tokens)}
        return self._chunk([content])

    def opening(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks before the first token."""
        yield from ()

    def closing(self) -> Iterator[dict[str, Any]]:
        """Yield the chunks behind the last token: the usage, where it is asked for."""
        if self.usage_at_end:
            yield {**self._head(self.chunk_object), "choices": [], "usage": self.run.usage()}

    @property
    @abstractmethod
    def scored(self) -> bool:
        """Whether log-probs are asked for."""

    @abstractmethod
    def content(self, job: Job, text: str, tokens: list[Scored], finish: str | None) -> dict[str, Any]:
        """Return the text and log-probs of a whole choice, and why it ended where that is not `finish`."""

    @abstractmethod
    def delta(self, piece: Piece) -> dict[str, Any]:
        """Return the text and log-probs of a chunk."""

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._head(self.chunk_object), "choices": choices, **({"usage": None} if self.usage_at_end else {})}

    def _head(self, object: str) -> dict[str, Any]:
        return {"id": self.id, "object": object, "created": self.created, "model": self.model}

    def _extras(self, tokens: Sequence[Scored], job: Job | None = None) -> dict[str, Any]:
        """The ids of a choice: of the tokens that its text has, and of the prompt in a whole answer."""
        ids = {"token_ids": [one.token for one in tokens]} if self.ids else {}
        return ids | ({"prompt_token_ids": list(job.request.prompt)} if self.ids and job is not None else {})

    def _above(self, jobs: Sequence[Job]) -> Mapping[str, Any]:
        return {}


class CompletionShape(Shape):
    """`text_completion`."""

    whole_object = chunk_object = "text_completion"

    def __init__(self, id: str, model: str, body: CompletionBody, run: Run, logprobs: LogprobShapes) -> None:
        super().__init__(id, model, body, run, logprobs)
        self.body = body

    @property
    def scored(self) -> bool:
        return self.body.logprobs is not None

    def content(self, job: Job, text: str, tokens: list[Scored], finish: str | None) -> dict[str, Any]:
        logprobs = self.logprobs.completion(tokens, len(job.text)) if self.scored else None
        if logprobs is not None and self.body.echo:
            prompt = self.logprobs.completion(job.scored_prompt)
            logprobs = {name: prompt[name] + logprobs[name] for name in logprobs}
        above = {"prompt_logprobs": self.logprobs.prompt(job.prompt_logprobs)} if self.prompt_logprobs else {}
        return {"text": job.text + text, "logprobs": logprobs, **above}

    def delta(self, piece: Piece) -> dict[str, Any]:
        base = sum(len(job.text) for job in self.run.jobs if any(one.index == piece.index for one in job.choices))
        return {"text": piece.text, "logprobs": self.logprobs.completion(piece.tokens, base) if self.scored else None}

    def opening(self) -> Iterator[dict[str, Any]]:
        for job in self.run.jobs if self.body.echo else ():
            for choice in job.choices:
                yield self._chunk([{"index": choice.index, "text": job.text, "logprobs": None, "finish_reason": None}])

    def _extras(self, tokens: Sequence[Scored], job: Job | None = None) -> dict[str, Any]:
        extras = super()._extras(tokens, job)
        if self.body.echo and self.ids and job is not None:
            extras["token_ids"] = [*job.request.prompt, *extras["token_ids"]]
        return extras


class ChatShape(Shape):
    """`chat.completion`."""

    whole_object, chunk_object = "chat.completion", "chat.completion.chunk"

    def __init__(self, id: str, model: str, body: ChatBody, run: Run, logprobs: LogprobShapes, calls: ToolCalls) -> None:
        super().__init__(id, model, body, run, logprobs)
        self.body, self.calls = body, calls
        self.streams = {choice.index: calls.stream() for job in run.jobs for choice in job.choices}

    @property
    def scored(self) -> bool:
        return self.body.logprobs

    def content(self, job: Job, text: str, tokens: list[Scored], finish: str | None) -> dict[str, Any]:
        logprobs = self.logprobs.chat(tokens) if self.scored else None
        stream = self.calls.stream()
        text, calls = (text, []) if stream is None else stream.push(text, final=True)
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if stream is None or not calls:
            return {"message": message, "logprobs": logprobs}
        plain = [{key: value for key, value in call.items() if key != "index"} for call in calls]
        called = {**message, "content": text or None, "tool_calls": plain}
        return {"message": called, "logprobs": logprobs, "finish_reason": stream.reason(finish)}

    def chunk(self, piece: Piece) -> dict[str, Any] | None:
        stream = self.streams[piece.index]
        if stream is None:
            return super().chunk(piece)
        text, calls = stream.push(piece.text, piece.finish is not None)
        if not (text or calls or piece.finish or (piece.tokens and (self.ids or self.scored))):
            return None
        delta = {**({"content": text} if text else {}), **({"tool_calls": calls} if calls else {})}
        logprobs = self.logprobs.chat(piece.tokens) if self.scored else None
        content = {"index": piece.index, "delta": delta, "logprobs": logprobs, "finish_reason": stream.reason(piece.finish)}
        return self._chunk([{**content, **self._extras(piece.tokens)}])

    def delta(self, piece: Piece) -> dict[str, Any]:
        delta = {"content": piece.text} if piece.text or piece.finish is None else {}
        return {"delta": delta, "logprobs": self.logprobs.chat(piece.tokens) if self.scored else None}

    def opening(self) -> Iterator[dict[str, Any]]:
        for job in self.run.jobs:
            for choice in job.choices:
                first = {"role": "assistant", "content": ""}
                yield self._chunk([{"index": choice.index, "delta": first, "logprobs": None, "finish_reason": None}])

    def _above(self, jobs: Sequence[Job]) -> Mapping[str, Any]:
        return {"prompt_logprobs": self.logprobs.prompt(jobs[0].prompt_logprobs)} if self.prompt_logprobs else {}
