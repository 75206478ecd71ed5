"""What both sides of `verify` read."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from dovetail.api.options import Seed
from dovetail.core.errors import SpecError
from dovetail.core.option import Option
from dovetail.core.option_group import OptionGroup

if TYPE_CHECKING:
    from dovetail.proof.compare.opening import SideLike
    from dovetail.proof.compare.prompt import Prompt
    from dovetail.proof.compare.sides import Side
    from dovetail.text.tokenizer import Tokenizer

MOST_TOKENS = 65_536  # of a prompt


@dc.dataclass(frozen=True)
class PromptOptions(OptionGroup):
    """What both sides read: texts, token ids (`"3 14 15"`), or by default `rows` rows of random tokens."""

    prompt: Annotated[
        Sequence[str] | str,
        Option(
            "A text that both sides read, by the tokenizer of the first directory that has one; may be given many times.",
            repeat=True,
        ),
    ] = ()
    rows: Annotated[int, Option("Rows of random tokens, if no prompt is given.", low=1, high=256)] = 2
    length: Annotated[
        int | None,
        Option("Tokens per row; by default enough to pass the edge of a short window.", low=1, high=MOST_TOKENS),
    ] = None
    longest: Annotated[
        int,
        Option(
            "The most tokens of the long prompt, which passes every window and length that a spec or config names; 0: none."
        ),
    ] = 4096
    seed: Annotated[int, Seed("The seed of the random prompts.")] = 0


def read_prompt(prompts: PromptOptions, tokenizer: Tokenizer | None, *sides: Side) -> Prompt:
    """Return the token ids of the texts, or random tokens where there are none."""
    from dovetail.proof.compare.check import padding_token
    from dovetail.proof.compare.prompt import prompt_of_ids, random_prompt

    texts = (prompts.prompt,) if isinstance(prompts.prompt, str) else tuple(prompts.prompt)
    spec = next((side.spec for side in sides if side.spec is not None), None)
    if not texts:
        if spec is None:
            remedy = "give --prompt ids, e.g. --prompt '3 14 15'"
            raise SpecError("prompt", "neither side has a spec to draw a prompt from", remedy)
        avoid = padding_token(*sides)
        return random_prompt(spec, rows=prompts.rows, length=prompts.length, seed=prompts.seed, avoid=avoid)
    if tokenizer is not None:
        rows = [tokenizer.prompt(text) for text in texts]
    elif all(text.replace(" ", "").isdigit() for text in texts):
        rows = [[int(word) for word in text.split()] for text in texts]
    else:
        raise SpecError("prompt", "no side has a tokenizer", "give token ids instead: --prompt '3 14 15'")
    shortest = min(len(row) for row in rows)  # both sides read rows of one length
    if shortest > MOST_TOKENS:
        raise SpecError("prompt", f"{shortest:,} tokens; the limit is {MOST_TOKENS:,}", "give a shorter text")
    return prompt_of_ids([row[:shortest] for row in rows], None if spec is None else spec.vocab)


def first_tokenizer(*sides: SideLike) -> Tokenizer | None:
    """Return the tokenizer of the first directory that has one."""
    from dovetail.text.tokenizer import TOKENIZER_FILE, Tokenizer

    for side in sides:
        if isinstance(side, (str, Path)):
            place = Path(str(side).removeprefix("hf:"))
            if (place / TOKENIZER_FILE).is_file():
                return Tokenizer.load(place)
    return None
