"""chat: a conversation with a model. Each turn renders all messages with the model's chat template; the KV cache of what was
said before is kept, so that a turn costs its own tokens.

    talk = dt.chat("Qwen3-0.6B", system="Answer in one sentence.")
    print(talk.ask("Why is the sky blue?"))
    print(talk.ask("And at sunset?"))
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dovetail.api.generate import opened
from dovetail.api.options import MIN_P, REPETITION_PENALTY, SAMPLING_SEED, TEMPERATURE, TOP_K, TOP_P, InDir, NewTokens
from dovetail.base.limits import MAX_LENGTH
from dovetail.base.option import Option

if TYPE_CHECKING:
    from dovetail.hf.load import Watch
    from dovetail.model.transformer import Transformer
    from dovetail.serving.chat import Chat


def chat(
    model: Annotated[
        Transformer | str | Path,
        InDir("A model directory with a tokenizer and a chat template: ours, or in Hugging Face layout.", argument=True),
    ],
    *,
    system: Annotated[str | None, Option("A system message before all others.")] = None,
    max_tokens: Annotated[int, NewTokens("The largest number of tokens of an answer.")] = 512,
    temperature: Annotated[float, TEMPERATURE] = 0.0,
    top_p: Annotated[float, TOP_P] = 1.0,
    top_k: Annotated[int | None, TOP_K] = None,
    min_p: Annotated[float, MIN_P] = 0.0,
    repetition_penalty: Annotated[float, REPETITION_PENALTY] = 1.0,
    seed: Annotated[int, SAMPLING_SEED] = 0,
    longest: Annotated[
        int,
        Option(
            "Tokens of the conversation and an answer together; the oldest turns are left out if they do not fit.",
            low=2,
            high=MAX_LENGTH,
        ),
    ] = 4096,
    watch: Watch | None = None,
) -> Chat:
    """Begin a conversation with a model, or the model of a directory, that has a chat template.

    `system` is a message before all others. An answer has at most `max_tokens` tokens. The conversation and an answer together
    have at most `longest`; the oldest turns are left out if they do not fit. The other options are those of `generate`.
    """
    from dovetail.decoding.continuation import checked_sampling
    from dovetail.serving.chat import Chat

    sampling = checked_sampling(
        max_tokens,
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        seed=seed,
        min_p=min_p,
        repetition_penalty=repetition_penalty,
    )
    return Chat(opened(model, watch), system, max_tokens, sampling, longest)
