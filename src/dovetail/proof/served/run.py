"""Open a server, announce what will be asked, and test the laws on it."""

from __future__ import annotations

import dataclasses as dc
import time
from collections.abc import Sequence
from typing import Any

from dovetail.core.errors import DovetailError
from dovetail.core.limits import ANSWER_SECONDS
from dovetail.proof.laws.case import Broken, NotApplicable, chosen
from dovetail.proof.laws.outcome import Outcome
from dovetail.proof.served import features, function
from dovetail.proof.served.case import LONGEST, Served
from dovetail.proof.served.client import DryRun, HttpClient
from dovetail.proof.served.law import SERVED
from dovetail.proof.served.quirks import Probe, Quirks
from dovetail.text.tokenizer import Tokenizer

__all__ = ["SERVED", "Plan", "Served", "calibrated", "features", "function", "law_names", "opened", "planned", "try_law"]

PATIENCE, MOST_SECONDS = 10.0, 1200.0
NOTHING = (
    "no prompt could be compared: tokens with log-probs do not spell the text, or the text has other tokens when encoded again"
)


@dc.dataclass(frozen=True)
class Plan:
    """What a run will ask, at most: a dry run takes every law to its end."""

    requests: int
    prompt_tokens: int
    new_tokens: int
    seconds: float

    def line(self) -> str:
        """One line for a person."""
        tokens = f"{self.prompt_tokens:,} prompt tokens, {self.new_tokens:,} new tokens at most"
        return (
            f"{self.requests} requests, {tokens}, about {max(1, round(self.seconds))} s at the speed of one request at a time"
        )

    def data(self) -> dict[str, Any]:
        """Plain data for the report."""
        return {**dc.asdict(self), "seconds": round(self.seconds, 1)}


def law_names(only: Sequence[str] = ()) -> list[str]:
    """The names of these laws on servers, or of all, by number; FileError for an unknown name."""
    return chosen(SERVED, only)


def opened(
    url: str,
    *,
    model: str | None = None,
    key: str | None = None,
    tokenizer: Tokenizer | None = None,
    dtype: str | None = None,
    exact: bool = False,
    against: str | None = None,
    seed: int = 0,
) -> Served:
    """Ask a server what it offers, and the one that it is compared with."""
    other = None
    if against is not None:
        other = opened(against, model=model, key=key, tokenizer=tokenizer, dtype=dtype, seed=seed + 1)
    client = HttpClient(url, key=key)
    quirks, prompts = Probe(client, tokenizer, seed).run(model)
    client.seconds = limit_of(quirks)
    return Served(client, quirks, prompts, dtype=dtype, exact=exact, other=other)


def limit_of(quirks: Quirks) -> float:
    """The seconds that one request may take: PATIENCE times what the speed of the server gives for the longest one.

    A slow server is not a wrong one: at a fixed limit a busy machine would fail a law.
    """
    expected = quirks.seconds + LONGEST * quirks.token_seconds
    return min(max(ANSWER_SECONDS, PATIENCE * expected), MOST_SECONDS)


def planned(case: Served, names: Sequence[str]) -> Plan:
    """Count what calibration and these laws will ask."""
    client = DryRun()

    def dry(served: Served) -> Served:
        other = None if served.other is None else dry(served.other)
        prompts = type(served.prompts)(served.prompts.pool, served.prompts.tokenizer)
        return Served(client, served.quirks, prompts, dtype=served.dtype, exact=served.exact, other=other)

    copy = dry(case)
    calibrated(copy)
    for name in names:
        try_law(copy, name)
    seconds = client.requests * case.quirks.seconds + client.new_tokens * case.quirks.token_seconds
    return Plan(client.requests, client.prompt_tokens, client.new_tokens, seconds)


def calibrated(case: Served) -> Served:
    """Measure the noise of the server, and of the one that it is compared with."""
    for served in (case, case.other):
        if served is not None:
            served.calibrate()
    return case


def try_law(case: Served, name: str) -> Outcome:
    """Test one law on one server. A server that stops answering fails the law."""
    begin = time.perf_counter()
    try:
        with case.law() as summary:
            note = SERVED[name].check(case)
        state, detail = "passed", "; ".join(part for part in (summary(), note) if part)
        if not case.compared:
            state, detail = "not applicable", NOTHING
    except NotApplicable as reason:
        state, detail = "not applicable", str(reason)
    except Broken as broken:
        state, detail = "failed", str(broken)
    except (DovetailError, IndexError) as error:  # IndexError: an answer without steps where others had some
        state, detail = "failed", str(error) if isinstance(error, DovetailError) else "an answer has no log-probs"
    return Outcome(name, state, detail, round(time.perf_counter() - begin, 2))
