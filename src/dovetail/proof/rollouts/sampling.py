"""The log-prob that a sampler reports for a token, from the logits z of the model.

    q(y) = softmax(z / T)_y / S,     S = Σ_{j ∈ K} softmax(z / T)_j

K is the set of tokens that truncation keeps, by the rules in this order: min_p (tokens at least min_p times as probable as the
most probable one), top_k (the k most probable), top_p (the fewest whose probs, of those kept so far, sum to top_p or more). The
sampled token is counted into K even where the rule leaves it out: a near-tie may have been decided otherwise.

Logits are sorted once, in descending order; temperature does not change the order.   Holtzman et al. 2020 (top-p),
Nguyen et al. 2024 (min-p)
"""

from __future__ import annotations

import dataclasses as dc

import torch
from torch import Tensor


@dc.dataclass(frozen=True)
class Settings:
    """The settings of a sampler; None: the rule is not used."""

    temperature: float = 1.0
    min_p: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    @property
    def truncates(self) -> bool:
        """Whether a rule leaves tokens out."""
        return (self.min_p, self.top_k, self.top_p) != (None, None, None)

    def __str__(self) -> str:
        parts = [f"T = {self.temperature:.4g}"] if self.temperature != 1 else []
        return ", ".join([*parts, *self.rules()]) or "no temperature, no truncation"

    def rules(self) -> list[str]:
        """The truncation rules: `top_p = 0.9`."""
        named = (("min_p", self.min_p), ("top_k", self.top_k), ("top_p", self.top_p))
        return [f"{name} = {value:.5g}" for name, value in named if value is not None]


RAW = Settings()


@dc.dataclass(frozen=True)
class RankedLogits:
    """Logits (n, vocab) in descending order, and the rank (n,) of the token of each row."""

    logits: Tensor
    rank: Tensor

    @classmethod
    def of(cls, logits: Tensor, tokens: Tensor) -> RankedLogits:
        """Sort logits (n, vocab); tokens (n,). Tokens of equal logits: the one that was sampled comes first."""
        own = logits.gather(1, tokens[:, None])
        rank = (logits > own).sum(1)
        return cls(logits.sort(1, descending=True).values, rank)

    def __getitem__(self, rows: Tensor) -> RankedLogits:
        return RankedLogits(self.logits[rows], self.rank[rows])

    def tempered(self, temperature: float) -> Tempered:
        """The probs at a temperature."""
        logprobs = (self.logits / temperature).log_softmax(1)
        return Tempered(logprobs, logprobs.exp().cumsum(1), logprobs.gather(1, self.rank[:, None])[:, 0], self.rank)


@dc.dataclass(frozen=True)
class Tempered:
    """Log-probs (n, vocab) in descending order, their cumulative probs, and the log-prob and rank (n,) of the tokens."""

    logprobs: Tensor
    cumulative: Tensor
    own: Tensor
    rank: Tensor

    def kept(self, settings: Settings) -> Tensor:
        """(n,) the number of most probable tokens that truncation keeps."""
        count = torch.full((len(self.rank), 1), self.logprobs.shape[1], device=self.rank.device)
        if settings.min_p is not None:
            count = self._min_p(torch.tensor([settings.min_p], dtype=self.own.dtype))
        if settings.top_k is not None:
            count = count.clamp(max=settings.top_k)
        if settings.top_p is not None:
            count = self._top_p(count, torch.tensor([settings.top_p], dtype=self.own.dtype))
        return count[:, 0].clamp(min=1)

    def kept_by(self, settings: Settings, rule: str, values: Tensor) -> Tensor:
        """(n, values) the number kept with each value (m,) of `top_p` or `min_p`, behind the other rules of the settings."""
        if rule == "min_p":
            return self._min_p(values).clamp(min=1)
        return self._top_p(self.kept(dc.replace(settings, top_p=None))[:, None], values).clamp(min=1)

    def _min_p(self, values: Tensor) -> Tensor:
        least = self.logprobs[:, :1] + values.log()
        return torch.searchsorted(-self.logprobs, -least, right=True)

    def _top_p(self, count: Tensor, values: Tensor) -> Tensor:
        mass = self.cumulative.gather(1, count.clamp(min=1) - 1)
        return torch.minimum(torch.searchsorted(self.cumulative, values * mass) + 1, count)

    def log_mass(self, count: Tensor) -> Tensor:
        """log S (n,) where the `count` most probable tokens and the sampled one are kept."""
        mass = self.cumulative.gather(1, count[:, None] - 1)[:, 0]
        return torch.where(self.rank >= count, mass + self.own.exp(), mass).clamp(max=1.0).log()

    def logprob(self, settings: Settings) -> Tensor:
        """(n,) the log-prob that the sampler reports."""
        return self.own - self.log_mass(self.kept(settings)) if settings.truncates else self.own
