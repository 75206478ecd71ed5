"""Embeddings and scores in the engine's process: texts of calls, one per step, so that they delay no continuation for long.

A model that does not generate (an encoder, a classifier) is served by `PooledEngine`, which has no rows and no KV cache.
"""

from __future__ import annotations

import dataclasses as dc
from collections import deque
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from dovetail.base.errors import DovetailError, InputError
from dovetail.decoding.embedding import Embedder
from dovetail.model.model import ModelModule
from dovetail.serving.adapters import Adapters
from dovetail.serving.client import Stats
from dovetail.serving.request import Output, Request
from dovetail.weights.adapters.kind import AdapterKind


@dc.dataclass
class PooledCall:
    """The texts of one call that are left, and the results of the others."""

    number: int
    texts: deque[Any]  # token ids; pairs of token ids and token types where they are scored
    scored: bool
    adapter: str | None
    results: list[Any] = dc.field(default_factory=list)


class Calls:
    """Calls in the order in which they came."""

    def __init__(self, embedder: Embedder, adapters: Adapters) -> None:
        self.embedder, self.adapters = embedder, adapters
        self.waiting: deque[PooledCall] = deque()

    def add(self, message: Mapping[str, Any]) -> None:
        """Queue the texts of a message."""
        scored = "score" in message
        self.waiting.append(
            PooledCall(message["call"], deque(message["score" if scored else "embed"]), scored, message["adapter"])
        )

    def cancel(self, number: int) -> None:
        """Forget a call, if it is there."""
        self.waiting = deque(call for call in self.waiting if call.number != number)

    def step(self) -> dict[str, Any] | None:
        """Compute one text; return the answer to its call, where it was the last."""
        if not self.waiting:
            return None
        call = self.waiting[0]
        try:
            if call.texts:
                call.results.append(self._compute(call))
        except DovetailError as error:
            self.waiting.popleft()
            return {"answer": call.number, "error": str(error)}
        if call.texts:
            return None
        self.waiting.popleft()
        return {"answer": call.number, "error": "", "value": call.results}

    def _compute(self, call: PooledCall) -> Any:
        text, slot = call.texts.popleft(), None if call.adapter is None else self.adapters.slot(call.adapter)
        with self.adapters.rows([slot]):
            return self.embedder.score(*text) if call.scored else self.embedder.vector(text).tolist()


class PooledEngine:
    """The engine of a model that does not generate."""

    busy = False
    grammars = None

    def __init__(self, model: ModelModule, longest: int) -> None:
        self.model, self.longest, self.adapters = model, longest, Adapters(model)

    def add(self, request: Request) -> None:
        """Refuse a request: nothing is generated here."""
        raise InputError("prompt: the model does not generate; use /v1/embeddings or /v1/rerank")

    def abort(self, id: str) -> list[Output]:
        """Nothing runs that could end."""
        return []

    def step(self) -> list[Output]:
        """Nothing runs."""
        return []

    def load_adapter(self, name: str, kind: AdapterKind, tensors: Mapping[str, Tensor]) -> None:
        """Let requests name an adapter."""
        self.adapters.load(name, kind, tensors)

    def unload_adapter(self, name: str) -> None:
        """Take no further requests for an adapter."""
        self.adapters.unload(name, ())

    def stats(self) -> Stats:
        """Return the state, which does not change."""
        return Stats()
