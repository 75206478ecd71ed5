"""What both sides of `verify` read."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence
from typing import Annotated

from dovetail.api.options import Seed
from dovetail.base.limits import PROMPT_TOKENS
from dovetail.base.option import Option
from dovetail.base.option_group import OptionGroup


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
        Option("Tokens per row; by default enough to pass the edge of a short window.", low=1, high=PROMPT_TOKENS),
    ] = None
    longest: Annotated[
        int,
        Option(
            "The most tokens of the long prompt, which passes every window and length that a spec or config names; 0: none."
        ),
    ] = 4096
    seed: Annotated[int, Seed("The seed of the random prompts.")] = 0
