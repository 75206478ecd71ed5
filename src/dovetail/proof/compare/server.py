"""A server as the second side: its first token and its log-probs against ours. Nothing else of a server can be observed.

    POST {url}/completions   {"prompt": [ids], "max_tokens": 1, "temperature": 0, "logprobs": 5}

Tokens that the server names by a string (proof/answers.py) are turned into ids by the tokenizer of the first side.

The dtype of a server is not known. Its log-probs may differ from ours by ROOM times the error of our own bfloat16 run of the
same model; a larger difference is not rounding. A log-prob that is not finite is never equal to anything.

Answers are bounded in bytes and in total time, and redirects are not followed (http.py).
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable
from math import inf, isfinite
from typing import Any

import torch
from torch import Tensor

from dovetail.base.errors import FileError, printable
from dovetail.base.limits import ANSWER_SECONDS
from dovetail.proof.answers import MAX_KEY, Key, TokenStep, UnreadableAnswer, choices_of
from dovetail.proof.compare.comparison import EXACT, Progress, Status
from dovetail.proof.compare.prompt import Prompt
from dovetail.proof.compare.sides import Side, run
from dovetail.proof.http import Http, Refused
from dovetail.text.tokenizer import Tokenizer

TOP = 5  # log-probs that are asked for
ROOM = 4.0  # times our own bfloat16 error
LEAST = 0.02  # in log-prob: a difference that is always allowed


@dc.dataclass(frozen=True)
class ServerRow:
    """One prompt: the first token of either side, and the distance of the server's log-probs from ours."""

    ours: int
    theirs: int | None  # None: the string is not one token of ours
    text: str  # of the server's token
    gap: float
    allowed: float
    close: bool  # our two best tokens are closer than rounding can separate
    nonfinite: bool  # a log-prob of either side is NaN or infinite

    @property
    def differs(self) -> bool:
        """Whether the difference is more than rounding."""
        return self.nonfinite or not self.gap <= self.allowed or (self.ours != self.theirs and not self.close)

    def data(self) -> dict[str, Any]:
        """The row as JSON data; a gap that is not finite is null."""
        return {**dc.asdict(self), "gap": self.gap if isfinite(self.gap) else None, "apart": self.differs}


@dc.dataclass(frozen=True)
class ServerVerdict:
    """The result of a comparison with a server."""

    a: str
    b: str
    tokens: int
    rows: list[ServerRow]

    @property
    def status(self) -> Status:
        """The verdict in one word."""
        if any(row.nonfinite for row in self.rows):
            return "non-finite"
        return "structural" if any(row.differs for row in self.rows) else "equal"

    @property
    def failed(self) -> bool:
        """Whether the exit code is 1."""
        return self.status != "equal"

    def tested(self) -> str:
        """The line that says what was compared."""
        return f"{len(self.rows)} prompts of {self.tokens} tokens, the first token and up to {TOP} log-probs of each"

    def not_tested(self) -> str:
        """The line that says what was not compared."""
        return "activations, later tokens and decoding with a cache, padding and batches, sampling, the server's dtype"

    def data(self) -> dict[str, Any]:
        """The verdict as JSON data; a number that is not finite is null."""
        rows = [row.data() for row in self.rows]
        sides = {"a": self.a, "b": self.b, "verdict": self.status, "prompts": len(rows), "tokens": self.tokens}
        return {**sides, "tested": self.tested(), "not_tested": self.not_tested(), "rows": rows}


def compare_server(
    a: Side,
    url: str,
    prompt: Prompt,
    *,
    model: str | None = None,
    tokenizer: Tokenizer | None = None,
    seconds: float = ANSWER_SECONDS,
    progress: Progress = lambda line: None,
    watch: Callable[[int, ServerRow], None] = lambda number, row: None,
) -> ServerVerdict:
    """Ask the server for the first token after each prompt, and compare its log-probs with the first side's."""
    progress(f"{a.label}, float64")
    exact = _last_logprobs(a, prompt, EXACT)
    progress(f"{a.label}, bfloat16")
    coarse = _last_logprobs(a, prompt, torch.bfloat16)
    rows = []
    for i, ids in enumerate(prompt.inputs.tolist()):
        progress(f"{url}, prompt {i + 1} of {prompt.batch}")
        rows.append(compare_row(exact[i], coarse[i], ask(url, ids, model, seconds), tokenizer))
        watch(i, rows[-1])
    return ServerVerdict(a.label, url, prompt.n, rows)


def _last_logprobs(side: Side, prompt: Prompt, dtype: torch.dtype) -> Tensor:
    """(batch, vocab) log-probs of the token after each prompt."""
    answer = run(side, prompt, dtype, lambda module: (), {}).taps["answer"]
    return answer[:, -1].to(EXACT).log_softmax(-1)


def compare_row(exact: Tensor, coarse: Tensor, step: TokenStep, tokenizer: Tokenizer | None) -> ServerRow:
    """Compare one answer with our log-probs (vocab,) in float64 and in bfloat16."""
    text, best, theirs, row = printable(step.text, MAX_KEY), int(exact.argmax()), _id(step.token, tokenizer), step.row()
    known = {i: x for key, x in row.items() if (i := _id(key, tokenizer)) is not None and i < exact.shape[0]}
    if not (all(map(isfinite, row.values())) and bool(exact.isfinite().all() and coarse.isfinite().all())):
        return ServerRow(best, theirs, text, inf, LEAST, False, True)
    allowed = max(LEAST, ROOM * (exact - coarse)[torch.tensor([best, *known])].abs().max().item())
    first, second = exact.topk(2).values.tolist()
    gap = max((abs(logprob - exact[i].item()) for i, logprob in known.items()), default=inf)
    return ServerRow(best, theirs, text, gap, allowed, first - second <= 2 * allowed, False)


def _id(token: Key, tokenizer: Tokenizer | None) -> int | None:
    """The id of a token that a server names by id or by its string."""
    if isinstance(token, int):
        return token
    ids = [] if tokenizer is None or len(token) >= MAX_KEY else tokenizer.encode(token).tolist()
    return ids[0] if len(ids) == 1 else None


def ask(url: str, ids: list[int], model: str | None, seconds: float = ANSWER_SECONDS) -> TokenStep:
    """The first token after a prompt, with the log-probs of the likeliest ones."""
    body: dict[str, Any] = {"prompt": ids, "max_tokens": 1, "temperature": 0, "logprobs": TOP}
    if model is not None:
        body["model"] = model
    client = Http(url, seconds=seconds)
    try:
        answer = client.post("/completions", {**body, "return_tokens_as_token_ids": True})
    except Refused:  # a strict server: ask without the field that it may not know
        answer = client.post("/completions", body)
    try:
        steps = choices_of(answer)[0].steps
        if not steps or steps[0].logprob is None:
            raise UnreadableAnswer("its first token has none")
    except UnreadableAnswer as error:
        problem = "the answer holds no log-probs that can be read"
        raise FileError(f"{url}: {problem} ({error}); does the server offer them?") from error
    return steps[0]
