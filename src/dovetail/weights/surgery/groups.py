"""The fields and tensors that differ between two specs; those of equal layers are one group."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from dovetail.account import format_value
from dovetail.weights.surgery.status import Diff, DiffRow, Status

LAYER_NUMBER = re.compile(r"(?<=layers\.)\d+")


class FieldGroup(NamedTuple):
    """A change of one field, in one or several layers."""

    paths: str
    a: str
    b: str


class TensorGroup(NamedTuple):
    """Equal rows of one or several layers."""

    a: str
    b: str
    times: int
    shapes: dict[str, tuple[int, ...]]
    how: str


def field_groups(result: Diff) -> list[FieldGroup]:
    """Return the fields that differ; equal changes of several layers are one."""
    groups: dict[tuple[str, str, str], list[str]] = {}
    for change in result.change:
        key = (LAYER_NUMBER.sub("*", change.path), format_value(change.a), format_value(change.b))
        groups.setdefault(key, []).append(change.path)
    return [FieldGroup(_folded(paths, result), old, new) for (_, old, new), paths in groups.items()]


def tensor_groups(result: Diff, status: Status) -> list[TensorGroup]:
    """Return the rows of one status; equal rows of several layers are one."""
    groups: dict[tuple[str, ...], list[DiffRow]] = {}
    for row in result.tensors:
        if row.status == status:
            key = tuple(LAYER_NUMBER.sub("*", text or "") for text in (row.a, row.b, row.how))
            groups.setdefault((*key, str(row.shapes)), []).append(row)
    found: list[TensorGroup] = []
    for (_, _, folded, _), rows in groups.items():
        before = _folded((row.a for row in rows if row.a is not None), result)
        after = _folded((row.b for row in rows if row.b is not None), result)
        how = folded if len(rows) > 1 else rows[0].how
        found.append(TensorGroup(before, after, len(rows), rows[0].shapes, how))
    return found


def _folded(paths: Iterable[str], result: Diff) -> str:
    """Return one name for paths that differ in their layer number alone: layers.* for all layers, layers.4–5 for some."""
    paths = list(dict.fromkeys(paths))
    if len(paths) < 2:
        return "".join(paths)
    numbers = sorted({int(number.group()) for path in paths if (number := LAYER_NUMBER.search(path))})
    stack = LAYER_NUMBER.split(paths[0])[0]
    of_stack = [path for row in result.tensors for path in (row.a, row.b) if path and path.startswith(stack)]
    if set(numbers) == {int(number.group()) for path in of_stack if (number := LAYER_NUMBER.search(path))}:
        return LAYER_NUMBER.sub("*", paths[0])
    contiguous = numbers == list(range(numbers[0], numbers[-1] + 1))
    return LAYER_NUMBER.sub(f"{numbers[0]}–{numbers[-1]}" if contiguous else ",".join(map(str, numbers)), paths[0])
