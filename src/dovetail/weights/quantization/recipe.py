"""Recipe: which linear leaves of a model are stored in which format; a model directory holds it as quantization.yaml.

    formats:
    - {kind: int4, group: 64, leaves: [layers.0.mixer.q, layers.0.mixer.k, …]}

    recipe = select(spec, Int4(group=64))       every matrix of the layers; not the router, the head and the embedding
    quantize(model, recipe)                     each W by its nearest levels, in place
    recipe_of(model)                            the recipe of a quantized model

A layer that uses the weights of another has the tensors and the storage of that layer's leaf.
"""

from __future__ import annotations

import dataclasses as dc
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from dovetail.base.errors import FileError, SpecError, UsageError, did_you_mean
from dovetail.disk.yaml import dump_yaml, parse_yaml
from dovetail.nn.linear import Linear
from dovetail.nn.module import holder
from dovetail.ops.formats import kinds as _registered  # noqa: F401  registers every format
from dovetail.ops.formats.format import Format, format_from
from dovetail.spec.fold import Declared, declared
from dovetail.spec.part import Part
from dovetail.weights.quantization.leaf import QuantizedLeaf, QuantizedStorage, store_quantized

GROUPS = (64, 32, 16, 8)  # inputs that share a scale, the first that divides every matrix
FORMATS = {8: "int8", 4: "int4"}  # by bits
Recipe = Mapping[str, Format]  # by the path of the leaf
LEAF = ".weight"


def candidates(spec: Part) -> dict[str, Declared]:
    """The leaves whose W may be stored in fewer bits, by path: matrices that every token is multiplied by. A readout (the head,
    a router) stays as it is: its errors reach the outputs and the choices of experts directly."""
    found = (d for d in declared(spec) if d.weight.learned and d.weight.matmul and not d.weight.readout)
    return {d.path.removesuffix(LEAF): d for d in found if d.path.endswith(LEAF)}


def select(spec: Part, format: Format, only: Iterable[str] = (), skip: Iterable[str] = ()) -> dict[str, Format]:
    """The recipe with one format for all candidates, or for those that match a pattern of `only` and none of `skip`. Raises
    SpecError with the path of a leaf that has no such form, and for a pattern that matches none."""
    leaves = candidates(spec)
    only, skip = tuple(only), tuple(skip)
    for pattern in (*only, *skip):
        if not any(fnmatchcase(path, pattern) for path in leaves):
            ends = sorted({path.rpartition(".")[2] for path in leaves})
            remedy = did_you_mean(pattern, leaves) or f"leaves end in {', '.join(ends)}; try '*.{ends[0]}'" if ends else ""
            raise SpecError(pattern, "no leaf of this model matches", remedy)
    chosen = {
        path: d
        for path, d in leaves.items()
        if (not only or any(fnmatchcase(path, one) for one in only)) and not any(fnmatchcase(path, one) for one in skip)
    }
    if not chosen:
        raise SpecError("", "this model has no leaf to quantize", "its matrices are a head or a router, or all are skipped")
    for path, d in chosen.items():
        if problem := format.check(d.weight.shape(d.scope)):
            raise SpecError(path, problem, "choose another group, or skip the leaf")
    return dict.fromkeys(chosen, format)


def recipe_of(model: nn.Module) -> dict[str, Format]:
    """The format of every quantized leaf, by path."""
    return {path: leaf.format for path, leaf in quantized_leaves(model)}


def quantized_leaves(model: nn.Module) -> Iterator[tuple[str, QuantizedLeaf]]:
    """(path, leaf) of every quantized leaf, each storage once."""
    known: set[int] = set()
    for path, leaf in model.named_modules():
        if isinstance(leaf, Linear) and isinstance(leaf.storage, QuantizedStorage) and id(leaf.storage) not in known:
            known.add(id(leaf.storage))
            yield path, QuantizedLeaf(leaf, leaf.storage)


@torch.no_grad()
def quantize(model: nn.Module, spec: Part, recipe: Recipe) -> None:
    """Store the leaves of a recipe in their formats, in place: every value by its nearest level."""
    for path, format in recipe.items():
        put_leaf(model, spec, path, format, format.encode(leaf_at(model, path).dense().detach()))


def open_leaves(model: nn.Module, spec: Part, recipe: Recipe) -> None:
    """Store the leaves of a recipe in their formats on the meta device, for a file to fill."""
    for path, format in recipe.items():
        put_leaf(model, spec, path, format, None)


