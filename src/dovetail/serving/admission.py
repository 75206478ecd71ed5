"""Admission: requests that an engine can never run are refused when they are added, with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dovetail.core.errors import InputError
from dovetail.core.limits import REQUEST_N
from dovetail.serving.request import Request

if TYPE_CHECKING:
    from dovetail.serving.engine import Engine


def check_request(engine: Engine, request: Request) -> None:
    """Raise InputError where a request can never run."""
    spec, prompt, longest, pool = engine.model.part, request.prompt, engine.longest, engine.runner.pool
    encoder = spec.encoder is not None
    before = len(engine.start) if encoder else len(prompt)
    sizes = f"{before} tokens of the prompt and {request.max_tokens} new ones"
    rules = [
        (
            request.id in engine.requests or any(output.id == request.id for output in engine.late),
            f"id: {request.id!r} is running already",
        ),
        (not prompt, "prompt: is empty; give at least one token"),
        (
            min(prompt, default=0) < 0 or max(prompt, default=0) >= spec.vocab,
            f"prompt: has a token id outside 0 to {spec.vocab - 1}",
        ),
        (not 1 <= request.n <= REQUEST_N, f"n: {request.n} is not from 1 to {REQUEST_N}"),
        (
            request.max_tokens < (0 if request.prompt_logprobs is not None else 1),
            f"max_tokens: {request.max_tokens} is not 1 or more; 0 if the prompt is only scored",
        ),
        (
            encoder and (not engine.start or len(prompt) > longest),
            f"prompt: has {len(prompt)} tokens; at most {longest}, and a first decoder token, are needed",
        ),
        (before < pool.ahead, f"prompt: has {before} tokens; the first {pool.ahead} see each other, so give as many"),
        (before + request.max_tokens > longest, f"max_tokens: {sizes} are more than {longest}; shorten one of them"),
        (
            not engine.runner.fits(before + max(request.max_tokens, 1)),  # one is admitted with room for a token
            f"max_tokens: {before + request.max_tokens} tokens do not fit into the KV cache; request fewer",
        ),
    ]
    for never_runs, problem in rules:
        if never_runs:
            raise InputError(problem)
