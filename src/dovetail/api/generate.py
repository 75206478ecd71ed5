"""generate: text from a prompt, with what a caller wants to know of it: tokens, why it ended, tokens per second."""

from __future__ import annotations

import dataclasses as dc
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dovetail.api.arguments import silent
from dovetail.api.models import load
from dovetail.api.options import (
    MIN_P,
    REPETITION_PENALTY,
    SAMPLING_SEED,
    SCHEMA,
    TEMPERATURE,
    TOP_K,
    TOP_P,
    InDir,
    NewTokens,
)
from dovetail.core.errors import SpecError
from dovetail.core.limits import MAX_NEW_TOKENS
from dovetail.core.option import Option
from dovetail.disk.untrusted import Directory

if TYPE_CHECKING:
    from dovetail.decoding.generation import Vocabulary
    from dovetail.decoding.sampling import Sampling
    from dovetail.hf.load import Watch
    from dovetail.text.grammar import Grammar, Matcher
    from dovetail.transformer import Transformer


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


def generate(
    model: Annotated[
        Transformer | str | Path,
        InDir("A model directory with a tokenizer.json: ours, or in Hugging Face layout.", argument=True),
    ],
    prompt: Annotated[str, Option("The prompt.", argument=True)],
    *,
    max_tokens: Annotated[int, NewTokens("The largest number of tokens to generate.")] = 128,
    temperature: Annotated[float, TEMPERATURE] = 0.0,
    top_p: Annotated[float, TOP_P] = 1.0,
    top_k: Annotated[int | None, TOP_K] = None,
    min_p: Annotated[float, MIN_P] = 0.0,
    repetition_penalty: Annotated[float, REPETITION_PENALTY] = 1.0,
    seed: Annotated[int, SAMPLING_SEED] = 0,
    beams: Annotated[int | None, Option("Beam search with N beams; the text is printed at the end.")] = None,
    chat: Annotated[bool, Option("Render the prompt with the model's chat template, as a user message.")] = False,
    system: Annotated[str | None, Option("With --chat: a system message before it.")] = None,
    compiled: Annotated[
        bool, Option("Decode with compiled graphs: compiling takes seconds to minutes, so it pays off for long texts.")
    ] = False,
    cache: Annotated[Literal["int8", "int4", "fp8"] | None, Option("Store the KV cache in fewer bits.")] = None,
    json_schema: Annotated[Mapping[str, Any] | bool | str | None, SCHEMA] = None,
    regex: Annotated[str | None, Option("A regular expression: the text matches it as a whole.")] = None,
    choice: Sequence[str] | None = None,
    grammar: str | None = None,
    on_text: Callable[[str], None] | None = None,
    watch: Watch | None = None,
) -> Generation:
    """Generate the text that follows a prompt, by a model or the model of a directory.

    Temperature 0 picks the most probable token; `beams` searches for the most probable text with that many beams. With `chat`
    the prompt is a user message, rendered by the model's chat template, after the message `system` if there is one. `compiled`
    decodes with compiled graphs, which take seconds to minutes to compile. `cache` stores the KV cache in int8, int4 or fp8.
    One of `json_schema` (plain data or JSON text), `regex` (Rust's syntax), `choice` (strings) and `grammar` (Lark or GBNF)
    restricts the text (extra `grammar`): generation ends where the text is complete, or is cut off after `max_tokens`.
    `on_text` is called with each piece of text, first with the prompt where the text continues it; `watch` with (bytes read,
    bytes in all) while weights are loaded.
    """
    from dovetail.decoding.generation import Vocabulary, check_generates, generate_pieces, prompt_ids

    sampling = check_options(max_tokens, temperature, top_p, top_k, seed, min_p, repetition_penalty, beams)
    constraint = constraint_of(json_schema, regex, choice, grammar, beams)
    model = opened(model, watch)
    check_generates(model.spec)
    vocabulary = model.vocabulary or Vocabulary()
    ids = prompt_ids(vocabulary, prompt, chat=chat, system=system)
    continues, tell = not chat and model.spec.encoder is None, on_text or silent
    if beams is not None:
        return _search(model, vocabulary, prompt, ids, max_tokens, beams, continues, tell)
    matcher = None if constraint is None else _matcher(model, vocabulary, constraint)
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
        matcher=matcher,
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
    complete = matcher is not None and matcher.finished
    finish = "end" if complete or (tokens and tokens[-1] in vocabulary.stop) else "length"
    return Generation(prompt, text, tokens, len(ids), finish, len(tokens) / seconds, sum(compiling))


