"""sample: several completions of each of several prompts, in one batch.

    answers = dt.sample(model, ["2+3=", "4+4="], choices=8, max_tokens=4)    answers[1][7]: the last one of the second prompt

A completion is a function of the weights, the seed, its number and its prompt, not of the batch beside it (law 21): those of
one prompt are independent samples, for pass@k, for votes, or for pairs to be judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dovetail.base.errors import UsageError

if TYPE_CHECKING:
    from dovetail.model.transformer import Transformer

ROWS = 1024  # completions that are sampled together


def sample(
    model: Transformer | str | Path,
    prompts: Sequence[str],
    *,
    choices: int = 1,
    max_tokens: int = 64,
    temperature: float = 1.0,
    seed: int = 0,
) -> list[list[str]]:
    """Return `choices` completions of each prompt, without the end token. Temperature 0 takes the most probable tokens."""
    from dovetail.api.generate import opened
    from dovetail.decoding.generation import Vocabulary, prompt_ids
    from dovetail.training.rollout import roll_out

    for name, value in (("choices", choices), ("max_tokens", max_tokens)):
        if value < 1:
            raise UsageError(f"{name}: {value} is below 1")
    if not 0 <= temperature < float("inf"):
        raise UsageError(f"temperature: {temperature} is not a number from 0")
    model = opened(model, None)
    vocabulary = model.vocabulary or Vocabulary()
    rows = [prompt_ids(vocabulary, prompt) for prompt in prompts]
    tokenizer, together, texts = model.tokenizer, max(1, ROWS // choices), list[str]()
    for start in range(0, len(rows), together):
        some = rows[start : start + together]
        rollouts = roll_out(model, some, choices, max_tokens, temperature, vocabulary.stop, seed + start)
        for rollout in rollouts:
            assert tokenizer is not None, "prompt_ids has refused"
            texts.append(tokenizer.decode([token for token in rollout.tokens if token not in vocabulary.stop]))
    return [texts[i : i + choices] for i in range(0, len(texts), choices)]
