"""Ctx: everything a forward pass carries besides the residual stream. Training, serving and inspection differ only here.

Taps: `ctx.tap(module, "q", x)` returns x when there is no listener. A listener receives the value and its address
(`layers.3.mixer.q`) and may return another in its place.

Draws: in training, dropout and router noise are functions of (seed, path, sample, position, channel), see core/random.py.
Sample and position come from the layout, the global channel from the declared axes and this rank's place among them. So
padded, packed and flat batches, tensor-parallel ranks and pieces of a split sequence all draw the same masks.

Statistics of a batch (balance losses, the capacity of an expert) are those of the whole batch, however ranks split it: a part
calls `ctx.batch_sum` and `ctx.batch_counts`.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from dovetail.core.errors import InputError
from dovetail.core.keywords import checks_keywords
from dovetail.core.layout import TokenLayout
from dovetail.core.loss import LossSum
from dovetail.core.random import draw, normals, streams, words

if TYPE_CHECKING:
    from dovetail.core.module import Module
    from dovetail.core.scope import Scope

Views = Sequence[Mapping[str, Any]]  # per layer: branch name -> view of its decode state


class Ranks(Protocol):
    """The ranks that share some logical axes (tensor parallel)."""

    @property
    def cuts(self) -> Mapping[str, int]:
        """The axes that are sharded, and into how many shards."""
        ...

    def sharded(self, axes: Sequence[str]) -> bool:
        """Whether any of the axes is sharded across ranks."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x over the ranks, with its gradient."""
        ...

    def enter(self, x: Tensor) -> Tensor:
        """Return x; its gradient is summed over the ranks."""
        ...

    def leave(self, x: Tensor) -> Tensor:
        """Return the sum of x over the ranks; the gradient passes unchanged."""
        ...

    def join(self, x: Tensor) -> Tensor:
        """Return x of all ranks, concatenated along the last dimension; the gradient is that of this rank's part."""
        ...

    def max(self, x: Tensor) -> Tensor:
        """Return the largest x of all ranks, without gradient."""
        ...

    def piece(self, pieces: int) -> int:
        """Return the number of the piece that this rank has of an axis in `pieces` equal ones."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Return the first rank's x."""
        ...


class BatchRanks(Protocol):
    """The ranks that split the tokens of a batch: its rows (data parallel), or every row (a split sequence)."""

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum of x over the ranks, with its gradient."""
        ...

    def counts(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return what `Ctx.batch_counts` returns."""
        ...

    def broadcast(self, x: Tensor) -> Tensor:
        """Return the first rank's x."""
        ...


class Placed(Protocol):
    """What draws: its path, and the sizes of its axes. A module, or the adapter of a leaf."""

    @property
    def path(self) -> str:
        """Its path in the model."""
        ...

    @property
    def scope(self) -> Scope:
        """The sizes of its axes."""
        ...


Listen = Callable[[str, Tensor], Tensor | None]  # (address, value) -> None, or a value to use instead


@checks_keywords
class Listener:
    """Address patterns (`*.mixer.pattern`) and the function to call at each; pairs where one pattern has several."""

    step = 0  # of generation: a decoder counts it

    def __init__(self, table: Mapping[str, Listen] | Sequence[tuple[str, Listen]]) -> None:
        self.table = tuple(table.items() if isinstance(table, Mapping) else table)

    def wants(self, address: str) -> bool:
        """Whether any pattern matches this address."""
        return any(fnmatchcase(address, pattern) for pattern, _ in self.table)

    def edits(self, address: str) -> bool:
        """Whether the value at this address may be replaced, so that the output must be computed with it."""
        return True

    def queries(self, address: str, layout: TokenLayout) -> Tensor | None:
        """Which queries (rows, n) of a pattern are asked for, where it is only read; None: all."""
        return None

    def hear(self, address: str, x: Tensor, layout: TokenLayout | None = None) -> Tensor:
        """Call each function whose pattern matches, in order, and return the last value; `layout` is that of the tokens."""
        for pattern, listen in self.table:
            if fnmatchcase(address, pattern):
                replacement = listen(address, x)
                x = x if replacement is None else replacement
        return x


class Losses:
    """The dict in which a caller collects losses. FSDP copies every dict among the arguments of a layer; this it passes on, so
    that the losses of all layers arrive."""

    __slots__ = ("by_path",)

    def __init__(self, by_path: dict[str, Tensor]) -> None:
        self.by_path = by_path


