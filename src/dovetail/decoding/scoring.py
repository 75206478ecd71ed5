"""The loss of each token of long sequences, and what is most probable after some of them, computed in pieces with a decode
state: no tensor of logits is as long as they."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F

from dovetail.base.errors import InputError
from dovetail.decoding.eviction import Eviction, evicting
from dovetail.decoding.generation import PIECE, check_generates, pool_for, token_limit
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.module import at_least_fp32, evaluating
from dovetail.spec.fold import position_limit

Watch = Callable[[int, int], None]  # (tokens so far, tokens in all)


@torch.inference_mode()
def token_losses(model: ModelModule, ids: Tensor, evict: Eviction | None = None, watch: Watch | None = None) -> Tensor:
    """Return the loss (rows, n − 1) of each next token of ids (rows, n); `watch` is called after each piece."""
    _check(model, ids, 2)
    if token_limit(model.part, 1, ids.shape[1] - 1) < ids.shape[1] - 1:
        raise InputError(f"ids: have {ids.shape[1]} tokens, more than the table of positions has rows; shorten them")
    targets = ids[:, 1:].to(model.device)
    pieces = list[Tensor]()
    for end, logits in _logits(model, ids[:, :-1], PIECE, 0, evict):
        wide = logits.to(at_least_fp32(logits.dtype))
        pieces.append(F.cross_entropy(wide.transpose(1, 2), targets[:, end - logits.shape[1] : end], reduction="none"))
        if watch is not None:
            watch(end, targets.shape[1])
    return torch.cat(pieces, 1)


@torch.inference_mode()
def probable_tokens(model: ModelModule, ids: Tensor, first: int = 0, piece: int = PIECE) -> Tensor:
    """Return the most probable next token (rows, n − first) after each of ids (rows, n), from the position `first` on, computed
    in pieces of `piece` tokens: with 1, token by token."""
    _check(model, ids, 1)
    if (limit := position_limit(model.part)) is not None and limit < ids.shape[1]:
        raise InputError(f"ids: have {ids.shape[1]} tokens, more than the {limit} rows of the table of positions; shorten them")
    return torch.cat([logits.argmax(-1) for _, logits in _logits(model, ids, piece, first)], 1)


def _logits(
    model: ModelModule, ids: Tensor, piece: int, first: int, evict: Eviction | None = None
) -> Iterator[tuple[int, Tensor]]:
    """(end, logits (rows, m, vocab) of the m tokens before it) of each piece, from the position `first` on."""
    rows, n = ids.shape
    if evict is not None:
        model = evicting(model, evict)
    pool = pool_for(model, rows, n + 1, 0, **({} if evict is None else evict.pool()))
    for begin, end in _pieces(n, pool.ahead, piece):
        step = pool.step(list(range(rows)), [end - begin] * rows)
        ctx, some = Ctx(layout=step.layout, views=step.views, ranks=model.ranks), ids[:, begin:end].to(model.device)
        with evaluating(model):
            logits = model(some, ctx)[:, max(0, first - begin) :] if end > first else model.next_logits(some, ctx)
        if end > first:
            yield end, logits


def _check(model: ModelModule, ids: Tensor, least: int) -> None:
    check_generates(model.part)
    if model.part.encoder is not None:
        raise InputError("ids: an encoder–decoder has a source; call model.loss(ids, source=…)")
    if ids.dim() != 2 or ids.shape[1] < least or ids.is_floating_point():
        raise InputError(f"ids: are {ids.dtype} of shape {tuple(ids.shape)}; give integers (rows, n), n from {least} on")


def _pieces(n: int, least: int, piece: int) -> Iterator[tuple[int, int]]:
    """[begin, end) of pieces of n tokens, of which the first has `least` or more."""
    begin = 0
    while begin < n:
        end = min(max(begin + piece, least), n)
        yield begin, end
        begin = end
