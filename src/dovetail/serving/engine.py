"""Engine: requests in, tokens out, many at once (continuous batching).

    engine = Engine(model, rows=8, longest=4096)
    engine.add(Request(id="a", prompt=(1, 5, 9), max_tokens=32))
    while engine.busy:
        for output in engine.step():
            print(output.id, output.tokens, output.finish)

A step: the schedule (schedule.py) chooses tokens; the runner (runner.py) computes them; each continuation whose tokens are all
computed gets its next token. What a request's tokens are depends on the request alone, up to the rounding of batched matmuls
(law invariant); with greedy sampling they are those of `generate`.

A call that ends in the middle (KeyboardInterrupt, an error of the model) has not happened: the next call recovers from the
requests and the tokens that were returned, and computes the rest again. The same happens where the weights have changed.
"""

from __future__ import annotations

import dataclasses as dc
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from torch import Tensor

from dovetail.base.errors import InputError
from dovetail.base.keywords import checks_keywords
from dovetail.decoding.eviction import Eviction, evicting
from dovetail.decoding.generation import check_generates
from dovetail.decoding.sampling import top_logprobs
from dovetail.model.model import ModelModule
from dovetail.serving.client import Stats
from dovetail.serving.next_token import allowed_logits, sample_next
from dovetail.serving.recovery import Change, Weights, leave, restart
from dovetail.serving.request import Finish, Logprob, Output, Request, check_request
from dovetail.serving.runner import PAGE, Runner, check_served
from dovetail.serving.schedule import Continuation, Schedule
from dovetail.serving.speculate import Drafter
from dovetail.spec.fold import position_limit
from dovetail.state.quantized import CacheFormat
from dovetail.text.grammar import GrammarError, Grammars, Matcher
from dovetail.weights.adapters.kind import AdapterKind


