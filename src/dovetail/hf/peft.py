"""Adapters in peft's layout: adapter_config.json and adapter_model.safetensors, under the module names of Hugging Face.

    ours   layers.0.mixer.q.adapter.a (rank, inp), .b (out, rank), .m (out,)       ia3: .l (out,) or (inp,)
    peft   base_model.model.….q_proj.lora_A.weight, .lora_B.weight, .lora_magnitude_vector       .ia3_l (out, 1) or (1, inp)

Where each row and column of our matrices lies in theirs is read off the dialect's own conversion, by converting the indices of
the entries. Leaves that they pack into one module (q, k, v) become one adapter of a larger rank, block by block; their adapter
of a packed module becomes one for each of our leaves, with the same A. Both compute the same function. Experts, which
transformers holds as one parameter and not as linear modules, are in hf/peft_experts.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dovetail.core.errors import FileError, SpecError
from dovetail.core.finite import nonfinite
from dovetail.core.limits import CONFIG_BYTES
from dovetail.disk.model_files import PEFT_CONFIG, PEFT_WEIGHTS
from dovetail.disk.shape import NUMBER, check_shape
from dovetail.disk.tensors import TensorFile, write_tensors
from dovetail.disk.untrusted import Directory
from dovetail.hf.hf import to_hf
from dovetail.hf.peft_experts import FACTORS, Bank, banks, names, our_factors, rank_of, targeted, their_factors
from dovetail.model import Model
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
    *(
        "target_modules",
        "target_parameters",
        "exclude_modules",
        "feedforward_modules",
        "layers_pattern",
        "layers_to_transform",
        "fan_in_fan_out",
    ),
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_dora", "use_rslora", "lora_dropout", "init_lora_weights"),
    *("init_ia3_weights", "eva_config", "ensure_weight_tying", "megatron_core", "qalora_group_size", "runtime_config"),
)
EMPTY = (None, False, "none", {}, [], 0)


class Place(NamedTuple):
    """Where the rows and columns of one matrix of theirs come from."""

    module: str
    leaf: Tensor  # (out,) which of the leaves has each row
    row: Tensor  # (out,) the row there
    column: Tensor  # (inp,) the column there
    leaves: tuple[str, ...]
    transposed: bool  # stored as (inp, out): GPT-2's Conv1D


def places(spec: Model, family: str | None = None) -> Iterator[Place]:
    """Every linear module of Hugging Face that holds linear leaves of a spec."""
    known = {f"{path}.weight": d for path, d in adaptable(spec)}
    for move in to_hf(spec, family).moves:
        if not all(path in known for path in move.paths):
            continue
        shapes = [known[path].weight.shape(known[path].scope) for path in move.paths]
        if any(len(shape) != 2 for shape in shapes):  # experts
            continue
        number = [torch.full(shape, i) for i, shape in enumerate(shapes)]
        row = [torch.arange(shape[0])[:, None].expand(shape) for shape in shapes]
        column = [torch.arange(shape[1]).expand(shape) for shape in shapes]
        theirs = zip(move.hf_names, *(move.convert.to_hf(one) for one in (number, row, column)), strict=True)
        for name, leaf_of, row_of, column_of in theirs:
            turned = not bool((row_of == row_of[:, :1]).all())
            if turned:
                leaf_of, row_of, column_of = leaf_of.T, row_of.T, column_of.T
            if not bool((row_of == row_of[:, :1]).all() and (column_of == column_of[:1]).all()):
                continue  # no matrix of rows of ours
            leaves = tuple(path.removesuffix(".weight") for path in move.paths)
            yield Place(name.removesuffix(".weight"), leaf_of[:, 0], row_of[:, 0], column_of[0], leaves, turned)


def write_peft(place: Path, spec: Model, stored: Stored, family: str | None = None) -> None:
    """Write an adapter in peft's layout. Raises SpecError with the path of a leaf that has no linear module there."""
    kind, tensors = stored.kind, stored.tensors
    adapted = {path.rpartition(".adapter.")[0] for path in tensors}
    found: dict[str, Tensor] = {}
    config: dict[str, Any] = {"target_modules": [], "fan_in_fan_out": False, "feedforward_modules": []}
    config |= {"rank_pattern": {}, "alpha_pattern": {}}
    held: set[str] = set()
    for one in places(spec, family):
        own = [i for i, leaf in enumerate(one.leaves) if leaf in adapted]
        if not own:
            continue
        held |= {one.leaves[i] for i in own}
        config["target_modules"].append(one.module)
        config["fan_in_fan_out"] |= one.transposed
        name = f"{PREFIX}{one.module}"
        if isinstance(kind, Lora):
            found |= _their_lora(name, one, own, tensors)
            if len(own) > 1:
                _in_patterns(config, one.module, kind, len(own))
        else:
            values = tensors[f"{one.leaves[own[0]]}.adapter.l"]
            if _scales_inputs(spec, one.leaves[own[0]]):
                config["feedforward_modules"].append(one.module)
                found[f"{name}.ia3_l"] = values[one.column][None].contiguous()
            else:
                found[f"{name}.ia3_l"] = _by_row(one, own, tensors, "l", values.new_ones(len(one.row)))[:, None].contiguous()
    targets: list[Bank] = []
    for bank in banks(spec, to_hf(spec, family).moves):
        own = [i for i, leaf in enumerate(bank.leaves) if leaf in adapted]
        if own and type(kind) is not Lora:
            what = f"is part of the parameter {bank.parameter}, of which peft has only lora, not {kind.kind}"
            raise SpecError(bank.leaves[own[0]], what, "leave it out of the targets")
        if own:
            targets.append(bank)
            held |= {bank.leaves[i] for i in own}
    for leaf in sorted(adapted - held):
        raise SpecError(
            leaf,
            "is neither a linear module nor a parameter of experts in transformers, so that peft cannot hold its adapter",
            "leave it out of the targets",
        )
    for name, bank in names(targets).items():
        own = [i for i, leaf in enumerate(bank.leaves) if leaf in adapted]
        factors = their_factors(bank, own, tensors)
        found |= {f"{PREFIX}{name}.{factor}.weight": one for factor, one in zip(FACTORS, factors, strict=True)}
        if len(own) > 1:
            _in_patterns(config, bank.parameter, kind, len(own))
    unused = ("feedforward_modules",) if isinstance(kind, Lora) else ("rank_pattern", "alpha_pattern")
    config = {name: value for name, value in config.items() if name not in unused} | _config(kind, stored.base)
    if targets:  # peft refuses a dropout of parameters, and it changes nothing of what was trained
        config |= {"target_parameters": [one.parameter for one in targets], "lora_dropout": 0.0}
    for name, tensor in found.items():
        if value := nonfinite(tensor):
            raise FileError(f"{place}: {name} holds {value}; nothing was written")
    place.mkdir(parents=True, exist_ok=True)
    fresh = place / f".{PEFT_WEIGHTS}.tmp"
    fresh.unlink(missing_ok=True)
    write_tensors(fresh, found, found.items())
    fresh.replace(place / PEFT_WEIGHTS)
    (place / PEFT_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _in_patterns(config: dict[str, Any], name: str, kind: AdapterKind, leaves: int) -> None:
    """Note the rank and alpha of a module or parameter that holds several leaves, block by block."""
    assert isinstance(kind, Lora)
    rank = kind.rank * leaves
    config["rank_pattern"][name] = rank
    config["alpha_pattern"][name] = kind.factor * (rank if kind.scale == "rank" else rank**0.5)


def _config(kind: AdapterKind, base: Base | None) -> dict[str, Any]:
    named = {"base_model_name_or_path": None if base is None else base.name, "inference_mode": True, "task_type": None}
    if isinstance(kind, Lora):
        named |= {"peft_type": "LORA", "r": kind.rank, "lora_alpha": kind.alpha, "lora_dropout": kind.dropout}
        return named | {"bias": "none", "use_dora": isinstance(kind, Dora), "use_rslora": kind.scale == "root"}
    if isinstance(kind, Ia3):
        return named | {"peft_type": "IA3"}
    raise SpecError("adapter", f"peft has no {kind.kind}", "write it in our own layout")


def _scales_inputs(spec: Model, leaf: str) -> bool:
    return Ia3.scales_inputs(dict(adaptable(spec))[leaf])


def _their_lora(name: str, one: Place, own: list[int], tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A of all leaves below each other, B block by block."""
    factors = {i: (tensors[f"{one.leaves[i]}.adapter.a"], tensors[f"{one.leaves[i]}.adapter.b"]) for i in own}
    a = torch.cat([factors[i][0][:, one.column] for i in own])
    b = a.new_zeros(len(one.row), len(a))
    for number, i in enumerate(own):
        rows, rank = one.leaf == i, len(factors[i][0])
        b[rows, number * rank : (number + 1) * rank] = factors[i][1][one.row[rows]]
    found = {f"{name}.lora_A.weight": a.contiguous(), f"{name}.lora_B.weight": b}
    if f"{one.leaves[own[0]]}.adapter.m" in tensors:
        if len(own) < len(one.leaves):
            raise SpecError(
                one.leaves[own[0]], f"is packed into {one.module}, of which DoRA needs all rows", "target all of it"
            )
        found[f"{name}.lora_magnitude_vector"] = _by_row(one, own, tensors, "m", b.new_empty(len(one.row)))
    return found


def _by_row(one: Place, own: list[int], tensors: Mapping[str, Tensor], name: str, out: Tensor) -> Tensor:
    for i in own:
        rows = one.leaf == i
        out[rows] = tensors[f"{one.leaves[i]}.adapter.{name}"][one.row[rows]]
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
    known: dict[str, Place | Bank] = {one.module: one for one in places(spec, family)}
    parameters = config.get("target_parameters") or []
    known |= names(targeted(banks(spec, to_hf(spec, family).moves), map(str, parameters)))
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


Modules = list[tuple[Place | Bank, dict[str, Tensor]]]


def _read_lora(config: Mapping[str, Any], modules: Modules) -> tuple[AdapterKind, dict[str, Tensor]]:
    root = bool(config.get("use_rslora"))
    ranks = [rank_of(one, own) if isinstance(one, Bank) else len(own["lora_A"]) for one, own in modules]
    rank = max(ranks)
    alpha = float(config["lora_alpha"])
    targets = sorted({leaf for one, _ in modules for leaf in one.leaves})
    fields = {"rank": rank, "alpha": alpha, "scale": "root" if root else "rank", "targets": targets}
    fields["dropout"] = float(config.get("lora_dropout") or 0.0)
    kind = read_adapter({"kind": "dora" if config.get("use_dora") else "lora", **fields})
    assert isinstance(kind, Lora)
    found: dict[str, Tensor] = {}
    for (one, own), r in zip(modules, ranks, strict=True):
        name = one.parameter if isinstance(one, Bank) else one.module
        scale = _pattern(config.get("alpha_pattern"), name, alpha) / (r**0.5 if root else r)
        if isinstance(one, Bank):
            found |= our_factors(one, own, rank, scale / kind.factor)
            continue
        a, b = own["lora_A"], own["lora_B"]
        a, b = (torch.cat([a, a.new_zeros(rank - r, a.shape[1])]), torch.cat([b, b.new_zeros(len(b), rank - r)], 1))
        if scale != kind.factor:
            b = b * (scale / kind.factor)
        back = one.column.argsort()
        for i, leaf in enumerate(one.leaves):
            rows = (one.leaf == i).nonzero()[:, 0]
            order = rows[one.row[rows].argsort()]
            found |= {f"{leaf}.adapter.a": a[:, back].clone(), f"{leaf}.adapter.b": b[order]}
            if isinstance(kind, Dora):
                found[f"{leaf}.adapter.m"] = own["lora_magnitude_vector"].flatten()[order]
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
        assert isinstance(one, Place), "(IA)³ has no target_parameters"
        values = own["ia3_l"]
        inputs = values.shape[0] == 1
        for i, leaf in enumerate(one.leaves):
            rows = (one.leaf == i).nonzero()[:, 0]
            taken = values[0][one.column.argsort()] if inputs else values[:, 0][rows[one.row[rows].argsort()]]
            found[f"{leaf}.adapter.l"] = taken.clone()
    targets = sorted({leaf for one, _ in modules for leaf in one.leaves})
    return read_adapter({"kind": "ia3", "targets": targets}), found
