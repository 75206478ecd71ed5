"""The loss of each token of long sequences, computed in pieces with a decode state: no tensor of logits is as long as they."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from dovetail.core.ctx import Ctx
from dovetail.core.errors import InputError
from dovetail.core.module import at_least_fp32, evaluating
from dovetail.decoding.eviction import Eviction, evicting
from dovetail.decoding.generation import PIECE, check_generates, pool_for, token_limit
from dovetail.model import ModelModule

Watch = Callable[[int, int], None]  # (tokens so far, tokens in all)


@torch.inference_mode()
def token_losses(model: ModelModule, ids: Tensor, evict: Eviction | None = None, watch: Watch | None = None) -> Tensor:
    """Return the loss (rows, n − 1) of each next token of ids (rows, n); `watch` is called after each piece."""
    check_generates(model.part)
    if model.part.encoder is not None:
        raise InputError("ids: an encoder–decoder has a source; call model.loss(ids, source=…)")
    if ids.dim() != 2 or ids.shape[1] < 2 or ids.is_floating_point():
        raise InputError(f"ids: are {ids.dtype} of shape {tuple(ids.shape)}; give integers (rows, n), n from 2 on")
    rows, n = ids.shape
    if token_limit(model.part, 1, n - 1) < n - 1:
        raise InputError(f"ids: have {n} tokens, more than the table of positions has rows; shorten them")
    if evict is not None:
        model = evicting(model, evict)
    pool = pool_for(model, rows, n, 0, **({} if evict is None else evict.pool()))
    pieces = list[Tensor]()
    for begin, end in _pieces(n - 1, pool.ahead):
        step = pool.step(list(range(rows)), [end - begin] * rows)
        with evaluating(model):
            logits = model(ids[:, begin:end].to(model.device), Ctx(layout=step.layout, views=step.views, ranks=model.ranks))
        targets = ids[:, begin + 1 : end + 1].to(model.device)
        wide = logits.to(at_least_fp32(logits.dtype))
        pieces.append(F.cross_entropy(wide.transpose(1, 2), targets, reduction="none"))
        if watch is not None:
            watch(end, n - 1)
    return torch.cat(pieces, 1)


def _pieces(n: int, least: int) -> Iterator[tuple[int, int]]:
    """[begin, end) of pieces of n tokens, of which the first has `least` or more."""
    begin = 0
    while begin < n:
        end = min(max(begin + PIECE, least), n)
        yield begin, end
        begin = end
