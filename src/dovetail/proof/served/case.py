"""A case: one server under test, with its requests and comparisons."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from dovetail.base.errors import DovetailError
from dovetail.proof.answers import Answer, TokenStep
from dovetail.proof.laws.law import LawCase, Laws
from dovetail.proof.served.client import ServerClient
from dovetail.proof.served.noise import Noise, distance, row_gap
from dovetail.proof.served.prompts import Prompts, ServedPrompt
from dovetail.proof.served.quirks import FLUSHES, Quirks

TOKENS = 8  # generated per request, unless a law says otherwise
CALIBRATION = (12, 20, 33, 40, 47, 58, 70, 90)  # lengths of the prompts that measure the noise
PREFIXES = (3, 5, TOKENS - 1)  # generated tokens of an answer that a prompt ends with, where the noise is measured
MEASURED = (14, 28, 44, 60, 76, 86, 110, 150, 190, 230)  # lengths of prefixes of a sampled text, none at the edge of a block
START, LONGEST = 9, 258  # tokens of the prompt and of the whole text that a server samples
NOTHING = (
    "no prompt could be compared: tokens with log-probs do not spell the text, or the text has other tokens when encoded again"
)
SERVED = Laws()
law = SERVED.law


class Served(LawCase):
    """One server; `other` is a second one that should be the same function."""

    errors = (DovetailError, IndexError)  # a server that stops answering; an answer without steps where others had some
    nothing = ("not applicable", NOTHING)

    def __init__(
        self,
        client: ServerClient,
        quirks: Quirks,
        prompts: Prompts,
        *,
        dtype: str | None = None,
        exact: bool = False,
        other: Served | None = None,
    ) -> None:
        super().__init__()
        self.client, self.quirks, self.prompts, self.other = client, quirks, prompts, other
        self.dtype, self.exact = dtype, exact
        self.noise, self.bound = Noise(), 0.0
        self.flips, self.largest = 0, 0.0

    # -- asking

    def body(self, prompt: ServedPrompt, tokens: int = TOKENS, salt: str | None = None, **more: Any) -> dict[str, Any]:
        """The fields of a request. Requests with one salt share the prefix cache; without one, it is not used if it can be."""
        quirks = self.quirks
        cold = {"salt": {"cache_salt": salt or new_salt()}, "cache_prompt": {} if salt else {"cache_prompt": False}}
        fields = {"model": quirks.model, "prompt": prompt.data(), "max_tokens": tokens, "temperature": 0}
        return {**fields, **quirks.fields, **cold.get(quirks.cold, {}), **more}

    def ask(self, prompt: ServedPrompt, tokens: int = TOKENS, salt: str | None = None, **more: Any) -> Answer:
        """The first choice of one request, sent alone; greedy unless `more` says otherwise."""
        return self.choices(prompt, tokens, salt, **more)[0]

    def sample(self, prompt: ServedPrompt, tokens: int) -> Answer:
        """One request at temperature 1; the same tokens in every run against a server that takes seeds."""
        seed: dict[str, Any] = {} if "seeds" in self.quirks.lacks else {"seed": self.prompts.seed}
        return self.ask(prompt, tokens, temperature=1, **seed)

    def choices(self, prompt: ServedPrompt, tokens: int = TOKENS, salt: str | None = None, **more: Any) -> list[Answer]:
        """All choices of one request."""
        self._flush(salt)
        return self.client.complete(self.body(prompt, tokens, salt, **more))

    def stream(self, prompt: ServedPrompt, tokens: int = TOKENS, salt: str | None = None, **more: Any) -> Answer:
        """The streamed answer to one request."""
        self._flush(salt)
        return self.client.stream(self.body(prompt, tokens, salt, **more))

    def together(self, bodies: Sequence[dict[str, Any]]) -> list[Answer]:
        """The first choices of requests that are sent at once."""
        self._flush(None)
        return at_once([lambda body=body: self.client.complete(body)[0] for body in bodies])

    def listed(self, prompts: Sequence[ServedPrompt], tokens: int = TOKENS) -> list[Answer]:
        """The answers to several prompts of one request."""
        self._flush(None)
        body = self.body(prompts[0], tokens)
        return self.client.complete({**body, "prompt": [prompt.data() for prompt in prompts]})

    def _flush(self, salt: str | None) -> None:
        if salt is None and self.quirks.cold in FLUSHES:
            self.client.flush(self.quirks.cold)

    def lengths(self, *wanted: int) -> list[int]:
        """These lengths of prompts, without those that the server refuses."""
        return [length for length in wanted if length <= self.quirks.longest]

    @cached_property
    def sampled(self) -> tuple[ServedPrompt, Answer]:
        """The text of laws that need one."""
        return self.text()

    def text(self) -> tuple[ServedPrompt, Answer]:
        """A short prompt and a long text that the server sampled after it: the log-probs of each position, by decoding."""
        prompt = self.prompts.new(START)
        return prompt, self.sample(prompt, min(self.quirks.longest, LONGEST) - START)

    # -- noise

    def calibrate(self) -> None:
        """Measure how far rounding moves the log-probs of this server, and set the bound."""
        if "logprobs" in self.quirks.lacks:
            return
        prompts = [self.prompts.new(length) for length in self.lengths(*CALIBRATION)]
        alone = [self.ask(prompt) for prompt in prompts]
        again = [self.ask(prompt) for prompt in prompts]
        at_once = self.together([self.body(prompt) for prompt in prompts])
        prefill = [0.0]
        for prompt, answer in zip(prompts, alone, strict=True):
            for place in PREFIXES:
                longer = self.prompts.after(prompt, answer, place)
                if longer is None or place >= len(answer.steps):
                    continue
                ids = None if answer.ids is None else answer.ids[place : place + 1]
                prefill.append(distance(self.ask(longer, 1), Answer(answer.steps[place : place + 1], ids=ids)).gap)
        prefill += self._sampled_rows()
        repeat, concurrent = (
            max(distance(got, want).gap for got, want in zip(answers, alone, strict=True)) for answers in (again, at_once)
        )
        self.noise = Noise(repeat, concurrent, max(prefill))
        self.bound = self.noise.bound(self.dtype)

    def _sampled_rows(self) -> list[float]:
        """The differences between decoding and prefill in a sampled text: rows of the kind that laws 4 and 5 compare."""
        prompt, gaps = self.prompts.new(START), list[float]()
        text = self.sample(prompt, MEASURED[-1] - START + 1)
        for length in self.lengths(*MEASURED):
            longer = self.prompts.after(prompt, text, length - START)
            got = Answer() if longer is None or length - START >= len(text.steps) else self.ask(longer, 1)
            gaps += [row_gap(got.steps[0], text.steps[length - START])] if got.steps else []
        return gaps

    # -- comparing

    @property
    def batch_bound(self) -> float:
        """The bound where only neighbors and time differ: 0 for a server that promises not to depend on them."""
        return 0.0 if self.exact else self.bound

    def same(self, got: Answer, want: Answer, what: str, bound: float | None = None) -> None:
        """Require that two answers to one prompt differ by rounding at most, up to a flip between near-ties."""
        self.compared += 1
        bound, found = self.bound if bound is None else bound, distance(got, want)
        self.largest = max(self.largest, found.gap)
        if not found.gap <= bound:
            self.gap(f"{what}: log-probs of token {found.at} differ by {found.gap:.3g}; the bound is {bound:.3g}")
        elif found.flip is not None:
            if found.flip > 2 * bound:
                self.gap(f"{what}: token {found.tokens - 1} is another one, {found.flip:.3g} less likely")
            self.flips += 1
        elif len(got.tokens) != len(want.tokens):
            if "ignore_eos" not in self.quirks.fields and "stop" in (got.finish, want.finish):
                self.flips += 1  # one of them took the token that ends a text, whose log-prob is not shown
            else:
                self.gap(f"{what}: {len(got.tokens)} tokens and {len(want.tokens)}")
        elif not got.steps and got.text != want.text:
            self.gap(f"{what}: the texts differ")

    def same_row(self, got: TokenStep, want: TokenStep, what: str) -> None:
        """Require that the log-probs of one position differ by rounding at most, whichever token was chosen."""
        self.compared += 1
        gap = row_gap(got, want)
        self.largest = max(self.largest, gap)
        if not gap <= self.bound:
            self.gap(f"{what}: log-probs differ by {gap:.3g}; the bound is {self.bound:.3g}")

    def same_first(self, got: Answer, want: TokenStep, what: str) -> None:
        """The same for the first position of an answer; one that ends at once, with a token that is not shown, has none."""
        if got.steps or got.finish != "stop":
            self.same_row(got.steps[0], want, what)

    def reset(self) -> None:
        super().reset()
        self.flips, self.largest = 0, 0.0

    def summary(self) -> str:
        flips = f"; {self.flips} flips between near-ties" if self.flips else ""
        bound = f", the largest difference {self.largest:.2g} of {self.bound:.2g}" if self.largest or self.bound else ""
        return f"{self.compared} comparisons{bound}{flips}"

    def raised(self, error: Exception) -> str:
        return str(error) if isinstance(error, DovetailError) else "an answer has no log-probs"


def at_once(runs: Sequence[Callable[[], Answer]]) -> list[Answer]:
    """The results of calls that start together, each in a thread; the first error is raised."""
    results: list[Answer | BaseException] = [Answer()] * len(runs)
    start = threading.Barrier(len(runs))

    def go(i: int) -> None:
        start.wait()
        try:
            results[i] = runs[i]()
        except BaseException as error:
            results[i] = error

    threads = [threading.Thread(target=go, args=(i,), daemon=True) for i in range(len(runs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if isinstance(result, Answer)]


def new_salt() -> str:
    """A salt that no request had."""
    return uuid.uuid4().hex
