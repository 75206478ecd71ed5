"""Decode a prompt with a cache: one prefill, then token by token, recorded at the same taps as the whole pass.

    tokens   0 … n − STEPS − 1 | n − STEPS | … | n − 1          each piece sees the earlier ones through the cache alone

A side that decodes correctly gives the activations of its own whole pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.core.part import walk
from dovetail.model import Model
from dovetail.proof.compare.float64 import float32_islands_widened
from dovetail.proof.compare.match import Place
from dovetail.proof.compare.prompt import Prompt
from dovetail.proof.compare.record import ANSWER, Recording, record

STEPS = 16  # tokens that are decoded one by one
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
    reasons = (part.excepts(scope).get("chunked") for _, part, scope in walk(spec))
    return next((reason for reason in reasons if reason), None)


def cached_decoder(call: Callable[..., Any], arguments: frozenset[str], answer: Callable[[Any], Tensor]) -> Decoder:
    """Decode with a model that returns its cache in a mapping, under the name of the argument that takes it back."""
    kwargs: dict[str, Any] = {"use_cache": True} if "use_cache" in arguments else {}

    def step(ids: Tensor) -> Tensor:
        out = call(ids, **kwargs)
        name = cache_name(out, arguments)
        if name is None:
            raise NoCache
        kwargs[name] = out[name]
        return answer(out)

    return step


class NoCache(Exception):
    """The model returns no cache."""


def cache_name(out: Any, arguments: frozenset[str]) -> str | None:
    """The entry of a model's output that is an argument too, as `past_key_values` or `cache_params`."""
    if not isinstance(out, Mapping):
        return None
    names = (name for name, value in out.items() if name in arguments and value is not None)
    return next((name for name in names if name not in ("logits", "loss")), None)


@torch.no_grad()
def run_decoding(
    decoder: Callable[[nn.Module, Prompt], Decoder | str],
    module: nn.Module,
    prompt: Prompt,
    dtype: torch.dtype,
    places: Sequence[Place],
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
                try:
                    answer = step(ids)
                except NoCache:
                    return "it returns no cache"
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
