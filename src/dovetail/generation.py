"""Writing with a model: token by token, each read from the memory of those before it.

    p = softmax(logits / temperature); of these the `top_k` likeliest, then the fewest whose shares add up to `top_p`;
    temperature 0 takes the likeliest                                                       Holtzman et al. 2020 (top-p)

A decoder goes on from the prompt. An encoder–decoder reads it as its source, once, and begins with `start`.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.core.errors import SpecError
from dovetail.core.finite import check_result
from dovetail.core.fold import declared
from dovetail.core.layout import TokenLayout
from dovetail.model import Model, ModelModule
from dovetail.state.pool import Pool


@dc.dataclass(frozen=True, kw_only=True)
class Sampling:
    """How one of the likely tokens is taken."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf"):
            raise SpecError("temperature", f"{self.temperature} is not 0 or more")
        if self.top_k is not None and self.top_k < 1:
            raise SpecError("top_k", f"{self.top_k} is not 1 or more")
        if not 0 < self.top_p <= 1:
            raise SpecError("top_p", f"{self.top_p} is not above 0 and at most 1")


GREEDY = Sampling()


def check_generates(spec: Model) -> None:
    """Raise unless the model can write: it must say the next token, and never see it before."""
    if spec.head is None or not any(d.path.startswith("head.") and "vocab" in d.weight.out for d in declared(spec)):
        raise SpecError("head", "this model says no next token", "it needs head: lm")
    if spec.order() != "causal":
        raise SpecError("layers", "this model sees later tokens, so it cannot write one after the other")


@torch.inference_mode()
def write(
    model: ModelModule,
    prompt: Tensor | Sequence[int],
    count: int,
    sampling: Sampling = GREEDY,
    *,
    stop: Collection[int] = (),
    start: Sequence[int] = (),
) -> Iterator[int]:
    """At most `count` tokens that follow the prompt (n,), one by one; one of `stop` is given and is the last."""
    check_generates(model.part)
    read = torch.as_tensor(prompt, dtype=torch.long)
    if not len(read):
        raise SpecError("prompt", "it is empty", "give at least one token")
    pool = Pool(model.part, 1, len(read) + len(start) + count, dtype=next(model.parameters()).dtype, source=len(read))
    if model.part.encoder is not None:
        _admit(model, pool, read)
        read = torch.tensor(list(start), dtype=torch.long)
        if not len(read):
            raise SpecError("start", "an encoder–decoder begins with a token of its own", "see decoder_start_token_id")
    draw = torch.Generator().manual_seed(sampling.seed)
    for number in range(count):
        step = pool.step([0], [len(read)])
        x, ctx = model.hidden(read[None], Ctx(layout=step.layout, views=step.views))
        logits = model.head(x[:, -1:], ctx)[0, -1].float()
        check_result(logits, f"logits of token {number + 1}")
        token = pick(logits, sampling, draw)
        yield int(token)
        if int(token) in stop:
            return
        read = token.view(1)


def _admit(model: ModelModule, pool: Pool, source: Tensor) -> None:
    """Let the encoder read the source, and every cross attention remember it."""
    encoder_output, layout = model.encode(source[None], Ctx(layout=TokenLayout.whole(1, len(source))))
    model.fill(
        Ctx(layout=layout, encoder_output=encoder_output, encoder_layout=layout), pool.admit([0], [encoder_output.shape[1]])
    )


def pick(logits: Tensor, sampling: Sampling, draw: torch.Generator) -> Tensor:
    """One token id from logits (vocab,)."""
    if sampling.temperature == 0:
        return logits.argmax()
    shares = torch.softmax(logits / sampling.temperature, -1)
    if sampling.top_k is not None and sampling.top_k < len(shares):
        shares = shares.masked_fill(shares < shares.topk(sampling.top_k).values[-1], 0.0)
        shares = shares / shares.sum()
    if sampling.top_p < 1:
        sorted_shares, order = shares.sort(descending=True, stable=True)
        before = sorted_shares.cumsum(-1) - sorted_shares  # the first is always kept
        shares = shares.index_fill(0, order[before >= sampling.top_p], 0.0)
    return torch.multinomial(shares, 1, generator=draw)[0]
