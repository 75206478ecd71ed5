"""A sweep that leaves out the tokens before an intervention and one that leaves out none: a part of law 28, looking.

    logits of a batch of patched rows, from the cache of the run that is patched = of full forward passes with the same patch

Four taps of the spec, chosen by its digest, at five positions in three batches; both texts begin with the same tokens.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import torch

from dovetail.look.address import resolve
from dovetail.look.intervention import from_run
from dovetail.look.resumed import Resumed
from dovetail.look.tracer import Tracer, listened, trace
from dovetail.proof.laws.case import Case


@torch.no_grad()
def sweep_from_a_cache(case: Case, addresses: Sequence[str], positions: Sequence[int]) -> None:
    """Patch some taps at some tokens; an encoder–decoder is not swept, and other models without ids or logits are in full."""
    spec, first = case.spec, positions[0] + 1
    if spec.encoder is not None or not spec.embed.token_ids or spec.head is None:
        return
    inner, start = [address for address in addresses if not address.startswith("mtp.")], zlib.crc32(spec.key.encode())
    swept = dict.fromkeys(["layers.0.in", *(inner[(start + i * len(inner) // 3) % len(inner)] for i in range(3))])
    pairs = [positions[i : i + 2] for i in range(0, len(positions), 2)]
    targets = resolve(spec, [f"{address}[pos={'|'.join(map(str, pair))}]" for address in swept for pair in pairs])
    corrupt = case.inputs[:1]
    value = from_run(trace(case.model, torch.cat([corrupt[:, :first], case.inputs[1:2, first:]], 1), *swept))
    for some, got in Resumed(case.model, corrupt, None, targets, value, agrees=first).batches(2):
        patch = {target._replace(picks={**target.picks, "row": i}).key: value for i, target in enumerate(some)}
        want = listened(case.model, corrupt.repeat(len(some), 1), Tracer(spec, None, patch))
        case.same(got, want, f"a sweep of {some[0].key} and others, from a cache, and full forward passes")