def put_leaf(model: nn.Module, spec: Part, path: str, format: Format, tensors: dict[str, Tensor] | None) -> None:
    """Store the W of the leaf at `path` in a format, also for the leaves of other layers that are tied to it."""
    leaf = leaf_at(model, path)
    store_quantized(leaf, format, tensors)
    for same in tied_to(spec, path):
        owner, name = holder(model, same)
        owner.add_module(name, leaf.twin(same))


def tied_to(spec: Part, path: str) -> list[str]:
    """The paths of the leaves of other layers that use the W of the leaf at `path`."""
    return [d.path.removesuffix(LEAF) for d in declared(spec) if d.weight.same_as == path + LEAF]


def leaf_at(model: nn.Module, path: str) -> Linear:
    """The linear leaf at a path; SpecError where there is another module."""
    leaf = model.get_submodule(path)
    if not isinstance(leaf, Linear):
        raise SpecError(path, f"is a {type(leaf).__name__}, not a linear leaf", "quantize the model before it is changed")
    return leaf


def named_format(spec: Part, bits: int | None, format: str | dict[str, Any] | Format | None, group: int | None) -> Format:
    """The format that the arguments name, with a group that divides every matrix."""
    if bits is not None and bits not in FORMATS:
        raise UsageError(f"--bits: {bits} is not a supported number of bits; use {' or '.join(map(str, FORMATS))}")
    if bits is not None and format is not None:
        raise UsageError(f"--bits {bits}: the bits are those of --format; give one of the two")
    if isinstance(format, Format):
        if group is not None:
            raise UsageError(f"--group {group}: the group is a field of the format; give it there")
        return format
    bits = 4 if bits is None else bits
    data = {"kind": FORMATS[bits]} if format is None else {"kind": format} if isinstance(format, str) else dict(format)
    made = format_from(data)
    fields = {field.name: field for field in dc.fields(made)}
    if group is not None and "group" not in fields:
        raise UsageError(f"--group {group}: {made.kind} has no groups")
    if group is not None and data.get("group", group) != group:
        raise UsageError(f"--group {group}: the format has groups of {data['group']}; give one of the two")
    if group is not None:
        return dc.replace(made, group=group)
    if "group" in data or "group" not in fields or fields["group"].default is None:
        return made
    inputs = {d.weight.shape(d.scope)[-1] for d in candidates(spec).values()}
    fitting = [size for size in GROUPS if all(inp % size == 0 for inp in inputs)]
    return dc.replace(made, group=fitting[0]) if fitting else made


def with_activations(format: Format) -> Format:
    """The format with activations in 8 bits as well."""
    if "dynamic" not in {field.name for field in dc.fields(format)}:
        raise UsageError(f"--activations: {format.kind} multiplies activations as they are; use --bits 8")
    return dc.replace(format, dynamic=True)


# -- plain data -----------------------------------------------------------------------------------------------------


def recipe_yaml(recipe: Recipe) -> str:
    """The recipe as YAML, leaves of one format together."""
    by_format: dict[Format, list[str]] = {}
    for path, format in recipe.items():
        by_format.setdefault(format, []).append(path)
    return dump_yaml({"formats": [{**format.to_data(), "leaves": paths} for format, paths in by_format.items()]})


def read_recipe(text: str, spec: Part, where: str) -> dict[str, Format]:
    """The recipe in YAML text, checked against the spec; `where` names the text in errors."""
    data: Any = parse_yaml(text, where)
    entries = data.get("formats") if isinstance(data, Mapping) else None
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise FileError(f"{where}: holds no list called formats")
    known, recipe = candidates(spec), {}
    for i, entry in enumerate(entries):
        paths = entry.get("leaves") if isinstance(entry, Mapping) else None
        if not isinstance(paths, Sequence) or isinstance(paths, str):
            raise FileError(f"{where}: formats.{i} holds no list called leaves")
        format = format_from({name: value for name, value in entry.items() if name != "leaves"}, f"{where}: formats.{i}")
        for path in paths:
            if not isinstance(path, str) or path not in known:
                raise FileError(f"{where}: {str(path)[:200]} is not a leaf of this spec; was the spec edited?")
            if problem := format.check(known[path].weight.shape(known[path].scope)):
                raise FileError(f"{where}: {path}: {problem}")
            recipe[path] = format
    return recipe


def stored_layout(spec: Part, recipe: Recipe) -> dict[str, Tensor]:
    """The tensors in fewer bits that a file of this spec holds, by name, on the meta device."""
    known = candidates(spec)
    return {
        f"{path}.{name}": tensor
        for path, format in recipe.items()
        for name, tensor in format.tensors(known[path].weight.shape(known[path].scope)).items()
    }
