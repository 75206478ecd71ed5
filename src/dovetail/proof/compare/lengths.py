"""How long the long prompt must be: past every length at which a model changes, within a bound on length, memory and time.

Windows end, a stretched rope changes at its original length, a table of positions has a last row. A bug there does not show in
a short prompt. The lengths come from the spec and from the config of a side.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from dovetail.core.group import Mask, Scaling
from dovetail.core.part import walk, walk_spec
from dovetail.model import Model
from dovetail.proof.compare.prompt import BEYOND, table_length

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


class Limit(NamedTuple):
    """A length at which a model changes."""

    tokens: int
    name: str


class LongLength(NamedTuple):
    """The length of the long prompt, and the limits that it does not pass."""

    tokens: int
    beyond: list[Limit]
    reason: str  # why it is not longer: empty where it passes every limit


def limits_of(spec: Model | None, configs: Iterable[Mapping[str, Any]]) -> list[Limit]:
    """Every length at which a model changes, shortest first, each once."""
    found = [limit for config in configs for limit in _in_config(config)]
    if spec is not None:
        for path, part in walk_spec(spec):
            tokens = part.reach() if isinstance(part, Mask) else part.limit() if isinstance(part, Scaling) else None
            if tokens is not None:
                found.append(Limit(tokens, path))
    by_length = {limit.tokens: limit for limit in reversed(found)}
    return [by_length[tokens] for tokens in sorted(by_length)]


def _in_config(config: Mapping[str, Any]) -> Iterable[Limit]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _in_config(value)
        elif name in NAMED and isinstance(value, int) and not isinstance(value, bool) and value > 0:
            yield Limit(value, name)


def long_length(spec: Model, limits: list[Limit], *, longest: int, seconds_per_token: float) -> LongLength:
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
