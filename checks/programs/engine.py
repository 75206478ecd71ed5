"""Programs of the engine: requests that are added, aborted, interrupted and preempted, with drafts, grammars, adapters, several
continuations and changed weights. Each gets the tokens of a fresh object, and the schedule's invariants hold after each plan.
"""

from __future__ import annotations

import dataclasses as dc
import random
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from checks.programs.engine_invariants import check_plan, check_rows
from checks.programs.engine_models import (
    KINDS,
    MODELS,
    START,
    VOCAB,
    adapter_of,
    borrow,
    change_weights,
    give_back,
    grammars,
    logits_of,
    model_of,
    original,
)
from checks.programs.frame import Kind, Session, Step, wrong
from checks.programs.interrupt import interrupted
from dovetail.base.errors import InputError, SpecError
from dovetail.decoding.sampling import Sampling, masked, sample_tokens
from dovetail.model.model import ModelModule
from dovetail.serving.draft_ahead import own_drafter
from dovetail.serving.engine import Engine
from dovetail.serving.request import Output, Request
from dovetail.serving.schedule import Plan
from dovetail.serving.speculate import Drafter, DraftModel, PromptLookup
from dovetail.text.grammar import Matcher, regex_grammar

PATTERNS = ("[a-z ]{1,6}", "(cat|mat|mice)+", "[0-9]{2,4}")
STEPS = 3000  # of an engine until it must have ended
CLOSE = 1e-5  # of log-probs, which are float32


class Noise(Drafter):
    """Drafts that are wrong but for chance: token and length are functions of the tokens before."""

    def draft(self, ones: Any, counts: Any) -> list[list[int]]:
        return [
            [(one.tokens[-1] * 7 + len(one.tokens) + i) % VOCAB for i in range(min(count, len(one.tokens) % 4))]
            for one, count in zip(ones, counts, strict=True)
        ]


def drafter_of(name: str, model: ModelModule, setup: Mapping[str, Any]) -> Drafter | None:
    """The drafter of a setup."""
    sizes = {"rows": setup["rows"], "longest": setup["longest"]}
    if name == "own":
        return own_drafter(model, **sizes, drafts=3)
    if name in ("itself", "other"):
        return DraftModel(original("attention" if name == "itself" else "hybrid"), **sizes, target=model)
    return {"": None, "lookup": PromptLookup(shortest=1), "noise": Noise()}[name]


