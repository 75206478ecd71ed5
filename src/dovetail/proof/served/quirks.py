"""What a server offers, found by asking: ids or text, log-probs, echo, salts, n, seeds, streams.

Each question is one or two small requests. A field that a server refuses is not sent again; a feature that it lacks is recorded
with the reason, and the laws that need it are not applicable. Sampling fields are always sent in full, since a server may take
its defaults from a file of the model.
"""

from __future__ import annotations

import dataclasses as dc
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

from dovetail.base.errors import FileError, names_or_nearest
from dovetail.proof.answers import Answer, UnreadableAnswer
from dovetail.proof.http import BadStatus
from dovetail.proof.laws.law import NotApplicable
from dovetail.proof.served.client import HttpClient, timed
from dovetail.proof.served.prompts import Prompts, ServedPrompt
from dovetail.text.tokenizer import Tokenizer

SAMPLING = {"top_p": 1, "presence_penalty": 0, "frequency_penalty": 0}
EXTRAS: tuple[Mapping[str, Any], ...] = (
    {"top_k": -1, "min_p": 0, "repetition_penalty": 1, "repeat_penalty": 1},
    {"ignore_eos": True},
    {"return_tokens_as_token_ids": True},
    {"return_token_ids": True},
)
LOGPROBS: tuple[Mapping[str, Any], ...] = (
    {"logprobs": 20},
    {"logprobs": 5},
    {"logprobs": True, "top_logprobs": 10},
    {"logprobs": 1},
)
FIRST_IDS = (5, 6, 7, 8, 9, 10, 11, 12)  # ids that every vocabulary has
UNLIKELY = "~#~#~"  # a stop string that no answer has; plain characters, since a vocabulary may lack others
POOL_TOKENS = 64  # sampled from the server, to learn ids of its vocabulary
LENGTHS = (300, 140, 70, 40)  # prompts that are tried, the longest first
FLUSHES = ("/reset_prefix_cache", "/flush_cache")  # at the root of the server: vLLM, SGLang


@dc.dataclass
class Quirks:
    """What one server offers; `lacks` says why a feature cannot be tested."""

    model: str = ""
    ids: bool = False  # prompts as ids
    fields: dict[str, Any] = dc.field(default_factory=dict)  # sent with every request
    lists: bool = False  # several prompts per request
    longest: int = 0  # tokens of a prompt that it accepted
    cold: str = "first"  # how a prompt is sent past the prefix cache: salt, cache_prompt, flush; first: once only
    reports_cached: bool = False
    seconds: float = 0.0  # per request of one token
    token_seconds: float = 0.0  # per generated token
    lacks: dict[str, str] = dc.field(default_factory=dict)

    def need(self, *features: str) -> None:
        """Raise NotApplicable where the server lacks one of these features."""
        for feature in features:
            if feature in self.lacks:
                raise NotApplicable(self.lacks[feature])

    def data(self) -> dict[str, Any]:
        """Plain data for the report."""
        return {"model": self.model, "ids": self.ids, "cold": self.cold, "lists": self.lists, "lacks": self.lacks}


