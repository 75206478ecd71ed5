"""LoRA of experts in peft's layout: a parameter of a module, which holds the matrices of all experts, as a target.

    ours   layers.0.ffn.bank.up.adapter.a (experts, rank, inp), .b (experts, out, rank)
    peft   target_parameters: ….mlp.experts.gate_up_proj, ….mlp.experts.down_proj
           ….experts.lora_A.weight (experts·rank, inp), expert by expert      lora_B.weight (out, rank·experts), rank by rank

Of a module with several targets, peft nests its wrappers: the last parameter of the module has the names above, each one before
it `base_layer.` once more in front of `lora_A`. Gate and up, which transformers holds as one parameter, become one adapter of
twice the rank, block by block, as packed linear modules do. peft has no DoRA, no (IA)³ and no dropout of a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from dovetail.hf.tensors import Move
from dovetail.model import Model
from dovetail.weights.adapters.attach import adaptable

WRAPPED = "base_layer."
FACTORS = ("lora_A", "lora_B")


class Bank(NamedTuple):
    """A parameter of transformers with matrices of all experts, and where their rows and columns come from."""

    parameter: str
    leaf: Tensor  # (out,) which of the leaves has each row
    row: Tensor  # (out,) the row there
    column: Tensor  # (inp,) the column there
    leaves: tuple[str, ...]
    experts: int

    @property
    def module(self) -> str:
        """The module that has the parameter."""
        return self.parameter.rpartition(".")[0]


def banks(spec: Model, moves: Iterable[Move]) -> list[Bank]:
    """Every parameter of transformers that holds banks of experts of a spec, in the order of their modules."""
    known = {f"{path}.weight": d for path, d in adaptable(spec)}
    found: dict[str, Bank] = {}
    for move in moves:
        shapes = [known[path].weight.shape(known[path].scope) for path in move.paths if path in known]
        name = move.fused or move.hf_names[0]
        if len(shapes) < len(move.paths) or any(len(shape) != 3 for shape in shapes):
            continue
        if move.fused is None and len(move.hf_names) > 1:
            continue  # one tensor per expert, and no declared parameter of all
        leaf, row, column = (_of_one_expert(move, one) for one in _indices(shapes))
        if not bool((row == row[:, :1]).all()):
            leaf, row, column = leaf.T, row.T, column.T
        if not bool((row == row[:, :1]).all() and (column == column[:1]).all()):
            continue  # no matrices of rows of ours
        paths = tuple(path.removesuffix(".weight") for path in move.paths)
        one = Bank(name, leaf[:, 0], row[:, 0], column[0], paths, shapes[0][0])
        found[name] = one if name not in found else _below(found[name], one)
    return list(found.values())


def _indices(shapes: Sequence[tuple[int, ...]]) -> Iterator[list[Tensor]]:
    """The number of the leaf, the row and the column of every entry, (experts, out, inp)."""
    yield [torch.full(shape, i) for i, shape in enumerate(shapes)]
    yield [torch.arange(shape[1])[:, None].expand(shape).clone() for shape in shapes]
    yield [torch.arange(shape[2]).expand(shape).clone() for shape in shapes]


def _of_one_expert(move: Move, tensors: list[Tensor]) -> Tensor:
    first = move.convert.to_hf(tensors)[0]
    return first if first.dim() == 2 else first[0]


def _below(first: Bank, second: Bank) -> Bank:
    """Both, the rows of the second below those of the first."""
    leaf = torch.cat([first.leaf, second.leaf + len(first.leaves)])
    return first._replace(leaf=leaf, row=torch.cat([first.row, second.row]), leaves=(*first.leaves, *second.leaves))


def names(targeted: Sequence[Bank]) -> dict[str, Bank]:
    """The name in front of `.lora_A` of each targeted parameter: that of its module, and the wrappers around it."""
    by_module: dict[str, list[Bank]] = {}
    for one in targeted:
        by_module.setdefault(one.module, []).append(one)
    return {
        f"{module}.{WRAPPED * depth}".rstrip("."): one
        for module, some in by_module.items()
        for depth, one in enumerate(reversed(some))
    }


def targeted(known: Sequence[Bank], parameters: Iterable[str]) -> list[Bank]:
    """The banks that `target_parameters` of a config mean: whole names, or ends of them."""
    ends = list(parameters)
    return [one for one in known if any(one.parameter == end or one.parameter.endswith(f".{end}") for end in ends)]


def their_factors(one: Bank, own: Sequence[int], tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A (experts·rank, inp) and B (out, rank·experts) of those leaves that are adapted."""
    pairs = [(tensors[f"{one.leaves[i]}.adapter.a"], tensors[f"{one.leaves[i]}.adapter.b"]) for i in own]
    a = torch.cat([a[:, :, one.column] for a, _ in pairs], 1)
    b = a.new_zeros(one.experts, len(one.row), a.shape[1])
    for number, (i, (_, factor)) in enumerate(zip(own, pairs, strict=True)):
        rows, rank = one.leaf == i, factor.shape[-1]
        b[:, rows, number * rank : (number + 1) * rank] = factor[:, one.row[rows]]
    return a.flatten(0, 1).contiguous(), b.permute(1, 2, 0).flatten(1).contiguous()


def our_factors(one: Bank, own: Mapping[str, Tensor], rank: int, factor: float) -> dict[str, Tensor]:
    """a and b of every leaf, padded to a rank; B is multiplied by `factor`."""
    a = own["lora_A"].unflatten(0, (one.experts, -1))
    b = own["lora_B"].unflatten(1, (-1, one.experts)).permute(2, 0, 1) * factor
    missing = rank - a.shape[1]
    a = torch.cat([a, a.new_zeros(one.experts, missing, a.shape[2])], 1)
    b = torch.cat([b, b.new_zeros(one.experts, b.shape[1], missing)], 2)
    found: dict[str, Tensor] = {}
    for i, leaf in enumerate(one.leaves):
        rows = (one.leaf == i).nonzero()[:, 0]
        order = rows[one.row[rows].argsort()]
        found |= {f"{leaf}.adapter.a": a[:, :, one.column.argsort()].clone(), f"{leaf}.adapter.b": b[:, order].contiguous()}
    return found


def rank_of(one: Bank, own: Mapping[str, Any]) -> int:
    """The rank per expert of peft's A."""
    return len(own["lora_A"]) // one.experts