@checks_keywords
class Engine:
    """A model that continues many prompts at once."""

    def __init__(
        self,
        model: ModelModule,
        *,
        rows: int = 8,
        longest: int = 4096,
        budget: int = 512,
        page: int = PAGE,
        pages: int | None = None,
        cache: CacheFormat | None = None,
        evict: Eviction | None = None,
        share: bool = True,
        start: Sequence[int] = (),
        drafter: Drafter | None = None,
        drafts: int = 4,
        grammars: Grammars | None = None,
        compiled: ModelModule | None = None,
    ) -> None:
        """`rows`: continuations that run at once; `longest`: tokens of one, the prompt included; `budget`: tokens per step;
        `pages`: of `page` tokens in the KV cache, by default enough for all rows; `cache`: its format; `evict`: holds it to a
        budget of entries (decoding/eviction.py); `share`: keep prefixes for later requests; `start`: the first decoder tokens
        of an encoder–decoder; `drafter`: guesses up to `drafts` next tokens (speculate.py), which changes no token;
        `grammars`: compiles the grammars of requests;
        `compiled`: the same model once more, to decode by a compiled graph (compiled.py)."""
        check_generates(model.part)
        check_served(model)
        if evict is not None:
            evict.check_options(pages=pages is not None, cache=cache is not None, compiled=compiled is not None)
            model = evicting(model, evict)
        table = position_limit(model.part)
        longest = longest if table is None or model.part.encoder is not None else min(longest, table)
        self.model, self.start, self.longest = model, tuple(start), longest
        source = longest if model.part.encoder is not None else 0
        sizes: dict[str, Any] = {"rows": rows, "longest": longest, "page": page, "pages": pages, "source": source}
        self.runner = Runner(model, **sizes, cache=cache, evict=evict, share=share, compiled=compiled)
        self.adapters = self.runner.adapters
        self.schedule = Schedule(budget)
        self.drafter, self.drafts, self.grammars = drafter, drafts, grammars
        if drafter is not None:
            if self.runner.whole:
                what = f"with drafts its tokens would change, since {self.runner.whole}"
                raise InputError(f"drafter: {what}; leave it out (--speculate)")
            drafter.attach(self.adapters)
        self.requests: dict[str, list[Continuation]] = {}
        self.scored: dict[str, list[Logprob]] = {}  # log-probs of prompts, until they are reported
        self.numbers = count()
        self.weights = Weights(model)
        self.call = Change(self)
        self.outputs: list[tuple[Continuation, Output]] = []  # of the last step
        self.late: list[Output] = []  # of interrupted steps, not returned yet
        self.prompt_tokens = self.generation_tokens = self.queries = self.hits = self.drafted = self.accepted = 0
        self.step_seconds = self.schedule_seconds = 0.0

    @property
    def busy(self) -> bool:
        """Whether a request is waiting or running, or an interrupted step has outputs that were not returned."""
        return bool(self.requests or self.late) or self.call.open

    # -- requests

    def add(self, request: Request) -> None:
        """Queue a request. Raises InputError where it can never run."""
        check_served(self.model)
        self._notice()
        check_request(self, request)
        matcher = self.matcher(request)
        if request.adapter is not None:
            request = dc.replace(request, adapter=self.adapters.slot(request.adapter))
        number = next(self.numbers)
        tokens = list(self.start) if self.model.part.encoder is not None else list(request.prompt)
        ones = [
            Continuation(
                request, i, (number, i), list(tokens), len(tokens), matcher=None if matcher is None else matcher.copy()
            )
            for i in range(request.n)
        ]
        with self.call:
            for one in ones:
                self.schedule.add(one)
            self.requests[request.id] = ones

    def _notice(self) -> None:
        """Recover from a call that was interrupted, and from changed weights."""
        with self.call:
            if self.weights.changed():
                restart(self)

    def matcher(self, request: Request) -> Matcher | None:
        """The state of an empty text under the grammar of a request; None: it has none."""
        if not request.grammar:
            return None
        if self.grammars is None:
            raise InputError("grammar: the model has no tokenizer, so its output cannot be constrained; leave it out")
        return self.grammars.matcher(request.grammar)

    def abort(self, id: str) -> list[Output]:
        """End a request, if it is there; returns its last outputs."""
        with self.call:
            outputs = [output for output in self.late if output.id == id]
            for one in self.requests.get(id, []):
                self.schedule.remove(one, self.runner)
                outputs.append(Output(id=id, index=one.index, finish="abort", cached=one.cached))
            self.forget(id)
            self.late = [output for output in self.late if output.id != id]
            return outputs

    def forget(self, id: str) -> None:
        """Drop what is known of a request that has ended."""
        self.requests.pop(id, None)
        self.scored.pop(id, None)
        if self.adapters.leaving:
            self.adapters.drop(self._slots())
            self.weights.read()

    # -- adapters

    def load_adapter(self, name: str, kind: AdapterKind, tensors: Mapping[str, Tensor]) -> None:
        """Let requests name an adapter, given by its kind and its tensors."""
        with self._adapting():
            self.adapters.load(name, kind, tensors)

    def unload_adapter(self, name: str) -> None:
        """Take no further requests for an adapter; those that run end with it."""
        with self._adapting():
            self.adapters.unload(name, self._slots())

    @contextmanager
    def _adapting(self) -> Iterator[None]:
        """Within this context adapters of the model change, which does not count as changed weights."""
        self._notice()
        try:
            yield
        finally:
            self.weights.read()

    def _slots(self) -> set[str | None]:
        return {one.request.adapter for ones in self.requests.values() for one in ones}

    # -- steps

    def step(self) -> list[Output]:
        """Compute some tokens of some requests; returns what is new."""
        check_served(self.model)
        with self.call:
            if self.weights.written():
                restart(self)
            self.outputs = self._step()  # from here on the step has happened: an interrupt delays its outputs
            leave(self)
            returned, self.late = [*self.late, *(output for _, output in self.outputs)], []
            return returned

    def _step(self) -> list[tuple[Continuation, Output]]:
        self._draft()
        begin = time.perf_counter()
        plan = self.schedule.plan(self.runner)
        self.schedule_seconds += time.perf_counter() - begin
        if not plan:
            return []
        self.prompt_tokens += sum(n for _, n in plan.prefill)
        begin = time.perf_counter()
        ready = self.runner.run(plan, self._score, None if self.drafter is None else self.drafter.observe)
        for one, _ in plan.prefill:
            self.runner.settle(one)
        outputs = self._next(ready)
        self.step_seconds += time.perf_counter() - begin
        return outputs

    def reset(self) -> None:
        """Drop the KV cache and all cached prefixes. Requests that run continue: their tokens are computed again. The engine
        does so itself where it sees that weights have changed; call it after a change that it cannot see (`weight.data`)."""
        with self.call:
            restart(self)

    def _draft(self) -> None:
        """Let the drafter guess the next tokens of each continuation that decodes."""
        if self.drafter is None:
            return
        ones = [one for one in self.schedule.running if one.left == 1 and len(one.tokens) > one.prompt]
        room = {one: min(self.drafts, one.request.max_tokens - (len(one.tokens) - one.prompt) - 1) for one in ones}
        asked = [one for one in ones if room[one] > 0]
        for one, guess in zip(asked, self.drafter.draft(asked, [room[one] for one in asked]), strict=True):
            one.drafts = guess[: room[one]]

    def _next(self, ready: dict[Continuation, Tensor]) -> list[tuple[Continuation, Output]]:
        """The next token of each continuation that is ready, and of those that begin where one of these is."""
        for one, logits in list(ready.items()):
            if one.index == 0 and len(one.tokens) == one.prompt:
                for other in self.requests[one.request.id][1:]:
                    if other in self.schedule.waiting and not other.admitted and self.runner.fork(one, other):
                        self.schedule.waiting.remove(other)
                        self.schedule.started(other)
                        ready[other] = logits
                        if self.drafter is not None:
                            self.drafter.fork(one, other)
        outputs: list[tuple[Continuation, Output]] = []
        going = dict(ready)
        for one, logits in ready.items():
            low, high = logits.aminmax()  # NaN where some value is; `isfinite` of all takes five times as long
            if not bool(low.isfinite() & high.isfinite()):
                del going[one]
                outputs.append((one, self._end(one, [], [], "error", "the logits are not finite")))
        for one in [one for one in going if self._ends(one)]:  # a prompt that is scored alone
            del going[one]
            outputs.append((one, self._end(one, [], [], "length")))
        new: dict[Continuation, list[int]] = {one: [] for one in going}
        refused: dict[Continuation, str] = {}
        for i in range(max((len(logits) for logits in going.values()), default=0)):
            allowed: dict[Continuation, Tensor] = {}
            for one, logits in going.items():
                if i < len(logits) and one.drafts[:i] == new[one] and not self._ends(one):
                    try:
                        allowed[one] = allowed_logits(one, logits[i])
                    except GrammarError as error:
                        refused[one] = str(error)
            for one, token in zip(allowed, sample_next(allowed), strict=True):
                one.tokens.append(token)
                new[one].append(token)
                if one.matcher is not None:
                    one.matcher.push(token)
        for one, tokens in new.items():
            outputs.append((one, self._report(one, tokens, going[one], refused.get(one, ""))))
        return outputs

    def _ends(self, one: Continuation) -> Finish | None:
        """Why its last token is the last, if it is."""
        generated = len(one.tokens) - one.prompt
        if generated and (one.tokens[-1] in one.request.stop or (one.matcher is not None and one.matcher.finished)):
            return "stop"
        return "length" if generated >= one.request.max_tokens else None

    def _report(self, one: Continuation, tokens: list[int], logits: Tensor, refused: str) -> Output:
        """Forget the drafts that were not sampled, and end the continuation where its last token is the last, or where its
        grammar is refused."""
        request, drafts = one.request, len(one.drafts)
        if len(one.tokens) - len(tokens) == one.prompt:
            self.queries += one.prompt
            self.hits += one.cached
        self.generation_tokens += len(tokens)
        self.drafted += drafts
        if refused:
            return self._end(one, tokens, [], "refused", refused)
        self.accepted += len(tokens) - 1
        self.runner.settle(one, rejected=drafts - (len(tokens) - 1))
        logprobs = []
        if request.logprobs is not None:
            logprobs = [Logprob(t, *top_logprobs(row, t, request.logprobs)) for t, row in zip(tokens, logits, strict=False)]
        finish = self._ends(one)
        return self._output(one, tokens, logprobs) if finish is None else self._end(one, tokens, logprobs, finish)

    def _end(self, one: Continuation, tokens: list[int], logprobs: list[Logprob], finish: Finish, message: str = "") -> Output:
        self.schedule.remove(one, self.runner)
        return self._output(one, tokens, logprobs, finish, message)

    def _output(
        self,
        one: Continuation,
        tokens: list[int],
        logprobs: list[Logprob],
        finish: Finish | None = None,
        message: str = "",
    ) -> Output:
        scored = self.scored.pop(one.request.id, []) if one.index == 0 else []
        first = bool(tokens) and len(one.tokens) - len(tokens) == one.prompt
        return Output(
            id=one.request.id,
            index=one.index,
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=scored,
            finish=finish,
            cached=one.cached,
            message=message,
            queue_seconds=one.begun - one.arrived if first else None,
            prefill_seconds=time.perf_counter() - one.begun if first else None,
        )

    def _score(self, one: Continuation, first: int, logits: Tensor) -> None:
        """Collect the log-probs of the prompt's tokens that these logits, of the tokens from `first` on, predict."""
        if one.index or one.request.prompt_logprobs is None or len(one.tokens) > one.prompt:
            return
        scored = self.scored.setdefault(one.request.id, [])
        for i, row in enumerate(logits.cpu(), first + 1):
            if i < one.prompt and len(scored) < i:
                token = one.tokens[i]
                scored.append(Logprob(token, *top_logprobs(row, token, one.request.prompt_logprobs)))

    def stats(self) -> Stats:
        """Return the state of the engine."""
        blocks, free, cached = self.runner.counts()
        return Stats(
            running=len(self.schedule.running),
            waiting=len(self.schedule.waiting),
            blocks=blocks,
            free_blocks=free,
            cached_blocks=cached,
            preemptions=self.schedule.preemptions,
            prefix_queries=self.queries,
            prefix_hits=self.hits,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
            step_seconds=self.step_seconds,
            schedule_seconds=self.schedule_seconds,
            drafted=self.drafted,
            accepted=self.accepted,
        )
