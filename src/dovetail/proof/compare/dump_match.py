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
import itertools
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.model.model import Model
from dovetail.proof.compare.dump import Dump, DumpTensor
from dovetail.proof.compare.match import MatchedModule, comparable, namings
from dovetail.proof.compare.record import ANSWER
from dovetail.spec.fold import declared

SAME, NEAR = 0.999, 0.5  # cosines: of one activation; of one activation with a bug before it, where no other is nearer
TIE = 1e-4  # a later form of an activation must be nearer by this much
NUMBER = re.compile(r"(?<![~#\d])\d+")
LOGITS = "logits"


@dc.dataclass(frozen=True)
class DumpSource:
    """The tensors of a dump that give one of our activations, and how: shards by rank -> (tokens, width)."""

    names: tuple[str, ...]
    read: Callable[[Sequence[DumpTensor]], Tensor]

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
    matcher = _Matcher(dump, want, spec, tokens)
    forms: Forms = {}
    for form, address, source in matcher.by_name():
        matcher.put(forms, form, address, source)
    chosen = {pattern: matcher.nearest(by_form) for pattern, by_form in forms.items()}
    found = {address: source for sources in chosen.values() for address, source in sources.items()}
    rest = [address for address in want if pattern_of(address) not in chosen and address not in alias]
    found |= matcher.by_value(rest, found)
    return {address: found[address] for address in want if address in found}


def head_sizes(spec: Model) -> dict[str, int]:
    """Head sizes of the linear maps whose outputs are heads, by their paths."""
    return {
        d.path.rpartition(".")[0]: d.scope.size(d.weight.out[1])
        for d in declared(spec)
        if d.weight.matmul and len(d.weight.out) == 2 and d.weight.out[0] in ("heads", "kv_heads")
    }


