"""Seeded bugs of eviction: what stays, the scores of entries, their positions, roll-backs and forks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dovetail.decoding import eviction
from dovetail.decoding.eviction import Eviction
from dovetail.nn.groups import Mixer, Position
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.mutant import Mutant, instead
from dovetail.spec.part import KINDS, Part
from dovetail.state.attended import AttendedEntries, Kept
from dovetail.state.slots import Copies

_of_policy, _slot, _layouts = eviction._of_policy, AttendedEntries._slot, AttendedEntries._layouts


def sinks_beside_the_budget(mixer: Mixer, choice: Eviction) -> dict[str, Part]:
    changes = _of_policy(mixer, choice)
    window: Any = KINDS["window"]
    if choice.policy == "sinks":
        fields: Mapping[str, Any] = vars(mixer)
        changes["mask"] = fields["mask"] & window(size=choice.entries - 3, keep=3)
    return changes


def sinks_dropped(mixer: Mixer, choice: Eviction) -> dict[str, Part]:
    return _of_policy(mixer, Eviction("oldest", choice.entries) if choice.policy == "sinks" else choice)


def sinks_far_away(mixer: Mixer, choice: Eviction) -> dict[str, Part]:
    changes = _of_policy(mixer, choice)
    position = vars(mixer)["position"]
    if choice.policy == "sinks" and isinstance(position, Position):
        del changes["position"]
    return changes


def newest_evicted(self: AttendedEntries, t: Tensor, order: Tensor, score: Tensor) -> Tensor:
    return torch.where(t < self.view.budget, t, score.argmin(-1))


def most_attended_evicted(self: AttendedEntries, t: Tensor, order: Tensor, score: Tensor) -> Tensor:
    return _slot(self, t, order, -score)


def oldest_evicted(self: AttendedEntries, t: Tensor, order: Tensor, score: Tensor) -> Tensor:
    return torch.where(t < self.view.budget, t, order.argmin(-1))


def one_recent_entry_fewer(self: AttendedEntries, t: Tensor, order: Tensor, score: Tensor) -> Tensor:
    return torch.where(t < self.view.budget, t, _slot(self, t + 1, order, score))


def positions_of_the_sequence(self: AttendedEntries, t: Tensor, order: Tensor) -> tuple[TokenLayout, TokenLayout]:
    query, keys = _layouts(self, t, order)
    return query, TokenLayout.of(torch.where(keys.real, order, 0), keys.seg)


def positions_of_slots(self: AttendedEntries, t: Tensor, order: Tensor) -> tuple[TokenLayout, TokenLayout]:
    query, keys = _layouts(self, t, order)
    place = t[:, None] - torch.arange(order.shape[-1] - 1, -1, -1)
    return query, TokenLayout.of(torch.where(keys.real & (t >= self.view.budget)[:, None], place, keys.order), keys.seg)


def rewinds_without_a_mark(self: Kept, length: int, written: int, n: int) -> bool:
    return length - n <= 8


def half_of_a_row_forked(self: Kept, a: int, b: int, length: int) -> Copies:
    begin, to, count = a * self.budget, b * self.budget, self.budget // 2
    return list(range(begin, begin + count)), list(range(to, to + count))


def mutants() -> list[Mutant]:
    """The bugs of this file."""
    return [
        Mutant("a sink is lost", "evicted", instead(eviction, "_of_policy", sinks_beside_the_budget)),
        Mutant("sinks are evicted as all others", "evicted", instead(eviction, "_of_policy", sinks_dropped)),
        Mutant(
            "distances to sinks grow with the sequence",
            "evicted",
            instead(eviction, "_of_policy", sinks_far_away),
        ),
        Mutant("H2O may evict a recent entry", "evicted", instead(AttendedEntries, "_slot", newest_evicted)),
        Mutant("H2O evicts the most attended entry", "evicted", instead(AttendedEntries, "_slot", most_attended_evicted)),
        Mutant("H2O evicts the oldest entry", "evicted", instead(AttendedEntries, "_slot", oldest_evicted)),
        Mutant("H2O protects one recent entry too few", "evicted", instead(AttendedEntries, "_slot", one_recent_entry_fewer)),
        Mutant("H2O has positions of the sequence", "evicted", instead(AttendedEntries, "_layouts", positions_of_the_sequence)),
        Mutant("H2O takes the slot for the position", "evicted", instead(AttendedEntries, "_layouts", positions_of_slots)),
        Mutant("sums of probs stay after a roll-back", "evicted", instead(Kept, "can_rewind", rewinds_without_a_mark)),
        Mutant("a fork copies half of the entries", "evicted", instead(Kept, "fork", half_of_a_row_forked)),
    ]
