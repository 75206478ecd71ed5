"""Which of another implementation's modules compute what ours do, read off the table that says where the weights lie.

A linear map or a norm is told by its weights: where our `layers.3.mixer.o.weight` lies in their
`model.layers.3.self_attn.o_proj.weight`, the two modules take the same input and give the same output. A packed matrix gives
the outputs of several of ours, one under the other as its rows lie. A layer is the innermost module that holds all its weights.
"""

from __future__ import annotations

import dataclasses as dc
import functools
from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from dovetail.construction import on_meta
from dovetail.core.errors import FileError, SpecError
from dovetail.core.module import Linear, Module
from dovetail.model import BlockModule, Model
from dovetail.port.dialect import DIALECTS
from dovetail.port.hf import to_hf
from dovetail.port.tensors import Move

TOKENS = 7919  # stands for the rows of an activation where its layout is asked for: no matrix has so many


@dc.dataclass(frozen=True)
class Place:
    """A module of theirs that gives some of our outputs, and how they lie in its own."""

    theirs: str
    ours: tuple[str, ...]
    move: Move | None = None  # None: its output is ours
    layer: bool = False

    def outputs(self, y: Tensor, sizes: Mapping[str, int]) -> list[Tensor]:
        """Ours (tokens, sizeᵢ) from theirs (tokens, Σ sizeᵢ); nothing where they do not fit."""
        if self.move is None:
            return [y]
        shapes = [(sizes[path], TOKENS) for path in self.ours]
        (wanted,) = self.move.convert.between(shapes)
        rows_first = wanted[-1] == TOKENS
        like_weight = y.T if rows_first else y
        if like_weight.numel() != y.shape[0] * sum(size for size, _ in shapes):
            return []
        found = self.move.convert.back([like_weight], [(size, y.shape[0]) for size, _ in shapes])
        return [one.T for one in found] if len(found) == len(self.ours) else []


@functools.lru_cache(maxsize=16)
def comparable(spec: Model) -> Mapping[str, int]:
    """Paths of our modules whose outputs another implementation has too, and the size of each: maps, norms and layers."""
    found: dict[str, int] = {}
    for path, module in on_meta(spec).named_modules():
        if isinstance(module, Linear):
            found[path] = module.out_features
        elif isinstance(module, BlockModule):
            found[path] = module.scope.size("embed")
        elif isinstance(module, Module) and module.part.group == "norm":
            found[path] = module.scope.size("dim")
    return found


def ours(spec: Model) -> list[Place]:
    """The places of a module whose names are ours."""
    return [Place(path, (path,), layer=_layer_of(path)[0] == path) for path in comparable(spec)]


@functools.lru_cache(maxsize=16)
def theirs(spec: Model, family: str) -> tuple[Place, ...]:
    """The places in a family's own implementation."""
    sizes, places = comparable(spec), []
    moves = to_hf(spec, family).moves
    for move in moves:
        owners = tuple(path.rpartition(".")[0] for path in move.ours)
        leaf = move.ours[0].rpartition(".")[2]
        if len(move.theirs) != 1 or not all(owner in sizes for owner in owners) or leaf not in ("weight", "scale"):
            continue
        if leaf == "weight" and not _by_rows(move):
            continue
        module = move.theirs[0].rpartition(".")[0]
        places.append(Place(module, owners, move if leaf == "weight" else None))
    return (*places, *_layers(spec, moves))


def _by_rows(move: Move) -> bool:
    """Whether their matrix has a row or a column for each of our outputs, so that what it gives can be told apart."""
    try:
        (shape,) = move.convert.between([(2, TOKENS)] * len(move.ours))
    except RuntimeError:  # squares of an image, say
        return False
    return len(shape) == 2 and TOKENS in shape


def _layers(spec: Model, moves: Iterable[Move]) -> Iterable[Place]:
    """The innermost module of theirs that holds every weight of a layer, and none of another."""
    held: dict[str, list[str]] = {}
    for move in moves:
        for path in move.ours:
            layer, _, _ = _layer_of(path)
            held.setdefault(layer, []).extend(move.theirs)
    for layer, names in held.items():
        prefix = _numbered(_shared([name.split(".")[:-1] for name in names]))
        others = (name for other, more in held.items() if other != layer for name in more)
        if layer and prefix and not any(name.split(".")[: len(prefix)] == prefix for name in others):
            yield Place(".".join(prefix), (layer,), layer=True)


