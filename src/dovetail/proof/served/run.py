"""Open a server, announce what will be asked, and test the laws on it."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Sequence
from typing import Any

from dovetail.base.limits import ANSWER_SECONDS
from dovetail.proof.served import features, function
from dovetail.proof.served.case import LONGEST, SERVED, Served
from dovetail.proof.served.client import DryRun, HttpClient
from dovetail.proof.served.quirks import QuirkProbe, Quirks
from dovetail.text.tokenizer import Tokenizer

__all__ = ["SERVED", "RequestPlan", "Served", "calibrated", "features", "function", "opened", "planned"]

PATIENCE, MOST_SECONDS = 10.0, 1200.0


@dc.dataclass(frozen=True)
class RequestPlan:
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
    quirks, prompts = QuirkProbe(client, tokenizer, seed).run(model)
    client.http.seconds = limit_of(quirks)
    return Served(client, quirks, prompts, dtype=dtype, exact=exact, other=other)


def limit_of(quirks: Quirks) -> float:
    """The seconds that one request may take: PATIENCE times what the speed of the server gives for the longest one.

    A slow server is not a wrong one: at a fixed limit a busy machine would fail a law.
    """
    expected = quirks.seconds + LONGEST * quirks.token_seconds
    return min(max(ANSWER_SECONDS, PATIENCE * expected), MOST_SECONDS)


def planned(case: Served, names: Sequence[str]) -> RequestPlan:
    """Count what calibration and these laws will ask."""
    client = DryRun()

    def dry(served: Served) -> Served:
        other = None if served.other is None else dry(served.other)
        prompts = type(served.prompts)(served.prompts.pool, served.prompts.tokenizer)
        return Served(client, served.quirks, prompts, dtype=served.dtype, exact=served.exact, other=other)

    copy = dry(case)
    calibrated(copy)
    for name in names:
        SERVED.test(name, copy)
    seconds = client.requests * case.quirks.seconds + client.new_tokens * case.quirks.token_seconds
    return RequestPlan(client.requests, client.prompt_tokens, client.new_tokens, seconds)


def calibrated(case: Served) -> Served:
    """Measure the noise of the server, and of the one that it is compared with."""
    for served in (case, case.other):
        if served is not None:
            served.calibrate()
    return case
