"""What activations are like, one score per text (rows) and site: a head, a channel, a layer, a unit of an FFN.

    uniform          Σ p log 1/p / log(visible keys), of a head's rows; `low-entropy` is 1 − that, the mean of a layer's heads
                     its entropy collapse                                                                   Zhai et al. 2023
    massive          max_t |x_tc| / median |x|                                                               Sun et al. 2024
    outlier channel  median_t |x_tc| / median_c median_t |x_tc|                                          Dettmers et al. 2022
    rank collapse    ‖1 x̄ᵀ‖² / ‖X‖²: 1 if the residual stream is the same for all tokens                      Dong et al. 2021
    dead             max_t |h_tc| of a neuron is below 1e-3 of the median neuron's; an expert that no token chooses
    copying          Σ Re λ / Σ |λ|, λ the eigenvalues of W_U W_O W_V W_E of a head                        Elhage et al. 2021

The OV matrix is measured: the value of each token t at one head of each layer, through the output projection, the final norm
and the head of the model, as logits of the tokens. Its null distribution exchanges the tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Generator, Tensor

from dovetail.look.residual import unembed
from dovetail.look.tracer import trace
from dovetail.model.model import ModelModule
from dovetail.nn.inputs import default_ctx

SILENT = 1e-3  # of the median neuron's largest activation
TOKENS = 128  # of the OV matrix
RESOLVED = 1e-6  # eigenvalues below this part of the largest singular value are rounding


def entropies(pattern: Tensor, fewest: int) -> Tensor:
    """(rows, heads): the entropy of a pattern (rows, heads, n, n) over log(visible keys), the mean over queries."""
    visible = (pattern > 0).any(0).any(0).sum(-1)  # (n,)
    counts = visible >= fewest
    entropy = torch.special.entr(pattern.double()).sum(-1)
    return (entropy[..., counts] / visible[counts].log()).mean(-1)


def overlaps(pattern: Tensor, other: Tensor, generator: Generator, draws: int) -> tuple[Tensor, Tensor]:
    """(heads,) Σ_k min(p, p') of the patterns of two texts, without the first key, and (draws, heads) with the keys of p'
    moved along; both less the mean of the latter, so that uniform attention has 0."""
    a, b = (_beyond_first(x) for x in (pattern, other))
    n, scores = a.shape[-1], list[Tensor]()
    size = torch.arange(1, n + 1)[:, None] if bool((pattern.triu(1) == 0).all()) else torch.full((n, 1), n)
    key = torch.arange(n)
    for i in range(draws + 1):
        moved = b
        if i:
            index = torch.where(key < size, (key + torch.rand(n, 1, generator=generator).mul(size).long()) % size, key)
            moved = b.gather(-1, index.to(b.device).expand_as(b))
        scores.append(torch.minimum(a, moved).sum(-1)[..., n // 4 :].mean((0, 2)))
    nulls = torch.stack(scores[1:])
    return scores[0] - nulls.mean(0), nulls - nulls.mean(0)


def _beyond_first(pattern: Tensor) -> Tensor:
    rest = pattern[..., 1:, 1:]
    total = rest.sum(-1, keepdim=True)
    return torch.where(total > 0.1, rest / total.clamp_min(1e-9), 0)


def residual_scores(x: Tensor) -> dict[str, Tensor]:
    """Massive activations and outlier channels (rows, channels), rank collapse (rows, 1), of x (rows, n, channels)."""
    x = x.double().flatten(1, -2)
    size = x.abs()
    typical = size.median(1).values
    mean = x.mean(1).square().sum(-1) * x.shape[1]
    return {
        "massive-activation": size.amax(1) / size.flatten(1).median(1).values[:, None].clamp_min(1e-30),
        "outlier-channel": typical / typical.median(-1).values[:, None].clamp_min(1e-30),
        "rank-collapse": (mean / x.square().sum((1, 2)).clamp_min(1e-30))[:, None],
    }


def silent_neurons(hidden: Tensor) -> Tensor:
    """(channels,) whether the largest activation of a neuron is near nothing, of hidden (rows, n, channels)."""
    largest = hidden.abs().flatten(0, -2).amax(0)
    return largest <= SILENT * largest.median()


def silent_experts(chosen: Tensor, experts: int) -> Tensor:
    """(experts,) whether no token chooses an expert."""
    return torch.bincount(chosen.flatten().long(), minlength=experts) == 0


def copying(
    model: ModelModule, tokens: Tensor, layers: Sequence[int], draws: int, seed: int
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (heads,) the copying score of each head of a layer, and (draws, heads) with the tokens exchanged."""
    generator = Generator().manual_seed(seed)
    some = torch.unique(tokens).to(model.device)
    some = some[torch.randperm(len(some), generator=generator)[:TOKENS].to(some.device)]
    ids = torch.stack([some.roll(1), some], -1)  # each after another: the first position of a model is often unlike the others
    mixers = [f"layers.{i}.mixer" for i in layers]
    run = trace(model, ids, *(f"{mixer}.{name}[pos=-1]" for mixer in mixers for name in ("v", "z")))
    z = {mixer: run[f"{mixer}.z"] for mixer in mixers}
    values = {m: run[f"{m}.v"].repeat_interleave(z[m].shape[-2] // run[f"{m}.v"].shape[-2], -2) for m in mixers}
    orders = [torch.arange(len(some)), *(torch.randperm(len(some), generator=generator) for _ in range(draws))]
    scores = {mixer: torch.zeros(draws + 1, x.shape[-2]) for mixer, x in z.items()}
    for head in range(max(x.shape[-2] for x in z.values())):  # of all layers at once: what a head adds depends on its z alone
        which = [mixer for mixer in mixers if head < z[mixer].shape[-2]]
        only = {mixer: torch.zeros_like(z[mixer]) for mixer in which}
        for mixer in which:
            only[mixer][..., head, :] = values[mixer][..., head, :]
        added = trace(
            model, ids, *(f"{mixer}_add" for mixer in which), patch={f"{m}.z[pos=-1]": value for m, value in only.items()}
        )
        for mixer in which:
            x = added[f"{mixer}_add"]
            x = x - x.mean(0, keepdim=True)  # biases are equal for all tokens
            logits = unembed(model, x, default_ctx(ids, ranks=model.ranks))[:, -1, some].double().cpu()
            left, sizes, right = torch.linalg.svd(logits - logits.mean(0))
            rank = min(z[mixer].shape[-1], max(int((sizes > RESOLVED * sizes[0]).sum()), 1))
            turned = torch.stack([right[:rank, order] for order in orders]) @ (left[:, :rank] * sizes[:rank])
            eigenvalues = torch.linalg.eigvals(turned)
            scores[mixer][:, head] = eigenvalues.real.sum(-1) / eigenvalues.abs().sum(-1).clamp_min(1e-30)
    for each in scores.values():
        yield each[0], each[1:]
