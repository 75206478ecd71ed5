"""Adapters in peft's layout: adapter_config.json and adapter_model.safetensors, under the module names of Hugging Face.

    ours   layers.0.mixer.q.adapter.a (rank, inp), .b (out, rank), .m (out,)       ia3: .l (out,) or (inp,)
    peft   base_model.model.….q_proj.lora_A.weight, .lora_B.weight, .lora_magnitude_vector       .ia3_l (out, 1) or (1, inp)

Where the leaves lie in transformers is in hf/peft_places.py. Leaves that they pack into one module (q, k, v) become one adapter
of a larger rank; their adapter of a packed module becomes one for each of our leaves, with the same A. Both compute the same
function. Of experts, which transformers holds as one parameter, peft has no DoRA, no (IA)³ and no dropout.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from dovetail.base.errors import FileError, SpecError
from dovetail.base.limits import CONFIG_BYTES
from dovetail.disk.model_files import PEFT_CONFIG, PEFT_WEIGHTS
from dovetail.disk.shape import NUMBER, check_shape
from dovetail.disk.tensors import TensorFile, write_tensors
from dovetail.disk.untrusted import Directory
from dovetail.hf.hf import to_hf
from dovetail.hf.peft_places import FACTORS, HfMatrix, modules, names, our_factors, parameters, rank_of, targeted, their_factors
from dovetail.model.model import Model
from dovetail.nn.finite import nonfinite
from dovetail.weights.adapters.attach import adaptable, read_adapter
from dovetail.weights.adapters.ia3 import Ia3
from dovetail.weights.adapters.kind import AdapterKind
from dovetail.weights.adapters.lora import Dora, Lora
from dovetail.weights.adapters.storage import Base, Stored

PREFIX = "base_model.model."
# fields of a config that do not change what a saved adapter computes; any other must be empty
NONE = type(None)
SHAPE = {  # of the fields that are read
    "peft_type": str,
    "lora_alpha?": NUMBER,
    "lora_dropout?": (NUMBER, NONE),
    "use_rslora?": (bool, NONE),
    "use_dora?": (bool, NONE),
    "alpha_pattern?": ({str: NUMBER}, NONE),
    "rank_pattern?": ({str: int}, NONE),
    "target_parameters?": ([str], NONE),
}
HARMLESS = (
    *("peft_type", "peft_version", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode"),
    *("target_modules", "target_parameters", "exclude_modules", "feedforward_modules", "layers_pattern"),
    *("layers_to_transform", "fan_in_fan_out"),
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_dora", "use_rslora", "lora_dropout", "init_lora_weights"),
    *("init_ia3_weights", "eva_config", "ensure_weight_tying", "megatron_core", "qalora_group_size", "runtime_config"),
)
EMPTY = (None, False, "none", {}, [], 0)


def write_peft(place: Path, spec: Model, stored: Stored, family: str | None = None) -> None:
    """Write an adapter in peft's layout. Raises SpecError with the path of a leaf that has no linear module there."""
    kind, tensors, moves = stored.kind, stored.tensors, to_hf(spec, family).moves
    adapted = {path.rpartition(".adapter.")[0] for path in tensors}
    found: dict[str, Tensor] = {}
    config: dict[str, Any] = {"target_modules": [], "fan_in_fan_out": False, "feedforward_modules": []}
    config |= {"rank_pattern": {}, "alpha_pattern": {}}
    targets = [parameter for parameter in parameters(spec, moves) if parameter.of(adapted)]
    named = {module.name: module for module in modules(spec, moves) if module.of(adapted)}
    for name, one in [*named.items(), *names(targets).items()]:
        own, prefix = one.of(adapted), f"{PREFIX}{name}"
        if one.experts and type(kind) is not Lora:
            what = f"is part of the parameter {one.name}, of which peft has only lora, not {kind.kind}"
            raise SpecError(one.leaves[own[0]], what, "leave it out of the targets")
        if not one.experts:
            config["target_modules"].append(one.name)
            config["fan_in_fan_out"] |= one.transposed
        if not isinstance(kind, Lora):
            values = tensors[f"{one.leaves[own[0]]}.adapter.l"]
            if Ia3.scales_inputs(dict(adaptable(spec))[one.leaves[own[0]]]):
                config["feedforward_modules"].append(one.name)
                found[f"{prefix}.ia3_l"] = values[one.column][None].contiguous()
            else:
                scaled = _by_row(one, own, tensors, "l", values.new_ones(len(one.row)))
                found[f"{prefix}.ia3_l"] = scaled[:, None].contiguous()
            continue
        a, b = their_factors(one, own, tensors)
        found |= {f"{prefix}.{factor}.weight": x for factor, x in zip(FACTORS, (a, b), strict=True)}
        if f"{one.leaves[own[0]]}.adapter.m" in tensors:
            if len(own) < len(one.leaves):
                what = f"is packed into {one.name}, of which DoRA needs all rows"
                raise SpecError(one.leaves[own[0]], what, "target all of it")
            found[f"{prefix}.lora_magnitude_vector"] = _by_row(one, own, tensors, "m", b.new_empty(len(one.row)))
        if len(own) > 1:
            rank = kind.rank * len(own)
            config["rank_pattern"][one.name] = rank
            config["alpha_pattern"][one.name] = kind.factor * (rank if kind.scale == "rank" else rank**0.5)
    held = {leaf for one in [*named.values(), *targets] for leaf in one.leaves}
    for leaf in sorted(adapted - held):
        raise SpecError(
            leaf,
            "is neither a linear module nor a parameter of experts in transformers, so that peft cannot hold its adapter",
            "leave it out of the targets",
        )
    unused = ("feedforward_modules",) if isinstance(kind, Lora) else ("rank_pattern", "alpha_pattern")
    config = {name: value for name, value in config.items() if name not in unused} | _config(kind, stored.base)
    if targets:  # peft refuses a dropout of parameters, and it changes nothing of what was trained
        config |= {"target_parameters": [target.name for target in targets], "lora_dropout": 0.0}
    for name, tensor in found.items():
        if value := nonfinite(tensor):
            raise FileError(f"{place}: {name} holds {value}; nothing was written")
    place.mkdir(parents=True, exist_ok=True)
    fresh = place / f".{PEFT_WEIGHTS}.tmp"
    fresh.unlink(missing_ok=True)
    write_tensors(fresh, found, found.items())
    fresh.replace(place / PEFT_WEIGHTS)
    (place / PEFT_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _config(kind: AdapterKind, base: Base | None) -> dict[str, Any]:
    named = {"base_model_name_or_path": None if base is None else base.name, "inference_mode": True, "task_type": None}
    if isinstance(kind, Lora):
        named |= {"peft_type": "LORA", "r": kind.rank, "lora_alpha": kind.alpha, "lora_dropout": kind.dropout}
        return named | {"bias": "none", "use_dora": isinstance(kind, Dora), "use_rslora": kind.scale == "root"}
    if isinstance(kind, Ia3):
        return named | {"peft_type": "IA3"}
    raise SpecError("adapter", f"peft has no {kind.kind}", "write it in our own layout")


def _by_row(matrix: HfMatrix, own: list[int], tensors: Mapping[str, Tensor], name: str, out: Tensor) -> Tensor:
    for i in own:
        rows = matrix.leaf == i
        out[rows] = tensors[f"{matrix.leaves[i]}.adapter.{name}"][matrix.row[rows]]
    return out


def read_peft(directory: str | Path, spec: Model, family: str | None = None) -> Stored:
    """Read an adapter in peft's layout. A field that may change what it computes, and a module that is no linear leaf of the
    spec, are refused."""
    where = Directory(directory)
    file = where.place / PEFT_CONFIG
    config = where.json(PEFT_CONFIG, CONFIG_BYTES)
    check_shape(config, SHAPE, str(file))
    for name, value in config.items():
        if name not in HARMLESS and value not in EMPTY:
            raise FileError(f"{file}: {name} is {str(value)[:60]!r}, which is not supported; it may change the adapter")
    if isinstance(begin := config.get("init_lora_weights"), str) and begin.startswith(
        ("pissa", "olora", "loftq", "corda", "lora_ga")
    ):
        raise FileError(
            f"{file}: init_lora_weights is {begin!r}, which changes the weights of the base, too; merge it with peft"
        )
    with TensorFile(where.path(PEFT_WEIGHTS)) as tensors:
        theirs = {name.removeprefix(PREFIX): tensors.read(name).clone() for name in tensors.entries}
    by_module: dict[str, dict[str, Tensor]] = {}
    for name, tensor in theirs.items():
        module, _, what = name.removesuffix(".weight").rpartition(".")
        by_module.setdefault(module, {})[what] = tensor
    moves, ends = to_hf(spec, family).moves, [str(end) for end in config.get("target_parameters") or []]
    known = {one.name: one for one in modules(spec, moves)} | names(targeted(parameters(spec, moves), ends))
    for module in by_module:
        if module not in known:
            raise FileError(f"{where.place / PEFT_WEIGHTS}: {module[:200]} is no linear module of this model")
    read = _read_lora if config.get("peft_type") == "LORA" else _read_ia3 if config.get("peft_type") == "IA3" else None
    if read is None:
        raise FileError(f"{file}: peft_type is {str(config.get('peft_type'))[:60]!r}; LORA and IA3 are supported")
    try:
        kind, found = read(config, [(known[module], own) for module, own in by_module.items()])
    except (KeyError, RuntimeError, IndexError, TypeError, ValueError) as error:
        raise FileError(f"{where.place}: {PEFT_CONFIG} and {PEFT_WEIGHTS} do not fit each other ({error})") from error
    return Stored(kind, None, found)


Modules = list[tuple[HfMatrix, dict[str, Tensor]]]


def _read_lora(config: Mapping[str, Any], modules: Modules) -> tuple[AdapterKind, dict[str, Tensor]]:
    root = bool(config.get("use_rslora"))
    ranks = [rank_of(one, own) for one, own in modules]
    alpha = float(config["lora_alpha"])
    targets = sorted({leaf for one, _ in modules for leaf in one.leaves})
    fields = {"rank": max(ranks), "alpha": alpha, "scale": "root" if root else "rank", "targets": targets}
    fields["dropout"] = float(config.get("lora_dropout") or 0.0)
    kind = read_adapter({"kind": "dora" if config.get("use_dora") else "lora", **fields})
    assert isinstance(kind, Lora)
    found: dict[str, Tensor] = {}
    for (one, own), rank in zip(modules, ranks, strict=True):
        scale = _pattern(config.get("alpha_pattern"), one.name, alpha) / (rank**0.5 if root else rank)
        found |= our_factors(one, own, kind.rank, scale / kind.factor)
        if isinstance(kind, Dora) and not one.experts:
            magnitudes = own["lora_magnitude_vector"].flatten()
            found |= {f"{leaf}.adapter.m": magnitudes[one.rows_of(i)] for i, leaf in enumerate(one.leaves)}
    return kind, found


def _pattern(pattern: Any, module: str, default: float) -> float:
    """The value of the first name that ends the module's; names with other signs of regular expressions are refused."""
    for name, value in (pattern or {}).items():
        if any(sign in name for sign in "*+?[](){}|^$\\"):
            raise ValueError(f"alpha_pattern: {name!r} is a regular expression")
        if module == name or module.endswith(f".{name}"):
            return float(value)
    return default


def _read_ia3(config: Mapping[str, Any], modules: Modules) -> tuple[AdapterKind, dict[str, Tensor]]:
    found: dict[str, Tensor] = {}
    for one, own in modules:
        assert not one.experts, "(IA)³ has no target_parameters"
        values = own["ia3_l"]
        for i, leaf in enumerate(one.leaves):
            taken = values[0][one.column.argsort()] if values.shape[0] == 1 else values[:, 0][one.rows_of(i)]
            found[f"{leaf}.adapter.l"] = taken.clone()
    targets = sorted({leaf for one, _ in modules for leaf in one.leaves})
    return read_adapter({"kind": "ia3", "targets": targets}), found
