"""Writing with a model: token by token, each read from the memory of those before it.

p = softmax(logits / temperature), the `top` likeliest alone; temperature 0 takes the likeliest
"""

from __future__ import annotations

import torch
from torch import Tensor

from dovetail.core.ctx import Ctx
from dovetail.model import ModelModule
from dovetail.state.pool import Pool


@torch.no_grad()
def write(
    model: ModelModule, prompt: Tensor, count: int, *, temperature: float = 0.8, top: int | None = None, seed: int = 0
) -> Tensor:
    """`count` tokens that go on from the prompt: (n,) ids -> (count,) ids. The prompt is read once, in one pass."""
    weight = next(model.parameters())
    pool = Pool(model.part, rows=1, capacity=len(prompt) + count, dtype=weight.dtype)
    draw = torch.Generator().manual_seed(seed)
    tokens, written = prompt[None], []
    for _ in range(count):
        step = pool.step([0], [tokens.shape[1]])
        logits = model(tokens, Ctx(at=step.at, views=step.views))[0, -1].float()
        token = pick(logits, temperature, top, draw)
        written.append(token)
        tokens = token.view(1, 1)
    return torch.stack(written) if written else prompt[:0]


def pick(logits: Tensor, temperature: float, top: int | None, draw: torch.Generator) -> Tensor:
    """One token id from logits (vocab,)."""
    if temperature == 0:
        return logits.argmax()
    if top is not None and top < len(logits):
        least = logits.topk(top).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return torch.multinomial(torch.softmax(logits / temperature, -1), 1, generator=draw)[0]
