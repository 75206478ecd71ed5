"""The next token of continuations: the logits that their requests allow, and a sample of each."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dovetail.decoding.sampling import masked, sample_tokens
from dovetail.serving.schedule import Continuation


def allowed_logits(one: Continuation, logits: Tensor) -> Tensor:
    """Logits (vocab,) without the tokens that its grammar excludes, nor those that end a continuation that is too short to
    end; where a grammar allows these alone, they stay. Raises GrammarError where the grammar takes too much work."""
    if one.matcher is not None:
        logits = masked(logits, one.matcher.mask())
    if not one.request.stop or len(one.tokens) - one.prompt >= one.request.min_tokens:
        return logits
    stop = torch.tensor([token for token in one.request.stop if token < len(logits)], dtype=torch.long)
    longer = logits.index_fill(0, stop, float("-inf"))
    return longer if one.matcher is None or bool(longer.isfinite().any()) else logits


def sample_next(logits: Mapping[Continuation, Tensor]) -> list[int]:
    """The next token of each continuation, from its logits (vocab,)."""
    if not logits:
        return []
    ones = list(logits)
    prompts, generated = [one.tokens[: one.prompt] for one in ones], [one.generated for one in ones]
    return sample_tokens(torch.stack(list(logits.values())), [one.sampling for one in ones], prompts, generated)