@checks_keywords
@dc.dataclass(slots=True)
class Ctx:
    """What a forward pass carries."""

    layout: TokenLayout
    views: Views | None = None
    encoder_output: Tensor | None = None  # (…, m, encoder): hidden states of the encoder, for cross attention
    encoder_layout: TokenLayout | None = None
    types: Tensor | None = None  # (…, n) token types, where the embedding has them
    patches: Tensor | None = None  # (p, channels, height, width): what token ids from the vocabulary's size on stand for
    listen: Listener | None = None
    labels: Tensor | None = None  # (…, n) what each token predicts, where a loss is computed
    losses: dict[str, Tensor] | Losses | None = None  # extra losses, by the path that added them; kept as Losses
    seed: int | Tensor | None = None  # set in training; kept as a tensor (), see core/random.py
    ranks: Ranks | None = None
    batch_ranks: BatchRanks | None = None

    def __post_init__(self) -> None:
        if self.seed is not None and not isinstance(self.seed, Tensor):
            self.seed = torch.tensor(self.seed)
        if isinstance(self.losses, dict):
            self.losses = Losses(self.losses)

    @property
    def training(self) -> bool:
        """Whether dropout and noise are drawn."""
        return self.seed is not None

    def for_mode(self, module: nn.Module) -> Ctx:
        """Return the ctx for a module's mode: in training mode it has a seed, drawn from torch's default generator (so
        torch.manual_seed reproduces it) where the caller gave none."""
        if self.seed is not None or not module.training:
            return self
        seed = torch.randint(2**62, ())
        for ranks in (self.ranks, self.batch_ranks):
            seed = seed if ranks is None else ranks.broadcast(seed)
        return dc.replace(self, seed=seed)

    def wants(self, module: Module, name: str) -> bool:
        """Whether anyone listens to this tap."""
        return self.listen is not None and self.listen.wants(f"{module.path}.{name}".lstrip("."))

    def tap(self, module: Module, name: str, x: Tensor) -> Tensor:
        """Pass x to the listeners at its address; return x when there are none."""
        if self.listen is None:
            return x
        return self.listen.hear(f"{module.path}.{name}".lstrip("."), x, self.layout)

    def sharded(self, axes: Sequence[str]) -> bool:
        """Whether a logical axis is sharded across ranks."""
        return self.ranks is not None and self.ranks.sharded(axes)

    def all_reduce(self, x: Tensor, axes: Sequence[str]) -> Tensor:
        """Return x summed over the ranks that share these axes; x itself where they are whole."""
        if self.ranks is None or not self.ranks.sharded(axes):
            return x
        return self.ranks.all_reduce(x)

    def enter(self, x: Tensor, axes: Sequence[str]) -> Tensor:
        """Return x, which every rank has whole and multiplies by its shard of a weight over these axes: the gradient of x is
        summed over the ranks."""
        return self.ranks.enter(x) if self.ranks is not None and self.ranks.sharded(axes) else x

    def leave(self, x: Tensor, axes: Sequence[str]) -> Tensor:
        """Return partial sums over shards of these axes as their sum, which every rank then has whole."""
        return self.ranks.leave(x) if self.ranks is not None and self.ranks.sharded(axes) else x

    def join(self, x: Tensor, axes: Sequence[str]) -> Tensor:
        """Return the shards (…, size/ranks) of these axes as a whole (…, size), which every rank then has."""
        return self.ranks.join(x) if self.ranks is not None and self.ranks.sharded(axes) else x

    def max(self, x: Tensor, axes: Sequence[str]) -> Tensor:
        """Return the largest x of the ranks that share these axes, without gradient; x itself where they are whole."""
        return self.ranks.max(x) if self.ranks is not None and self.ranks.sharded(axes) else x

    # -- statistics of the whole batch

    def batch_sum(self, x: Tensor) -> Tensor:
        """Return x, a sum over the tokens of this rank, summed over all tokens of the batch; x itself where no rank has others.

        Its gradient is summed, too: where the losses of the ranks are averaged, one that is computed from x counts once.
        """
        return x if self.batch_ranks is None else self.batch_ranks.sum(x)

    def batch_counts(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Take counts (rows, …) of the tokens of this rank, per row. Return the counts (rows, …) of all tokens of the batch
        before those of each row, in the order row by row, and the counts (…) of the whole batch. No gradient."""
        if self.batch_ranks is not None:
            return self.batch_ranks.counts(counts)
        return counts.cumsum(0) - counts, counts.sum(0)

    def batch_mean(self, loss: LossSum) -> Tensor:
        """Return the mean of a loss over all labels of the batch, the same on every rank. Its gradient is exact where gradients
        are averaged over ranks, as FSDP does."""
        return LossSum(self.batch_sum(loss.sum), self.batch_sum(loss.num_labels)).mean()

    # -- draws

    def dropout(self, x: Tensor, p: float, module: Placed, name: str = "", axes: Sequence[str] = ("embed",)) -> Tensor:
        """Set values of x to 0 with probability p and scale the others by 1/(1 − p); in training only.

        x is (…, n, channels), or (answers, channels) with one answer per sample; `axes` are the logical axes of the channels.
        """
        if self.seed is None or p == 0.0:
            return x
        return _drop(x, torch.stack(words(self._bits(x, module, name, axes)), -1), p, self.first(module, axes, x.shape[-1]))

    def dropout_rows(
        self, x: Tensor, p: float, module: Placed, name: str, axes: Sequence[str], token: Tensor, expert: Tensor
    ) -> Tensor:
        """The same for rows (rows, channels) that experts read, by (sample, position, expert, channel): `token` (rows,) is the
        number of each row's token in the layout, `expert` (rows,) that of its expert among all."""
        if self.seed is None or p == 0.0:
            return x
        sample, position = (one.flatten().index_select(0, token) for one in (self.layout.sample, self.layout.order))
        first = self.first(module, axes, x.shape[-1])
        pairs = _pairs(first, x.shape[-1], x.device)
        bits = draw(self._stream(module, name), *(one[:, None] for one in (sample, position, expert)), pairs)
        return _drop(x, torch.stack(words(bits), -1), p, first)

    def dropout_probs(
        self, probs: Tensor, p: float, module: Module, name: str, q_layout: TokenLayout, k_layout: TokenLayout
    ) -> Tensor:
        """The same for attention probs (…, heads, n, m), by (sample, query position, key position, head)."""
        if self.seed is None or p == 0.0:
            return probs
        heads = probs.shape[-3]
        first = self.first(module, ("heads",), heads)
        sample, q = (per_query[..., None, :, None] for per_query in (q_layout.sample, q_layout.order))
        keys, pairs = k_layout.order[..., None, None, :], _pairs(first, heads, probs.device)[:, None, None]
        bits = draw(self._stream(module, name), sample, q, keys, pairs)
        return _drop(probs.movedim(-3, -1), torch.stack(words(bits), -1).movedim(-4, -2), p, first).movedim(-1, -3)

    def noise(self, x: Tensor, std: float, module: Module, name: str = "", axes: Sequence[str] = ("embed",)) -> Tensor:
        """Add normal noise to x (…, n, channels); in training only."""
        if self.seed is None or std == 0.0:
            return x
        both = torch.stack(normals(self._bits(x, module, name, axes)), -1)
        return x + (std * _slice(both, self.first(module, axes, x.shape[-1]), x.shape[-1])).to(x.dtype)

    def _stream(self, module: Placed, name: str) -> Tensor:
        assert isinstance(self.seed, Tensor)
        return streams(self.seed, [f"{module.path}.{name}"])[0]

    def _bits(self, x: Tensor, module: Placed, name: str, axes: Sequence[str]) -> Tensor:
        """64 random bits (…, n, pairs) for each pair of channels of x."""
        sample, position = self.layout.sample, self.layout.order
        if x.shape[:-1] != position.shape:  # one answer per sample
            sample = self.layout.sample.amin() + torch.arange(x.shape[0], device=x.device)
            position = torch.zeros_like(sample)
        pairs = _pairs(self.first(module, axes, x.shape[-1]), x.shape[-1], x.device)
        return draw(self._stream(module, name), sample[..., None], position[..., None], pairs)

    def first(self, module: Placed, axes: Sequence[str], size: int) -> int:
        """The global index of this rank's first channel, of `size` channels along the axes."""
        total = module.scope.size(*axes)
        if size == total:
            return 0
        if self.ranks is None or total % size:
            raise InputError(f"{module.path}: {size} channels of {' × '.join(axes)} = {total}; without ranks they must be all")
        return self.ranks.piece(total // size) * size

    # -- losses

    def add_loss(self, module: Module, name: str, loss: Tensor) -> None:
        """Add a loss of this part, where losses are collected; a recomputed one counts once."""
        if self.losses is not None:
            assert isinstance(self.losses, Losses)
            self.losses.by_path[f"{module.path}.{name}"] = loss

    def with_added(self, loss: Tensor) -> Tensor:
        """Return the loss plus those that parts added."""
        added = self.added()
        return loss if added is None else loss + added

    def added(self) -> Tensor | None:
        """Return the sum of the losses that parts added; None where there is none."""
        found = list(self.losses.by_path.values()) if isinstance(self.losses, Losses) else []
        return torch.stack(found).sum() if found else None


def _pairs(first: int, size: int, device: torch.device) -> Tensor:
    """The numbers of the pairs that cover channels first … first + size − 1."""
    return torch.arange(first // 2, (first + size + 1) // 2, device=device)


def _slice(both: Tensor, first: int, size: int) -> Tensor:
    """(…, pairs, 2) -> (…, size): the channels from `first` on."""
    return both.flatten(-2)[..., first % 2 : first % 2 + size]


def _drop(x: Tensor, both: Tensor, p: float, first: int) -> Tensor:
    """x (…, channels) with values dropped where the random 32-bit word (…, pairs, 2) is below p."""
    keep = _slice(both, first, x.shape[-1]) >= int(p * 2**32)
    return x * keep.to(x.dtype) / (1.0 - p)
