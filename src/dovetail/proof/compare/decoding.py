"""Decode a prompt with a cache: one prefill, then token by token, recorded at the same taps as the whole pass.

    tokens   0 … n − STEPS − 1 | n − STEPS | … | n − 1          each piece sees the earlier ones through the cache alone

A side that decodes correctly gives the activations of its own whole pass.
"""

from __future__ import annotations

import contextlib
import dataclasses as dc
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.model.model import Model
from dovetail.proof.compare.float64 import float32_islands_widened
from dovetail.proof.compare.match import MatchedModule
from dovetail.proof.compare.prompt import Prompt
from dovetail.proof.compare.record import ANSWER, Recording, answer_of, record
from dovetail.spec.part import walk

STEPS = 16  # tokens that are decoded one by one
PROBE = 5  # tokens with which a cache is looked for
NO_CACHE = "it takes no cache"
Decoder = Callable[[Tensor], Any]  # the next token ids (batch, m) -> the answer for them (batch, m, …)


def decode_refusal(spec: Model, prompt: Prompt) -> str | None:
    """Why a model is not decoded; None where it can be."""
    if spec.order() != "causal" or not spec.embed.causal():
        return "the model is not a causal decoder"
    if spec.head is not None and spec.head.pools():
        return "the model gives one answer per row"
    if prompt.types is not None:
        return "the prompt has token types"
    if prompt.n < 2:
        return "the prompt has one token"
    reasons = (part.whole_prefill(scope) for _, part, scope in walk(spec))
    return next((reason for reason in reasons if reason), None)


@dc.dataclass(frozen=True)
class Cache:
    """How a module returns its cache, and how it takes it as an argument."""

    flags: Mapping[str, Any]  # the arguments that make the module return its cache
    argument: str
    place: str | int  # its key or index in the result of the module

    def of(self, out: Any) -> Any:
        """The cache in the result of a module."""
        return out[self.place]


def arguments_of(module: nn.Module) -> dict[str, inspect.Parameter]:
    """The arguments of a module's forward besides the token ids."""
    parameters = list(inspect.signature(module.forward).parameters.items())
    return {name: p for name, p in parameters[1:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}


def find_cache(
    call: Callable[..., Any], arguments: Mapping[str, inspect.Parameter], start: Tensor, following: Tensor
) -> Cache | None:
    """How a module returns and takes its cache, tried on the tokens `start` and those that follow; None where it has none."""
    switches = [{name: True} for name, parameter in arguments.items() if parameter.default is False]
    for flags in ({}, *switches, {"use_cache": True} if "use_cache" in arguments else {}):
        with contextlib.suppress(Exception):
            cache = _cache_with(flags, call, arguments, start, following)
            if cache is not None:
                return cache
    return None


def _cache_with(
    flags: Mapping[str, Any],
    call: Callable[..., Any],
    arguments: Mapping[str, inspect.Parameter],
    start: Tensor,
    following: Tensor,
) -> Cache | None:
    out = call(start, **flags)
    if isinstance(out, Mapping):  # an output with the name of an argument
        named = (name for name, value in out.items() if name in arguments and value is not None)
        return next((Cache(flags, name, name) for name in named if name not in ("logits", "loss")), None)
    places = range(1, len(out)) if isinstance(out, (tuple, list)) else ()
    for place, name in [(i, name) for i in places for name, p in arguments.items() if p.default is None]:
        with contextlib.suppress(Exception):
            later = answer_of(call(following, **flags, **{name: out[place]}))
            if not later.equal(answer_of(call(following, **flags))):
                return Cache(flags, name, place)
            out = call(start, **flags)  # the call may have changed the cache in place
    return None


def cached_decoder(
    call: Callable[..., Any], arguments: Mapping[str, inspect.Parameter], ids: Tensor, answer: Callable[[Any], Tensor]
) -> Decoder | str:
    """Decode with a module that returns its cache and takes it back, found out on the first of these tokens."""
    first = max(1, min(PROBE, ids.shape[1] - 1))
    cache = find_cache(call, arguments, ids[:, :first], ids[:, first : first + 1])
    if cache is None:
        return NO_CACHE
    kwargs = dict(cache.flags)

    def step(ids: Tensor) -> Tensor:
        out = call(ids, **kwargs)
        kwargs[cache.argument] = cache.of(out)
        return answer(out)

    return step


@torch.no_grad()
def run_decoding(
    decoder: Callable[[nn.Module, Prompt], Decoder | str],
    module: nn.Module,
    prompt: Prompt,
    dtype: torch.dtype,
    places: Sequence[MatchedModule],
    sizes: Mapping[str, int],
) -> Recording | str:
    """Decode the prompt and record every tap over all tokens; a string says why the side is not decoded."""
    pieces: list[Recording] = []
    with float32_islands_widened(dtype):
        step = decoder(module.eval(), prompt)
        if isinstance(step, str):
            return step
        prefill = max(1, prompt.n - STEPS)
        for ids in prompt.inputs.split([prefill, *[1] * (prompt.n - prefill)], 1):
            with record(module, places, sizes, (prompt.batch, ids.shape[1])) as piece:
                answer = step(ids)
            piece.taps[ANSWER] = answer.detach()
            pieces.append(piece)
    return _joined(pieces, prompt.batch)


def _joined(pieces: Sequence[Recording], batch: int) -> Recording:
    """One recording over all tokens; taps that do not have one row per token in every piece are left out."""
    joined = Recording(alias=dict(pieces[0].alias))
    for address in pieces[0].taps:
        parts = [piece.taps.get(address) for piece in pieces]
        rows = [x.reshape(batch, -1, x.shape[-1]) for x in parts if x is not None and x.shape[0] % batch == 0]
        if len(rows) == len(pieces):
            joined.taps[address] = torch.cat(rows, 1).flatten(0, 1)
    return joined
