"""Match the modules of another implementation with ours, by the table that maps the weights.

A linear map or a norm is matched by its weights: where our `layers.3.mixer.o.weight` is their
`model.layers.3.self_attn.o_proj.weight`, the two modules have the same input and the same output. A packed matrix gives the
outputs of several of our modules, in the order of its rows. A layer is the innermost module that holds all weights of the
layer.
"""

from __future__ import annotations

import contextlib
import dataclasses as dc
import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from dovetail.base.errors import FileError, SpecError
from dovetail.hf.dialect import DIALECTS
from dovetail.hf.hf import to_hf
from dovetail.hf.tensors import Move
from dovetail.model.construction import on_meta
from dovetail.model.model import Model
from dovetail.nn.block import BlockModule
from dovetail.nn.groups import Norm, Router
from dovetail.nn.linear import Linear
from dovetail.nn.module import Module
from dovetail.spec.fold import declared
from dovetail.spec.part import walk

LAYER = re.compile(r"(?:.*?\.)?layers\.\d+(?=\.|$)")
TOKENS = 7919  # a number of tokens that is no size of a matrix, to find out which dimension of a converted tensor is tokens


@dc.dataclass(frozen=True)
class MatchedModule:
    """A module of theirs that computes outputs of ours, and how its output maps to them."""

    theirs: str
    ours: tuple[str, ...]
    move: Move | None = None  # None: the outputs are the same
    layer: bool = False
    choices: int = 0  # of a router: the number of experts per token; its choices are recorded, not its output

    def outputs(self, y: Tensor, sizes: Mapping[str, int]) -> list[Tensor]:
        """Our outputs (tokens, sizeᵢ) from theirs (tokens, Σ sizeᵢ); an empty list where the shapes do not fit."""
        if self.move is None:
            return [y]
        shapes = [(sizes[path], TOKENS) for path in self.ours]
        (shape,) = self.move.convert.hf_shapes(shapes)
        like_weight = y.T if shape[-1] == TOKENS else y
        if like_weight.numel() != y.shape[0] * sum(size for size, _ in shapes):
            return []
        outputs = self.move.convert.from_hf([like_weight], [(size, y.shape[0]) for size, _ in shapes])
        return [output.T for output in outputs] if len(outputs) == len(self.ours) else []


@functools.lru_cache(maxsize=16)
def comparable(spec: Model) -> Mapping[str, int]:
    """Paths and output sizes of our modules that other implementations have too: linear maps, norms and layers. Of a router
    only the choices are compared."""
    sizes: dict[str, int] = {}
    for path, module in on_meta(spec).named_modules():
        if isinstance(module, Linear) and path.rpartition(".")[0] not in routers(spec):
            sizes[path] = module.out_features
        elif isinstance(module, BlockModule):
            sizes[path] = module.scope.size("embed")
        elif isinstance(module, Module) and isinstance(module.part, Norm):
            sizes[path] = module.scope.size("dim")
    return sizes


@functools.lru_cache(maxsize=16)
def routers(spec: Model) -> Mapping[str, int]:
    """Paths of our routers, and the number of experts per token of each."""
    return {path: part.choices() for path, part, _ in walk(spec) if isinstance(part, Router)}


def ours(spec: Model) -> list[MatchedModule]:
    """The places of a module with our names."""
    places = [MatchedModule(path, (path,), layer=_layer(path) == path) for path in comparable(spec)]
    return places + [MatchedModule(path, (path,), choices=choices) for path, choices in routers(spec).items()]


@functools.lru_cache(maxsize=16)
def theirs(spec: Model, family: str) -> tuple[MatchedModule, ...]:
    """The places in the implementation of a family in transformers."""
    sizes, chosen = comparable(spec), routers(spec)
    places: dict[tuple[str, tuple[str, ...]], MatchedModule] = {}
    moves = to_hf(spec, family).moves
    for move in moves:
        owners = tuple(path.rpartition(".")[0] for path in move.paths)
        leaf = move.paths[0].rpartition(".")[2]
        module = move.hf_names[0].rpartition(".")[0]
        router = owners[0].rpartition(".")[0]
        if router in chosen and len(owners) == len(move.hf_names) == 1:
            places[module, (router,)] = MatchedModule(module, (router,), choices=chosen[router])
        if len(move.hf_names) != 1 or not all(owner in sizes for owner in owners) or leaf not in ("weight", "scale"):
            continue
        if leaf == "weight" and not _by_rows(move):
            continue
        places[module, owners] = MatchedModule(module, owners, move if leaf == "weight" else None)
    return (*places.values(), *_layers(spec, moves))


def _by_rows(move: Move) -> bool:
    """Whether each of our outputs is one row or column of their matrix, so that its output can be split."""
    try:
        (shape,) = move.convert.hf_shapes([(2, TOKENS)] * len(move.paths))
    except RuntimeError:  # patches of an image, for one
        return False
    return len(shape) == 2 and TOKENS in shape


def _layers(spec: Model, moves: Iterable[Move]) -> Iterable[MatchedModule]:
    """The innermost module of theirs that holds every weight of a layer, and none of another."""
    by_layer: dict[str, list[str]] = {}
    for move in moves:
        for path in move.paths:
            by_layer.setdefault(_layer(path), []).extend(move.hf_names)
    for layer, names in by_layer.items():
        prefix = _up_to_number(_common_prefix([name.split(".")[:-1] for name in names]))
        others = (name for other, more in by_layer.items() if other != layer for name in more)
        if layer and prefix and not any(name.split(".")[: len(prefix)] == prefix for name in others):
            yield MatchedModule(".".join(prefix), (layer,), layer=True)


