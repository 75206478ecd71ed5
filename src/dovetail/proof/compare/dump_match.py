"""Match the tensors of a dump with our activations, without a map from the user.

    by name     our names, or those of a family in transformers. A module that is fused in the engine (qkv, gate and up) is
                found beside the modules it replaces: its width is the sum of theirs, and its rows follow their order
    by value    names of no checkpoint (`Qcur-3`): numbers in a name stand for the layer, and the names of one pattern are
                matched with the address to which one of the layers is nearest

An activation may be stored in several forms, of which the nearest over all layers is taken: a sum (delta, residual) or its
first tensor; rotary pairs in halves or interleaved. The choice is one for all layers, so that a wrong layer does not hide
behind a form of its own.
"""

from __future__ import annotations

import dataclasses as dc
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.core.fold import declared
from dovetail.model import Model
from dovetail.proof.compare.dump import Dump, Rows
from dovetail.proof.compare.match import Place, comparable, namings
from dovetail.proof.compare.record import ANSWER

SAME, NEAR = 0.999, 0.5  # cosines: of one activation; of one activation with a bug before it, where no other is nearer
TIE = 1e-4  # a later form of an activation must be nearer by this much
NUMBER = re.compile(r"(?<![~#\d])\d+")
LOGITS = "logits"


@dc.dataclass(frozen=True)
class DumpSource:
    """The tensors of a dump that give one of our activations, and how: shards by rank -> (tokens, width)."""

    names: tuple[str, ...]
    read: Callable[[Sequence[Rows]], Tensor]

    def of(self, dump: Dump) -> Tensor:
        """The activation (tokens, width) in float64."""
        return self.read([dump[name] for name in self.names])

    def present(self, dump: Dump) -> Tensor:
        """(tokens,) which tokens all its tensors have."""
        return torch.stack([dump[name].present for name in self.names]).all(0)


Sources = dict[str, DumpSource]  # by address
Forms = dict[str, dict[str, Sources]]  # by the pattern of an address and the name of the form


def pattern_of(name: str) -> str:
    """A name with `{}` for its numbers."""
    return NUMBER.sub("{}", name)


def numbers_of(name: str) -> tuple[int, ...]:
    """The numbers in a name."""
    return tuple(map(int, NUMBER.findall(name)))


def match_dump(
    dump: Dump, want: Mapping[str, Tensor], spec: Model | None, tokens: Tensor, alias: Container[str] = ()
) -> Sources:
    """The source of each of our activations that the dump has. `want` are ours (len(tokens), width) in float64; `tokens` the
    indices of their tokens in the dump; `alias` the addresses of tensors that have another address, too."""
    heads = {} if spec is None else head_sizes(spec)
    forms: Forms = {}
    for form, address, source in _by_name(dump, want, spec):
        _put(forms, form, address, source, want, heads)
    fits = _Fits(dump, want, tokens)
    chosen = {pattern: fits.nearest(by_form) for pattern, by_form in forms.items()}
    found = {address: source for sources in chosen.values() for address, source in sources.items()}
    rest = {address: x for address, x in want.items() if pattern_of(address) not in chosen and address not in alias}
    found |= _by_value(dump, rest, heads, fits, found)
    return {address: found[address] for address in want if address in found}


def head_sizes(spec: Model) -> dict[str, int]:
    """Head sizes of the linear maps whose outputs are heads, by their paths."""
    return {
        d.path.rpartition(".")[0]: d.scope.size(d.weight.out[1])
        for d in declared(spec)
        if d.weight.matmul and len(d.weight.out) == 2 and d.weight.out[0] in ("heads", "kv_heads")
    }


def _put(
    forms: Forms, form: str, address: str, source: DumpSource, want: Mapping[str, Tensor], heads: Mapping[str, int]
) -> None:
    """Add a form of an activation, and where it is heads the same with interleaved pairs."""
    if address not in want:
        return
    forms.setdefault(pattern_of(address), {}).setdefault(form, {})[address] = source
    size = heads.get(address, 0)
    if size and size % 2 == 0:
        forms[pattern_of(address)].setdefault(f"{form}, interleaved", {})[address] = _in_halves(source, size)


