"""Convert a model directory from Hugging Face layout to ours and back, with the files beside the weights.

    import    config.json, their tensors    ->    dovetail.yaml, our tensors, imported_config.json (their config)
    export    dovetail.yaml, our tensors    ->    config.json, their tensors, dovetail.yaml

The imported config is kept for what a spec does not hold (max_position_embeddings, token ids, names of classes): an export to
the same family writes it again. Tokenizer, generation settings, chat template and license are copied. Tensors that an import
drops are reported and not exported.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dovetail.base.errors import SpecError, UsageError
from dovetail.base.limits import CARRIED_BYTES, CONFIG_BYTES
from dovetail.disk.model_files import CARRIED, CONFIG_FILE, GENERATION_FILE, KEPT_CONFIG
from dovetail.disk.untrusted import Directory
from dovetail.files.model_dir import SHARD, LazyTensors, check_replaceable, model_files, own_pieces, spec_and, write_directory
from dovetail.hf.classes import names_of_file, with_names
from dovetail.hf.dialect import DIALECTS
from dovetail.hf.hf import Ported, form_of, from_hf, to_hf
from dovetail.hf.layouts import DEFAULT, LAYOUTS, QuantizedLayout, layout_named, packed_pieces
from dovetail.hf.load import Watch, load, load_reporting
from dovetail.hf.own_config import is_own
from dovetail.hf.quantized import FIELD
from dovetail.hf.resolved import explicit, untrained
from dovetail.hf.rotary import LENGTH
from dovetail.hf.tensors import Dropped, Move
from dovetail.model.model import Model, ModelModule
from dovetail.nn.declared_tensors import check_plain, stored
from dovetail.nn.linear import Linear
from dovetail.nn.module import holder, tensor_at
from dovetail.spec.fold import declared
from dovetail.weights.quantization.leaf import SAVED, QuantizedLeaf, QuantizedStorage
from dovetail.weights.quantization.recipe import quantized_leaves

TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")


class ImportedSpec(NamedTuple):
    """The spec of an imported model, and the tensors of its checkpoint that were not imported."""

    spec: Model
    dropped: list[Dropped]


def import_directory(source: str | Path, out: str | Path, *, watch: Watch | None = None) -> ImportedSpec:
    """Write the model of a directory in Hugging Face layout as one of ours."""
    check_replaceable(out)  # refused now, not after the weights are read
    model, dropped = load_reporting(source, watch=watch)
    write_own(model, Directory(source), out)
    return ImportedSpec(model.part, dropped)


def write_own(
    model: ModelModule,
    source: Directory,
    out: str | Path,
    beside: Mapping[str, bytes] | None = None,
    *,
    keep_foreign: bool = False,
) -> None:
    """Write a model as a directory of ours, with the files beside the weights of `source`, and those of `beside`."""
    files = model_files(model, model.part, {**files_beside(source), **(beside or {})})
    write_directory(out, own_pieces(dict(stored(model, model.part))), files, keep_foreign=keep_foreign)


def model_pieces(model: ModelModule) -> list[LazyTensors]:
    """Every stored weight of a model, one per piece; a quantized one dense, decoded when it is written."""
    check_plain(model, model.part, SAVED)
    return [_weight_piece(model, d.path) for d in declared(model.part) if d.weight.stored]


def _weight_piece(model: ModelModule, path: str) -> LazyTensors:
    leaf = holder(model, path)[0]
    if isinstance(leaf, Linear) and isinstance(form := leaf.storage, QuantizedStorage) and path.endswith(".weight"):
        return LazyTensors({path: torch.empty(form.shape, dtype=form.dtype, device="meta")}, lambda: {path: leaf.dense()})
    return own_pieces({path: tensor_at(model, path).detach()})[0]


def files_beside(source: Directory) -> dict[str, bytes]:
    """Return the files that a directory of ours holds beside spec and weights, by name: tokenizer, generation settings, chat
    template, license, and the config that the model was imported with."""
    carried = _beside(source)
    config = imported_config(source)
    if config:
        carried[KEPT_CONFIG] = _json(config)
        ids = {name: config[name] for name in TOKEN_IDS if config.get(name) is not None}
        if ids:
            carried.setdefault(GENERATION_FILE, _json(ids))
    return carried


def export_directory(
    source: str | Path,
    out: str | Path,
    family: str | None = None,
    *,
    layout: str = DEFAULT,
    watch: Watch | None = None,
    shard: int = SHARD,
) -> Ported:
    """Write the model of a directory in Hugging Face layout as a family: the one named, else the one it was imported from,
    else the first that can express it. Weights of fewer bits are written in a layout of `LAYOUTS`."""
    packing = layout_named(layout)
    check_replaceable(out)  # refused now, not after the weights are read
    model = load(source, watch=watch)
    leaves = dict(quantized_leaves(model))
    if layout != DEFAULT and not leaves:
        raise UsageError(f"--layout {layout}: {source} holds no weights of fewer bits; run dovetail quantize first")
    weights, where = model_pieces(model), Directory(source)
    return write_theirs(model.part, weights, where, out, family, shard=shard, leaves=leaves, layout=packing)


def write_theirs(
    spec: Model,
    weights: Sequence[LazyTensors],
    source: Directory,
    out: str | Path,
    family: str | None = None,
    beside: Mapping[str, bytes] | None = None,
    *,
    shard: int = SHARD,
    keep_foreign: bool = False,
    leaves: Mapping[str, QuantizedLeaf] | None = None,
    layout: QuantizedLayout = LAYOUTS[DEFAULT],
) -> Ported:
    """Write a model in Hugging Face layout as a family, by default the one of `source`, else the first that can express it,
    with the files beside the weights of `source`, and those of `beside`. `weights` has one weight of the spec per piece;
    `leaves` are quantized ones, which are written in a layout."""
    carried, kept = _beside(source), {name: value for name, value in imported_config(source).items() if name != FIELD}
    ported, pieces = exported(spec, weights, family or kept.get("model_type"), kept)
    if leaves:
        ported.config[FIELD] = layout.config(spec, ported.moves, leaves)
        pieces = packed_pieces(ported.moves, pieces, leaves, layout.tensors)
    if GENERATION_FILE in carried:
        generation = source.json(GENERATION_FILE)
        ported.config.update({name: generation[name] for name in TOKEN_IDS if name in generation})
    ported = ported._replace(config=with_names(ported.config, names_of_file(source)))
    files = {**spec_and(spec, {}), **carried, **(beside or {}), CONFIG_FILE: _json(ported.config)}
    write_directory(out, pieces, files, shard=shard, keep_foreign=keep_foreign)
    return ported


def write_fresh(model: ModelModule, out: str | Path, family: str | None = None) -> Ported:
    """Write a new model in Hugging Face layout, without the files of a source. Its token ids are null, since the defaults of a
    config class may lie beyond a small vocabulary; an encoder–decoder starts with token 0."""
    ported, pieces = exported(model.part, model_pieces(model), family, {})
    start = {} if model.part.encoder is None else {"decoder_start_token_id": 0, "pad_token_id": 0}
    ported = ported._replace(config={**dict.fromkeys(TOKEN_IDS[:3]), **start, **ported.config})
    write_directory(out, pieces, {**spec_and(model.part, {}), CONFIG_FILE: _json(ported.config)})
    return ported


def family_for(spec: Model, source: Directory, family: str | None = None) -> str:
    """The family to write a changed spec as: the one named, else the one of the directory, else the first that can express it.
    Raises SpecError with the path of the part that cannot be written."""
    came = imported_config(source).get("model_type")
    if family is None and isinstance(came, str):
        try:
            return to_hf(spec, came).dialect
        except SpecError:
            return to_hf(spec).dialect
    return to_hf(spec, family).dialect


def imported_config(where: Directory) -> dict[str, Any]:
    """The config of a family in a directory, or the one it was imported with; empty if there is none."""
    name = next((name for name in (CONFIG_FILE, KEPT_CONFIG) if where.has(name)), None)
    config = {} if name is None else where.json(name, CONFIG_BYTES)
    return {} if is_own(config) else config


def exported(
    spec: Model, weights: Sequence[LazyTensors], family: str | None, kept: Mapping[str, Any]
) -> tuple[Ported, list[LazyTensors]]:
    """The config of a model in a family, and its tensors, each read and converted when it is written."""
    ported = to_hf(spec, family)
    config = _merged_config(spec, ported, kept)
    config.pop("torch_dtype", None)  # `dtype` by its older name
    by_path = {path: piece for piece in weights for path in piece.layout}
    parameters = [d.path for d in declared(spec) if d.weight.stored and not d.weight.buffer]
    dtype = functools.reduce(torch.promote_types, {by_path[path].layout[path].dtype for path in parameters})
    config["dtype"] = str(dtype).removeprefix("torch.")
    return ported._replace(config=config), [_piece(by_path, move) for move in ported.moves]


def _merged_config(spec: Model, ported: Ported, kept: Mapping[str, Any]) -> dict[str, Any]:
    """The imported config if it still describes the spec; else the new one, with the ignored fields of the imported one."""
    dialect = DIALECTS[ported.dialect]
    if kept.get("model_type") != dialect.name:
        return ported.config
    if dialect.ahead is not None and dialect.ahead.count in ported.config:  # an import has as many as the files had
        kept = {**kept, dialect.ahead.count: ported.config[dialect.ahead.count]}
    if form_of(kept, dialect) == ported.form and _describes(kept, spec):
        return {**kept, **{name: value for name, value in dialect.reset.items() if name in kept}}
    made = {**{name: value for name, value in kept.items() if name in dialect.ignored}, **ported.config}
    longer = {**made, LENGTH: kept.get(LENGTH)}
    return longer if LENGTH in made and _describes(longer, spec) else made


def _describes(config: Mapping[str, Any], spec: Model) -> bool:
    try:
        return explicit(untrained(from_hf(config), spec)) == explicit(spec)
    except SpecError:
        return False


def _piece(weights: Mapping[str, LazyTensors], move: Move) -> LazyTensors:
    def named(tensors: list[Tensor]) -> dict[str, Tensor]:
        return dict(zip(move.hf_names, move.convert.to_hf(tensors), strict=True))

    layout = named([weights[path].layout[path].to("meta") for path in move.paths])
    return LazyTensors(layout, lambda: named([weights[path].make()[path] for path in move.paths]))


def _beside(where: Directory) -> dict[str, bytes]:
    return {name: where.read(name, CARRIED_BYTES) for name in CARRIED if where.has(name)}


def _json(data: Mapping[str, Any]) -> bytes:
    return (json.dumps(data, indent=2) + "\n").encode()
