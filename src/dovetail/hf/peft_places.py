"""Where the linear leaves of a spec lie in transformers, and LoRA's factors there: modules, and parameters of experts.

    ours   layers.0.mixer.q.adapter.a (rank, inp), .b (out, rank)      of experts a (experts, rank, inp), b (experts, out, rank)
    peft   ….q_proj.lora_A.weight (rank, inp), .lora_B.weight (out, rank)
           target_parameters: ….mlp.experts.gate_up_proj, ….mlp.experts.down_proj
           ….experts.lora_A.weight (experts·rank, inp), expert by expert      lora_B.weight (out, rank·experts), rank by rank

Where each row and column of our matrices lies in theirs is read off the dialect's own conversion, by converting the indices of
the entries. Of a module with several targets, peft nests its wrappers: the last parameter of the module has the names above,
each one before it `base_layer.` once more in front of `lora_A`. Leaves that they pack into one module or parameter (q, k, v;
gate and up of experts) become one adapter of a larger rank, block by block.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dovetail.hf.tensors import Move
from dovetail.model.model import Model
from dovetail.weights.adapters.attach import adaptable

WRAPPED = "base_layer."
FACTORS = ("lora_A", "lora_B")


class HfMatrix(NamedTuple):
    """A linear module of transformers, or a parameter with matrices of all experts: where its rows and columns come from."""

    name: str
    leaf: Tensor  # (out,) which of the leaves has each row
    row: Tensor  # (out,) the row there
    column: Tensor  # (inp,) the column there
    leaves: tuple[str, ...]
    transposed: bool  # stored as (inp, out): GPT-2's Conv1D
    experts: int = 0  # 0: a module

    def of(self, adapted: Collection[str]) -> list[int]:
        """The numbers of those leaves that are adapted."""
        return [i for i, leaf in enumerate(self.leaves) if leaf in adapted]

    def rows_of(self, i: int) -> Tensor:
        """The rows of leaf i, in the order that they have in it."""
        rows = (self.leaf == i).nonzero()[:, 0]
        return rows[self.row[rows].argsort()]


def modules(spec: Model, moves: Iterable[Move]) -> Iterator[HfMatrix]:
    """Every linear module that holds linear leaves of a spec."""
    for move, shapes in _of_leaves(spec, moves, 2):
        for matrix in _matrices(move, shapes):
            yield matrix._replace(name=matrix.name.removesuffix(".weight"))


def parameters(spec: Model, moves: Iterable[Move]) -> list[HfMatrix]:
    """Every parameter that holds banks of experts of a spec, in the order of their modules."""
    found: dict[str, HfMatrix] = {}
    for move, shapes in _of_leaves(spec, moves, 3):
        name = move.fused or move.hf_names[0]
        # without a declared parameter of all experts, files may have one tensor per expert
        first = next(_matrices(move, shapes), None) if move.fused is not None or len(move.hf_names) == 1 else None
        if first is not None:
            one = first._replace(name=name, experts=shapes[0][0])
            found[name] = one if name not in found else _below(found[name], one)
    return list(found.values())


def _of_leaves(spec: Model, moves: Iterable[Move], dims: int) -> Iterator[tuple[Move, list[tuple[int, ...]]]]:
    """The moves of linear leaves of so many dimensions, with the shapes of these."""
    known = {f"{path}.weight": d.weight.shape(d.scope) for path, d in adaptable(spec)}
    for move in moves:
        shapes = [known[path] for path in move.paths if path in known]
        if len(shapes) == len(move.paths) and all(len(shape) == dims for shape in shapes):
            yield move, shapes


def _matrices(move: Move, shapes: Sequence[tuple[int, ...]]) -> Iterator[HfMatrix]:
    """Each tensor of theirs that is a matrix of rows of ours; of experts, the matrix of the first."""
    number = [torch.full(shape, i) for i, shape in enumerate(shapes)]
    row = [torch.arange(shape[-2])[:, None].expand(shape).clone() for shape in shapes]
    column = [torch.arange(shape[-1]).expand(shape).clone() for shape in shapes]
    leaves = tuple(path.removesuffix(".weight") for path in move.paths)
    for name, *indices in zip(move.hf_names, *(move.convert.to_hf(one) for one in (number, row, column)), strict=True):
        leaf_of, row_of, column_of = (index if index.dim() == 2 else index[0] for index in indices)
        turned = not bool((row_of == row_of[:, :1]).all())
        if turned:
            leaf_of, row_of, column_of = leaf_of.T, row_of.T, column_of.T
        if bool((row_of == row_of[:, :1]).all() and (column_of == column_of[:1]).all()):
            yield HfMatrix(name, leaf_of[:, 0], row_of[:, 0], column_of[0], leaves, turned)


def _below(first: HfMatrix, second: HfMatrix) -> HfMatrix:
    """Both, the rows of the second below those of the first."""
    leaf = torch.cat([first.leaf, second.leaf + len(first.leaves)])
    return first._replace(leaf=leaf, row=torch.cat([first.row, second.row]), leaves=(*first.leaves, *second.leaves))


def names(targeted: Sequence[HfMatrix]) -> dict[str, HfMatrix]:
    """The name in front of `.lora_A` of each targeted parameter: that of its module, and the wrappers around it."""
    by_module: dict[str, list[HfMatrix]] = {}
    for one in targeted:
        by_module.setdefault(one.name.rpartition(".")[0], []).append(one)
    return {
        f"{module}.{WRAPPED * depth}".rstrip("."): one
        for module, some in by_module.items()
        for depth, one in enumerate(reversed(some))
    }


def targeted(known: Sequence[HfMatrix], ends: Collection[str]) -> list[HfMatrix]:
    """The parameters that `target_parameters` of a config mean: whole names, or ends of them."""
    return [one for one in known if any(one.name == end or one.name.endswith(f".{end}") for end in ends)]


def their_factors(matrix: HfMatrix, own: Sequence[int], tensors: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """A and B of those leaves that are adapted: A of all leaves below each other, B block by block."""
    pairs = [[_by_expert(tensors[f"{matrix.leaves[i]}.adapter.{name}"]) for name in "ab"] for i in own]
    a = torch.cat([a[:, :, matrix.column] for a, _ in pairs], 1)
    b, begin = a.new_zeros(len(a), len(matrix.row), a.shape[1]), 0
    for i, (_, factor) in zip(own, pairs, strict=True):
        rows, end = matrix.leaf == i, begin + factor.shape[-1]
        b[:, rows, begin:end] = factor[:, matrix.row[rows]]
        begin = end
    return a.flatten(0, 1).contiguous(), b.permute(1, 2, 0).flatten(1).contiguous()


def our_factors(matrix: HfMatrix, own: Mapping[str, Tensor], rank: int, factor: float) -> dict[str, Tensor]:
    """a and b of every leaf, padded to a rank; B is multiplied by `factor`."""
    experts = max(matrix.experts, 1)
    a = own["lora_A"].unflatten(0, (experts, -1))[:, :, matrix.column.argsort()]
    b = own["lora_B"].unflatten(1, (-1, experts)).permute(2, 0, 1) * factor
    missing = rank - a.shape[1]
    a, b = torch.nn.functional.pad(a, (0, 0, 0, missing)), torch.nn.functional.pad(b, (0, missing))
    result: dict[str, Tensor] = {}
    for i, leaf in enumerate(matrix.leaves):
        both = {"a": a.clone(), "b": b[:, matrix.rows_of(i)].contiguous()}
        result |= {f"{leaf}.adapter.{name}": x if matrix.experts else x[0] for name, x in both.items()}
    return result


def _by_expert(x: Tensor) -> Tensor:
    """A factor with a dimension of experts in front."""
    return x if x.dim() == 3 else x[None]


def rank_of(matrix: HfMatrix, own: Mapping[str, Tensor]) -> int:
    """The rank of peft's A; of experts, per expert."""
    return len(own["lora_A"]) // max(matrix.experts, 1)