def _in_halves(source: DumpSource, head: int) -> DumpSource:
    """Heads whose rotary pairs are interleaved, with the pairs in halves: (…, head / 2, 2) -> (…, 2, head / 2)."""

    def read(rows: Sequence[Rows]) -> Tensor:
        return source.read(rows).unflatten(-1, (-1, head // 2, 2)).transpose(-1, -2).flatten(-3)

    return DumpSource(source.names, read)


# -- by name --------------------------------------------------------------------------------------------------------


def _by_name(dump: Dump, want: Mapping[str, Tensor], spec: Model | None) -> Iterator[tuple[str, str, DumpSource]]:
    """(form, address, source) of every place whose name the dump has, likeliest form first."""
    if LOGITS in dump:
        yield "whole", ANSWER, _whole(LOGITS)
    sizes: Mapping[str, int] = {} if spec is None else comparable(spec)
    prefix, places = _naming(dump, want, spec)
    present = {place.theirs for place in places if _tensors(dump, prefix + place.theirs)}
    for place in places:
        if place.theirs in present and not place.choices:
            yield from _outputs(dump, prefix + place.theirs, place, sizes, want)
        for path in place.ours:
            yield from (
                (form, f"{path}.in", one) for form, one in _plain(dump, f"{prefix}{place.theirs}.in", want, f"{path}.in")
            )
    absent = [place for place in places if place.theirs not in present and not place.choices and len(place.ours) == 1]
    yield from _fused(dump, prefix, absent, sizes)


def _naming(dump: Dump, want: Mapping[str, Tensor], spec: Model | None) -> tuple[str, list[Place]]:
    """The names of modules of which the dump has the most, and what stands before them in the dump."""
    if spec is None:
        return "", [Place(name, (name,)) for name in want if not name.endswith(".in")]
    names = [name.partition("#")[0] for name in dump.names()]
    best: tuple[int, str, Sequence[Place]] = (-1, "", ())
    for places in namings(spec):
        last = places[0].theirs
        for prefix in {name[: -len(last)] for name in names if name.endswith(f".{last}")} | {""}:
            count = sum(prefix + place.theirs in names for place in places)
            best = max(best, (count, prefix, places), key=lambda one: one[0])
    return best[1], list(best[2])


def _tensors(dump: Dump, name: str) -> list[str]:
    """The tensors of one name: itself, or `name#0`, `name#1` …"""
    if name in dump:
        return [name]
    found: list[str] = []
    while f"{name}#{len(found)}" in dump:
        found.append(f"{name}#{len(found)}")
    return found


def _outputs(
    dump: Dump, name: str, place: Place, sizes: Mapping[str, int], want: Mapping[str, Tensor]
) -> Iterator[tuple[str, str, DumpSource]]:
    first = _tensors(dump, name)[0]
    if place.move is None:
        yield from ((form, place.ours[0], one) for form, one in _plain(dump, name, want, place.ours[0], layer=place.layer))
        return
    for i, path in enumerate(place.ours):

        def read(rows: Sequence[Rows], i: int = i) -> Tensor:
            ranks = len(rows[0].shards)
            per_rank = {path: sizes[path] // ranks for path in place.ours}
            return torch.cat([place.outputs(shard, per_rank)[i] for shard in rows[0].shards], -1)

        if sum(shard.shape[1] for shard in dump[first].shards) == sum(sizes[path] for path in place.ours):
            yield "whole", path, DumpSource((first,), read)


def _plain(
    dump: Dump, name: str, want: Mapping[str, Tensor], address: str, *, layer: bool = True
) -> Iterator[tuple[str, DumpSource]]:
    """The forms of a tensor that is not packed: the sum of a layer's (delta, residual), or the first tensor."""
    names = _tensors(dump, name)
    if not names or address not in want:
        return
    fitting = [one for one in names if dump[one].whole().shape[1] == want[address].shape[1]]
    if layer and len(names) > 1 and names[:2] == fitting[:2]:
        yield "sum", DumpSource((names[0], names[1]), lambda rows: rows[0].whole() + rows[1].whole())
    if names[0] in fitting or address == ANSWER:
        yield ("first" if len(names) > 1 else "whole"), _whole(names[0])


def _whole(name: str) -> DumpSource:
    return DumpSource((name,), lambda rows: rows[0].whole())


def _fused(dump: Dump, prefix: str, absent: Sequence[Place], sizes: Mapping[str, int]) -> Iterator[tuple[str, str, DumpSource]]:
    """Outputs of modules that the dump does not have, as parts of a module beside them whose width is their sum."""
    siblings: dict[str, list[Place]] = {}
    for place in absent:
        if place.ours[0] in sizes and not place.layer:
            siblings.setdefault((prefix + place.theirs).rpartition(".")[0], []).append(place)
    beside: dict[str, list[str]] = {}
    for name in dump.names():
        beside.setdefault(name.partition("#")[0].rpartition(".")[0], []).append(name)
    for parent, places in siblings.items():
        # most modules first: q, k and v before gate and up; `.in` is the parent of inputs, not of a module
        runs = [places[i:j] for i in range(len(places)) for j in range(len(places), i + 1, -1)]
        used: set[str] = set()
        for run in sorted(runs, key=len, reverse=True):
            widths = [sizes[place.ours[0]] for place in run]
            candidates = [name for name in beside.get(parent, ()) if not name.endswith((".in", "#1"))]
            for name in candidates:
                total = sum(shard.shape[1] for shard in dump[name].shards)
                if total != sum(widths) or used.intersection((name, *(place.theirs for place in run))):
                    continue
                used |= {name, *(place.theirs for place in run)}
                for i, place in enumerate(run):
                    yield "whole", place.ours[0], DumpSource((name,), _part(widths, i))


def _part(widths: Sequence[int], i: int) -> Callable[[Sequence[Rows]], Tensor]:
    """Part i of a fused output; of every rank, where it is sharded."""

    def read(rows: Sequence[Rows]) -> Tensor:
        ranks = len(rows[0].shards)
        return torch.cat([shard.split([width // ranks for width in widths], -1)[i] for shard in rows[0].shards], -1)

    return read


# -- by value -------------------------------------------------------------------------------------------------------


class _Fits:
    """How near tensors of a dump are to our activations."""

    def __init__(self, dump: Dump, want: Mapping[str, Tensor], tokens: Tensor) -> None:
        self.dump, self.want, self.tokens = dump, want, tokens

    def cosine(self, address: str, source: DumpSource) -> float:
        """The cosine of a source and our activation, over the tokens that the dump has; −1 where the shapes differ."""
        rows, ours = source.present(self.dump)[self.tokens], self.want[address]
        x = source.of(self.dump)[self.tokens]
        x = x[:, : ours.shape[1]] if address == ANSWER else x  # columns after the vocabulary are padding
        if x.shape != ours.shape or not bool(rows.any()):
            return -1.0
        x, ours = x[rows].flatten(), ours[rows].flatten()
        cosine = (x @ ours / (x.norm() * ours.norm()).clamp_min(1e-300)).item()
        return cosine if cosine == cosine else -1.0  # NaN: the comparison reports it

    def best(self, sources: Mapping[str, DumpSource]) -> float:
        """The largest cosine over the layers: with a bug, the layers before it are near."""
        return max((self.cosine(address, source) for address, source in sources.items()), default=-1.0)

    def mean(self, sources: Mapping[str, DumpSource]) -> float:
        """The mean cosine over the layers: decides where one layer is the same in two patterns, as with gate and up swapped."""
        return sum(self.cosine(address, source) for address, source in sources.items()) / max(len(sources), 1)

    def nearest(self, forms: Mapping[str, Mapping[str, DumpSource]]) -> Mapping[str, DumpSource]:
        """The sources of the nearest form. Addresses that it lacks, as the first layer of a sum, take another."""
        fits = {form: self.best(sources) for form, sources in forms.items()}
        best = next(form for form, fit in fits.items() if fit >= max(fits.values()) - TIE)
        return {
            **{address: one for sources in reversed(list(forms.values())) for address, one in sources.items()},
            **forms[best],
        }


class Pair(NamedTuple):
    """A pattern of names in a dump, a pattern of our addresses, and how near they are."""

    fit: float  # over the layers, the nearest
    mean: float
    order: int
    group: str
    pattern: str
    sources: Mapping[str, DumpSource]


def _by_value(
    dump: Dump, want: Mapping[str, Tensor], heads: Mapping[str, int], fits: _Fits, found: Mapping[str, DumpSource]
) -> Sources:
    """Sources of the addresses that no name gives: nearest pairs of patterns first, each pattern of the dump once, unless it
    is the same activation. What is less than the same counts only where no name of a module is known."""
    used = {name for source in found.values() for name in source.names}
    groups: dict[str, dict[tuple[int, ...], str]] = {}
    for name in dump.names():
        if name not in used:
            groups.setdefault(pattern_of(name), {})[numbers_of(name)] = name
    pairs: list[Pair] = []
    for order, (group, names) in enumerate(groups.items()):
        for pattern in dict.fromkeys(map(pattern_of, want)):
            forms: Forms = {}
            addresses = [address for address in want if pattern_of(address) == pattern]
            for address in addresses:
                name = names.get(numbers_of(address)) or (names.get(()) if len(addresses) == 1 else None)
                if name is not None and _fitting(dump[name].whole(), want[address], address):
                    _put(forms, "whole", address, _whole(name), want, heads)
            for by_form in forms.values():
                sources = fits.nearest(by_form)
                pairs.append(Pair(fits.best(sources), fits.mean(sources), -order, group, pattern, sources))
    return _assigned(pairs, NEAR if not set(found) - {ANSWER} else SAME)


def _fitting(x: Tensor, ours: Tensor, address: str) -> bool:
    """Whether the widths are equal; logits may have columns of padding."""
    return x.shape[1] == ours.shape[1] or (address == ANSWER and x.shape[1] > ours.shape[1])


def _assigned(pairs: Iterable[Pair], least: float) -> Sources:
    chosen: Sources = {}
    patterns: set[str] = set()
    groups: set[str] = set()
    for one in sorted(pairs, key=lambda pair: (round(pair.fit, 5), round(pair.mean, 5), pair.order), reverse=True):
        if one.pattern in patterns or one.fit < least or (one.fit < SAME and one.group in groups):
            continue
        patterns.add(one.pattern)
        groups.add(one.group)
        chosen |= one.sources
    return chosen
