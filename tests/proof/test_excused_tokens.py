"""Tokens that routers excuse from the bound on rounding, against a plain count over random flips of both sides."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch

from dovetail.proof.compare.comparison import Flips, excused_tokens
from dovetail.proof.compare.prompt import Prompt

ROWS, N = 2, 7
PROMPT = Prompt(torch.zeros(ROWS, N, dtype=torch.long), N)
ROUTERS = ("layers.0.ffn.router", "layers.1.ffn.router", "layers.3.mixer.router")
ADDRESSES = ("embed", "layers.0", "layers.0.mixer.out", "layers.0.ffn.out", "layers.1.in", "layers.1.ffn", "layers.2", "head")


def naive(flips: Sequence[Flips], address: str, causal: bool) -> list[bool]:
    """Token by token: whether some side's flip at or before it lies on its way."""
    here = {"embed": -1, "head": 99}.get(address.partition(".")[0]) or int((address + ".0").split(".")[1])
    found = [[False] * N for _ in range(ROWS)]
    for path in {path for side in flips for path in side}:
        layer, branch = int(path.split(".")[1]), path.removesuffix(".router")
        behind = address == f"layers.{layer}" or address == branch or address.startswith(f"{branch}.")
        for row in range(ROWS):
            for token in (t for t in range(N) if any(bool(side[path].view(ROWS, N)[row, t]) for side in flips)):
                later = range(token if causal else 0, N)
                for reached in later if here > layer else [token] if here == layer and behind else []:
                    found[row][reached] = True
    return [token for row in found for token in row]


@pytest.mark.parametrize("causal", [True, False])
def test_a_token_is_excused_where_a_flip_of_either_side_reaches_it(causal: bool) -> None:
    for seed in range(40):
        draw = random.Random(seed)
        paths = draw.sample(ROUTERS, draw.randint(1, len(ROUTERS)))
        one, other = ({path: torch.tensor([draw.random() < 0.15 for _ in range(ROWS * N)]) for path in paths} for _ in "ab")
        for address in ADDRESSES:
            both, turned = (excused_tokens(pair, address, PROMPT, causal=causal) for pair in ((one, other), (other, one)))
            assert both.tolist() == turned.tolist() == naive((one, other), address, causal), (seed, address)
