"""generate: text from a prompt, with what a caller wants to know of it: tokens, why it ended, tokens per second."""

from __future__ import annotations

import dataclasses as dc
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from dovetail.api.models import load
from dovetail.core.errors import SpecError
from dovetail.core.finite import check_weights
from dovetail.core.limits import MAX_NEW_TOKENS
from dovetail.generation import Sampling, Vocabulary, check_generates, generate_pieces, prompt_ids
from dovetail.io.model_files import TOKENIZER_FILE
from dovetail.io.untrusted import Directory
from dovetail.port.adapter import base_place, is_adapter
from dovetail.port.load import origin
from dovetail.state.quantized import CacheFormat
from dovetail.transformer import Transformer


@dc.dataclass(frozen=True)
class Generation:
    """The text that follows a prompt, and how it came about."""

    prompt: str
    text: str
    tokens: list[int]
    prompt_tokens: int
    finish: Literal["end", "length"]  # an end-of-sequence token, or the largest number of tokens
    tokens_per_second: float  # without the time of compilation
    compile_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        times = ("tokens_per_second", "compile_seconds")
        return {**dc.asdict(self), **{name: round(getattr(self, name), 2) for name in times}}

    def __str__(self) -> str:
        return self.text


def generate(
    model: Transformer | str | Path,
    prompt: str,
    *,
    max_tokens: int = 128,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    chat: bool = False,
    system: str | None = None,
    compiled: bool = False,
    cache: CacheFormat | None = None,
    on_text: Callable[[str], None] | None = None,
) -> Generation:
    """Generate the text that follows a prompt, by a model or the model of a directory.

    Temperature 0 takes the most probable token. With `chat` the prompt is a user message, rendered by the model's chat
    template, behind the message `system` if there is one. `compiled` decodes by compiled graphs, which take seconds to minutes
    to make. `cache` stores the KV cache in int8, int4 or fp8. `on_text` is called with each piece of text, first with the
    prompt where the text continues it.
    """
    sampling = check_options(max_tokens, temperature, top_p, top_k, seed)
    if not isinstance(model, Transformer):
        check_model(model)
        model = load(model)
    check_generates(model.spec)
    check_weights(model, model.spec)
    vocabulary = model.vocabulary or Vocabulary()
    ids = prompt_ids(vocabulary, prompt, chat=chat, system=system)
    continues = not chat and model.spec.encoder is None

    def tell(piece: str) -> None:
        if on_text is not None:
            on_text(piece)

    tokens: list[int] = []
    compiling: list[float] = []
    text, begin = "", time.monotonic()
    pieces = generate_pieces(
        model,
        vocabulary,
        ids,
        max_tokens,
        sampling,
        stop=vocabulary.stop,
        continues=continues,
        compiled=compiled,
        on_compiled=compiling.append,
        cache=cache,
    )
    for number, (token, piece) in enumerate(pieces):
        if number == 0 and continues:
            tell(prompt)
        if token is not None:
            tokens.append(token)
        if piece:
            tell(piece)
            text += piece
    seconds = max(time.monotonic() - begin - sum(compiling), 1e-9)
    finish = "end" if tokens and tokens[-1] in vocabulary.stop else "length"
    return Generation(prompt, text, tokens, len(ids), finish, len(tokens) / seconds, sum(compiling))


def check_options(
    max_tokens: int, temperature: float = 0.0, top_p: float = 1.0, top_k: int | None = None, seed: int = 0
) -> Sampling:
    """Return the sampling; raise SpecError for an option outside its range."""
    if not 1 <= max_tokens <= MAX_NEW_TOKENS:
        raise SpecError("max_tokens", f"{max_tokens} is not from 1 to {MAX_NEW_TOKENS:,}")
    return Sampling(temperature=temperature, top_p=top_p, top_k=top_k, seed=seed)


def check_model(directory: str | Path) -> None:
    """Raise, before any weight is read, where the model of a directory cannot generate text."""
    where = Directory(base_place(directory) if is_adapter(directory) else directory)
    check_generates(origin(where).spec)
    where.path(TOKENIZER_FILE)
