"""Runs with one intervention per row that compute again only what the interventions can change.

    layers before it     once: the residual stream after them is that of the base run, the run without an intervention
    tokens before it     in a causal model they are as in the base run; later tokens read its KV cache and recurrent state

Interventions are sorted by the first token that they change, so that the rows of a batch start at nearly the same one; a batch
starts at its earliest. A model whose early tokens read later ones computes every token (`every_token_because`), and one whose
layers read values of earlier ones computes every layer.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby

import torch
from torch import Tensor

from dovetail.look.address import Pick, Target, parse, suffix
from dovetail.look.intervention import PerToken, Replacement, applied, per_token
from dovetail.look.site import Site, among, tokens_meant
from dovetail.look.tracer import Tracer
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.inputs import default_ctx
from dovetail.spec.part import walk
from dovetail.state.pool import Pool
from dovetail.state.saved import restore, snapshot

BATCH = 64  # interventions per forward pass
TOKENS_ON_CPU = 1024  # at most, where no batch is given: a fifth faster than 4,096, whose activations leave the caches
LAST = 10**9  # the layer of what comes after the last one


@dc.dataclass(frozen=True)
class SweepCost:
    """What a sweep computed, and full forward passes would have, in tokens × layers."""

    computed: int
    full: int
    every_token: str = ""  # why no token was left out

    def __repr__(self) -> str:
        why = f"; every token each time, since {self.every_token}" if self.every_token else ""
        return f"{self.computed / max(self.full, 1):.1%} of the tokens × layers of full forward passes computed{why}"


def every_token_because(model: ModelModule, replacements: Iterable[Replacement]) -> str:
    """Why tokens before an intervention are computed again; empty where they are not."""
    spec = model.part
    if spec.ahead() is None:
        return "early tokens of this model read later ones"
    reasons = ((path, part.whole_prefill(scope)) for path, part, scope in walk(spec) if not scope.drafts)
    if chunked := next((f"{path}: {why}" for path, why in reasons if why), None):
        return chunked
    if spec.head is None or spec.head.pools():
        return "the model has no logits per token"
    if not spec.embed.token_ids:
        return f"the model embeds no token ids ({spec.embed.kind})"
    if model.ranks.axes is not None:
        return "the model is sharded"
    if model.training:
        return "the model is in training mode (call eval() first)"
    return "" if all(map(per_token, replacements)) else "an intervention may read several tokens (a function, or a tensor)"


def layer_of(address: str) -> int:
    """The layer of an address; −1 before the first, a large number after the last."""
    first, _, rest = address.partition(".")
    if first == "layers":
        return int(rest.partition(".")[0])
    return LAST if first in ("normed", "norm", "head") else -1


class Resumed:
    """The base run of a sweep (`patch` holds in every run), and runs with interventions that continue it."""

    def __init__(
        self,
        model: ModelModule,
        inputs: Tensor,
        patch: Mapping[str, Replacement] | None,
        targets: Sequence[Target],
        value: Replacement,
        agrees: int = 0,
    ) -> None:
        """`value` is what each intervention puts at its target; it changes nothing at the first `agrees` tokens."""
        self.model, self.inputs, self.patch, self.value, self.rows = model, inputs, dict(patch or {}), value, len(inputs)
        self.targets, self.n, self.depth = targets, inputs.shape[1], len(model.layers)
        self.ahead = model.part.ahead() or 0  # tokens that see each other
        self.every_token = every_token_because(model, [value, *self.patch.values()])
        self.agrees = 0 if self.every_token or agrees < self.ahead else agrees  # a token that differs is seen by those before
        self.computed = self.rows * self.n * self.depth
        self.streams: dict[int, Tensor] = {}  # the residual stream before a layer
        self.base: Pool | None = None  # of the base run
        self.pool: Pool | None = None  # of a batch, whose rows continue from token `start`
        self.start = 0
        self.logits = self._base_run()

    def work(self) -> SweepCost:
        """What was computed so far."""
        return SweepCost(self.computed, (len(self.targets) + 1) * self.rows * self.n * self.depth, self.every_token)

    @torch.no_grad()
    def batches(self, batch: int | None) -> Iterator[tuple[list[Target], Tensor]]:
        """Some targets, and the logits (targets · rows, n, …) with one of them patched in each group of rows."""
        starts = {target.key: self._start(target) for target in self.targets}
        alike = sorted(self.targets, key=lambda target: (self._layer(target), starts[target.key]))
        planned: list[tuple[int, int, list[Target]]] = []
        for layer, group in groupby(alike, key=self._layer):
            members = list(group)
            while members:
                start = starts[members[0].key]
                some, members = members[: (size := batch or self._size(start))], members[size:]
                planned.append((start, layer, some))
        for start, layer, some in sorted(planned, key=lambda item: item[:2]):
            yield some, self._run(some, layer, start)

    def _layer(self, target: Target) -> int:
        """The first layer to compute; −1: the embedding as well."""
        layer = min(layer_of(target.address), self.depth)
        return layer if layer in self.streams else -1

    def _size(self, start: int) -> int:
        """The interventions per batch."""
        tokens = self.rows * max(self.n - start, 1)
        return min(BATCH, max(1, TOKENS_ON_CPU // tokens)) if self.model.device.type == "cpu" else BATCH

    def _start(self, target: Target) -> int:
        """The first token to compute; n: none, since the intervention changes nothing."""
        if self.every_token:
            return 0
        meant = tokens_meant(target, self.n)
        meant[: self.agrees] = False
        first = int(meant.int().argmax()) if bool(meant.any()) else self.n
        return 0 if first < self.ahead else first

    def _base_run(self) -> Tensor:
        """The logits (rows, n, …) without an intervention; keeps the residual streams that runs continue from."""
        model, tracer = self.model, Tracer(self.model.part, None, self.patch)
        ctx = default_ctx(self.inputs, ranks=model.ranks)
        with torch.no_grad(), torch.compiler.set_stance("force_eager"):
            if any(block.io is not None for block in model.layers) or model.part.head is None or model.training:
                return model(self.inputs, dc.replace(ctx, taps=tracer))
            x, _, begun = model.begin(self.inputs, dc.replace(ctx, taps=tracer))
            streams, at = dict[int, Tensor](), 0
            for layer in sorted({min(layer_of(target.address), self.depth) for target in self.targets} - {-1}):
                streams[layer] = x = model.run_layers(x, begun, {}, range(at, layer))
                at = layer
            if begun.layout is ctx.layout:  # an embedding of images has tokens of its own
                self.streams = streams
            return model.head(model.end(model.run_layers(x, begun, {}, range(at, self.depth)), begun), begun)

    def _run(self, targets: Sequence[Target], layer: int, start: int) -> Tensor:
        """The logits (targets · rows, n, …) of a batch."""
        model, count = self.model, len(targets)
        before = _repeated(self.logits[:, :start], count)
        if start == self.n:
            return before
        inputs = _repeated(self.inputs[:, start:], count)
        ctx = self._continued(start, count) if start else default_ctx(inputs, ranks=model.ranks)
        ctx.taps = self._tracer(targets)
        self.computed += len(inputs) * (self.n - start) * (self.depth - max(layer, 0))
        with torch.compiler.set_stance("force_eager"):
            if layer < 0:
                logits = model(inputs, ctx)
            else:
                x = _repeated(self.streams[layer][:, start:], count)
                x = model.run_layers(x, ctx, {}, range(layer, self.depth))
                logits = model.head(model.end(x, ctx), ctx)
        return torch.cat([before, logits], 1) if start else logits

    def _continued(self, start: int, count: int) -> Ctx:
        """The ctx of the tokens from `start` on, in rows that hold the decode state of the base run before them."""
        rows, model = count * self.rows, self.model
        if self.pool is None or start != self.start or rows > self.pool.rows:
            states = self._states(start)
            self.pool, self.start = self._pool(rows), start
            for row in range(rows):
                restore(self.pool, row, start, (), states[row % self.rows])
                self.pool.mark(row)
        else:
            for row in range(rows):
                self.pool.rollback(row, start)
        step = self.pool.step(range(rows), [self.n - start] * rows)
        return Ctx(layout=step.layout, views=step.views, ranks=model.ranks)

    def _states(self, start: int) -> list[list[Tensor]]:
        """The decode state of each row of the base run after its first `start` tokens."""
        base = self.base = self.base or self._pool(self.rows)
        if (done := base.lengths[0]) < start:
            step = base.step(range(self.rows), [start - done] * self.rows)
            tracer = Tracer(self.model.part, None, self.patch)
            tracer.ends[False] = torch.full((self.rows,), self.n)  # negative positions count from the end of the whole input
            self.model.hidden(self.inputs[:, done:start], Ctx(step.layout, step.views, taps=tracer, ranks=self.model.ranks))
            self.computed += self.rows * (start - done) * self.depth
        return [snapshot(base, row) for row in range(self.rows)]

    def _pool(self, rows: int) -> Pool:
        return Pool(self.model.part, rows, self.n, dtype=self.model.dtype, device=self.model.device)

    def _tracer(self, targets: Sequence[Target]) -> Tracer:
        """The patch of every run in all rows, and each target in its own."""
        patch, count = dict[str, Replacement](), self.rows
        for text, replacement in self.patch.items():
            pattern, picks = parse(text)
            if (pick := picks.get("row")) is not None:
                rows = _rows(text, pick, count)
                picks["row"] = tuple(i * count + row for i in range(len(targets)) for row in rows)
            patch[pattern + suffix(picks)] = InEachRun(replacement, count)
        tracer, value = Tracer(self.model.part, None, patch), InRows(self.value, count)
        for i, target in enumerate(targets):
            row: Pick = slice(i * count, (i + 1) * count)
            if (pick := target.picks.get("row")) is not None:
                row = tuple(i * count + of_run for of_run in _rows(target.key, pick, count))
            tracer.patch([target._replace(picks={**target.picks, "row": row})], value)
        return tracer


class InRows:
    """An intervention on some rows of a larger batch, as if they were all."""

    def __init__(self, value: Replacement, count: int) -> None:
        self.value, self.count = value, count

    def at(self, x: Tensor, site: Site) -> Tensor:
        """The value of these rows."""
        rows = None if site.rows is None or len(x) == self.count else site.rows % self.count
        of_run = dc.replace(site, rows=rows)
        return applied(self.value, x, of_run, of_run.mask(x))


class InEachRun:
    """An intervention on every run of a batch of runs of `count` rows each, as if each were by itself."""

    def __init__(self, value: Replacement, count: int) -> None:
        self.value, self.count = value, count

    def at(self, x: Tensor, site: Site) -> Tensor:
        """The value of all rows."""
        rows = torch.arange(len(x), device=x.device) if site.rows is None else site.rows
        if isinstance(self.value, PerToken):
            return self.value.at(x, dc.replace(site, rows=rows % self.count))
        new = x.clone()
        for run in (rows // self.count).unique():
            index = (rows // self.count == run).nonzero()[:, 0]
            target = site.target._replace(picks={**site.target.picks, "row": tuple(index.tolist())})
            of_run = dc.replace(site, target=target).within(x)
            of_run.rows = None if len(index) == self.count else rows[index] % self.count
            new[index] = applied(self.value, x[index], of_run, of_run.mask(x[index]))
        return new


def _rows(key: str, pick: Pick, count: int) -> list[int]:
    return among(key, "row", torch.arange(count), pick, count).nonzero()[:, 0].tolist()


def _repeated(x: Tensor, count: int) -> Tensor:
    return x.repeat(count, *[1] * (x.dim() - 1))
