"""What the author of an external part would run: every law on sampled specs with the part. One JSON object on stdout.

    python hold_offset.py            the laws on every spec; `--plant` breaks the part first, and the laws must see it

A process of its own, in which the package counts as installed: nothing here imports it but to break it.
"""

from __future__ import annotations

import dataclasses as dc
import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import torch

from dovetail.files.spec import from_yaml, to_yaml
from dovetail.model.model import Model
from dovetail.proof.laws.case import LAWS
from dovetail.proof.laws.cover import PairCover, all_factors, pins
from dovetail.proof.laws.oracle import check_oracles
from dovetail.proof.laws.suite import try_spec
from dovetail.spec.part import KINDS, walk_spec

KIND = "offset"
DECODER = """
width: 28
vocab: 62
layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]
"""
WINDOWS = """
width: 28
vocab: 62
layers:
  - mixer: {heads: 6, kv_heads: 2, head: 12, softcap: 2.0, mask: [causal, {kind: window, size: 5, keep: 1}]}
  - mixer: {heads: 6, kv_heads: 1, head: 12, sink: true, packed: true}
"""
BOTH_WAYS = """
width: 28
vocab: 62
encoder:
  width: 22
  vocab: 62
  head: null
  layers: [{mixer: {heads: 6, kv_heads: 2, head: 10, mask: full}, ffn: {kind: mlp, hidden: 36}}]
layers:
  - {repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, cross: {kind: cross_attention, heads: 4, head: 10}, ffn: {hidden: 44}}
"""


def written() -> Iterator[Model]:
    """A few specs by hand, the part swapped in."""
    for text in (DECODER, WINDOWS, BOTH_WAYS):
        yield from_yaml(text).swap("position", KINDS[KIND](start=0.3))


def drawn() -> Iterator[Model]:
    """A legal spec for every factor that the part brings along: its kind in a mixer, each sample of its field."""
    cover = PairCover(0)
    for factor in all_factors():
        brought = factor.value == KIND if factor.kind else factor.node.endswith(f"={KIND}")
        spec = cover.best(pins(factor), {factor}) if brought else None
        if spec is not None:  # none where it cannot stand: cross attention takes no position
            yield spec


def tried(spec: Model, names: list[str]) -> dict[str, Any]:
    """Laws on one spec, as plain data."""
    text = to_yaml(spec)
    holds = sum(part.kind == KIND for _, part in walk_spec(spec))
    return {"spec": text, "holds": holds, "laws": [dc.asdict(outcome) for outcome in try_spec(text, names)]}


def flat_at_decode(whole: Any) -> Any:
    """The part's score with a known bug: nothing at all where there is one query."""
    return lambda self, q, k, *tables: whole(self, q, k, *tables) * (q.n > 1)


def main() -> None:
    """Try them all."""
    torch.set_num_threads(1)
    if "--plant" in sys.argv:
        module = KINDS[KIND].module
        assert module is not None
        with patch.object(module, "score", flat_at_decode(module.score)):
            rows = [tried(from_yaml(DECODER).swap("position", KINDS[KIND]()), ["chunked", "causal"])]
    else:
        rows = [tried(spec, list(LAWS)) for spec in (*written(), *drawn())]
    print(json.dumps({"rows": rows, "oracles": [str(failure) for failure in check_oracles([KIND])]}))


if __name__ == "__main__":
    main()
