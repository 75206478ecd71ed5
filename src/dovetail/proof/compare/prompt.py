"""Prompts: the inputs that both sides read. Random tokens unless ids are given; all rows have one length, without padding.

The long prompt passes every length at which a model changes, within a bound on length, memory and time. Windows end, a
stretched rope changes at its original length, a table of positions has a last row. A bug there does not show in a short prompt.
The lengths come from the spec and from the config of a side.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dovetail.account import longest_length
from dovetail.base.errors import SpecError
from dovetail.hf.field import value_at
from dovetail.model.construction import generator
from dovetail.model.model import Model
from dovetail.nn.groups import Mask, Scaling
from dovetail.spec.part import walk, walk_spec
from dovetail.spec.scope import Scope

ROWS, LENGTH, WIDEST = 2, 37, 512  # 37 is no other size of a model; windows extend it up to 512
BEYOND = 5  # tokens past the edge of a window


@dc.dataclass(frozen=True)
class Prompt:
    """inputs (batch, n) token ids, or images; source (batch, m) for an encoder–decoder; types (batch, n) of tokens."""

    inputs: Tensor
    n: int  # tokens per row
    source: Tensor | None = None
    types: Tensor | None = None

    @property
    def batch(self) -> int:
        """The number of rows."""
        return self.inputs.shape[0]

    def ids(self) -> list[list[int]]:
        """The token ids of each row."""
        return self.inputs.tolist()


def windows(spec: Model) -> list[int]:
    """The sizes of attention windows, in tokens."""
    reach = [part.reach() for _, part in walk_spec(spec) if isinstance(part, Mask)]
    return sorted({size for size in reach if size is not None})


def table_length(spec: Model) -> int | None:
    """The most tokens that a model takes; None where there is no end."""
    longest, offset = longest_length(spec), value_at(spec, "position.offset")
    return longest - offset if longest is not None and isinstance(offset, int) else longest  # unused rows of the table


def random_prompt(
    spec: Model, *, rows: int = ROWS, length: int | None = None, seed: int = 0, avoid: int | None = None
) -> Prompt:
    """Random inputs for a spec, long enough to pass the edges of its shorter windows; `avoid` is the padding token of a
    side."""
    edges = [size + BEYOND for size in windows(spec) if size + BEYOND <= WIDEST]
    longest = table_length(spec)
    n = length or min(max([LENGTH, *edges]), longest or WIDEST)
    inputs = spec.embed.example(spec.axes(Scope()), rows, n, generator(seed, "prompt"))
    source = None
    if spec.encoder is not None:
        source = spec.encoder.embed.example(spec.encoder.axes(Scope()), rows, n + 2, generator(seed, "source"))
    n = n if inputs.dim() == 2 else longest or n
    return Prompt(_without(inputs, avoid), n, None if source is None else _without(source, avoid))


def ids_in(texts: Sequence[str]) -> list[list[int]] | None:
    """The token ids in texts such as "3 14 15"; None where one is not of numbers."""
    if not all(text.replace(" ", "").isdigit() for text in texts):
        return None
    return [[int(word) for word in text.split()] for text in texts]


def prompt_of_ids(rows: list[list[int]], vocab: int | None) -> Prompt:
    """A prompt of given token ids; all rows must have one length."""
    if not rows or not rows[0] or len({len(row) for row in rows}) != 1:
        raise SpecError("prompt", "all prompts must have the same number of tokens, and at least one")
    largest = max(max(row) for row in rows)
    if vocab is not None and largest >= vocab:
        raise SpecError("prompt", f"token {largest} is beyond the vocabulary of {vocab}")
    return Prompt(torch.tensor(rows), len(rows[0]))


def _without(inputs: Tensor, avoid: int | None) -> Tensor:
    if avoid is None or inputs.is_floating_point():
        return inputs
    return torch.where(inputs == avoid, torch.full_like(inputs, avoid + 1 if avoid == 0 else avoid - 1), inputs)


LONG, LONGEST = 512, 4096  # tokens of the long prompt: at least, and at most
SECONDS, BYTES = 60.0, 2**31  # that one run of the long prompt may take, as estimated beforehand
# entries of a config in Hugging Face layout that hold a length
NAMED = frozenset(
    {
        "max_position_embeddings",
        "original_max_position_embeddings",
        "n_positions",
        "n_ctx",
        "max_seq_len",
        "max_sequence_length",
        "sliding_window",
        "window_size",
        "attention_chunk_size",
        "chunk_length",
        "local_attention",
    }
)


class LengthLimit(NamedTuple):
    """A length at which a model changes."""

    tokens: int
    name: str


class LongLength(NamedTuple):
    """The length of the long prompt, and the limits that it does not pass."""

    tokens: int
    beyond: list[LengthLimit]
    reason: str  # why it is not longer: empty where it passes every limit


def limits_of(spec: Model | None, configs: Iterable[Mapping[str, Any]]) -> list[LengthLimit]:
    """Every length at which a model changes, shortest first, each once."""
    found = [limit for config in configs for limit in _in_config(config)]
    if spec is not None:
        for path, part in walk_spec(spec):
            tokens = part.reach() if isinstance(part, Mask) else part.limit() if isinstance(part, Scaling) else None
            if tokens is not None:
                found.append(LengthLimit(tokens, path))
    by_length = {limit.tokens: limit for limit in reversed(found)}
    return [by_length[tokens] for tokens in sorted(by_length)]


def _in_config(config: Mapping[str, Any]) -> Iterable[LengthLimit]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _in_config(value)
        elif name in NAMED and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield LengthLimit(value, name)


def long_length(spec: Model, limits: list[LengthLimit], *, longest: int, seconds_per_token: float) -> LongLength:
    """The length of the long prompt. `seconds_per_token` is the time of the slowest run of the short one."""
    wanted = max([LONG, *(limit.tokens + BEYOND for limit in limits)])
    bounds = {
        f"the longest prompt is {longest:,} tokens (--longest)": longest,
        f"a run would take more than {SECONDS:g} seconds": int(SECONDS / max(seconds_per_token, 1e-9)),
        f"a run would take more than {BYTES / 2**30:g} GB": _fits(spec),
        "the model has no position for more tokens": table_length(spec) or wanted,
    }
    tokens, reason = min(((bound, text) for text, bound in bounds.items()), key=lambda pair: pair[0])
    tokens = min(tokens, wanted)
    beyond = [limit for limit in limits if limit.tokens >= tokens]
    return LongLength(tokens, beyond, reason if beyond else "")


def _fits(spec: Model) -> int:
    """The longest row whose recorded layers, logits and dense scores in float64 take at most BYTES."""
    heads = max((scope.sizes.get("heads", 1) for _, _, scope in walk(spec)), default=1)
    per_token = 8 * 4 * (2 * len(spec.layers) * spec.width + (spec.vocab))
    tokens = LONGEST
    while tokens > 1 and per_token * tokens + 3 * 8 * heads * tokens**2 > BYTES:
        tokens //= 2
    return tokens
