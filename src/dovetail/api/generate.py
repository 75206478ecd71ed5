"""generate: text from a prompt, with what a caller wants to know of it: tokens, why it ended, tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from dovetail.api.arguments import silent
from dovetail.api.models import load
from dovetail.api.options import (
    EVICT,
    EVICT_TO,
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
from dovetail.base.option import Option

if TYPE_CHECKING:
    from dovetail.decoding.continuation import Generation
    from dovetail.hf.load import Watch
    from dovetail.model.transformer import Transformer


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
    evict: Annotated[Literal["oldest", "attended", "sinks"] | None, EVICT] = None,
    evict_to: Annotated[int | None, EVICT_TO] = None,
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
    `evict` holds the KV cache of full attention to `evict_to` entries per layer, so that its memory does not grow.
    One of `json_schema` (plain data or JSON text), `regex` (Rust's syntax), `choice` (strings) and `grammar` (Lark or GBNF)
    restricts the text (extra `grammar`): generation ends where the text is complete, or is cut off after `max_tokens`.
    `on_text` is called with each piece of text, first with the prompt where the text continues it; `watch` with (bytes read,
    bytes in all) while weights are loaded.
    """
    from dovetail.decoding.continuation import checked_sampling, continue_prompt, only_constraint
    from dovetail.decoding.eviction import given_eviction
    from dovetail.decoding.generation import Vocabulary
    from dovetail.text.grammar import given_grammars

    sampling = checked_sampling(
        max_tokens,
        beams,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    constraint = only_constraint(given_grammars(json_schema, regex, choice, grammar), beams)
    eviction = given_eviction(evict, evict_to)
    model = opened(model, watch)
    return continue_prompt(
        model,
        model.vocabulary or Vocabulary(),
        prompt,
        max_tokens,
        sampling,
        on_text or silent,
        beams=beams,
        chat=chat,
        system=system,
        compiled=compiled,
        cache=cache,
        constraint=constraint,
        evict=eviction,
    )


def opened(model: Transformer | str | Path, watch: Watch | None) -> Transformer:
    """Return the model, or that of a directory, with finite weights."""
    from dovetail.hf.adapter import check_generates_text
    from dovetail.model.transformer import Transformer
    from dovetail.nn.finite import check_weights

    if not isinstance(model, Transformer):
        check_generates_text(model)
        model = load(model, watch=watch)
    check_weights(model, model.spec)
    return model