def _in_halves(source: DumpSource, head: int) -> DumpSource:
    """Heads whose rotary pairs are interleaved, with the pairs in halves: (…, head / 2, 2) -> (…, 2, head / 2)."""

    def read(rows: Sequence[DumpTensor]) -> Tensor:
        return source.read(rows).unflatten(-1, (-1, head // 2, 2)).transpose(-1, -2).flatten(-3)

    return DumpSource(source.names, read)


def _whole(name: str) -> DumpSource:
    return DumpSource((name,), lambda rows: rows[0].whole())


def _part(widths: Sequence[int], i: int) -> Callable[[Sequence[DumpTensor]], Tensor]:
    """Part i of a fused output; of every rank, where it is sharded."""

    def read(rows: Sequence[DumpTensor]) -> Tensor:
        ranks = len(rows[0].shards)
        return torch.cat([shard.split([width // ranks for width in widths], -1)[i] for shard in rows[0].shards], -1)

    return read


class Matched(NamedTuple):
    """A pattern of names in a dump, a pattern of our addresses, and how near they are."""

    fit: float  # over the layers, the nearest
    mean: float
    order: int
    group: str
    pattern: str
    sources: Mapping[str, DumpSource]


class _Matcher:
    """A dump and the activations that are looked for in it."""

    def __init__(self, dump: Dump, want: Mapping[str, Tensor], spec: Model | None, tokens: Tensor) -> None:
        self.dump, self.want, self.spec, self.tokens = dump, want, spec, tokens
        self.sizes: Mapping[str, int] = {} if spec is None else comparable(spec)
        self.heads = {} if spec is None else head_sizes(spec)

    def put(self, forms: Forms, form: str, address: str, source: DumpSource) -> None:
        """Add a form of an activation, and where it is heads the same with interleaved pairs."""
        if address not in self.want:
            return
        forms.setdefault(pattern_of(address), {}).setdefault(form, {})[address] = source
        size = self.heads.get(address, 0)
        if size and size % 2 == 0:
            forms[pattern_of(address)].setdefault(f"{form}, interleaved", {})[address] = _in_halves(source, size)

    # -- by name ----------------------------------------------------------------------------------------------------

    def by_name(self) -> Iterator[tuple[str, str, DumpSource]]:
        """(form, address, source) of every place whose name the dump has, likeliest form first."""
        if LOGITS in self.dump:
            yield "whole", ANSWER, _whole(LOGITS)
        prefix, places = self._naming()
        present = {place.theirs for place in places if self._tensors(prefix + place.theirs)}
        for place in places:
            if place.theirs in present and not place.choices:
                yield from self._outputs(prefix + place.theirs, place)
            for path in place.ours:
                yield from self._plain(f"{prefix}{place.theirs}.in", f"{path}.in")
        absent = [place for place in places if place.theirs not in present and not place.choices and len(place.ours) == 1]
        yield from self._fused(prefix, absent)

    def _naming(self) -> tuple[str, list[MatchedModule]]:
        """What stands before the names of modules in the dump, and the naming of which it has the most."""
        if self.spec is None:
            return "", [MatchedModule(name, (name,)) for name in self.want if not name.endswith(".in")]
        names = [name.partition("#")[0] for name in self.dump.names()]
        best: tuple[int, str, Sequence[MatchedModule]] = (-1, "", ())
        for places in namings(self.spec):
            last = places[0].theirs
            for prefix in {name[: -len(last)] for name in names if name.endswith(f".{last}")} | {""}:
                count = sum(prefix + place.theirs in names for place in places)
                best = max(best, (count, prefix, places), key=lambda one: one[0])
        return best[1], list(best[2])

    def _tensors(self, name: str) -> list[str]:
        """The tensors of one name: itself, or `name#0`, `name#1` …"""
        numbered = itertools.takewhile(self.dump.__contains__, (f"{name}#{i}" for i in itertools.count()))
        return [name] if name in self.dump else list(numbered)

    def _outputs(self, name: str, module: MatchedModule) -> Iterator[tuple[str, str, DumpSource]]:
        if module.move is None:
            yield from self._plain(name, module.ours[0], layer=module.layer)
            return
        first, sizes = self._tensors(name)[0], self.sizes
        for i, path in enumerate(module.ours):

            def read(rows: Sequence[DumpTensor], i: int = i) -> Tensor:
                ranks = len(rows[0].shards)
                per_rank = {path: sizes[path] // ranks for path in module.ours}
                return torch.cat([module.outputs(shard, per_rank)[i] for shard in rows[0].shards], -1)

            if self.dump[first].width() == sum(sizes[path] for path in module.ours):
                yield "whole", path, DumpSource((first,), read)

    def _plain(self, name: str, address: str, *, layer: bool = True) -> Iterator[tuple[str, str, DumpSource]]:
        """The forms of a tensor that is not packed: the sum of a layer's (delta, residual), or the first tensor."""
        names = self._tensors(name)
        if not names or address not in self.want:
            return
        fitting = [one for one in names if self.dump[one].whole().shape[1] == self.want[address].shape[1]]
        if layer and len(names) > 1 and names[:2] == fitting[:2]:
            yield "sum", address, DumpSource((names[0], names[1]), lambda rows: rows[0].whole() + rows[1].whole())
        if names[0] in fitting or address == ANSWER:
            yield ("first" if len(names) > 1 else "whole"), address, _whole(names[0])

    def _fused(self, prefix: str, absent: Sequence[MatchedModule]) -> Iterator[tuple[str, str, DumpSource]]:
        """Outputs of modules that the dump does not have, as parts of a module beside them whose width is their sum."""
        siblings: dict[str, list[MatchedModule]] = {}
        for place in absent:
            if place.ours[0] in self.sizes and not place.layer:
                siblings.setdefault((prefix + place.theirs).rpartition(".")[0], []).append(place)
        beside: dict[str, list[str]] = {}
        for name in self.dump.names():
            if not name.endswith((".in", "#1")):
                beside.setdefault(name.partition("#")[0].rpartition(".")[0], []).append(name)
        for parent, places in siblings.items():
            # most modules first: q, k and v before gate and up; `.in` is the parent of inputs, not of a module
            runs = [places[i:j] for i in range(len(places)) for j in range(len(places), i + 1, -1)]
            used: set[str] = set()
            for run in sorted(runs, key=len, reverse=True):
                widths = [self.sizes[place.ours[0]] for place in run]
                for name in beside.get(parent, ()):
                    taken = {name, *(place.theirs for place in run)}
                    if self.dump[name].width() == sum(widths) and not used & taken:
                        used |= taken
                        yield from (("whole", one.ours[0], DumpSource((name,), _part(widths, i))) for i, one in enumerate(run))

    # -- by value ---------------------------------------------------------------------------------------------------

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
        others = {address: one for sources in reversed(list(forms.values())) for address, one in sources.items()}
        return {**others, **forms[best]}

    def by_value(self, addresses: Sequence[str], found: Mapping[str, DumpSource]) -> Sources:
        """Sources of addresses that no name gives: nearest pairs of patterns first, each pattern of the dump once, unless it is
        the same activation. What is less than the same counts only where no name of a module is known."""
        used = {name for source in found.values() for name in source.names}
        groups: dict[str, dict[tuple[int, ...], str]] = {}
        for name in self.dump.names():
            if name not in used:
                groups.setdefault(pattern_of(name), {})[numbers_of(name)] = name
        by_pattern: dict[str, list[str]] = {}
        for address in addresses:
            by_pattern.setdefault(pattern_of(address), []).append(address)
        pairs: list[Matched] = []
        for order, (group, names) in enumerate(groups.items()):
            for pattern, alike in by_pattern.items():
                forms: Forms = {}
                for address in alike:
                    name = names.get(numbers_of(address)) or (names.get(()) if len(alike) == 1 else None)
                    if name is None:
                        continue
                    extra = self.dump[name].whole().shape[1] - self.want[address].shape[1]
                    if extra == 0 or (address == ANSWER and extra > 0):  # logits may have columns of padding
                        self.put(forms, "whole", address, _whole(name))
                for by_form in forms.values():
                    sources = self.nearest(by_form)
                    pairs.append(Matched(self.best(sources), self.mean(sources), -order, group, pattern, sources))
        return _assigned(pairs, NEAR if not set(found) - {ANSWER} else SAME)


def _assigned(pairs: Iterable[Matched], least: float) -> Sources:
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