class QuirkProbe:
    """Asks one server what it offers."""

    def __init__(self, client: HttpClient, tokenizer: Tokenizer | None, seed: int) -> None:
        self.client, self.tokenizer, self.seed = client, tokenizer, seed
        self.quirks = Quirks()
        self.first = ServedPrompt(FIRST_IDS, FIRST_IDS)

    def run(self, model: str | None) -> tuple[Quirks, Prompts]:
        """Ask all questions."""
        quirks = self.quirks
        quirks.model = self._model(model)
        self._fields()
        prompts = self._prompts()
        self._length(prompts)
        self._cold(prompts)
        self._features(prompts)
        one, many = prompts.new(20), prompts.new(20)
        self.ask(one, 1)
        quirks.seconds = timed(lambda: self.ask(prompts.new(20), 1))[1]
        quirks.token_seconds = max(0.0, timed(lambda: self.ask(many, 17))[1] - quirks.seconds) / 16
        return quirks, prompts

    def ask(self, prompt: ServedPrompt, tokens: int, **more: Any) -> list[Answer]:
        """The choices of one request."""
        body = {"model": self.quirks.model, "prompt": prompt.data(), "max_tokens": tokens, "temperature": 0}
        return self.client.complete({**body, **self.quirks.fields, **more})

    def answers(self, prompt: ServedPrompt, tokens: int, **more: Any) -> list[Answer] | None:
        """The same; None where the server refuses."""
        try:
            return self.ask(prompt, tokens, **more)
        except (BadStatus, UnreadableAnswer):
            return None

    def _model(self, wanted: str | None) -> str:
        try:
            listed = self.client.http.get("/models").get("data")
        except FileError as error:  # mlx-lm without a cache of Hugging Face answers nothing
            if wanted is not None:
                return wanted
            if isinstance(error, BadStatus):
                raise FileError(f"{error}; name the model with --model") from error
            raise
        entries: Sequence[Any] = listed if isinstance(listed, list) else ()
        names = [str(entry["id"])[:300] for entry in entries[:1000] if isinstance(entry, dict) and "id" in entry]
        if wanted is None and not names:
            raise FileError(f"{self.client.http.url}: lists no model; name one with --model")
        if wanted is not None and names and wanted not in names:
            raise FileError(f"{self.client.http.url}: has no model {wanted!r}; {names_or_nearest(wanted, names, 'models')}")
        return wanted or names[0]

    def _fields(self) -> None:
        quirks = self.quirks
        quirks.ids = self.answers(self.first, 1) is not None
        if not quirks.ids:
            self.first = Prompts(None, self.tokenizer, self.seed).new(8)
            self.ask(self.first, 1)  # its error is the user's: the server completes neither ids nor text
        for extra in (SAMPLING, *EXTRAS):
            if self.answers(self.first, 1, **extra) is not None:
                quirks.fields |= extra
        for form in LOGPROBS:
            answers = self.answers(self.first, 2, **form)
            if answers and answers[0].steps and all(step.top for step in answers[0].steps):
                quirks.fields |= form
                break
        else:
            quirks.lacks["logprobs"] = "the server gives no log-probs"

    def _prompts(self) -> Prompts:
        """Learn ids of the vocabulary from a sample of the server."""
        quirks = self.quirks
        sampled = self.answers(self.first, POOL_TOKENS, temperature=1, seed=self.seed)  # a server may refuse seeds
        answer = (sampled or self.ask(self.first, POOL_TOKENS, temperature=1))[0]
        if not quirks.ids:
            if self.tokenizer is None:
                quirks.lacks["ids"] = "the server takes only text; give its tokenizer: --tokenizer DIR"
            return Prompts(None, self.tokenizer, self.seed)
        if answer.ids is None:
            quirks.lacks["ids"] = "the server gives no ids of the tokens that it generates"
        keys = {key for step in answer.steps for key in step.row() if isinstance(key, int)}
        pool = sorted({*FIRST_IDS, *(answer.ids or ()), *keys})
        return Prompts(pool, None, self.seed)

    def _length(self, prompts: Prompts) -> None:
        for length in LENGTHS:
            if self.answers(prompts.new(length), 1) is not None:
                self.quirks.longest = length
                return
        raise FileError(f"{self.client.http.url}: refuses prompts of {LENGTHS[-1]} tokens")

    def _cold(self, prompts: Prompts) -> None:
        """Find a field that sends a prompt past the prefix cache; believed where no cached tokens are reported."""
        quirks, prompt = self.quirks, prompts.new(self.quirks.longest)
        self.ask(prompt, 1)
        again = self.ask(prompt, 1)[0]
        quirks.reports_cached = again.cached is not None
        caches = (again.cached or 0) > 1  # a first token that all prompts share may count as cached
        for name, fields in (
            ("salt", lambda: {"cache_salt": uuid.uuid4().hex}),
            ("cache_prompt", lambda: {"cache_prompt": False}),
        ):
            answers = self.answers(prompt, 1, **fields())
            if answers and (not caches or (answers[0].cached or 0) <= 1):
                quirks.cold = name
                return
        for path in FLUSHES:
            if self.client.flush(path):
                quirks.cold = path
                return

    def _features(self, prompts: Prompts) -> None:
        quirks, short = self.quirks, prompts.new(12)
        quirks.lists = self._two(prompts)
        echo = self.answers(short, 1, echo=True)
        length = None if short.ids is None else len(short.ids)
        if not echo or "logprobs" in quirks.lacks or length is None or len(echo[0].steps) not in (length, length + 1):
            quirks.lacks["echo"] = "the server does not score prompts (echo with logprobs)"
        choices = self.answers(short, 2, n=2, temperature=1)
        if choices is None or len(choices) != 2:
            quirks.lacks["choices"] = "the server gives one choice where n is 2"
        pairs = [[self.answers(short, 8, temperature=1, seed=seed) for _ in range(2)] for seed in (11, 12)]
        if not any(a and b and a[0].text == b[0].text and a[0].tokens == b[0].tokens for a, b in pairs):
            quirks.lacks["seeds"] = "the server ignores seeds: two requests with one seed differ"
        try:
            self.client.stream(
                {"model": quirks.model, "prompt": short.data(), "max_tokens": 2, "temperature": 0, **quirks.fields}
            )
        except (BadStatus, UnreadableAnswer) as error:
            quirks.lacks["streams"] = f"the server does not stream ({error})"
        if self.answers(short, 2, stop=[UNLIKELY]) is None:
            quirks.lacks["stops"] = "the server refuses stop strings"

    def _two(self, prompts: Prompts) -> bool:
        """Whether it takes lists of prompts. Asked only where ids are taken: mlx-lm 0.32.2 ends by a list of strings."""
        if not self.quirks.ids:
            return False
        body = {"model": self.quirks.model, "max_tokens": 1, "temperature": 0, **self.quirks.fields}
        try:
            return len(self.client.complete({**body, "prompt": [prompts.new(9).data(), prompts.new(14).data()]})) == 2
        except (BadStatus, UnreadableAnswer):
            return False
