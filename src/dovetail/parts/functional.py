"""Parts as functions of tensors, as a textbook writes them: no model, no weights.

    attention           softmax(q kᵀ · scale, where the mask allows) v    q (…, n, d)   k (…, m, d)   v (…, m, c) -> (…, n, c)
    attention_weights   the softmax itself                                -> (…, n, m)
    rope                pairs of channels, turned by position · frequency   x (…, n, d) -> like x
    positions           sines and cosines, to be added to embeddings      -> (n, width)
    layer_norm          (x − mean x) / √(var x + eps) · scale + shift     x (…, d) -> like x
    scan                h_t = a h_{t−1} + b u_t,   y_t = c h_t            u (…, n) -> (…, n)

They call what the models call: `attention` runs the kernels of ops/attend.py, `scan` those of ops/scan/state_space.py, `rope`
and `positions` the modules of the parts. A mask is a part, or what a spec says: "causal", {"kind": "window", "size": 4}. The
axis before n is that of the heads; k and v may have fewer heads, which are shared then (grouped-query attention).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from dovetail.base.errors import UsageError
from dovetail.base.keywords import checks_keywords
from dovetail.nn.groups import Mask
from dovetail.nn.layout import TokenLayout
from dovetail.nn.module import Module, make
from dovetail.nn.view import Scoring
from dovetail.ops.attend import attend
from dovetail.ops.scan.state_space import convolved, naive
from dovetail.parts.position.absolute import Sinusoidal, SinusoidalModule
from dovetail.parts.position.rope import Rope, RopeModule
from dovetail.spec.part import Part, from_data
from dovetail.spec.scope import Scope

MaskLike = Mask | str | Mapping[str, Any] | Sequence[Any]


@checks_keywords
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: MaskLike = "full", scale: float | None = None, softcap: float | None = None
) -> Tensor:
    """Softmax attention: (…, n, c). The scale of the scores is 1/√d where none is given; with `softcap` they are
    softcap · tanh(score / softcap)."""
    one = q.dim() == 2
    if q.dim() < 2 or not q.dim() == k.dim() == v.dim():
        raise UsageError(f"{_shapes(q, k, v)}: give each as (…, tokens, channels), with the same axes before")
    if k.shape[-1] != q.shape[-1] or v.shape[:-1] != k.shape[:-1]:
        raise UsageError(f"{_shapes(q, k, v)}: q and k need equally many channels, k and v equally many tokens")
    q, k, v = (x[None] if one else x for x in (q, k, v))
    before, (heads, n, _), (groups, m, _) = q.shape[:-3], q.shape[-3:], k.shape[-3:]
    if k.shape[:-3] != before or heads % groups:
        raise UsageError(f"{_shapes(q, k, v)}: {groups} heads of k and v do not divide {heads} of q")
    scoring = Scoring(
        mask=mask if isinstance(mask, Mask) else from_data(mask, Mask, "mask"),
        scale=q.shape[-1] ** -0.5 if scale is None else scale,
        heads=torch.arange(heads, device=q.device),
        softcap=softcap,
        needs=frozenset() if softcap is None else frozenset({"softcap"}),
    )
    q, k, v = (x.reshape(-1, *x.shape[-3:]).transpose(1, 2) for x in (q, k, v))
    queries = TokenLayout.whole(len(q), n, q.device, start=max(m - n, 0))  # the last query is at the last key
    z = attend(q, k, v, scoring, queries, TokenLayout.whole(len(q), m, q.device))
    return z.transpose(1, 2).reshape(*(() if one else (*before, heads)), n, v.shape[-1])


@checks_keywords
def attention_weights(
    q: Tensor, k: Tensor, *, mask: MaskLike = "full", scale: float | None = None, softcap: float | None = None
) -> Tensor:
    """The weights of attention (…, n, m): each row sums to 1."""
    identity = torch.eye(k.shape[-2], dtype=q.dtype, device=q.device).expand(*k.shape[:-1], -1)
    return attention(q, k, identity, mask=mask, scale=scale, softcap=softcap)


@checks_keywords
def rope(x: Tensor, part: Rope | None = None, *, start: int = 0) -> Tensor:
    """x (…, n, d), queries or keys, rotated by their positions from `start` on; `part` has base, pairs and scaling."""
    part = part or Rope()
    module = _module(part, Scope({"head": x.shape[-1], "coords": 1}), x)
    assert isinstance(module, RopeModule)
    rows = x.reshape(-1, *x.shape[-2:])[:, :, None]  # (rows, n, one head, d)
    return module.turn(rows, TokenLayout.whole(len(rows), x.shape[-2], x.device, start=start)).reshape(x.shape)


@checks_keywords
def positions(n: int, width: int, part: Sinusoidal | None = None, *, start: int = 0) -> Tensor:
    """(n, width) float64 sinusoidal encodings of the positions from `start` on, to be added to embeddings."""
    zeros = torch.zeros(1, n, width, dtype=torch.float64)
    module = _module(part or Sinusoidal(), Scope({"embed": width}), zeros)
    assert isinstance(module, SinusoidalModule)
    return module.embed(zeros, TokenLayout.whole(1, n, start=start))[0]


@checks_keywords
def layer_norm(x: Tensor, scale: Tensor | None = None, shift: Tensor | None = None, *, eps: float = 1e-5) -> Tensor:
    """x (…, d) with mean 0 and variance 1 in each vector, times `scale`, plus `shift`."""
    return F.layer_norm(x, x.shape[-1:], scale, shift, eps)


@checks_keywords
def scan(
    u: Tensor, a: float, b: float = 1.0, c: float = 1.0, *, form: Literal["recurrence", "convolution"] = "recurrence"
) -> Tensor:
    """y (…, n) of a linear recurrence with one real number as state, token by token or as a convolution; |a| ≤ 1, a > 0."""
    if not 0 < a <= 1:
        raise UsageError(f"a: {a} is not above 0 and at most 1: the state would oscillate or grow")
    if form not in ("recurrence", "convolution"):
        raise UsageError(f"form: {form!r} is not recurrence or convolution")
    rows = u.reshape(-1, u.shape[-1], 1)
    wide = torch.promote_types(u.dtype, torch.float32).to_complex()
    log_a, b_, c_ = (torch.full((1, 1), x, dtype=torch.complex128).to(u.device) for x in (math.log(a), b, c))
    carry = torch.zeros(len(rows), 1, 1, dtype=wide, device=u.device)
    if form == "convolution":
        y, _ = convolved(rows.to(wide.to_real()), log_a, b_, c_, carry)
    else:
        y, _ = naive(rows.to(wide.to_real()), log_a, b_, c_, None, None, carry)
    return y.to(u.dtype).reshape(u.shape)


def _module(part: Part, scope: Scope, like: Tensor) -> Module:
    """The module of a part without weights, its constants computed."""
    if problems := part.check(part.axes(scope)):
        raise UsageError(str(problems[0]))
    module = make(part, scope)
    for weight in part.weights(module.scope):
        setattr(module, weight.name, part.constant(weight.name, module.scope).to(like.device))
    return module


def _shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v)))
