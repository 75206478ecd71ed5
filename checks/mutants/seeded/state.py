"""Seeded bugs of the pool: roll-backs in a row, rows without a token, refused steps, forks, marks, pages that leak.

Law 19 must see each of them: chunks, one roll-back and one fork (laws 4 and 7) never lead to them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from dovetail.base.errors import StateError
from dovetail.files.spec import from_yaml
from dovetail.nn import rows
from dovetail.nn.layout import TokenLayout
from dovetail.proof.laws.mutant import Mutant, instead, spec
from dovetail.state import pool as pool_module
from dovetail.state.pool import Pool, Step
from dovetail.state.slots import NO_COPIES, Contiguous, Copies, Paged, Ring

_step, _fork, _rollback, _to_mark = Pool.step, Pool.fork, Pool.rollback, Pool._to_mark
_rows_of, _check, _reserve = rows._rows_of, Paged.check, Paged.reserve

RECURRENT = """
width: 28
vocab: 62
layers: [{mixer: {kind: %s}, ffn: {hidden: 44}}, {mixer: {heads: 6, kv_heads: 2, head: 12}, ffn: {hidden: 44}}]
head: {kind: lm, tied: false}
"""


def rewind_from_the_length(self: Ring, length: int, written: int, n: int) -> bool:
    return length - n <= self.slack or length <= self.size


def ring_rewinds_its_window(self: Ring, length: int, written: int, n: int) -> bool:
    return written - n <= self.turn or written <= self.size


def last_rows_without_a_token_dropped(layout: TokenLayout) -> rows.SequenceRows:
    bare = layout if layout.row is None else TokenLayout(layout.coords, layout.order, layout.seg, layout.row)
    return _rows_of(bare)


def pages_kept_by_a_refused_step(self: Paged, all_rows: Sequence[int], lengths: Sequence[int], new: Sequence[int]) -> None:
    for row, length, n in zip(all_rows, lengths, new, strict=True):
        if (
            len(self.free) < -(-(length + n) // self.page) - len(self.owned[row])
            or length + n > self.table.shape[1] * self.page
        ):
            raise StateError("no page is free")
        _reserve(self, [row], [length], [n])


def checked_row_by_row(self: Paged, all_rows: Sequence[int], lengths: Sequence[int], new: Sequence[int]) -> None:
    for row, length, n in zip(all_rows, lengths, new, strict=True):
        if -(-(length + n) // self.page) > min(self.table.shape[1], len(self.owned[row]) + len(self.free)):
            raise StateError("no page is free")


def length_counted_before_the_check(self: Pool, all_rows: Sequence[int], new: Sequence[int], *how: Any) -> Step:
    try:
        return _step(self, all_rows, new, *how)
    except StateError:
        self.lengths[all_rows[0]] += new[0]
        raise


def page_copied_by_a_refused_step(self: Paged, all_rows: Sequence[int], lengths: Sequence[int], new: Sequence[int]) -> None:
    try:
        _check(self, all_rows, lengths, new)
    except StateError:
        _reserve(self, all_rows[:1], lengths[:1], [1])
        raise


def capacity_ignored(self: Contiguous, all_rows: Sequence[int], lengths: Sequence[int], new: Sequence[int]) -> None:
    return None


def marks_lost(self: Pool, a: int, b: int) -> None:
    _fork(self, a, b)
    self.marks[b] = []


def marks_aliased(self: Pool, a: int, b: int) -> None:
    _fork(self, a, b)
    self.marks[b] = self.marks[a]


def written_not_copied(self: Pool, a: int, b: int) -> None:
    _fork(self, a, b)
    self.written[b] = self.lengths[b]


def marks_survive_a_rollback(self: Pool, row: int, n: int) -> int:
    marks = self.marks[row]
    reached = _rollback(self, row, n)
    self.marks[row] = marks
    return reached


def first_mark_restored(self: Pool, row: int, n: int) -> int:
    self.marks[row] = self.marks[row][:1]
    return _to_mark(self, row, n)


def mark_forgets_what_was_written(self: Pool, row: int, n: int) -> int:
    reached = _to_mark(self, row, n)
    self.written[row] = reached
    return reached


def pages_never_given_back(self: Paged, row: int, n: int) -> None:
    del self.owned[row][-(-n // self.page) :]


def shared_pages_counted_once(self: Paged, a: int, b: int, length: int) -> Copies:
    self.rewind(b, 0)
    self.owned[b] = list(self.owned[a])
    self.table[b] = self.table[a]
    return NO_COPIES


def row_overwritten_by_a_fork_keeps_its_pages(self: Paged, a: int, b: int, length: int) -> Copies:
    self.owned[b] = list(self.owned[a])
    self.table[b] = self.table[a]
    for page in self.owned[a]:
        self.uses[page] += 1
    return NO_COPIES


def source_stays_behind(self: Pool, a: int, b: int) -> None:
    length = self.source_lengths[b]
    _fork(self, a, b)
    self.source_lengths[b] = length


def rows_in_sorted_order(self: Pool, all_rows: Sequence[int], new: Sequence[int], *how: Any) -> Step:
    return _step(self, sorted(all_rows), new, *how)


def orders_count_from_the_longest_row(lengths: Sequence[int], new: Sequence[int], flat: bool, device: Any) -> TokenLayout:
    if flat:
        return TokenLayout.flat(new, lengths, device)
    return TokenLayout.whole(len(lengths), max(new), device, start=max(lengths))


def written_forgotten_at_every_rollback(self: Pool, row: int, n: int) -> int:
    reached = _rollback(self, row, n)
    self.written[row] = reached
    return reached


def mutants() -> list[Mutant]:
    """The seeded bugs of this area."""
    window = spec(mask=["causal", {"kind": "window", "size": 5}])
    recurrent = {kind: from_yaml(RECURRENT % kind) for kind in ("s4", "lstm", "gru", "rnn")}
    cross = from_yaml(
        "{width: 28, vocab: 62, encoder: {width: 24, vocab: 62, head: null, layers: [{mixer: {heads: 2, mask: full}}]},"
        " layers: [{repeat: 2, mixer: {heads: 6, kv_heads: 2, head: 12}, cross: {kind: cross_attention, heads: 4}}]}"
    )
    table: list[tuple[str, Callable[..., Any], Any]] = [
        (
            "a ring compares a roll-back with its current length",
            instead(Ring, "can_rewind", rewind_from_the_length),
            window,
        ),
        ("a ring rewinds further than its slack", instead(Ring, "can_rewind", ring_rewinds_its_window), window),
        ("a roll-back forgets what was written", instead(Pool, "rollback", written_forgotten_at_every_rollback), window),
        ("a fork does not copy what was written", instead(Pool, "fork", written_not_copied), window),
        ("a mark forgets what was written", instead(Pool, "_to_mark", mark_forgets_what_was_written), window),
        ("a fork loses its marks", instead(Pool, "fork", marks_lost), window),
        ("a fork shares its list of marks", instead(Pool, "fork", marks_aliased), recurrent["gru"]),
        ("marks survive the tokens they mark", instead(Pool, "rollback", marks_survive_a_rollback), recurrent["gru"]),
        ("the first mark is restored, not the last", instead(Pool, "_to_mark", first_mark_restored), recurrent["gru"]),
        ("a refused step keeps the pages of its first row", instead(Paged, "check", pages_kept_by_a_refused_step), None),
        ("the pages of a step are checked row by row", instead(Paged, "check", checked_row_by_row), None),
        ("a refused step copies a page that a fork shares", instead(Paged, "check", page_copied_by_a_refused_step), None),
        ("a refused step counts its tokens", instead(Pool, "step", length_counted_before_the_check), None),
        ("a full row is not refused", instead(Contiguous, "check", capacity_ignored), None),
        ("the pages of a freed row stay taken", instead(Paged, "rewind", pages_never_given_back), None),
        ("a page shared by a fork is counted once", instead(Paged, "fork", shared_pages_counted_once), None),
        ("a row that a fork replaces keeps its pages", instead(Paged, "fork", row_overwritten_by_a_fork_keeps_its_pages), None),
        ("a fork reads the encoder output of the row it replaced", instead(Pool, "fork", source_stays_behind), cross),
        ("rows of a step are sorted, their tokens are not", instead(Pool, "step", rows_in_sorted_order), None),
        ("rows of different lengths share one order", instead(pool_module, "_layout", orders_count_from_the_longest_row), None),
    ]
    empty = instead(rows, "_rows_of", last_rows_without_a_token_dropped)
    table += [(f"a last row without a token is dropped ({kind})", empty, model) for kind, model in recurrent.items()]
    return [Mutant(name, "programs", seed, spec() if model is None else model) for name, seed, model in table]