class EngineKind(Kind):
    """The native engine."""

    name = "engine"
    share = 3.0

    def sample(self, rng: random.Random) -> tuple[dict[str, Any], list[Step]]:
        names = list(MODELS)
        model = rng.choices(names, [MODELS[name].weight for name in names])[0]
        sort = MODELS[model]
        page, rows = rng.choice([2, 4, 8]), rng.randint(1, 4)
        longest = rng.randint(24, 56)
        widest = -(-longest // page)
        pages = rng.choice([None, widest, widest + rng.randint(0, 2), rng.randint(widest, rows * widest)])
        drafters = ["lookup", "noise", "itself", "other", *(["own"] * 3 if sort.own else [])]
        setup = {
            "model": model,
            "rows": rows,
            "longest": longest,
            "budget": rng.choice([4, 9, 24, 512]),
            "page": page,
            "pages": pages,
            "cache": rng.choice([None, None, None, None, "int8"]) if model == "attention" else None,
            "share": rng.random() < 0.85,
            "drafter": rng.choice(drafters) if rng.random() < 0.5 else "",
            "drafts": rng.randint(1, 4),
        }
        shared = [rng.randrange(VOCAB) for _ in range(longest)]
        steps, added, loaded, number = list[Step](), list[dict[str, Any]](), set[str](), 0
        for _ in range(rng.randint(4, 16)):
            call = rng.choices(
                ["add", "again", "step", "abort", "interrupt", "preempt", "load", "unload", "weights", "train"],
                [30, 8, 40, 6, 6, 10, 3, 2, 1, 1],
            )[0]
            if call == "step":
                steps.append(("step", {"times": rng.choice([1, 2, 3, 5, 9, 40])}))
            elif call == "again" and added:
                number += 1
                steps.append(("add", {**rng.choice(added), "id": str(number)}))
            elif call in ("add", "again"):
                number += 1
                request = self._request(rng, setup, str(number), shared, sorted(loaded))
                added.append(request)
                steps.append(("add", request))
            elif call == "abort" and number:
                steps.append(("abort", {"id": str(rng.randint(1, number))}))
            elif call == "interrupt":
                steps.append(("interrupt", {"after": int(10 ** rng.uniform(0, 3.3))}))
            elif call == "preempt":
                steps.append(("preempt", {"which": rng.randrange(4)}))
            elif call == "load" and sort.spec:
                name = rng.choice("ab")
                loaded.add(name)
                steps.append(("load", {"name": name, "kind": rng.choice(list(KINDS)), "seed": rng.randrange(3)}))
            elif call == "unload" and loaded:
                name = rng.choice(sorted(loaded))
                loaded.remove(name)
                steps.append(("unload", {"name": name}))
            elif call == "weights" and not sort.stepwise and setup["cache"] is None:
                steps.append(("weights", {"seed": rng.randrange(9)}))
            elif call == "train":
                steps.append(("train", {}))
        return setup, steps

    def _request(
        self, rng: random.Random, setup: Mapping[str, Any], id: str, shared: list[int], adapters: list[str]
    ) -> dict[str, Any]:
        """The fields of a request that mostly fits."""
        sort, longest = MODELS[setup["model"]], setup["longest"]
        generated = rng.choice([1, 2, rng.randint(1, 6), rng.randint(1, 10), rng.randint(1, longest // 2)])
        most = longest - generated
        encoder = "encoder:" in sort.spec
        length = rng.choice([sort.least, rng.randint(sort.least, max(most, sort.least)), max(most, sort.least)])
        begin = 0 if rng.random() < 0.3 else rng.randrange(length + 1)
        own = [rng.randrange(VOCAB) for _ in range(length - begin)]
        request: dict[str, Any] = {"id": id, "prompt": [*shared[:begin], *own], "max_tokens": generated}
        if rng.random() < 0.4:
            request |= {"temperature": rng.choice([0.7, 1.5]), "seed": rng.randrange(99)}
        if rng.random() < 0.2:
            request["n"] = rng.randint(2, 4)
        if rng.random() < 0.15:
            request["logprobs"] = rng.randint(0, 2)
        if rng.random() < 0.1 and not encoder and not sort.stepwise and setup["cache"] is None:
            request["prompt_logprobs"] = 1
            request["max_tokens"] = rng.choice([0, generated])
        if rng.random() < 0.15:
            request |= {"stop": rng.sample(range(VOCAB), 60), "min_tokens": rng.randint(0, 4)}
        if rng.random() < 0.12:
            request["grammar"] = rng.choice(PATTERNS)
        if adapters and rng.random() < 0.5:
            request["adapter"] = rng.choice(adapters)
        return request

    def start(self, setup: Mapping[str, Any]) -> Session:
        try:
            return EngineSession(setup)
        except SpecError as error:  # a model that the engine takes, it must compute
            refused = MODELS[setup["model"]].refused
            if not refused or refused not in str(error):
                raise
            return Refused()

    def smaller(self, step: Step) -> Iterator[Step]:
        call, arguments = step
        if call == "add":
            for name in ("temperature", "seed", "n", "logprobs", "prompt_logprobs", "stop", "min_tokens", "grammar", "adapter"):
                if name in arguments:
                    yield call, {key: value for key, value in arguments.items() if key != name}
            prompt, tokens = arguments["prompt"], arguments["max_tokens"]
            for fewer in (prompt[: len(prompt) // 2], prompt[:-1]):
                if fewer:
                    yield call, {**arguments, "prompt": fewer}
            if tokens > 1:
                yield call, {**arguments, "max_tokens": tokens // 2}
                yield call, {**arguments, "max_tokens": tokens - 1}
        if call == "step" and arguments["times"] > 1:
            yield call, {"times": arguments["times"] // 2}


class Refused(Session):
    """Nothing: the engine refuses the model, as it should."""

    def do(self, call: str, **arguments: Any) -> None:
        """Skip a step."""


@dc.dataclass
class Known:
    """A request that was added: what its continuations got, and under which weights."""

    request: Request
    adapter: tuple[str, int] | None  # kind and seed
    outputs: dict[int, list[Output]] = dc.field(default_factory=dict)
    versions: dict[int, list[int]] = dc.field(default_factory=dict)  # per token, of the weights
    scored: int = 0  # the version that scored the prompt


class EngineSession(Session):
    """An engine, and all that it returned."""

    def __init__(self, setup: Mapping[str, Any]) -> None:
        self.name: str = setup["model"]
        self.cache = setup["cache"]
        self.model = borrow(self.name)
        self.weights: list[ModelModule | None] = [None]  # the weights so far, copied where a result needs them
        self.adapters: dict[str, tuple[str, int]] = {}
        sizes = {name: setup[name] for name in ("rows", "longest", "budget", "page", "pages", "cache", "share", "drafts")}
        drafter = drafter_of(setup["drafter"], self.model, setup)
        more: dict[str, Any] = {**sizes, "start": START, "grammars": grammars()}
        self.known: dict[str, Known] = {}
        try:
            self.engine = Engine(self.model, **more, drafter=drafter)
        except InputError:  # what an engine takes, it must compute
            if drafter is None or MODELS[self.name].drafts:
                raise
            self.engine = Engine(self.model, **more)
        schedule, plan = self.engine.schedule, self.engine.schedule.plan
        self.preempts: int | None = None  # the number of a running continuation, which the next plan preempts first

        def planned(room: Any) -> Plan:
            if self.preempts is not None and schedule.running:
                schedule.preempt(schedule.running[self.preempts % len(schedule.running)], room)
                self.preempts = None
            before = list(schedule.running)
            made = plan(room)
            check_plan(self.engine, made, before)
            return made

        schedule.plan = planned  # type: ignore[method-assign]

    def do_add(self, id: str, prompt: list[int], max_tokens: int, **more: Any) -> None:
        """Add a request; one that can never run must be refused."""
        sampling = Sampling(temperature=more.pop("temperature", 0.0), seed=more.pop("seed", 0))
        given = {**more, "stop": frozenset(more.get("stop", ()))}
        if grammar := more.get("grammar"):
            given["grammar"] = grammars().source(regex_grammar(grammar))
        request = Request(id=id, prompt=tuple(prompt), max_tokens=max_tokens, sampling=sampling, **given)
        if request.adapter is not None and request.adapter not in self.adapters:
            request = dc.replace(request, adapter=None)
        if id in self.known:
            return
        try:
            self.engine.add(request)
        except InputError as error:
            if not any(name in str(error) for name in ("prompt:", "max_tokens:")):
                raise
            return
        adapter = None if request.adapter is None else self.adapters[request.adapter]
        self.known[id] = Known(request, adapter)

    def do_step(self, times: int) -> None:
        """Some steps."""
        for _ in range(times):
            if not self.engine.busy:
                break
            self.take(self.engine.step())
            check_rows(self.engine)

    def do_preempt(self, which: int) -> None:
        """Preempt a continuation before the next plan, whether or not its room is needed: that changes no token."""
        self.preempts = which

    def do_interrupt(self, after: int) -> None:
        """A step that Ctrl-C ends after so many lines of Python."""
        if not self.engine.busy:
            return
        outputs: list[Output] = []
        try:
            with interrupted(after):
                outputs = self.engine.step()
        except KeyboardInterrupt:
            return
        self.take(outputs)

    def do_abort(self, id: str) -> None:
        """End a request."""
        running = id in self.engine.requests
        self.take(self.engine.abort(id))
        if running and id in self.engine.requests:
            wrong(f"request {id} was aborted, and runs")

    def do_load(self, name: str, kind: str, seed: int) -> None:
        """Load an adapter."""
        if name not in self.adapters:
            self.engine.load_adapter(name, KINDS[kind], adapter_of(self.name, kind, seed))
            self.adapters[name] = (kind, seed)

    def do_unload(self, name: str) -> None:
        """Unload an adapter."""
        if name in self.adapters:
            self.engine.unload_adapter(name)
            del self.adapters[name]

    def do_weights(self, seed: int) -> None:
        """Change the weights in place. Later tokens are those of the new weights."""
        if MODELS[self.name].stepwise or self.engine.runner.pool.cache is not None:
            return
        self._version()
        change_weights(self.model, seed)
        self.weights.append(None)

    def do_train(self) -> None:
        """In training mode, a step and a request are refused."""
        self.model.train()
        for call in (self.engine.step, lambda: self.engine.add(Request(id="in training", prompt=(1,) * 12, max_tokens=1))):
            try:
                call()
            except InputError as error:
                if "training mode" not in str(error):
                    raise
            else:
                wrong("the engine runs in training mode")
        self.model.eval()

    def _version(self) -> ModelModule:
        """A copy of the engine's model with the present weights, without adapters."""
        latest = self.weights[-1]
        if latest is None:
            latest = original(self.name)
            if len(self.weights) > 1:
                latest = model_of(self.name)
                for old, new in zip(latest.parameters(), self.model.parameters(), strict=True):
                    old.copy_(new)
            self.weights[-1] = latest
        return latest

    # -- results

    def take(self, outputs: list[Output]) -> None:
        """Record outputs; compare those that end."""
        for output in outputs:
            known = self.known.get(output.id)
            if known is None:
                wrong(f"an output of {output.id}, which was not added")
            own = known.outputs.setdefault(output.index, [])
            if own and own[-1].finish is not None:
                wrong(f"request {output.id}, continuation {output.index}: an output after its last one")
            own.append(output)
            known.versions.setdefault(output.index, []).extend([len(self.weights) - 1] * len(output.tokens))
            if output.prompt_logprobs:
                known.scored = len(self.weights) - 1
            if output.finish is not None:
                self._version()
                self.compare(known, output.index)

    def end(self) -> None:
        """Run until nothing is left; then nothing may be held but cached prefixes."""
        for _ in range(STEPS):
            if not self.engine.busy:
                break
            self.take(self.engine.step())
        else:
            wrong(f"after {STEPS} steps, {sorted(self.engine.requests)} have not ended")
        for known in self.known.values():
            for index in range(known.request.n):
                outputs = known.outputs.get(index, [])
                if not outputs or outputs[-1].finish is None:
                    wrong(f"request {known.request.id}, continuation {index} has no last output")
        check_rows(self.engine)
        stats = self.engine.stats()
        if stats.free_blocks + stats.cached_blocks != stats.blocks:
            wrong(f"{stats.free_blocks} free and {stats.cached_blocks} cached blocks of {stats.blocks}")
        give_back(self.name, self.model)

    def compare(self, known: Known, index: int) -> None:
        """Compare a continuation with a fresh object."""
        request, outputs = known.request, known.outputs[index]
        tokens = [token for output in outputs for token in output.tokens]
        finish = outputs[-1].finish
        what = f"request {request.id}, continuation {index}"
        if finish in ("error", "refused"):
            wrong(f"{what}: {finish}, {outputs[-1].message}")
        if not tokens and request.prompt_logprobs is None:
            if finish != "abort":
                wrong(f"{what}: ended by {finish} without a token")
            return
        logits = self.logits(known, index, tokens)
        prompt = list(START) if self.model.part.encoder is not None else list(request.prompt)
        first = 0 if self.model.part.encoder is not None else len(prompt) - 1
        sampling = dc.replace(request.sampling, seed=request.sampling.seed + index)
        matcher = grammars().matcher(request.grammar) if request.grammar else None
        for i, token in enumerate(tokens):
            allowed = _allowed(request, matcher, logits[first + i], i)
            (want,) = sample_tokens(allowed[None], [sampling], [prompt], [tokens[:i]])
            if token != want:
                wrong(f"{what}: token {i} is {token}, and {want} of a fresh model; all: {tokens}")
            if matcher is not None:
                matcher.push(token)
            ends = token in request.stop or (matcher is not None and matcher.finished)
            if ends and (i + 1 < len(tokens) or finish not in ("stop", "abort")):
                wrong(f"{what}: token {i} ends it, and it ended by {finish} after {len(tokens)} tokens")
        if finish == "length" and len(tokens) != request.max_tokens:
            wrong(f"{what}: {len(tokens)} tokens of {request.max_tokens}")
        scores = torch.log_softmax(logits, -1)
        self.compare_logprobs(
            what, [one for output in outputs for one in output.logprobs], tokens, scores[first:], request.logprobs
        )
        if index == 0 and request.prompt_logprobs is not None and (finish != "abort" or tokens):
            scored = [one for output in outputs for one in output.prompt_logprobs]
            version = self.weights[known.scored]
            assert version is not None
            of = logits_of(self.name, version, request.prompt, tokens or [0], known.adapter, self.cache)
            self.compare_logprobs(f"{what}, prompt", scored, prompt[1:], torch.log_softmax(of, -1), request.prompt_logprobs)

    def logits(self, known: Known, index: int, tokens: list[int]) -> Tensor:
        """The logits (n, vocab) before each token, each by the weights under which it was sampled."""
        versions = known.versions.get(index, [])
        prompt, adapter = known.request.prompt, known.adapter
        made: Tensor | None = None
        for number in sorted({*versions, len(self.weights) - 1}):
            model = self.weights[number]
            assert model is not None
            of = logits_of(self.name, model, prompt, tokens or [0], adapter, self.cache)
            made = of.clone() if made is None else made
            for i, version in enumerate(versions):
                if version == number:
                    made[i - len(versions)] = of[i - len(versions)]
        assert made is not None
        return made

    def compare_logprobs(self, what: str, got: list[Any], tokens: list[int], scores: Tensor, top: int | None) -> None:
        """Compare reported log-probs with those of a fresh model."""
        if [one.token for one in got] != (tokens if top is not None else []):
            wrong(f"{what}: log-probs of {[one.token for one in got]} for the tokens {tokens}")
        for i, one in enumerate(got):
            if abs(one.logprob - float(scores[i, one.token])) > CLOSE * max(1.0, abs(one.logprob)):
                wrong(f"{what}: log-prob {one.logprob} of token {i}, {float(scores[i, one.token])} of a fresh model")


def _allowed(request: Request, matcher: Matcher | None, logits: Tensor, number: int) -> Tensor:
    """The logits that the grammar, and the least number of tokens, leave."""
    if matcher is not None:
        logits = masked(logits, matcher.mask())
    if request.stop and number < request.min_tokens:
        longer = logits.index_fill(0, torch.tensor(sorted(request.stop)), float("-inf"))
        return longer if bool(longer.isfinite().any()) else logits
    return logits
