"""Seeded bugs of the KV cache: its declared size, writes, rings, pages, roll-back and forks."""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from dovetail.account import BYTES, Account
from dovetail.nn.layout import TokenLayout
from dovetail.parts.mixer.attention import Attention
from dovetail.proof.laws.mutant import Mutant, instead, spec
from dovetail.spec.weight import State
from dovetail.state import frame, pages, slots
from dovetail.state.pool import Pool

_append, _state, _copy, _flat_pieces = frame.TokenView.append, Attention.state, pages.Scratch.copy, pages.flat_pieces
_stale: dict[Any, Any] = {}


def windows_ignored(self: State, n: int) -> int:
    return n


def one_kv_head_per_query_head(self: Attention, scope: Any) -> list[State]:
    return [dc.replace(s, axes=("heads", "head")) for s in _state(self, scope)]


def one_place_for_all(self: pages.Scratch, number: int, stored: Tensor, index: Tensor) -> Tensor:
    return _copy(self, 0, stored, index)


def pages_of_the_first_row(table: Tensor, lengths: list[int], new: list[int]) -> list[pages.PageRows]:
    return _flat_pieces(table[:1].expand_as(table), lengths, new)


def all_state_narrow(self: Account, n: int) -> int:
    return self.state_values(n) * BYTES[self.dtype]


def decoded_keys_not_written(self: frame.TokenView, layout: TokenLayout, *new: Tensor) -> Any:
    return _append(self, layout, *(torch.zeros_like(x) if layout.n == 1 else x for x in new))


def stale_mask(self: TokenLayout, queries: TokenLayout, key: Any, make: Callable[..., Any], *given: Any) -> Any:
    return _stale.setdefault((key, self.n, queries.n), make(*given))


def ring_too_short(self: slots.Ring, held: int) -> list[int]:
    first = range(min(self.keep, held))
    return [*first, *range(max(len(first), held - self.turn + self.slack + 1), held)]


def ring_keeps_no_first_tokens(self: slots.Ring, row: Tensor, position: Tensor) -> Tensor:
    return row * self.size + position % self.size


def rollback_without_effect(self: Pool, row: int, n: int) -> int:
    return n


def mark_ignored(self: Pool, row: int, n: int) -> int:
    return n


def shared_pages_written(self: slots.Paged, rows: list[int], lengths: list[int], new: list[int]) -> slots.Copies:
    for row, length, n in zip(rows, lengths, new, strict=True):
        owned = self.owned[row]
        owned += [self._take() for _ in range(-(-(length + n) // self.page) - len(owned))]
        self.table[row, : len(owned)] = torch.tensor(owned, dtype=torch.long)
    return slots.NO_COPIES


def fork_copies_nothing(self: slots.Contiguous, a: int, b: int, held: int) -> slots.Copies:
    return slots.NO_COPIES


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    window = spec(mask=["causal", {"kind": "window", "size": 5, "keep": 1}])
    plain_window = spec(mask=["causal", {"kind": "window", "size": 5}])
    return [
        Mutant(
            "the declared KV cache ignores windows",
            "declared",
            instead(State, "entries", windows_ignored),
            plain_window,
            "hf-mem#61",
        ),
        Mutant(
            "the KV cache is declared with as many KV heads as query heads",
            "declared",
            instead(Attention, "state", one_kv_head_per_query_head),
            report="hf-mem#61",
        ),
        Mutant(
            "the forecast counts float32 state as bfloat16",
            "declared",
            instead(Account, "state_bytes", all_state_narrow),
            spec().set("layers.0.mixer", {"kind": "mamba2", "inner": 36, "head": 6, "state_size": 5}),
        ),
        Mutant(
            "a decoded key is never written",
            "chunked",
            instead(frame.TokenView, "append", decoded_keys_not_written),
            report="TransformerLens#776",
        ),
        Mutant(
            "a window is wrong once its ring has filled",
            "chunked",
            instead(slots.Ring, "positions", ring_too_short),
            window,
            "transformers#37574",
        ),
        Mutant(
            "a ring overwrites the first tokens that it should keep",
            "chunked",
            instead(slots.Ring, "slot", ring_keeps_no_first_tokens),
            window,
            "vllm#3385",
        ),
        Mutant(
            "the mask of an earlier step is reused",
            "chunked",
            instead(TokenLayout, "once_for", stale_mask),
            plain_window,
            "x-transformers#311",
        ),
        Mutant("rolling back does nothing", "rollback", instead(Pool, "rollback", rollback_without_effect)),
        Mutant("a wrapped ring is not restored to its mark", "rollback", instead(Pool, "_to_mark", mark_ignored), window),
        Mutant("a page shared by a fork is written to", "rollback", instead(slots.Paged, "reserve", shared_pages_written)),
        Mutant("keys and values are copied to one place", "chunked", instead(pages.Scratch, "copy", one_place_for_all)),
        Mutant(
            "a flat batch reads the pages of its first row", "chunked", instead(frame, "flat_pieces", pages_of_the_first_row)
        ),
        Mutant("a fork copies nothing", "rollback", instead(slots.Contiguous, "fork", fork_copies_nothing)),
    ]
