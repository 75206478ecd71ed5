"""Runner: a model with its pool. It executes plans, and keeps rows, pages and cached prefixes.

    logits = runner.run(plan)               the logits after the last token of each continuation whose tokens are all computed

Rows that decode are one batch. Chunks of prompts run beside them: in one flat batch with the rows that decode, without padding,
where every mixer attends to its KV cache alone; else in batches of similar lengths, padded on the right, since the scan of a
recurrent state wants rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dovetail.base.errors import InputError
from dovetail.decoding.eviction import Eviction
from dovetail.decoding.generation import encode_source
from dovetail.model.model import ModelModule
from dovetail.nn.ctx import Ctx
from dovetail.nn.softmax import SoftmaxMixer
from dovetail.serving.adapters import Adapters
from dovetail.serving.compiled import CompiledStep
from dovetail.serving.prefix import PrefixCache, block_keys, root_key
from dovetail.serving.schedule import Continuation, Plan
from dovetail.spec.part import Part, walk
from dovetail.state.pool import Pool
from dovetail.state.quantized import CacheFormat
from dovetail.state.saved import keeps_states, paged_slots, pages_of, restore, snapshot

WASTE = 0.34  # of a padded batch of chunks may be padding
SNAPSHOTS = 8  # of recurrent states that are kept for later prompts, per row: eight times the memory of the rows themselves
EVERY = 8  # blocks between the snapshots of a continuation that decodes
PAGE = 8  # tokens of a block: half of the last is empty, 2 % of requests of 170 tokens; pages of 16 are not faster on a CPU
Listen = Callable[[Continuation, int, Tensor], None]  # (continuation, number of its first token, values per token)


class Runner:
    """Rows, pages and prefixes of one model."""

    def __init__(
        self,
        model: ModelModule,
        *,
        rows: int,
        longest: int,
        page: int = PAGE,
        pages: int | None = None,
        source: int = 0,
        cache: CacheFormat | None = None,
        evict: Eviction | None = None,
        share: bool = True,
        compiled: ModelModule | None = None,
    ) -> None:
        """`longest`: tokens per row; `pages`: of the KV cache, by default enough for all rows; `share`: keep prefixes;
        `evict`: the policy that `model` was made for, whose caches lie in no pages;
        `compiled`: the same model, with its matrices as files store them, to decode by a compiled graph (compiled.py)."""
        self.model, self.page, self.rows, self.longest = model, page, rows, longest
        self.adapters = Adapters(model)
        spec = model.part
        how: dict[str, Any] = {"layout": "paged"} if evict is None else evict.pool()
        self.pool = Pool(
            spec,
            rows,
            longest,
            **how,
            dtype=model.dtype,
            device=model.device,
            page=page,
            pages=pages,
            source=source,
            cache=cache,
            sharded=model.ranks.cuts,
        )
        self.slots = paged_slots(self.pool)
        self.stateful = keeps_states(self.pool)
        # why a token's state depends on how many tokens are computed with it (longrope), if it does: then a prompt is computed
        # at once, and the tokens behind it one by one
        reasons = (part.whole_prefill(scope) for _, part, scope in walk(spec))
        self.whole: str | None = next((reason for reason in reasons if reason is not None), None)
        self.flat = cache is None and self.slots is not None and attends_alone(spec)
        self.compiled = None
        if compiled is not None:
            if self.slots is None or not self.flat:
                raise InputError("compiled: only models whose decode state is a KV cache in the model's dtype; leave it out")
            self.compiled = CompiledStep(compiled, self.pool, page, room=min(longest, self.slots.total))
        self.shares = share and self.whole is None and spec.encoder is None
        self.reset()

    def reset(self) -> None:
        """Forget all rows and cached prefixes, whatever state an interrupt left them in."""
        self.pool.reset()
        self.free_rows = list(range(self.rows))[::-1]
        snapshots = SNAPSHOTS * self.rows
        self.prefix = PrefixCache(self.stateful, self._hold, self._drop, snapshots) if self.shares else None

    # -- rows and blocks: `Room`

    def _hold(self, page: int) -> None:
        assert self.slots is not None
        self.slots.keep(page)

    def _drop(self, page: int) -> None:
        assert self.slots is not None
        self.slots.forget(page)

    def admit(self, one: Continuation) -> bool:
        if not self.free_rows:
            return False
        one.row = self.free_rows.pop()
        one.computed = one.shared = 0
        chain = []
        if self.prefix is not None and one.request.prompt_logprobs is None:
            self._extend_keys(one)
            # at least one token is computed: its logits are needed
            chain = self.prefix.match(one.keys[: (len(one.tokens) - 1) // self.page])
            while chain and len(chain) * self.page < self.pool.ahead:
                chain.pop()
        if chain:
            pages = [] if self.slots is None else [node.page for node in chain if node.page is not None]
            one.computed, one.shared = len(chain) * self.page, len(chain)
            restore(self.pool, one.row, one.computed, pages, chain[-1].states or ())
        if not one.admitted:
            one.cached = one.computed
        if self.model.part.encoder is not None:
            with torch.inference_mode(), self.adapters.rows([one.request.adapter]):
                encode_source(self.model, self.pool, torch.tensor(one.request.prompt, device=self.model.device), one.row)
        return True

    def release(self, one: Continuation) -> None:
        self.pool.free(one.held_row)
        self.free_rows.append(one.held_row)
        one.row, one.computed, one.shared, one.drafts = None, 0, 0, []

    def fork(self, one: Continuation, other: Continuation) -> bool:
        """Let a continuation that waits begin where another is; False where no row or block is free."""
        running = self.rows - len(self.free_rows)
        if not self.free_rows or one.row is None or not self.ensure(1 + running):  # each may need a page in the next step
            return False
        other.row = self.free_rows.pop()
        self.pool.fork(one.row, other.row)
        other.computed, other.cached, other.keys, other.shared = one.computed, one.computed, list(one.keys), one.shared
        return True

    def needed(self, one: Continuation, n: int) -> int:
        return 0 if self.slots is None else self.slots.needed(one.held_row, one.computed, n)

    def ensure(self, blocks: int) -> bool:
        slots = self.slots
        if slots is None:
            return True
        if self.prefix is None:
            return len(slots.free) >= blocks
        return self.prefix.evict(lambda: len(slots.free) >= blocks, lambda page: slots.uses[page])

    def cut(self, one: Continuation, n: int) -> int:
        if self.whole is not None:  # as without preemption
            return max(one.prompt - one.computed, 1)
        if self.stateful and self.prefix is not None and one.left > 1:
            # a snapshot is taken at the edge of a block: chunks end there
            edge = (one.computed + n) // self.page * self.page - one.computed
            n = edge if edge > 0 else n
        return max(n, self.pool.ahead - one.computed)  # the first tokens of a prefix mask see each other

    def counts(self) -> tuple[int, int, int]:
        """Blocks in all, those that are free, and those that cached prefixes alone use."""
        slots = self.slots
        return (0, 0, 0) if slots is None else (slots.pages, len(slots.free), slots.idle)

    def fits(self, tokens: int) -> bool:
        """Whether a continuation of so many tokens fits into the empty pool."""
        return tokens <= self.longest and (self.slots is None or -(-tokens // self.page) <= self.slots.pages)

    # -- running

    @torch.inference_mode()
    def run(self, plan: Plan, score: Listen, observe: Listen | None = None) -> dict[Continuation, Tensor]:
        """Compute the tokens of a plan. Returns logits (1 + drafts, vocab) in float32 of each continuation that is ready for
        its next token: behind its last token, and behind each draft. `settle` follows, once it is known which drafts stay.
        score(continuation, first, logits (n, vocab)) gets the logits of a chunk whose request asks for log-probs of its
        prompt; observe(continuation, first, hidden (n, embed)) the hidden states of all tokens, drafts included."""
        ready: dict[Continuation, Tensor] = {}
        decode = [(one, 1 + len(one.drafts)) for one in plan.decode]
        if observe is None and not plan.prefill and self._compiles(plan.decode):
            return self._by_graph(plan.decode)
        if self.flat and plan.prefill:
            return self._batch([*sorted(decode, key=lambda pair: pair[1]), *plan.prefill], score, observe, flat=True)
        for batch in [*([decode] if decode else []), *_batches(plan.prefill)]:
            ready |= self._batch(batch, score, observe)
        return ready

    def _compiles(self, decode: Sequence[Continuation]) -> bool:
        """Whether these may decode by the compiled graph."""
        if self.compiled is None or self.adapters.loaded or not self.compiled.takes(len(decode)):
            return False
        scored = any(one.request.prompt_logprobs is not None and one.computed < one.prompt for one in decode)
        return not scored and not any(one.drafts for one in decode)

    def _by_graph(self, decode: Sequence[Continuation]) -> dict[Continuation, Tensor]:
        assert self.compiled is not None
        logits = self.compiled({one.held_row: one.tokens[one.computed] for one in decode}).float().cpu()
        for one in decode:
            one.computed += 1
        return {one: logits[one.held_row : one.held_row + 1] for one in decode}

    def _batch(
        self, batch: Sequence[tuple[Continuation, int]], score: Listen, observe: Listen | None, flat: bool = False
    ) -> dict[Continuation, Tensor]:
        rows, new = [one.held_row for one, _ in batch], [n for _, n in batch]
        for one, _ in batch:
            if one.drafts:
                self.pool.mark(one.held_row)
        step = self.pool.step(rows, new, flat)
        fed = [[*one.tokens, *one.drafts][one.computed : one.computed + n] for one, n in batch]
        ctx = Ctx(layout=step.layout, views=step.views, ranks=self.model.ranks)
        slots = [one.request.adapter for one, _ in batch]
        if flat:
            tokens, each = (
                torch.tensor([token for row in fed for token in row]),
                [slots[i] for i, n in enumerate(new) for _ in range(n)],
            )
        else:
            tokens, each = torch.tensor([row + [0] * (max(new) - len(row)) for row in fed]), slots
        with self.adapters.rows(each):
            x, ctx = self.model.hidden(tokens.to(self.model.device), ctx)
        hidden = x.split(new) if flat else [x[i, :n] for i, n in enumerate(new)]  # (n, embed) of each
        ready = [(i, 1 + len(one.drafts)) for i, (one, n) in enumerate(batch) if n == one.left + len(one.drafts)]
        logits = x.new_zeros(0)
        if ready:
            last = torch.cat([hidden[i][-count:] for i, count in ready])[:, None]
            logits = self._head(last, ctx, [slots[i] for i, count in ready for _ in range(count)])[:, 0].cpu()
        for i, (one, n) in enumerate(batch):
            if one.request.prompt_logprobs is not None and one.computed < one.prompt:
                score(one, one.computed, self._head(hidden[i][None], ctx, slots[i : i + 1])[0])
            if observe is not None:
                observe(one, one.computed, hidden[i])
            one.computed += n
        pieces = logits.split([count for _, count in ready]) if ready else ()
        return {batch[i][0]: piece for (i, _), piece in zip(ready, pieces, strict=True)}

    def _head(self, x: Tensor, ctx: Ctx, slots: Sequence[str | None]) -> Tensor:
        """Logits (rows, n, vocab) in float32, each row with its adapter."""
        with self.adapters.rows(slots):
            return self.model.head(x, ctx).float()

    def settle(self, one: Continuation, rejected: int = 0) -> None:
        """After `run`: forget the last `rejected` tokens of a row, which were drafts, and offer its blocks to the prefix cache.
        A recurrent state returns to where it was before the step; its tokens are computed again with the next one."""
        if rejected:
            one.computed = self.pool.rollback(one.held_row, one.computed - rejected)
        self.pool.marks[one.held_row] = []
        one.drafts = []
        self._share(one)

    def _extend_keys(self, one: Continuation) -> None:
        root = root_key(one.request.salt, one.request.adapter)
        one.keys = block_keys(root, one.tokens, self.page, one.keys)

    def _share(self, one: Continuation) -> None:
        """Offer the whole blocks of a row to the prefix cache; with recurrent states, at the edge of a block."""
        whole = one.computed // self.page
        if self.prefix is None or whole <= one.shared or one.row is None or one.computed < self.pool.ahead:
            return
        states = None
        if self.stateful:
            decoding = one.computed > one.prompt
            if one.computed % self.page or (decoding and whole % EVERY):
                return
            states = snapshot(self.pool, one.row)
        self._extend_keys(one)
        one.shared = whole
        pages = self.prefix.insert(one.keys[:whole], pages_of(self.pool, one.row)[:whole], states)
        if self.slots is not None:
            self.slots.share(one.row, pages)


def _batches(prefill: Sequence[tuple[Continuation, int]]) -> list[list[tuple[Continuation, int]]]:
    """Chunks in batches of which padding is a small part."""
    batches: list[list[tuple[Continuation, int]]] = []
    for one, n in sorted(prefill, key=lambda pair: -pair[1]):
        if batches:
            last = batches[-1]
            area = last[0][1] * (len(last) + 1)
            if area - sum(m for _, m in last) - n <= WASTE * area:
                last.append((one, n))
                continue
        batches.append([(one, n)])
    return batches


def attends_alone(spec: Part) -> bool:
    """Whether the decode state of a model is KV caches alone, which `KV.attend` alone reads."""
    held = [(part, part.state(scope)) for _, part, scope in walk(spec) if scope.decodes and not scope.drafts]
    return all(
        isinstance(part, SoftmaxMixer) and part.attends and all(state.per == "token" for state in states)
        for part, states in held
        if states
    )


def check_served(model: ModelModule) -> None:
    """Raise InputError where the native engine cannot serve a model."""
    if model.training:
        raise InputError("model: is in training mode; call model.eval()")