def _common_prefix(paths: list[list[str]]) -> list[str]:
    """The names with which all paths begin."""
    end = next((i for i, names in enumerate(zip(*paths, strict=False)) if len(set(names)) > 1), min(map(len, paths)))
    return paths[0][:end]


def _up_to_number(names: list[str]) -> list[str]:
    """Names up to the last number: `encoder.block.0` of `encoder.block.0.layer`, which is a list and is never called."""
    last = max((i for i, name in enumerate(names) if name.isdigit()), default=-1)
    return names[: last + 1]


def _layer(path: str) -> str:
    """`layers.3` or `encoder.layers.3`; empty outside of layers."""
    match = LAYER.match(path)
    return "" if match is None else match[0]


def layer_of(path: str) -> str:
    """The layer of an address; `embed` before the first layer, `head` after the last."""
    return _layer(path) or ("embed" if path.startswith("embed") else "head")


def namings(spec: Model) -> Iterator[Sequence[MatchedModule]]:
    """The places of a spec by our names, and by those of every family that can express it."""
    yield ours(spec)
    for family in DIALECTS:
        with contextlib.suppress(SpecError):
            yield theirs(spec, family)


def places_by_name(module: nn.Module, spec: Model, user_map: Mapping[str, str]) -> list[MatchedModule]:
    """The places of a module of which only the names are known: pairs of the user's map (their pattern -> ours, `{}` is the
    number of the layer), our names or those of a family that can express the spec, and a list with one module per layer."""
    names = {name for name, _ in module.named_modules()}
    present = [with_routers(places, module, spec) for places in namings(spec)]
    mapped = _user_places(user_map, spec, names)
    covered = {path for place in mapped for path in place.ours}
    best = [place for place in max(present, key=len) if not covered.intersection(place.ours)]
    return with_layers([*mapped, *best], module, spec)


def with_routers(places: Sequence[MatchedModule], module: nn.Module, spec: Model) -> list[MatchedModule]:
    """The places that a module has. A router whose module has another name than its weight in a file is found in its layer by
    the shape of its weight, where only one module has that shape."""
    modules = dict(module.named_modules())
    layers = {place.ours[0]: place.theirs for place in places if place.layer}
    shapes = {
        d.path.removesuffix(f".{d.weight.name}"): d.weight.shape(d.scope)
        for d in declared(spec)
        if d.weight.matmul and d.weight.out == ("experts",)
    }
    result = [place for place in places if place.theirs in modules]
    for place in places:
        layer = _layer(place.ours[0])
        if place.choices and place.theirs not in modules and layer in layers:
            below = [name for name in modules if name.startswith(f"{layers[layer]}.")]
            wanted = (shapes.get(place.ours[0]),)
            names = [n for n in below if wanted == tuple(tuple(w.shape) for w in modules[n].parameters(recurse=False))]
            result += [dc.replace(place, theirs=names[0])] if len(names) == 1 else []
    return result


def with_layers(places: list[MatchedModule], module: nn.Module, spec: Model) -> list[MatchedModule]:
    """The places, and the layers that are not among them, where the module has one list with one module per layer."""
    covered = {path for place in places for path in place.ours}
    return [*places, *(place for place in _list_of_layers(module, spec) if not covered.intersection(place.ours))]


def _user_places(user_map: Mapping[str, str], spec: Model, names: set[str]) -> list[MatchedModule]:
    known, places = comparable(spec), []
    for pattern, path in user_map.items():
        count = len(spec.layers) if "{}" in pattern else 1
        for i in range(count):
            theirs, ours = pattern.replace("{}", str(i)), path.replace("{}", str(i))
            if theirs not in names:
                raise FileError(f"--map {pattern}={path}: the module has no {theirs}")
            if ours not in known:
                raise FileError(f"--map {pattern}={path}: {ours} is not a linear map, norm or layer of the spec")
            places.append(MatchedModule(theirs, (ours,)))
    return places


def _list_of_layers(module: nn.Module, spec: Model) -> list[MatchedModule]:
    lists = [(name, one) for name, one in module.named_modules() if isinstance(one, nn.ModuleList)]
    names = [name for name, one in lists if len(one) == len(spec.layers)]
    if len(names) != 1:
        return []
    return [MatchedModule(f"{names[0]}.{i}", (f"layers.{i}",), layer=True) for i in range(len(spec.layers))]


def same_named(a: nn.Module, b: nn.Module) -> list[MatchedModule]:
    """Where no spec is known: every module whose name both sides have."""
    names = {name for name, _ in b.named_modules()}
    return [MatchedModule(name, (name,)) for name, _ in a.named_modules() if name in names and name]


def rows_of(x: Tensor, batch: int, n: int) -> Tensor:
    """An activation with one row per token, where its shape allows that; else unchanged."""
    if tuple(x.shape[:2]) == (batch, n) or x.shape[:1] == torch.Size((batch * n,)):
        return x.reshape(batch * n, -1)
    return x