def check_options(
    max_tokens: int,
    temperature: float = 0.0,
    top_p: float = 1.0,
    top_k: int | None = None,
    seed: int = 0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    beams: int | None = None,
) -> Sampling:
    """Return the sampling; raise SpecError for an option outside its range."""
    from dovetail.decoding.beam import check_beams
    from dovetail.decoding.sampling import Sampling

    if beams is not None:
        check_beams(beams)
        if (temperature, top_p, top_k, min_p, repetition_penalty) != (0.0, 1.0, None, 0.0, 1.0):
            raise SpecError("beams", "beam search samples nothing", "leave out the options of sampling, or the beams")
    if not 1 <= max_tokens <= MAX_NEW_TOKENS:
        raise SpecError("max_tokens", f"{max_tokens} is not from 1 to {MAX_NEW_TOKENS:,}")
    return Sampling(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
        seed=seed,
    )


def constraint_of(
    json_schema: Mapping[str, Any] | bool | str | None = None,
    regex: str | None = None,
    choice: Sequence[str] | None = None,
    grammar: str | None = None,
    beams: int | None = None,
) -> Grammar | None:
    """Return the grammar of the one constraint that is given; raise where there are several, or beams beside one."""
    from dovetail.text.grammar import given_grammars

    given = given_grammars(json_schema, regex, choice, grammar)
    if len(given) > 1:
        raise SpecError(given[1].format, f"the output is constrained by {given[0].format} already", "give one of the two")
    if given and beams is not None:
        raise SpecError("beams", "beam search takes no constraint", f"leave out the beams, or {given[0].format}")
    return given[0] if given else None


def _matcher(model: Transformer, vocabulary: Vocabulary, constraint: Grammar) -> Matcher:
    from dovetail.text.grammar import Grammars

    assert vocabulary.tokenizer is not None  # the prompt was encoded
    return Grammars(vocabulary.tokenizer, model.spec.vocab, vocabulary.stop).matcher(constraint)


def _search(
    model: Transformer,
    vocabulary: Vocabulary,
    prompt: str,
    ids: list[int],
    max_tokens: int,
    beams: int,
    continues: bool,
    tell: Callable[[str], None],
) -> Generation:
    """The best text of a beam search; it is known at the end alone."""
    from dovetail.decoding.beam import beam_search
    from dovetail.text.stream import TextStream

    begin = time.monotonic()
    best = beam_search(model, ids, max_tokens, beams=beams, stop=vocabulary.stop, start=vocabulary.start)[0]
    seconds, tokens = max(time.monotonic() - begin, 1e-9), list(best.tokens)
    assert vocabulary.tokenizer is not None
    stream = TextStream(vocabulary.tokenizer, ids if continues else ())
    ended = tokens[-1] in vocabulary.stop
    text = "".join(map(stream.push, tokens[:-1] if ended else tokens)) + stream.end()
    if continues:
        tell(prompt)
    tell(text)
    return Generation(prompt, text, tokens, len(ids), "end" if ended else "length", len(tokens) / seconds)


def opened(model: Transformer | str | Path, watch: Watch | None) -> Transformer:
    """Return the model, or that of a directory, with finite weights."""
    from dovetail.core.finite import check_weights
    from dovetail.transformer import Transformer

    if not isinstance(model, Transformer):
        check_model(model)
        model = load(model, watch=watch)
    check_weights(model, model.spec)
    return model


def check_model(directory: str | Path) -> None:
    """Raise, before any weight is read, where the model of a directory cannot generate text."""
    from dovetail.decoding.generation import check_generates
    from dovetail.hf.adapter import base_place, is_adapter
    from dovetail.hf.load import origin
    from dovetail.text.tokenizer import check_tokenizer

    where = Directory(base_place(directory) if is_adapter(directory) else directory)
    check_generates(origin(where).spec)
    check_tokenizer(where)