def _shared(paths: list[list[str]]) -> list[str]:
    """The names that all paths begin with."""
    end = next((i for i, names in enumerate(zip(*paths, strict=False)) if len(set(names)) > 1), min(map(len, paths)))
    return paths[0][:end]


def _numbered(names: list[str]) -> list[str]:
    """As far as the last number: `encoder.block.0` of `encoder.block.0.layer`, which is a list and never called."""
    last = max((i for i, name in enumerate(names) if name.isdigit()), default=-1)
    return names[: last + 1]


def _layer_of(path: str) -> tuple[str, int, str]:
    """(`layers.3` or `encoder.layers.3`, its number, what follows); an empty name for what is no layer's."""
    names = path.removesuffix(".in").split(".")
    for i, name in enumerate(names[:-1]):
        if name == "layers" and names[i + 1].isdigit():
            return ".".join(names[: i + 2]), int(names[i + 1]), ".".join(names[i + 2 :])
    return "", -1, path


def layer_of(path: str) -> str:
    """The layer that an address is of, `embed` before the first, `head` behind the last."""
    return _layer_of(path)[0] or ("embed" if path.startswith("embed") else "head")


def found_in(module: nn.Module, spec: Model, told: Mapping[str, str]) -> list[Place]:
    """The places of a module of which nothing is known but its names: ours, those of a family that can say the spec, what the
    user told (their pattern -> ours, `{}` being the number of the layer), and a list of as many modules as there are layers."""
    have = {name for name, _ in module.named_modules()}
    candidates: list[Sequence[Place]] = [ours(spec)]
    for family in DIALECTS:
        try:
            candidates.append(theirs(spec, family))
        except SpecError:
            continue
    fitting = [[place for place in places if place.theirs in have] for places in candidates]
    said = _told(told, spec, have)
    seen = {path for place in said for path in place.ours}
    best = [place for place in max(fitting, key=len) if not seen.intersection(place.ours)]
    return with_layers([*said, *best], module, spec)


def with_layers(places: list[Place], module: nn.Module, spec: Model) -> list[Place]:
    """The places, and the layers that are not among them, where the module has one list of just as many."""
    seen = {path for place in places for path in place.ours}
    return [*places, *(place for place in _list_of_layers(module, spec) if not seen.intersection(place.ours))]


def _told(told: Mapping[str, str], spec: Model, have: set[str]) -> list[Place]:
    known, places = comparable(spec), []
    for pattern, path in told.items():
        count = len(spec.layers) if "{}" in pattern else 1
        for i in range(count):
            there, here = pattern.replace("{}", str(i)), path.replace("{}", str(i))
            if there not in have:
                raise FileError(f"--map {pattern}={path}: the module has no {there}")
            if here not in known:
                raise FileError(f"--map {pattern}={path}: {here} is no map, norm or layer of the spec")
            places.append(Place(there, (here,)))
    return places


def _list_of_layers(module: nn.Module, spec: Model) -> list[Place]:
    lists = [(name, one) for name, one in module.named_modules() if isinstance(one, nn.ModuleList)]
    fitting = [name for name, one in lists if len(one) == len(spec.layers)]
    if len(fitting) != 1:
        return []
    return [Place(f"{fitting[0]}.{i}", (f"layers.{i}",), layer=True) for i in range(len(spec.layers))]


def same_named(a: nn.Module, b: nn.Module) -> list[Place]:
    """Where no spec is known: every module that both have."""
    have = {name for name, _ in b.named_modules()}
    return [Place(name, (name,)) for name, _ in a.named_modules() if name and name in have]


def rows_of(x: Tensor, batch: int, n: int) -> Tensor:
    """An activation with one row a token, where it can be seen as that; else as it is."""
    if tuple(x.shape[:2]) == (batch, n) or x.shape[:1] == torch.Size((batch * n,)):
        return x.reshape(batch * n, -1)
    return x
