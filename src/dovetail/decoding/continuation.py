"""The text that follows a prompt, with what a caller wants to know of it: tokens, why it ended, tokens per second."""

from __future__ import annotations

import dataclasses as dc
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

from dovetail.base.errors import SpecError
from dovetail.base.limits import MAX_NEW_TOKENS
from dovetail.decoding.beam import beam_search, check_beams
from dovetail.decoding.eviction import Eviction
from dovetail.decoding.generation import Vocabulary, check_generates, generate_pieces, prompt_ids
from dovetail.decoding.sampling import GREEDY, Sampling
from dovetail.model.model import ModelModule
from dovetail.state.quantized import CacheFormat
from dovetail.text.grammar import Grammar, Grammars
from dovetail.text.stream import TextStream


@dc.dataclass(frozen=True)
class Generation:
    """The text that follows a prompt, and how it came about."""

    prompt: str
    text: str
    tokens: list[int]
    prompt_tokens: int
    finish: Literal["end", "length"]  # an end-of-sequence token or a complete constrained text; the largest number of tokens
    tokens_per_second: float  # without the time of compilation
    compile_seconds: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        times = ("tokens_per_second", "compile_seconds")
        return {**dc.asdict(self), **{name: round(getattr(self, name), 2) for name in times}}

    def __str__(self) -> str:
        return self.text


def checked_sampling(max_tokens: int, beams: int | None = None, **options: Any) -> Sampling:
    """Return the sampling of these options; raise SpecError for an option outside its range."""
    if beams is not None:
        check_beams(beams)
    sampling = Sampling(**options)
    if beams is not None and dc.replace(sampling, seed=GREEDY.seed) != GREEDY:
        raise SpecError("beams", "beam search samples nothing", "leave out the options of sampling, or the beams")
    if not 1 <= max_tokens <= MAX_NEW_TOKENS:
        raise SpecError("max_tokens", f"{max_tokens} is not from 1 to {MAX_NEW_TOKENS:,}")
    return sampling


def only_constraint(given: Sequence[Grammar], beams: int | None = None) -> Grammar | None:
    """Return the one constraint that is given; raise where there are several, or beams beside one."""
    if len(given) > 1:
        raise SpecError(given[1].format, f"the output is constrained by {given[0].format} already", "give one of the two")
    if given and beams is not None:
        raise SpecError("beams", "beam search takes no constraint", f"leave out the beams, or {given[0].format}")
    return given[0] if given else None


def continue_prompt(
    model: ModelModule,
    vocabulary: Vocabulary,
    prompt: str,
    max_tokens: int,
    sampling: Sampling,
    on_text: Callable[[str], None],
    *,
    beams: int | None = None,
    chat: bool = False,
    system: str | None = None,
    compiled: bool = False,
    cache: CacheFormat | None = None,
    constraint: Grammar | None = None,
    evict: Eviction | None = None,
) -> Generation:
    """Generate the text that follows a prompt; `on_text` is called with each piece of it, first with the prompt where the text
    continues it. The best text of a beam search is known only at the end."""
    check_generates(model.part)
    ids = prompt_ids(vocabulary, prompt, chat=chat, system=system)
    continues, matcher = not chat and model.part.encoder is None, None
    tokens, compiling, text = list[int](), list[float](), ""
    if constraint is not None and vocabulary.tokenizer is not None:
        matcher = Grammars(vocabulary.tokenizer, model.part.vocab, vocabulary.stop).matcher(constraint)
    if beams is not None and evict is not None:
        raise SpecError("evict", "beam search evicts nothing", "leave out the beams, or evict")
    begin = time.monotonic()
    if beams is not None:
        pieces = _searched(model, vocabulary, ids, max_tokens, beams, continues)
    else:
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
            matcher=matcher,
            evict=evict,
        )
    for number, (token, piece) in enumerate(pieces):
        if number == 0 and continues:
            on_text(prompt)
        if token is not None:
            tokens.append(token)
        if piece:
            on_text(piece)
            text += piece
    seconds = max(time.monotonic() - begin - sum(compiling), 1e-9)
    complete = matcher is not None and matcher.finished
    finish = "end" if complete or (tokens and tokens[-1] in vocabulary.stop) else "length"
    return Generation(prompt, text, tokens, len(ids), finish, len(tokens) / seconds, sum(compiling))


def _searched(
    model: ModelModule, vocabulary: Vocabulary, ids: list[int], max_tokens: int, beams: int, continues: bool
) -> Iterator[tuple[int | None, str]]:
    """Yield the tokens of the best text of a beam search with their pieces, as generate_pieces does."""
    best = beam_search(model, ids, max_tokens, beams=beams, stop=vocabulary.stop, start=vocabulary.start)[0]
    assert vocabulary.tokenizer is not None  # the prompt was encoded
    stream = TextStream(vocabulary.tokenizer, ids if continues else ())
    for token in best.tokens:
        yield token, "" if token in vocabulary.stop else stream.push(token)
    yield None, stream.end()
