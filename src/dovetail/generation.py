"""Generation: tokens one by one, with a decode state (KV cache, recurrent state).

    probs = softmax(logits / temperature) of the `top_k` most probable tokens, of these the fewest whose probs sum to `top_p`;
    temperature 0 takes the most probable token                                             Holtzman et al. 2020 (top-p)

A decoder continues the prompt. An encoder–decoder encodes the prompt once, as its source, and decodes from the tokens `start`.
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
    """How the next token is sampled from the probs."""

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
    """Raise SpecError unless the model predicts the next token and sees no later one."""
    if spec.head is None or not any(d.path.startswith("head.") and "vocab" in d.weight.out for d in declared(spec)):
        raise SpecError("head", "the model has no logits over the vocabulary, so it cannot generate", "set head: lm")
    if spec.order() != "causal":
        raise SpecError("layers", "the model is not causal, so it cannot generate token by token", "use a causal mask")


@torch.inference_mode()
def generate_tokens(
    model: ModelModule,
    prompt: Tensor | Sequence[int],
    max_tokens: int,
    sampling: Sampling = GREEDY,
    *,
    stop: Collection[int] = (),
    start: Sequence[int] = (),
) -> Iterator[int]:
    """Yield up to `max_tokens` token ids that continue the prompt (n,). A token of `stop` ends it, and is yielded, too."""
    check_generates(model.part)
    inputs = torch.as_tensor(prompt, dtype=torch.long)
    if not len(inputs):
        raise SpecError("prompt", "is empty", "give at least one token")
    capacity = len(inputs) + len(start) + max_tokens
    pool = Pool(model.part, 1, capacity, dtype=next(model.parameters()).dtype, source=len(inputs))
    if model.part.encoder is not None:
        _encode_source(model, pool, inputs)
        inputs = torch.tensor(list(start), dtype=torch.long)
        if not len(inputs):
            raise SpecError("start", "an encoder–decoder needs a first decoder token", "give decoder_start_token_id")
    generator = torch.Generator().manual_seed(sampling.seed)
    for number in range(max_tokens):
        step = pool.step([0], [len(inputs)])
        x, ctx = model.hidden(inputs[None], Ctx(layout=step.layout, views=step.views))
        logits = model.head(x[:, -1:], ctx)[0, -1].float()
        check_result(logits, f"logits of token {number + 1}")
        token = sample_token(logits, sampling, generator)
        yield int(token)
        if int(token) in stop:
            return
        inputs = token.view(1)


def _encode_source(model: ModelModule, pool: Pool, source: Tensor) -> None:
    """Run the encoder on the source (m,) and store its keys and values for every cross-attention."""
    encoder_output, layout = model.encode(source[None], Ctx(layout=TokenLayout.whole(1, len(source))))
    model.fill(
        Ctx(layout=layout, encoder_output=encoder_output, encoder_layout=layout), pool.admit([0], [encoder_output.shape[1]])
    )


def sample_token(logits: Tensor, sampling: Sampling, generator: torch.Generator) -> Tensor:
    """Return one token id, a scalar tensor, sampled from logits (vocab,)."""
    if sampling.temperature == 0:
        return logits.argmax()
    probs = torch.softmax(logits / sampling.temperature, -1)
    if sampling.top_k is not None and sampling.top_k < len(probs):
        probs = probs.masked_fill(probs < probs.topk(sampling.top_k).values[-1], 0.0)
        probs = probs / probs.sum()
    if sampling.top_p < 1:
        sorted_probs, order = probs.sort(descending=True, stable=True)
        before = sorted_probs.cumsum(-1) - sorted_probs  # the most probable token stays in any case
        probs = probs.index_fill(0, order[before >= sampling.top_p], 0.0)
    return torch.multinomial(probs, 1, generator=generator)[0]
